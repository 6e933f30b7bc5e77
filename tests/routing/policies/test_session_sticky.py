from policy_lab import Desk, prompt


def desk(*names):
    return Desk("session-sticky", *names)


def load(it, **tokens):
    for name, prefill in tokens.items():
        it.endpoints[name].load.prefill_tokens = prefill


def ask(it, session, request=None, **fields):
    on = it.place(prompt(x=1), session=session, request=request, **fields)
    if request:
        it.end(request)
    return on


def test_a_session_stays_where_its_first_request_went_whatever_the_load():
    it = desk("a", "b", "c")
    load(it, a=500, b=100, c=900)
    assert ask(it, "s") == "b"
    load(it, a=0, b=10**6, c=0)
    assert [ask(it, "s") for _ in range(5)] == ["b"] * 5
    assert it.scores(prompt(y=2), session="s") == {"a": 1.0, "b": 0.0, "c": 1.0}


def test_load_is_tokens_in_flight_those_that_decode_included():
    it = desk("a", "b")
    it.endpoints["a"].load.prefill_tokens = 10
    it.endpoints["b"].load.decode_kv_tokens = 5_000
    it.endpoints["a"].load.inflight = 9
    assert ask(it, "s") == "a"


def test_among_equal_loads_sessions_are_spread():
    it = desk("a", "b", "c", "d")
    homes = [ask(it, f"s{i}") for i in range(12)]
    assert {homes.count(name) for name in "abcd"} == {3}


def test_a_request_without_a_session_goes_to_the_least_loaded_and_binds_nothing():
    it = desk("a", "b")
    load(it, a=5, b=4)
    assert ask(it, "") == "b"
    load(it, a=4, b=5)
    assert ask(it, "") == "a"


def test_300_idle_seconds_after_its_last_end_a_session_is_bound_anew():
    it = desk("a", "b")
    load(it, a=0, b=1)
    it.place(prompt(x=1), session="s", request="r")
    it.t = 200.0
    it.end("r")
    load(it, a=1, b=0)
    it.t = 499.9
    assert it.scores(prompt(x=1), session="s") == {"a": 0.0, "b": 1.0}
    it.t = 500.0
    assert ask(it, "s") == "b"


def test_each_use_keeps_it_bound():
    it = desk("a", "b")
    load(it, a=0, b=1)
    ask(it, "s")
    load(it, a=1, b=0)
    for _ in range(5):
        it.t += 299.0
        assert ask(it, "s") == "a"


def test_it_is_bound_anew_when_its_endpoint_takes_no_requests_and_stays_at_the_new_one():
    it = desk("a", "b", "c")
    load(it, a=0, b=1, c=2)
    assert ask(it, "s") == "a"
    assert ask(it, "s", among="bc") == "b"
    assert ask(it, "s") == "b"


def test_sessions_of_an_endpoint_that_is_gone_are_bound_anew():
    it = desk("a", "b")
    load(it, a=0, b=1)
    it.place(prompt(x=1), session="s", request="r")
    it.policy.gone("a")
    it.end("r")
    load(it, a=1, b=0)
    assert ask(it, "s") == "b"


def test_state_is_bounded_by_the_sessions_of_the_last_300_seconds():
    it = desk("a", "b")
    for i in range(1000):
        it.t += 10.0
        ask(it, f"s{i}", request=f"r{i}")
    assert len(it.policy._bound) <= 31
    assert sum(it.policy._sessions.values()) == len(it.policy._bound)
    assert not it.policy._running

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_lab import BLOCK, REPEATABLE, Engine, Lab, keys_of, prompt

from sumibi.core.errors import BadRequest, ConfigError
from sumibi.routing.config import RouterConfig
from sumibi.routing.decisions import EXPLANATION_BYTES, Candidate, Decision, explain, read_decisions
from sumibi.routing.events import AnyEvent, Dispatch, EndpointSuspect, FinishReason, Grade, Signals, Tick
from sumibi.routing.policies import POLICIES, PRICED, SCORERS, rerun
from sumibi.routing.policies.base import least
from sumibi.routing.router import Router


def candidate(endpoint="e", *, total=1.0, matched=0, inflight=0, prefill=0, dispatched=0, compute=0.5):
    return Candidate(
        endpoint=endpoint,
        grade=Grade.EXACT,
        matched_tokens=matched,
        pending_tokens=0,
        wait_s=0.0,
        pending_s=0.0,
        room_s=0.0,
        compute_s=compute,
        delay_s=0.0,
        evict_s=0.0,
        balance_s=0.0,
        total_s=total,
        inflight=inflight,
        prefill_tokens=prefill,
        dispatched=dispatched,
    )


def picker(policy):
    return lambda request, number, candidates: least(request, SCORERS[policy](request, number, candidates))


cost, round_robin, least_loaded = picker("cost"), picker("round-robin"), picker("least-loaded")


def test_cost_takes_the_least_seconds():
    assert cost("r", 0, [candidate(total=2.0), candidate(total=1.0), candidate(total=3.0)]) == 1


def test_cost_takes_the_least_used_of_those_that_differ_by_less_than_the_models_know():
    near = [candidate(total=1.0, dispatched=5), candidate(total=1.005, dispatched=4), candidate(total=1.5)]
    assert cost("r", 0, near) == 1
    far = [candidate(total=1.0, dispatched=5), candidate(total=1.05, dispatched=4)]
    assert cost("r", 0, far) == 0


def test_cost_prefers_less_to_compute_among_equals():
    assert cost("r", 0, [candidate(dispatched=0), candidate(matched=16, dispatched=9)]) == 1


def test_round_robin_goes_by_the_number_of_decisions_before():
    three = [candidate(), candidate(), candidate()]
    assert [round_robin("r", n, three) for n in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_counts_requests_then_tokens():
    assert least_loaded("r", 0, [candidate(inflight=2), candidate(inflight=1), candidate(inflight=3)]) == 1
    assert least_loaded("r", 0, [candidate(prefill=200), candidate(prefill=100)]) == 1


def test_an_undecided_tie_goes_by_the_request_alone_and_is_spread():
    four = [candidate() for _ in range(4)]
    picks = [cost(f"r{i}", 0, four) for i in range(200)]
    assert picks == [cost(f"r{i}", 7, four) for i in range(200)]
    assert min(picks.count(i) for i in range(4)) > 25


features = st.builds(
    candidate,
    total=st.floats(0, 10),
    matched=st.integers(0, 100),
    inflight=st.integers(0, 9),
    prefill=st.integers(0, 9),
    dispatched=st.integers(0, 3),
)


@given(st.lists(features, min_size=1, max_size=8), st.integers(0, 99), st.sampled_from([*SCORERS]), st.text())
@settings(REPEATABLE)
def test_a_record_alone_recomputes_its_pick(candidates, number, policy, request):
    decision = Decision(
        id="d",
        t=1.0,
        request=request,
        attempt=1,
        model="m",
        tenant="",
        policy=policy,
        number=number,
        prompt_tokens=5,
        candidates=[msgspec.structs.replace(c, endpoint=f"e{i}") for i, c in enumerate(candidates)],
        pick=picker(policy)(request, number, candidates),
    )
    (again,) = rerun(read_decisions([msgspec.json.encode(decision)]))
    assert again.same
    assert again.recorded == f"e{decision.pick}"


@pytest.mark.parametrize("policy", [*POLICIES])
def test_the_router_s_records_recompute_their_picks_and_answer_what_others_would_do(policy):
    lab = Lab(policy=policy)
    lab.up("a", "b", "c", kv_tokens=100 * BLOCK)
    for i in range(30):
        lab.ask(f"r{i}", prompt(i % 5, 40 * (1 + i % 7)))
        if i % 3:
            lab.first(f"r{i}", dt=0.1)
    lines = [msgspec.json.encode(d) for d in lab.router.decisions(100)]
    picked = [d.picked.endpoint for d in lab.router.decisions(100)]
    assert [r.recorded for r in rerun(read_decisions(lines)) if r.same] == picked
    answering = [p for p in SCORERS if policy in PRICED or p not in PRICED]
    others = {p: [r.rerun for r in rerun(read_decisions(lines), p)] for p in answering}
    assert others.get(policy, picked) == picked
    assert len({tuple(picks) for picks in others.values()}) > 1


def test_a_record_that_cannot_answer_for_another_policy_says_so():
    lab = Lab(policy="round-robin")
    lab.up("a", "b")
    lab.ask("r", prompt("p", 40))
    with pytest.raises(ConfigError, match="made under round-robin, which prices nothing"):
        list(rerun(lab.router.decisions(), "cost"))


def test_only_the_pick_is_priced_under_a_policy_that_looks_at_no_seconds():
    lab, priced = Lab(policy="round-robin"), Lab(policy="cost")
    for each in (lab, priced):
        each.up("a", "b")
        each.ask("r", prompt("p", 40))
    a, b = lab.candidates("r").values()
    assert a == priced.candidates("r")["a"]
    assert (b.total_s, b.compute_s) == (0.0, 0.0)


def test_reading_names_line_and_field():
    with pytest.raises(BadRequest, match=r"line 2 is not a decision record: .*missing.*"):
        list(read_decisions([b"", b"{}"]))
    lab = Lab()
    lab.up("a")
    lab.ask("r", [1])
    decision = msgspec.structs.replace(lab.router.decisions()[0], pick=3)
    with pytest.raises(BadRequest, match="pick 3"):
        list(read_decisions([msgspec.json.encode(decision)]))
    with pytest.raises(ConfigError, match="nearest"):
        list(rerun([lab.router.decisions()[0]], "nearest"))


@pytest.mark.parametrize("endpoints", [1, 3, 200])
def test_an_explanation_fits_into_a_header_and_shows_the_pick(endpoints):
    lab = Lab()
    lab.up(*(f"http://engine-{i}.example:8000#0" for i in range(endpoints)))
    lab.ask("r", prompt("p", 100))
    (decision,) = lab.router.decisions()
    text = explain(decision)
    shown = msgspec.json.decode(text)
    assert len(text) <= EXPLANATION_BYTES
    assert shown["candidates"][0]["endpoint"] == shown["endpoint"] == decision.picked.endpoint
    assert len(shown["candidates"]) + shown["left_out"] == endpoints


def test_decisions_are_kept_within_a_bound_and_found_by_id():
    lab = Lab(decisions_kept=3)
    lab.up("a")
    ids = []
    for i in range(5):
        lab.ask(str(i), prompt(i, 20))
        ids.append(lab.attempts[str(i)].decision)
    assert [d.id for d in lab.router.decisions()] == ids[2:]
    assert lab.router.decision(ids[0]) is None
    assert lab.router.decision(ids[4]).request == "4"


# --- a recorded session, fed to a fresh router ---

steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "ask", "first", "finish", "fail", "events", "scrape", "suspect", "tick"]
        ),
        st.integers(0, 5),
        st.integers(1, 9),
    ),
    max_size=60,
)


@given(steps, st.sampled_from([*POLICIES]))
@settings(REPEATABLE, max_examples=60)
def test_a_recorded_session_fed_to_a_fresh_router_gives_equal_decisions(steps, policy):
    lab = Lab(policy=policy)
    engines = {"a": Engine(30), "b": Engine(30, block=8)}
    lab.up("a", kv_tokens=480, has_events=True, has_replay=True, process_start_s=1.0)
    lab.up("b", kv_tokens=240, has_events=True, process_start_s=1.0)
    lab.up("c", kv_tokens=240, max_sequences=2)
    lab.replay("a", engines["a"], 0)
    running = []
    for n, (what, which, size) in enumerate(steps):
        lab.t += 0.37
        endpoint = "abc"[which % 3]
        if what == "ask":
            lab.ask(f"r{n}", prompt(which, 20 * size))
            running.append((f"r{n}", prompt(which, 20 * size)))
        elif what == "first" and running:
            request = running[which % len(running)][0]
            lab.first(request)
        elif what in ("finish", "fail") and running:
            request, token_ids = running.pop(which % len(running))
            if what == "fail":
                lab.finish(request, FinishReason.REFUSED, answered=False)
                lab.finish(request, FinishReason.CLIENT_GONE)
            else:
                lab.finish(request, cached_tokens=which, output_tokens=size)
                if (engine := engines.get(endpoint)) is not None:
                    engine.run(token_ids)
                    lab.batch(endpoint, engine.publish())
        elif what == "events" and endpoint in engines:
            engines[endpoint].run(prompt(which, 20 * size))
            batch = engines[endpoint].publish()
            if size % 3:
                lab.batch(endpoint, batch)
        elif what == "scrape":
            lab.tell(Signals, endpoint=endpoint, scraped_t=lab.t, running=size, process_start_s=1.0)
        elif what == "suspect":
            for ask in lab.tell(EndpointSuspect, endpoint=endpoint, cause="?"):
                if hasattr(ask, "from_seq"):
                    lab.replay(endpoint, engines[endpoint], ask.from_seq)
        elif what == "tick":
            lab.tell(Tick)
    log = [msgspec.json.encode(event) for event in lab.recorded]
    assert not any(b"token_ids" in line for line in log)
    fresh, placed = Router(RouterConfig(policy=policy)), []
    for line in log:
        for instruction in fresh.handle(msgspec.json.decode(line, type=AnyEvent)):
            if isinstance(instruction, Dispatch):
                placed.append(instruction)
    assert fresh.decisions(1000) == lab.router.decisions(1000)
    assert [d.decision for d in placed] == [d.id for d in fresh.decisions(1000)]
    assert fresh.outcomes(1000) == lab.router.outcomes(1000)


def test_a_log_holds_keys_and_lengths_and_nothing_of_the_text():
    lab, engine = Lab(), Engine(20)
    lab.up("a", has_events=True)
    engine.run(prompt("secret", 2 * BLOCK))
    lab.batch("a", engine.publish())
    lab.ask("r", prompt("secret", 2 * BLOCK))
    text = b"".join(msgspec.json.encode(event) for event in lab.recorded)
    assert str(keys_of(prompt("secret", 2 * BLOCK))[0]).encode() in text
    for token in prompt("secret", 2 * BLOCK):
        assert f"[{token},".encode() not in text
        assert f",{token},".encode() not in text

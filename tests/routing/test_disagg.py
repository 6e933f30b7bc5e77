"""Pairs of a prefill and a decode endpoint: when one is taken, and what becomes of it on every way out."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pair_lab import FIELDS, LINK, NOTHING, begin, busy, crowd, decision, fleet, load, prefilled
from routing_lab import BLOCK, REPEATABLE, Engine, Lab, prompt

from sumibi.core.errors import ConfigError
from sumibi.routing import cost
from sumibi.routing.decisions import Decision, explain
from sumibi.routing.disagg import FALLBACK, PAIR, WHOLE
from sumibi.routing.events import (
    AnyEvent,
    Dispatch,
    Dispatched,
    EndpointDown,
    EndpointUp,
    FinishReason,
    Refuse,
    Role,
    Tick,
)
from sumibi.routing.router import Router


def test_a_pair_is_taken_where_a_prefill_would_hold_up_those_who_decode():
    lab = fleet()
    busy(lab)
    assert begin(lab, "r", prompt("r", 1000), max_tokens=128) == ("p", "d")
    made = decision(lab)
    pair = made.picked
    # By hand: the prefill and its price of work; one sequence more in 128 steps of the other answer, at 0.1;
    # 1,000 tokens of 100 kB over 1 GB/s; a step of what decodes there and this one.
    moved_s, step_s = 0.002 + 0.1, 0.02 + 2 * 0.001
    assert pair.compute_s == pytest.approx(1.01)
    assert pair.transfer_s == pytest.approx(moved_s + step_s)
    assert pair.ttft_s == pytest.approx(1.01 + moved_s + step_s)
    assert pair.delay_s == pytest.approx(0.1 * 128 * 0.001)
    assert pair.total_s == pytest.approx(pair.ttft_s + pair.delay_s + 0.3 * 1.0)
    whole = next(c for c in made.candidates if not c.prefill)
    # Whoever decodes where only that should be done stands still for the prefill: 2.5 times its seconds.
    # One that came a moment ago lets so many expect in 1.01 s, each for half of it: 1.01 * ln 2 / 60.
    stalled = 1 + 1.01 * 0.693147 / 60 / 2
    assert whole.delay_s == pytest.approx(2.5 * stalled * 1.01 + 0.1 * 128 * 0.001)
    assert made.reason == "delay"
    assert lab.router.counters().disagg == {WHOLE: {"transfer": 1}, PAIR: {"delay": 1}}


def test_without_anybody_to_hold_up_a_transfer_buys_nothing():
    lab = fleet()
    assert begin(lab, "r", prompt("r", 1000)) == (None, "d")
    assert decision(lab).reason == "transfer"


@pytest.mark.interpreted
def test_where_others_came_lately_the_next_ones_are_expected_to_be_held_up(monkeypatch):
    def whole_run():
        lab = fleet()
        for number in range(60):  # one a second, each over before the next
            begin(lab, f"s{number}", prompt(f"s{number}", 32), max_tokens=2)
            lab.first(f"s{number}", dt=0.1)
            lab.finish(f"s{number}", dt=0.05, output_tokens=2)
            lab.t = number + 1.0
        where = begin(lab, "r", prompt("r", 4000))
        return where, next(c for c in decision(lab).candidates if not c.prefill)

    where, whole = whole_run()
    assert where == ("p", "d")
    monkeypatch.setattr(cost, "STALL", 0.0)
    _, free = whole_run()
    # Half of one a second is known after a minute. Each waits for half of the prefill, 2.5 times counted.
    assert whole.compute_s == pytest.approx(free.compute_s, rel=0.05)
    assert whole.delay_s - free.delay_s == pytest.approx(2.5 * 0.5 * whole.compute_s**2 / 2, rel=0.05)


def test_a_short_remainder_stays_where_its_conversation_decodes():
    lab = fleet()
    tokens = prompt("talk", 1600)
    begin(lab, "first", tokens)
    lab.first("first", dt=1.6)
    lab.finish("first", output_tokens=128)
    busy(lab)
    assert begin(lab, "second", tokens + prompt("more", 40)) == (None, "d")
    assert decision(lab).reason == "compute", "the prefill endpoint would have to compute it all"
    assert decision(lab).picked.matched_tokens == 1600


def test_a_busy_prefill_endpoint_is_waited_for_only_so_long():
    lab = fleet()
    busy(lab)
    kinds = [begin(lab, f"r{i}", prompt(i, 4000))[0] for i in range(7)]
    # By hand: a whole run holds up the one who decodes, and the next pair, for 4 s each, 2.5 times counted.
    assert kinds[:4] == ["p"] * 4, "the fourth waits for twelve seconds"
    assert None in kinds, "seven prefills in a row would make the last one wait for twenty-four"


def test_a_pair_reserves_on_both_sides_and_lets_go_of_each_once():
    lab = fleet()
    busy(lab)
    begin(lab, "r", prompt("r", 1000))
    assert load(lab, "p") == (1, 1, 0, 0)
    assert load(lab, "d") == (2, 0, 1, 1)
    prefilled(lab, "r", dt=1.0, cached_tokens=0)
    assert load(lab, "p") == NOTHING
    assert load(lab, "d") == (2, 0, 0, 2)
    prefilled(lab, "r")
    assert lab.router.counters().stale_events == 1, "a second end of the leg"
    lab.dispatched("r")
    lab.first("r", dt=0.2)
    assert load(lab, "d") == (2, 0, 0, 2)
    lab.finish("r", output_tokens=20)
    assert load(lab, "d") == (1, 0, 0, 1)


def test_what_was_computed_counts_on_both_sides():
    lab = fleet()
    busy(lab)
    tokens = prompt("r", 1000)
    begin(lab, "r", tokens)
    prefilled(lab, "r", dt=1.0, cached_tokens=0)
    lab.dispatched("r")
    lab.first("r", dt=0.2)
    lab.finish("r")
    begin(lab, "again", tokens)
    made = decision(lab)
    full = 1000 // BLOCK * BLOCK
    assert [c.matched_tokens for c in made.legs] == [full]
    pair = next(c for c in made.candidates if c.prefill)
    whole = next(c for c in made.candidates if not c.prefill)
    assert (whole.matched_tokens, pair.local_tokens, pair.matched_tokens) == (full, full, full)


def test_kv_events_of_both_sides_are_believed():
    lab = Lab()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        lab.up(name, role=role, has_events=True, **FIELDS)
    engine, tokens = Engine(1000), prompt("known", 800)
    engine.run(tokens)
    lab.batch("p", engine.publish())
    busy(lab)
    begin(lab, "r", tokens)
    pair = next(c for c in decision(lab).candidates if c.prefill)
    assert (pair.matched_tokens, pair.local_tokens) == (784, 0)
    assert pair.compute_s == pytest.approx(0.01 + 16 * 0.001)


def test_blocks_on_their_way_are_not_sent_twice():
    lab = fleet()
    busy(lab)
    tokens = prompt("shared", 2000)
    assert begin(lab, "one", tokens) == ("p", "d")
    begin(lab, "two", tokens + prompt("own", 100))
    pair = next(c for c in decision(lab).candidates if c.prefill)
    assert (pair.pending_tokens, pair.local_tokens) == (2000, 2000)
    whole = next(c for c in decision(lab).candidates if not c.prefill)
    assert whole.pending_tokens == 2000
    assert whole.pending_s > pair.pending_s, "it has to be moved, too"


def test_kv_goes_from_one_endpoint_to_another_only_within_one_revision():
    lab = Lab()
    lab.up("p1", role=Role.PREFILL, revision="1", **FIELDS)
    lab.up("d2", role=Role.DECODE, revision="2", **FIELDS)
    busy(lab)
    assert begin(lab, "r", prompt("r", 3000)) == (None, "d2")
    assert decision(lab).reason == "only"
    lab.up("p2", role=Role.PREFILL, revision="2", **FIELDS)
    lab.up("d1", role=Role.DECODE, revision="1", **FIELDS)
    busy(lab, "other")
    for i in range(6):
        made = begin(lab, f"r{i}", prompt(i, 3000))
        if made[0] is not None:
            assert made in {("p1", "d1"), ("p2", "d2")}
    pairs = {(c.prefill, c.endpoint) for d in lab.router.decisions() for c in d.candidates if c.prefill}
    assert pairs == {("p1", "d1"), ("p2", "d2")}


def test_a_prefill_endpoint_alone_takes_nothing():
    lab = fleet(decode=())
    assert lab.ask("r", prompt("r", 100)) is None
    (refused,) = lab.tell(Tick, dt=11.0)
    assert isinstance(refused, Refuse)
    assert refused.reason == "rejected-no-endpoints"


def test_endpoints_for_both_are_never_paired_while_nobody_has_a_role():
    lab = fleet(prefill=(), decode=(), both=("a", "b"))
    busy(lab)
    assert begin(lab, "r", prompt("r", 3000))[0] is None
    made = decision(lab)
    assert (made.legs, made.reason, lab.router.counters().disagg) == ([], "", {})
    assert b"prefill" not in msgspec.json.encode(made.candidates).replace(b"prefill_tokens", b"")


def test_an_endpoint_for_both_may_be_either_half():
    lab = fleet(prefill=("p",), decode=(), both=("a", "b"))
    busy(lab)
    begin(lab, "r", prompt("r", 2000))
    pairs = {(c.prefill, c.endpoint) for c in decision(lab).candidates if c.prefill}
    assert {d for _, d in pairs} == {"a", "b"}
    assert all(p != d for p, d in pairs)
    assert {c.endpoint for c in decision(lab).legs} == {"p", "a", "b"}


def test_a_record_says_by_itself_that_the_pair_is_the_best():
    lab = fleet(prefill=("p1", "p2", "p3"), decode=("d1", "d2"))
    busy(lab)
    for i in range(12):
        begin(lab, f"r{i}", prompt(i % 5, 500 + 300 * i))
        made = msgspec.json.decode(msgspec.json.encode(decision(lab)), type=Decision)
        assert made == decision(lab)
        best = min(c.total_s for c in made.candidates)
        assert made.picked.total_s <= best + 0.02 * made.picked.ttft_s
        legs = {leg.endpoint: leg for leg in made.legs}
        for pair in (c for c in made.candidates if c.prefill):
            leg = legs[pair.prefill]
            # What the decode endpoint adds is the same with any other prefill endpoint.
            after_s = pair.transfer_s + pair.delay_s - leg.delay_s + pair.evict_s - leg.evict_s
            for other in made.legs:
                ready_s = max(other.wait_s, other.pending_s, other.room_s) + other.compute_s
                total_s = max(ready_s, pair.room_s) + other.delay_s + other.evict_s + other.balance_s
                assert pair.total_s <= total_s + after_s + 0.02 * pair.ttft_s + 1e-9


def test_an_explanation_names_both_endpoints_and_why():
    lab = fleet()
    busy(lab)
    begin(lab, "r", prompt("r", 1000))
    said = msgspec.json.decode(explain(decision(lab)))
    assert said["reason"] == "delay"
    assert said["candidates"][0]["prefill"] == "p"
    assert said["candidates"][0]["transfer_s"] == pytest.approx(0.124)


def test_transfers_are_learnt_at_the_endpoint_they_go_to():
    lab = fleet(max_attempts=1)
    crowd(lab)
    for i in range(60):
        request = f"r{i}"
        assert begin(lab, request, prompt(request, 1000)) == ("p", "d")
        prefilled(lab, request, dt=1.0)
        lab.dispatched(request)
        step_s = 0.02 + 11 * 0.001
        lab.first(request, dt=4 * 0.102 + step_s)  # the link is four times as slow as it says
        lab.finish(request, dt=0.3, output_tokens=1)
    assert lab.view("d").transfer_factor == pytest.approx(4.0, rel=0.1)
    assert lab.view("p").transfer_factor == 1.0


def test_in_large_pools_the_pairs_are_those_of_looking_at_all(monkeypatch: pytest.MonkeyPatch):
    # Orders of victims are renewed whenever they are asked for: it does not matter who asked before.
    for name, value in {"placing.FRESH_S": -1.0, "placing.STALE_S": -1.0, "recency.FRESH_S": -1.0}.items():
        monkeypatch.setattr(f"sumibi.routing.{name}", value)
    monkeypatch.setattr("sumibi.routing.placing.MOST_ORDERED", 0)

    def played(many: int) -> list[tuple[str | None, str]]:
        monkeypatch.setattr("sumibi.routing.placing.MANY", many)
        lab = fleet([f"p{i}" for i in range(20)], [f"d{i}" for i in range(20)], check=False)
        made = []
        for i in range(120):
            request = f"r{i}"
            made.append(begin(lab, request, prompt(i % 30, 200 + 97 * (i % 17) * (i % 5))))
            lab.t += 0.05
            if made[-1][0] is not None and i % 3:
                prefilled(lab, request)
            if i % 2:
                lab.first(request)
            if i % 7 == 0:
                lab.finish(request)
        lab.router.check_integrity()
        return made

    few, all_ = played(16), played(1000)
    assert few == all_
    assert 20 < sum(prefill is not None for prefill, _ in few) < 110


# --- ways out ---


def started(**config):
    lab = fleet(**config)
    busy(lab)
    assert begin(lab, "r", prompt("r", 2000)) == ("p", "d")
    return lab


@pytest.mark.parametrize("why", [r for r in FinishReason if r.retriable])
def test_a_failed_prefill_falls_back_to_a_whole_run_where_it_was_to_decode(why: FinishReason):
    lab = started()
    (again,) = [i for i in prefilled(lab, "r", failed=why) if isinstance(i, Dispatch)]
    assert (again.endpoint, again.prefill, again.attempt) == ("d", None, 2)
    assert load(lab, "p") == NOTHING
    assert load(lab, "d") == (2, 1, 0, 1)
    assert decision(lab).reason == FALLBACK
    counters = lab.router.counters()
    assert (counters.retries, counters.disagg[WHOLE][FALLBACK], counters.finished[why]) == (1, 1, 1)
    lab.dispatched("r")
    lab.first("r")
    lab.finish("r")
    assert load(lab, "d") == (1, 0, 0, 1)


def test_a_prefill_endpoint_that_broke_is_left_alone_and_the_other_one_is_not_blamed():
    lab = started()
    prefilled(lab, "r", failed=FinishReason.ENGINE_GONE)
    assert (lab.view("p").reachable, lab.view("d").reachable) == (False, True)
    assert begin(lab, "next", prompt("next", 2000)) == (None, "d")
    assert decision(lab).reason == "only"


def test_a_failed_prefill_whose_decode_endpoint_left_goes_elsewhere():
    lab = fleet(prefill=("p", "q"), decode=("d", "e"))
    busy(lab)
    first = begin(lab, "r", prompt("r", 2000))
    lab.tell(EndpointDown, endpoint=first[1], cause="test")
    prefilled(lab, "r", failed=FinishReason.REFUSED)
    second = lab.attempts["r"]
    assert second.attempt == 2
    assert second.endpoint != first[1]
    assert second.prefill != first[0]


def test_a_request_at_fault_is_not_tried_again():
    lab = started()
    assert not [i for i in prefilled(lab, "r", failed=FinishReason.REJECTED) if isinstance(i, Dispatch)]
    assert (load(lab, "p"), load(lab, "d")) == (NOTHING, (1, 0, 0, 1))
    assert lab.router.counters().requests_now == 1, "the writer"


def test_a_failed_prefill_of_the_last_attempt_is_the_end():
    lab = started(max_attempts=1)
    assert not [i for i in prefilled(lab, "r", failed=FinishReason.TIMEOUT) if isinstance(i, Dispatch)]
    assert lab.router.counters().requests_now == 1


@pytest.mark.parametrize("after", ["dispatch", "prefill", "first token"])
def test_a_client_that_leaves_frees_both_sides(after: str):
    lab = started()
    if after != "dispatch":
        prefilled(lab, "r")
    if after == "first token":
        lab.first("r")
    lab.finish("r", FinishReason.CLIENT_GONE)
    assert (load(lab, "p"), load(lab, "d")) == (NOTHING, (1, 0, 0, 1))
    prefilled(lab, "r")
    assert lab.router.counters().stale_events == 1


def test_a_decode_endpoint_that_refuses_is_replaced_and_the_prompt_not_computed_again():
    lab = fleet(decode=("d", "e"))
    busy(lab)
    p, d = begin(lab, "r", prompt("r", 2000))
    prefilled(lab, "r", cached_tokens=0)
    lab.finish("r", FinishReason.REFUSED, answered=False)
    again = lab.attempts["r"]
    assert again.attempt == 2
    assert again.endpoint != d
    assert again.prefill == p, "it has the whole prompt"
    assert decision(lab).picked.matched_tokens == 2000 - BLOCK


@pytest.mark.parametrize("who", ["p", "d"])
def test_a_restart_of_either_leaves_the_new_life_without_load(who: str):
    lab = Lab()
    lab.up("p", role=Role.PREFILL, process_start_s=1.0, **FIELDS)
    lab.up("d", role=Role.DECODE, process_start_s=1.0, **FIELDS)
    busy(lab)
    begin(lab, "r", prompt("r", 2000))
    role = Role.PREFILL if who == "p" else Role.DECODE
    lab.up(who, role=role, process_start_s=2.0, **FIELDS)
    assert load(lab, who) == NOTHING
    prefilled(lab, "r")
    lab.first("r")
    lab.finish("r")
    lab.finish("writer-d")
    assert (load(lab, "p"), load(lab, "d")) == (NOTHING, NOTHING)


def test_what_a_dead_prefill_endpoint_was_computing_is_waited_for_by_nobody():
    lab = Lab()
    lab.up("p", role=Role.PREFILL, process_start_s=1.0, **FIELDS)
    lab.up("d", role=Role.DECODE, process_start_s=1.0, **FIELDS)
    busy(lab)
    tokens = prompt("r", 2000)
    assert begin(lab, "r", tokens) == ("p", "d")
    lab.up("p", role=Role.PREFILL, process_start_s=2.0, **FIELDS)
    begin(lab, "same", tokens)
    assert all(c.pending_tokens == c.local_tokens == 0 for c in decision(lab).candidates)


def test_a_first_token_without_word_of_the_prefill_ends_it_too():
    lab = started()
    lab.first("r")
    assert (load(lab, "p"), load(lab, "d")) == (NOTHING, (2, 0, 0, 2))


def test_a_request_is_held_until_its_prefill_endpoint_can_begin():
    lab = fleet(hold_above_s=1.0)
    crowd(lab)
    assert begin(lab, "r", prompt("r", 3000)) == ("p", "d")
    lab.arrive("next", prompt("next", 3000))
    assert [held.requests for held in lab.router.counters().held_now] == [1]
    assert "next" not in lab.attempts
    prefilled(lab, "r", dt=3.0)
    assert lab.router.counters().held_now == []
    assert lab.attempts["next"].prefill == "p"


# --- other policies ---


def test_round_robin_takes_each_side_in_turn():
    lab = fleet(prefill=("p1", "p2"), decode=("d1", "d2", "d3"), policy="round-robin")
    made = [begin(lab, f"r{i}", prompt(i, 100)) for i in range(6)]
    assert made == [(f"p{i % 2 + 1}", f"d{i % 3 + 1}") for i in range(6)]
    assert lab.router.counters().disagg == {PAIR: {"always": 6}}
    assert decision(lab).picked.compute_s == pytest.approx(0.01 + 0.1), "what is predicted is recorded"


def test_random_draws_each_side_for_itself():
    lab = fleet(prefill=("p1", "p2"), decode=("d1", "d2"), policy="random", check=False)
    made = {begin(lab, f"r{i}", prompt(i, 100)) for i in range(40)}
    assert made == {(p, d) for p in ("p1", "p2") for d in ("d1", "d2")}


def test_policies_that_make_no_pairs_say_so():
    with pytest.raises(ConfigError, match=r"llmd-weighted makes no pairs.*cost, round-robin, random do"):
        fleet(policy="llmd-weighted")


def test_a_log_with_pairs_replays_bit_equal():
    lab = started()
    prefilled(lab, "r", dt=1.0, cached_tokens=0)
    lab.dispatched("r")
    lab.first("r", dt=0.2)
    lab.finish("r", output_tokens=7, prompt_tokens=2000, cached_tokens=0)
    begin(lab, "s", prompt("s", 2500))
    prefilled(lab, "s", failed=FinishReason.TIMEOUT)
    wire = [msgspec.json.encode(event) for event in lab.recorded]
    again = Router(lab.router.config)
    for line in wire:
        again.handle(msgspec.json.decode(line, type=AnyEvent))
    assert again.decisions() == lab.router.decisions()
    assert again.outcomes() == lab.router.outcomes()
    assert again.fleet_view() == lab.router.fleet_view()


class Interleavings(RuleBasedStateMachine):
    """Whatever comes in whatever order, counters equal a recount, and nothing is left when all is over."""

    def __init__(self):
        super().__init__()
        self.lab = Lab(check=True, max_attempts=3, hold_above_s=1.0)
        self.started = 1.0
        self.number = 0
        for name in ("p1", "p2"):
            self._up(name, Role.PREFILL)
        for name in ("d1", "d2"):
            self._up(name, Role.DECODE)
        self._up("b", Role.BOTH)
        self.roles = {v.endpoint: v.role for v in self.lab.router.fleet_view()}
        self.open: list[str] = []

    def _up(self, name, role, start=1.0):
        self.lab.up(name, role=role, process_start_s=start, kv_tokens=8000, max_sequences=4, **FIELDS)

    def _some(self, choice):
        return self.open[choice % len(self.open)] if self.open else None

    def _number(self, request):
        attempt = self.lab.attempts.get(request)
        return attempt.attempt if attempt is not None else 0

    def _sync(self):
        """Requests that the router let go of are over."""
        known = {r for r in self.open if r in self.lab.router._requests}
        self.open = [r for r in self.open if r in known]

    @rule(what=st.integers(0, 3), tokens=st.integers(1, 6000), stream=st.booleans())
    def arrive(self, what, tokens, stream):
        self.number += 1
        request = f"r{self.number}"
        self.lab.arrive(request, prompt(what, tokens), stream=stream)
        self.open.append(request)
        self._sync()

    @rule(choice=st.integers(0, 50), second=st.booleans())
    def dispatch(self, choice, second):
        request = self._some(choice)
        attempt = self.lab.attempts.get(request)
        if attempt is not None:
            endpoint = attempt.endpoint if second or attempt.prefill is None else attempt.prefill
            self.lab.tell(Dispatched, request=request, attempt=attempt.attempt, endpoint=endpoint)

    @rule(
        choice=st.integers(0, 50),
        failed=st.sampled_from(
            [None, None, FinishReason.REFUSED, FinishReason.TIMEOUT, FinishReason.REJECTED]
        ),
        cached=st.sampled_from([None, 0, 160]),
        dt=st.sampled_from([0.0, 0.5]),
    )
    def leg_over(self, choice, failed, cached, dt):
        request = self._some(choice)
        if request in self.lab.attempts:
            prefilled(self.lab, request, dt=dt, failed=failed, cached_tokens=cached)
            self._sync()

    @rule(choice=st.integers(0, 50), dt=st.sampled_from([0.0, 0.5]))
    def first(self, choice, dt):
        request = self._some(choice)
        if request in self.lab.attempts:
            self.lab.first(request, dt=dt)

    @rule(
        choice=st.integers(0, 50),
        reason=st.sampled_from(list(FinishReason)),
        answered=st.booleans(),
        cached=st.sampled_from([None, 0, 160]),
    )
    def finish(self, choice, reason, answered, cached):
        request = self._some(choice)
        if request is not None:
            self.lab.finish(request, reason, answered=answered, cached_tokens=cached, output_tokens=5)
            self._sync()

    @rule(name=st.sampled_from(["p1", "p2", "d1", "d2", "b"]), how=st.sampled_from(["up", "down", "restart"]))
    def endpoint(self, name, how):
        if how == "down":
            self.lab.tell(EndpointDown, endpoint=name, cause="test")
            return
        self.started += how == "restart"
        self._up(name, self.roles[name], self.started)
        self._sync()

    @rule(dt=st.sampled_from([0.1, 20.0]))
    def tick(self, dt):
        self.lab.tell(Tick, dt=dt)
        self._sync()

    @invariant()
    def nobody_holds_what_is_not_open(self):
        assert len(self.lab.router._ledger) <= len(self.open)

    def teardown(self):
        for request in list(self.open):
            self.lab.finish(request, FinishReason.CLIENT_GONE)
        assert [load(self.lab, name) for name in self.roles] == [NOTHING] * 5
        assert self.lab.router.counters().requests_now == 0


Interleavings.TestCase.settings = settings(REPEATABLE, max_examples=60, stateful_step_count=40)
TestInterleavings = Interleavings.TestCase


def test_both_names_of_an_event_are_known_to_the_log():
    up = EndpointUp(t=0.0, endpoint="e", models=["m"], role=Role.PREFILL, revision="7", link=LINK)
    assert msgspec.json.decode(msgspec.json.encode(up), type=AnyEvent) == up

"""Flow control: who is held, in which order requests leave, and that nobody waits for ever."""

import io
from math import inf

import msgspec
import pytest
from flow_lab import FLAT, Queues, held
from hypothesis import given
from hypothesis import strategies as st
from routing_lab import BLOCK, MODEL, REPEATABLE, Lab, keys_of, prompt

from sumibi.routing.config import BandLimits, RouterConfig
from sumibi.routing.events import (
    Arrived,
    Dispatch,
    EndpointDown,
    FinishReason,
    Refuse,
    Signals,
    Tick,
    WakeAt,
)
from sumibi.routing.flow import AGED_AFTER_S, HASTE, MOST_HANDICAP_S, Flow
from sumibi.routing.held import Held
from sumibi.routing.recording import Started, replay
from sumibi.routing.requests import Request

HOLD_S = 1.0


def dispatched(instructions):
    return [i.request for i in instructions if isinstance(i, Dispatch)]


def refusals(instructions):
    return {i.request: (i.status, i.reason) for i in instructions if isinstance(i, Refuse)}


def queues(*names, **config):
    return Queues(*names, hold_above_s=HOLD_S, check=True, **config)


# --- who is held, and until when ---


@pytest.mark.parametrize(("tokens", "is_held"), [(9_999, False), (10_001, True)])
def test_a_request_is_held_if_its_pick_cannot_begin_within_the_bound(tokens, is_held):
    it = queues("a")
    it.arrive("first", tokens)  # 1 s of work at 10,000 tokens a second
    it.arrive("second", 100)
    assert held(it.lab) == is_held
    assert it.placed == (["first"] if is_held else ["first", "second"])


def test_it_leaves_when_the_work_before_it_is_down_to_the_bound():
    lab = Lab(hold_above_s=HOLD_S, latency=FLAT)
    lab.up("a")
    lab.ask("first", [], prompt_tokens=35_000, keys=[])
    told = lab.arrive("second", [], prompt_tokens=100, keys=[])
    (wake,) = [i.at for i in told if isinstance(i, WakeAt)]
    assert wake == pytest.approx(2.5)
    assert dispatched(lab.tell(Tick, dt=2.49)) == []
    assert dispatched(lab.tell(Tick, dt=0.02)) == ["second"]
    assert held(lab) == 0


def test_it_leaves_at_the_first_token_of_what_was_before_it():
    lab = Lab(hold_above_s=HOLD_S, latency=FLAT)
    lab.up("a")
    lab.ask("first", [], prompt_tokens=35_000, keys=[])
    lab.ask("second", [], prompt_tokens=100, keys=[])
    assert held(lab) == 1
    lab.first("first", dt=0.5)
    assert (held(lab), lab.attempts["second"].endpoint) == (0, "a")


@pytest.mark.parametrize("how", ["up", "signals", "failed", "down"])
def test_every_event_that_can_make_room_is_used(how):
    lab = Lab(hold_above_s=HOLD_S, latency=FLAT)
    lab.up("a", "b")
    if how == "signals":
        for name in "ab":
            lab.tell(Signals, endpoint=name, scraped_t=lab.t, running=0, waiting=50)
    else:
        lab.ask("1", [], prompt_tokens=35_000, keys=[])
        lab.ask("2", [], prompt_tokens=40_000, keys=[])
    assert lab.ask("r", [], prompt_tokens=100, keys=[]) is None
    first, second = (lab.attempts[name].endpoint if name in lab.attempts else "" for name in "12")
    match how:
        case "up":
            lab.up("c")
        case "signals":
            lab.tell(Signals, endpoint="b", scraped_t=lab.t, running=0, waiting=0)
        case "failed":
            lab.finish("1", FinishReason.REJECTED, answered=True)
        case "down":
            # Its home is gone; the other one cannot begin soon, and that is all there is.
            lab.tell(EndpointDown, endpoint=lab.attempts["1"].endpoint, cause="health")
            assert held(lab) == 1
            lab.first("2")
    where = {"up": "c", "failed": first, "down": second}.get(how, lab.attempts["r"].endpoint)
    assert (held(lab), lab.attempts["r"].endpoint) == (0, where)


@pytest.mark.parametrize(
    "config", [{"hold_above_s": None}, {"policy": "round-robin"}, {"policy": "llmd-weighted"}]
)
def test_nothing_is_held_without_a_bound_or_under_a_policy_that_knows_no_seconds(config):
    it = Queues("a", **({"hold_above_s": HOLD_S} | config))
    for i in range(50):
        it.arrive(f"r{i}", 50_000)
    assert (len(it.placed), held(it.lab)) == (50, 0)


# --- the order ---

SIZE_S = MOST_HANDICAP_S
"""What a second of work and more puts a turn off."""


def flow_of(**config):
    return Flow(RouterConfig(**({"hold_above_s": HOLD_S} | config)))


def put(flow, name, t, *, program="", priority=0, work_s=1.0, home="a", endpoints=1, keys=(), known_blocks=0):
    """Hold a request of `work_s` at time `t`; each is a program of its own if none is named."""
    event = Arrived(t=t, request=name, model=MODEL, keys=list(keys), prompt_tokens=10, priority=priority)
    request = Request(event, None)
    request.program = program or name
    one = Held(request, t, inf)
    flow.settle(one, home, work_s, known_blocks)
    flow.add(one, endpoints, t)
    flow.check_integrity()
    return one


def order(flow):
    return [one.request.event.request for one in flow.turns()]


@pytest.mark.interpreted
def test_higher_priorities_go_first_and_equal_ones_as_they_came():
    flow = flow_of()
    for number, priority in enumerate([0, 5, -3, 5, 0, 2]):
        put(flow, f"{priority}/{number}", float(number), priority=priority)
    assert order(flow) == ["5/1", "5/3", "2/5", "0/0", "0/4", "-3/2"]


@pytest.mark.interpreted
def test_requests_of_a_program_that_is_ahead_go_after_those_that_come_within_its_lead():
    flow = flow_of()
    flow.attained.charge("greedy", 1000, 12.0, 0.0)  # it is 12 s ahead at 0, 8 s at 4
    assert put(flow, "r1", 4.0, program="greedy").turn_t == pytest.approx(12.0 + SIZE_S)
    put(flow, "r2", 11.9)
    put(flow, "r3", 12.1)
    assert order(flow) == ["r2", "r1", "r3"]


@pytest.mark.interpreted
def test_a_lead_costs_no_more_than_the_limit():
    flow = flow_of()
    flow.attained.charge("greedy", 1000, 5000.0, 0.0)
    assert put(flow, "r1", 1.0, program="greedy").turn_t == 1.0 + MOST_HANDICAP_S + SIZE_S


@pytest.mark.interpreted
def test_what_a_program_holds_already_is_before_its_next_request_at_its_share_of_the_pool():
    flow = flow_of()
    # Two endpoints do 2 s of prefill a second. One program alone is due all of it.
    assert put(flow, "p1", 0.0, program="p", work_s=6.0, endpoints=2).turn_t == 0.0 + SIZE_S
    assert put(flow, "p2", 0.0, program="p", work_s=6.0, endpoints=2).turn_t == 3.0 + SIZE_S
    # With another one it is due half.
    assert put(flow, "q1", 0.0, program="q", work_s=6.0, endpoints=2).turn_t == 0.0 + SIZE_S
    assert put(flow, "p3", 0.0, program="p", work_s=6.0, endpoints=2).turn_t == 12.0 + SIZE_S
    assert order(flow) == ["p1", "q1", "p2", "p3"]


@pytest.mark.interpreted
def test_who_has_less_to_compute_goes_before_others_by_a_bound():
    flow = flow_of()
    assert put(flow, "cold", 0.0, work_s=500.0).turn_t == MOST_HANDICAP_S
    assert put(flow, "small", 0.0, work_s=0.5).turn_t == pytest.approx(0.5 * HASTE)
    assert put(flow, "warm", 20.0, work_s=0.01).turn_t == pytest.approx(20.0 + 0.01 * HASTE)
    put(flow, "late", MOST_HANDICAP_S + 0.1, work_s=0.01)
    assert order(flow) == ["small", "warm", "cold", "late"]


@pytest.mark.interpreted
def test_those_that_wait_for_the_same_blocks_go_with_the_first_that_computes_them():
    flow = flow_of()
    shared = list(range(1, 101))  # a hundred blocks, of which the homes have the first ten
    first = put(flow, "first", 0.0, keys=[*shared, 201], known_blocks=10, work_s=9.0)
    other = put(flow, "other", 1.0, keys=[*range(1, 11), 301, 302], known_blocks=10, work_s=9.0)
    put(flow, "like it", 2.0, keys=[*shared, *range(401, 410)], known_blocks=10, work_s=10.0)
    flow.remove("first", 3.0)
    flow.together(first, "a", 1)
    flow.check_integrity()
    # 100 blocks were missing to it, one of them not full; ten are now.
    like = flow.remove("like it", 3.0)
    assert (like.known_blocks, like.work_ns) == (100, 1_000_000_000)
    assert like.turn_t == pytest.approx(2.0 + 30.0)
    assert (other.known_blocks, other.turn_t) == (10, 1.0 + SIZE_S)


@pytest.mark.interpreted
@pytest.mark.parametrize(("elsewhere_s", "where"), [(0.0, "b"), (20.0, "a")])
def test_they_follow_it_where_that_is_no_longer_a_wait(elsewhere_s, where):
    flow = flow_of()
    shared = list(range(1, 101))
    if elsewhere_s:
        put(flow, "at b", 0.0, home="b", work_s=elsewhere_s)
    first = put(flow, "first", 0.0, keys=shared, home="a")
    like = put(flow, "like it", 0.0, keys=[*shared, 201], home="a", work_s=5.0)
    flow.remove("first", 1.0)
    flow.together(first, "b", 2)
    flow.check_integrity()
    assert like.home == where


@pytest.mark.interpreted
def test_what_others_compute_is_no_longer_before_those_of_the_same_program():
    flow = flow_of()
    shared = list(range(1, 100))
    forks = [put(flow, f"fork {i}", 0.0, program="p", keys=[*shared, 200 + i], work_s=10.0) for i in range(4)]
    assert [one.turn_t - SIZE_S for one in forks] == [0.0, 10.0, 20.0, 30.0]
    flow.remove("fork 0", 0.0)
    flow.together(forks[0], "a", 1)
    # Each has two blocks of 101 left, the one that is not full counted: a fiftieth. Two others are before.
    left_s = 10.0 * 2 / 101
    assert [one.turn_t for one in forks[1:]] == [pytest.approx(left_s * (2 + HASTE), rel=1e-6)] * 3


def test_a_shared_prefix_is_computed_once_for_all_who_wait_for_it():
    """Cold prompts of five groups, mixed, before one endpoint that can keep but one group's prefix."""
    it = queues("a")
    it.arrive("busy", 25_000)
    for i in range(20):
        keys = keys_of(prompt(f"group {i % 5}", 9_984) + prompt(f"own {i}", 96))
        it.arrive(f"{i % 5}/{i}", 10_080, keys)
    it.play()
    groups = [name[0] for name in it.placed[1:]]
    assert groups == sorted(groups)


@pytest.mark.interpreted
def test_within_a_program_requests_go_as_they_came_even_if_its_lead_is_corrected_meanwhile():
    flow = flow_of()
    flow.attained.charge("p", 1000, 20.0, 0.0)
    put(flow, "p1", 1.0, program="p")
    flow.attained.correct("p", -1000, -20.0, 0.0, 2.0)
    put(flow, "p2", 2.0, program="p")
    assert order(flow) == ["p1", "p2"]


@pytest.mark.interpreted
def test_a_share_is_what_the_pool_was_seen_to_do_while_requests_waited():
    flow = flow_of()
    put(flow, "r1", 0.0)
    for t in range(1, 301):
        flow.placed(0.25)  # a pool that decodes does prefills a quarter of the time
        flow.rate.waiting(float(t), True)
    assert flow.share_per_s(4) == pytest.approx(0.25, rel=0.25)
    flow.remove("r1", 300.0)
    flow.placed(100.0)  # nobody waits: that says nothing
    assert flow.rate.per_s(4) == pytest.approx(0.25, rel=0.25)


def test_priorities_leave_in_order_through_the_router():
    it = queues("a")
    it.arrive("busy", 25_000)
    for number, priority in enumerate([-10, 0, 100, 0, 100]):
        it.arrive(f"{priority}/{number}", 15_000, priority=priority)
    it.play()
    assert it.placed == ["busy", "100/2", "100/4", "0/1", "0/3", "-10/0"]


def test_a_session_s_requests_are_one_program_s_and_a_fairness_id_stands_above_it():
    for fields in ({"session": "s"}, {"program": "s"}):
        it = queues("a")
        it.arrive("busy", 25_000)
        for i in range(4):
            more = {"session": f"s{i}"} if "program" in fields else {}
            it.arrive(f"s/{i}", 15_000, **fields, **more)
        it.at(0.001, it.arrive, "other", 15_000)
        it.play()
        # Its second one would stand 1.5 s behind its arrival.
        assert it.placed == ["busy", "s/0", "other", "s/1", "s/2", "s/3"]


def test_conversations_are_told_apart_by_their_keys():
    it = queues("a")
    first = prompt("talk", 20 * BLOCK)
    it.arrive("turn 1", 20 * BLOCK, keys_of(first))
    it.play()
    grown = first + prompt("more", 1_000)
    it.arrive("turn 2", len(grown), keys_of(grown))
    it.play()
    it.arrive("busy", 25_000)
    for i in range(2):
        fork = grown + prompt(f"fork {i}", 15_000)
        it.arrive(f"fork {i}", len(fork), keys_of(fork))
    it.at(it.lab.t + 0.001, it.arrive, "stranger", 15_000, keys_of(prompt("stranger", 15_000)))
    it.play()
    assert it.placed == ["turn 1", "turn 2", "busy", "fork 0", "stranger", "fork 1"]


# --- homes ---


def warm(tokens=20_000):
    """Two endpoints, the first of which has a prompt of `tokens`: two seconds to compute it elsewhere."""
    lab = Lab(hold_above_s=HOLD_S, latency=FLAT)
    lab.up("a")
    token_ids = prompt("shared", tokens)
    lab.run("warm", token_ids)
    lab.up("b")
    return lab, token_ids


def test_a_held_request_stays_with_its_prefix_while_that_is_less_than_to_compute_it_elsewhere():
    lab, token_ids = warm()
    lab.ask("busy", token_ids + prompt("x", 15_000), program="p")
    assert lab.ask("r", token_ids + prompt("y", 100)) is None  # 1.5 s there, 2 s elsewhere
    lab.tell(Tick, dt=0.3)
    assert held(lab) == 1
    lab.tell(Tick, dt=0.3)
    assert lab.attempts["r"].endpoint == "a"


def test_what_is_held_for_an_endpoint_counts_as_a_wait_there():
    lab, token_ids = warm()
    lab.ask("busy", token_ids + prompt("x", 15_000))
    placed = [lab.ask(f"r{i}", token_ids + prompt(i, 3_000)) for i in range(8)]
    # 1.5 s of wait there, and 0.3 s more for each one held. Elsewhere all of it takes 2.3 s, and less than
    # 3 s whatever that work is worth besides: some are held, then one goes there.
    moved = placed.index("b")
    assert 2 <= moved <= 5
    assert placed[:moved] == [None] * moved
    assert lab.candidates(f"r{moved}")["a"].wait_s == pytest.approx(1.5 + 0.3 * moved, abs=1e-3)
    assert held(lab) >= moved


@pytest.mark.parametrize("event", ["another is free", "one comes up", "its home goes"])
def test_a_held_request_is_asked_anew_only_if_the_choice_has_changed(event):
    lab, token_ids = warm(tokens=8_000)
    lab.ask("busy a", token_ids + prompt("x", 12_000))
    lab.ask("busy b", prompt("z", 14_000))
    assert lab.ask("r", token_ids + prompt("y", 100)) is None
    match event:
        case "another is free":
            lab.finish("busy b", FinishReason.REJECTED, answered=True)
            assert held(lab) == 1
            lab.first("busy a")
        case "one comes up":
            lab.up("c")
        case "its home goes":
            lab.finish("busy b", FinishReason.REJECTED, answered=True)
            lab.tell(EndpointDown, endpoint="a", cause="health")
    where = {"another is free": "a", "one comes up": "c", "its home goes": "b"}[event]
    assert (lab.attempts["r"].endpoint, held(lab)) == (where, 0)


# --- limits and ends ---


def test_bands_have_limits_of_their_own_in_requests_and_bytes():
    bands = [BandLimits(priority=1, max_requests=2), BandLimits(priority=2, max_bytes=4_000)]
    it = queues("a", bands=bands)
    it.arrive("busy", 100_000)
    for i in range(3):
        for priority in (1, 2, 3):
            it.arrive(f"{priority}/{i}", 400, priority=priority)
    assert it.refused == dict.fromkeys(("1/2", "2/2"), (429, "rejected-saturated"))
    now = {q.priority: (q.requests, q.bytes) for q in it.lab.router.counters().held_now}
    assert now == {3: (3, 4_800), 2: (2, 3_200), 1: (2, 3_200)}


def test_a_deadline_ends_a_wait_and_a_wake_up_is_asked_for_it():
    it = queues("a")
    it.arrive("busy", 4_000_000)
    it.arrive("usual", 100)
    it.arrive("hasty", 100, ttl_s=7.0)
    it.play(until=6.9)
    assert it.refused == {}
    it.play(until=7.0)
    assert it.refused == {"hasty": (429, "rejected-ttl-expired")}
    it.play(until=300.1)
    assert it.refused["usual"] == (429, "rejected-ttl-expired")
    assert it.lab.router.counters().refused == {"rejected-ttl-expired": 2}


def test_who_waits_for_its_own_home_at_its_deadline_is_sent_there_instead_of_refused():
    lab, token_ids = warm(tokens=200_000)
    lab.ask("busy", token_ids + prompt("x", 180_000))
    assert lab.ask("r", token_ids + prompt("y", 100), ttl_s=9.0) is None  # 18 s there, 20 s elsewhere
    told = lab.tell(Tick, dt=9.0)
    assert (dispatched(told), refusals(told)) == (["r"], {})
    assert lab.attempts["r"].endpoint == "a"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (FinishReason.CLIENT_GONE, "rejected-context-cancelled"),
        (FinishReason.SHUTDOWN, "rejected-shutting-down"),
    ],
)
def test_who_leaves_the_queue_is_gone_at_once(reason, said):
    lab = Lab(hold_above_s=HOLD_S, latency=FLAT)
    lab.up("a")
    lab.ask("busy", [], prompt_tokens=50_000, keys=[])
    lab.ask("r", [], prompt_tokens=100, keys=[])
    assert lab.finish("r", reason, answered=False) == []
    assert (held(lab), lab.router.counters().refused) == (0, {said: 1})
    lab.first("busy")
    assert "r" not in lab.attempts


def test_without_endpoints_the_end_of_a_wait_is_another():
    lab = Lab(hold_above_s=HOLD_S, latency=FLAT)
    lab.up("a")
    lab.ask("busy", [], prompt_tokens=50_000, keys=[])
    lab.ask("r", [], prompt_tokens=100, keys=[], ttl_s=3.0)
    lab.tell(EndpointDown, endpoint="a", cause="health")
    assert refusals(lab.tell(Tick, dt=3.0)) == {"r": (503, "rejected-no-endpoints")}


def test_a_fleet_that_comes_back_is_not_flooded_by_those_who_waited_for_it():
    lab = Lab(hold_above_s=HOLD_S, latency=FLAT)
    lab.up("a")
    lab.tell(EndpointDown, endpoint="a", cause="health")
    for i in range(10):
        lab.ask(f"r{i}", [], prompt_tokens=4_000, keys=[])
    lab.up("a")
    # 0.4 s each: the fourth begins after 1.2 s.
    assert (len(lab.attempts), held(lab), lab.router.counters().waiting_now) == (3, 7, 0)


# --- nobody starves ---


def overload(seconds, *, low_tokens, high_gap_s=0.1, ttl_s=None):
    """A stream of urgent prompts that takes one endpoint altogether, and some others from second 5 on."""
    it = Queues("a", hold_above_s=HOLD_S, other_bands=BandLimits(ttl_s=ttl_s))
    for i in range(int(seconds / high_gap_s)):
        it.at(i * high_gap_s, it.arrive, f"high{i}", round(19_000 * high_gap_s))
    for i, tokens in enumerate(low_tokens):
        it.at(5.0, lambda i=i, tokens=tokens: it.arrive(f"low{i}", tokens, priority=-1))
    it.play(until=seconds)
    return it


def test_a_lower_band_gets_its_turn_for_its_age_and_no_more_than_its_share():
    it = overload(200.0, low_tokens=[5_000] * 40)
    lows = [name for name in it.placed if name.startswith("low")]
    assert it.waited_s(lows[0]) == pytest.approx(AGED_AFTER_S, abs=0.5)
    # From second 35 on, a tenth of 10,000 tokens a second: 0.2 of them a second.
    assert len(lows) == pytest.approx(0.2 * 165, abs=3)


@pytest.mark.parametrize("tokens", [10, 20_000, 200_000])
def test_a_wait_is_bounded_at_every_size_even_in_the_lowest_band(tokens):
    it = overload(60.0, low_tokens=[tokens])
    assert it.waited_s("low0") == pytest.approx(AGED_AFTER_S, abs=0.5)


def p99(values):
    return sorted(values)[int(0.99 * (len(values) - 1))]


def test_under_overload_high_bands_stay_quick_and_low_ones_are_shed():
    """Nearly three times what two endpoints can do, a fifth of it urgent."""
    waits, refused = {}, {}
    for hold_s in (HOLD_S, None):
        it = Queues("a", "b", hold_above_s=hold_s, other_bands=BandLimits(ttl_s=20.0))
        for i in range(1800):
            priority = (100, 0, 0, 0, -10)[i % 5]
            it.at(i / 30, lambda it=it, i=i, p=priority: it.arrive(f"{p}/{i}", 1_900, priority=p))
        it.play()
        ttft_s = {name: it.first_t[name] - it.arrived_t[name] for name in it.first_t}
        waits[hold_s] = p99([s for name, s in ttft_s.items() if name.startswith("100/")])
        refused[hold_s] = {p: sum(name.startswith(f"{p}/") for name in it.refused) for p in (100, 0, -10)}
        assert len(it.first_t) + len(it.refused) == 1800
    # At most the bound, its own prefill and the one that it finds.
    assert waits[HOLD_S] < HOLD_S + 0.5
    assert waits[None] > 60.0
    assert refused[HOLD_S][100] == 0
    assert refused[HOLD_S][-10] > 0.85 * 360
    assert refused[None] == {100: 0, 0: 0, -10: 0}


# --- priorities in the price ---


@pytest.mark.parametrize(("theirs", "factor"), [(0, 1.0), (7, 4.0), (-7, 0.25)])
def test_delay_to_others_counts_by_who_is_more_urgent(theirs, factor):
    lab = Lab()
    lab.up("a", max_sequences=100)
    for i in range(3):
        lab.ask(f"d{i}", prompt(i, 100), priority=theirs)
        lab.first(f"d{i}")
    lab.ask("one", prompt("r", 1_000), priority=theirs)
    lab.finish("one", FinishReason.CLIENT_GONE, answered=False)
    lab.ask("other", prompt("r", 1_000))
    as_equal, as_is = (lab.candidates(name)["a"] for name in ("one", "other"))
    assert as_equal.compute_s == as_is.compute_s
    assert as_is.delay_s == pytest.approx(as_equal.delay_s * factor, rel=1e-6)


# --- everything ---

ARRIVAL = st.tuples(
    st.floats(0.0, 2.0),
    st.integers(1, 60_000),
    st.integers(-1, 1),
    st.sampled_from(["", "p", "q"]),
    st.none() | st.floats(0.5, 90.0),
    st.none() | st.floats(0.0, 40.0),
)


@REPEATABLE
@given(
    arrivals=st.lists(ARRIVAL, max_size=40),
    names=st.sampled_from([("a",), ("a", "b", "c")]),
    limit=st.integers(3, 40),
)
def test_whatever_comes_leaves_once_in_time_and_in_order(arrivals, names, limit):
    """(gap, tokens, priority, program, own time limit, leaves after) of each request."""
    it = queues(*names, other_bands=BandLimits(max_requests=limit, ttl_s=60.0))
    t = 0.0
    for i, (gap_s, tokens, priority, program, ttl_s, patience_s) in enumerate(arrivals):
        t += gap_s
        fields = {"priority": priority, "program": program, "ttl_s": ttl_s}
        it.at(t, lambda i=i, tokens=tokens, fields=fields: it.arrive(f"r{i}", tokens, **fields))
        if patience_s is not None:
            it.at(t + patience_s, it.leave, f"r{i}", FinishReason.CLIENT_GONE)
    it.play()
    requests = [f"r{i}" for i in range(len(arrivals))]
    left = [*it.left_t, *it.refused, *it.gone]
    assert sorted(left) == sorted(requests)
    counters = it.lab.router.counters()
    assert (held(it.lab), counters.requests_now, counters.decisions) == (0, 0, len(it.left_t))
    for view in it.lab.router.fleet_view():
        assert (view.inflight, view.prefill_tokens) == (0, 0)
    for i, (_, _, _, _, ttl_s, _) in enumerate(arrivals):
        if f"r{i}" in it.left_t:
            assert it.waited_s(f"r{i}") <= min(60.0, ttl_s or 60.0) + 1e-6
    if names == ("a",):
        _assert_order(it, arrivals)


def _assert_order(it, arrivals):
    """At one endpoint: only smaller ones pass an older one of their program and band, and nobody passes one
    that is in no program by more than the limit in its band.
    """
    for i, (_, tokens, priority, program, _, _) in enumerate(arrivals):
        if f"r{i}" not in it.left_t:
            continue
        for j in range(i):
            if arrivals[j][2] != priority or f"r{j}" not in it.left_t:
                continue
            passed = it.left_t[f"r{j}"] > it.left_t[f"r{i}"]
            if program and arrivals[j][3] == program:
                assert not passed or tokens < arrivals[j][1]
            if not arrivals[j][3]:
                assert not passed or it.arrived_t[f"r{i}"] < it.arrived_t[f"r{j}"] + MOST_HANDICAP_S


def test_a_recorded_log_gives_the_same_decisions():
    config = RouterConfig(hold_above_s=HOLD_S, latency=FLAT)
    it = Queues("a", "b", hold_above_s=HOLD_S)
    for i in range(200):
        fields = {"priority": i % 3 - 1, "session": f"s{i % 7}" if i % 2 else ""}
        keys = keys_of(prompt(i % 11, 4_000) + prompt(i, 500))
        it.at(i * 0.02, lambda i=i, keys=keys, fields=fields: it.arrive(f"r{i}", 4_500, keys, **fields))
    it.play()
    encoder, log = msgspec.json.Encoder(), io.BytesIO()
    for record in (Started(config), *it.lab.recorded):
        log.write(encoder.encode(record) + b"\n")
    log.seek(0)
    (again,) = replay(log)
    assert it.lab.router.counters().held > 50
    assert again.decisions(1_000) == it.lab.router.decisions(1_000)
    assert again.counters() == it.lab.router.counters()

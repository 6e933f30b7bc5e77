"""F10, F13, F39-F42, F45: who waits, for how long, whom it is charged to, and what is told when it ends."""

import msgspec
import pytest
from routing_lab import MODEL, Lab, prompt
from serving_fleet import Fleet

from sumibi.core.latency import LatencyModel
from sumibi.routing.config import BandLimits
from sumibi.routing.events import (
    Arrived,
    Dispatch,
    EndpointDown,
    Finished,
    FinishReason,
    Refuse,
    Signals,
    Tick,
)

GPU = LatencyModel(a_s=0.01, b_s=1e-4, q_s=0.0, d0_s=0.01, d1_s=1e-4, d2_s=1e-9)
"""10,000 prompt tokens a second, of any length."""
HOLD_S = 1.0


def lab_of(*names, **config):
    lab = Lab(latency=GPU, hold_above_s=HOLD_S, **config)
    lab.up(*names)
    return lab


def refusals(instructions):
    return {i.request: (i.status, i.reason) for i in instructions if isinstance(i, Refuse)}


def dispatched(instructions):
    return [i.request for i in instructions if isinstance(i, Dispatch)]


def fill(lab, requests=1, tokens=20_000):
    """Two seconds of work a request, one an endpoint, so that later ones are held."""
    for i in range(requests):
        assert isinstance(lab.ask(f"fill{i}", [], keys=[], prompt_tokens=tokens), str)


def held(lab):
    return sum(band.requests for band in lab.router.counters().held_now)


@pytest.mark.parametrize("reason", [FinishReason.CLIENT_GONE, FinishReason.SHUTDOWN])
def test_f10_abandoned_requests_pin_no_state_of_their_programs(reason):
    """The fairness README of llm-d: what is abandoned in the queue pins its program's state for ever."""
    lab = lab_of("a")
    fill(lab)
    for i in range(100):
        assert lab.ask(f"r{i}", prompt(i, 500), program=f"p{i % 7}", priority=i % 3) is None
    assert held(lab) == 100
    for i in range(100):
        lab.finish(f"r{i}", reason, answered=False)
    counters = lab.router.counters()
    assert (held(lab), counters.requests_now) == (0, 1)
    gate = lab.router._gate
    assert not any(flow._programs or flow._bands or flow.bytes for flow in gate._flows.values())
    lab.first("fill0")
    lab.finish("fill0")
    # Nobody of those was served, so nobody is charged: all are equal again.
    assert lab.router.counters().jain_now[MODEL] == 1.0
    assert lab.ask("next", prompt("next", 500), program="p0") == "a"


def test_f13_what_is_held_goes_on_without_any_metrics():
    """R#2100, R#2408, R#2475, R#2492, R#2514, R#2547: a queue that is opened by fresh metrics halts without
    them. Here no page is ever read, or an old one says full: first tokens open it.
    """
    lab = lab_of("a", "b")
    lab.tell(Signals, endpoint="a", scraped_t=lab.t, running=0, waiting=0, kv_usage=1.0)
    lab.t += 600.0
    fill(lab, 2)
    for i in range(4):
        assert lab.ask(f"r{i}", prompt(i, 15_000)) is None
    lab.t += 2.0
    gone = dispatched(lab.tell(Tick))
    for i in range(2):
        gone += dispatched(lab.finish(f"fill{i}", dt=0.01))
    assert len(gone) >= 2
    assert {lab.attempts[name].endpoint for name in gone[:2]} == {"a", "b"}


def test_f39_each_end_of_a_wait_has_its_code_and_reason():
    """R#2047, R#2162: the end of a time limit is told as 503, an early error as 500."""
    lab = lab_of("a", other_bands=BandLimits(max_requests=2, ttl_s=20.0), max_waiting=1)
    fill(lab)
    assert lab.ask("one", prompt(1, 500)) is None
    assert lab.ask("two", prompt(2, 500)) is None
    full = lab.ask("three", prompt(3, 500))
    assert (full.status, full.reason) == (429, "rejected-saturated")
    lab.t += 20.0
    assert refusals(lab.tell(Tick)) == dict.fromkeys(("one", "two"), (429, "rejected-ttl-expired"))

    lab.ask("left", prompt("left", 500))
    lab.finish("left", FinishReason.CLIENT_GONE, answered=False)
    lab.ask("shut", prompt("shut", 500))
    lab.finish("shut", FinishReason.SHUTDOWN, answered=False)
    assert lab.ask("empty pool", prompt("empty", 500), ttl_s=3.0) is None
    lab.tell(EndpointDown, endpoint="a", cause="health")
    assert lab.ask("waits", prompt("waits", 500)) is None
    over = lab.ask("over", prompt("over", 500))
    assert (over.status, over.reason) == (429, "rejected-saturated")
    lab.t += 3.0
    assert refusals(lab.tell(Tick)) == {"empty pool": (503, "rejected-no-endpoints")}
    lab.t += 10.0
    assert refusals(lab.tell(Tick)) == {"waits": (503, "rejected-no-endpoints")}
    assert lab.router.counters().refused == {
        "rejected-saturated": 2,
        "rejected-ttl-expired": 2,
        "rejected-context-cancelled": 1,
        "rejected-shutting-down": 1,
        "rejected-no-endpoints": 2,
    }


async def test_f39_a_client_reads_code_and_reason(lab):
    """The same over HTTP: status, error code and both headers; what is wrong before placement is no 500."""
    async with lab() as it:
        engine = await it.engine()
        gateway = await it.start()
        gateway.router.config = msgspec.structs.replace(gateway.router.config, wait_for_endpoint_s=0.1)
        body = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}]}
        for wrong in ({**body, "messages": 5}, {**body, "max_tokens": -1}, {"model": "nobody's"}, b"{"):
            assert (await it.ask(body=wrong)).status in (400, 404)
        await engine.stop()
        await it.until(lambda: not gateway.watches[0].up)
        answer = await it.ask(body=body)
        assert (answer.status, answer.json["error"]["code"]) == (503, "rejected-no-endpoints")
        for header in ("x-sumibi-dropped-reason", "x-llm-d-request-dropped-reason"):
            assert answer.headers[header] == "rejected-no-endpoints"


@pytest.mark.parametrize(
    ("priority", "asked_s", "waits_s"),
    [
        (0, None, 300.0),
        (0, 2.0, 2.0),
        (0, 600.0, 300.0),
        (5, None, 5.0),
        (5, 2.0, 2.0),
        (5, 30.0, 5.0),
        (7, None, 90.0),
        (7, 600.0, 90.0),
        (-1, None, None),
        (-1, 3.0, 3.0),
    ],
)
def test_f40_a_band_replaces_the_time_limit_and_a_request_shortens_it(priority, asked_s, waits_s):
    """R#2316, R#2649: the time limit is one for all."""
    own = [(5, 5.0), (7, 90.0), (-1, None)]
    bands = [BandLimits(priority=band, ttl_s=limit_s) for band, limit_s in own]
    lab = lab_of("a", bands=bands)
    fill(lab, tokens=10_000_000)  # for a thousand seconds
    assert lab.ask("r", prompt("r", 100), priority=priority, ttl_s=asked_s) is None
    if waits_s is None:
        lab.t += 900.0
        assert lab.tell(Tick) == []
        assert held(lab) == 1
        return
    lab.t += waits_s - 0.01
    assert refusals(lab.tell(Tick)) == {}
    lab.t += 0.02
    assert refusals(lab.tell(Tick)) == {"r": (429, "rejected-ttl-expired")}


@pytest.mark.parametrize("tokens", [1_000, 20_000, 100_000, 250_000])
@pytest.mark.parametrize("load", [0.9, 1.1])
def test_f41_the_wait_is_bounded_at_every_size(tokens, load):
    """dyn#10571: weighted shortest processing time starves long prompts while short ones keep coming."""
    fleet = Fleet(["a", "b"], GPU, decode_s=0.1, hold_above_s=HOLD_S)
    # Prompts of 2,000 tokens, 0.21 s each, of ever other programs; for two minutes.
    gap_s = 0.21 / 2 / load
    for i in range(int(120 / gap_s)):
        t = i * gap_s
        if i == int(20 / gap_s):
            fleet.arrive_unlike_any(t, "long", tokens, program="long")
        fleet.arrive_unlike_any(t, f"r{i}", 2_000, program=f"p{i}")
    assert "long" in fleet.placed  # while the others still come
    # A turn is at most 30 s behind its arrival, and those before it are computed at this rate.
    assert fleet.waited_s["long"] < 45.0
    fleet.drain()
    assert fleet.refused == {}


def served(fleet, tokens):
    """Tokens that each program got: the name of a request begins with its program."""
    got = {}
    for name in fleet.ended:
        program = name.partition("/")[0]
        got[program] = got.get(program, 0) + tokens[program]
    return got


def compete(programs, *, until_s=240.0):
    """Programs as {name: (sessions, tokens a request)}: each session asks again as soon as it is answered.
    Returns the tokens that each got after the first minute.
    """
    fleet = Fleet(["a"], GPU, decode_s=0.05, hold_above_s=HOLD_S)
    number = 0

    def ask(program, session):
        nonlocal number
        number += 1
        name = f"{program}/{session}/{number}"
        tokens, its_session = programs[program][1], f"{program}.{session}"
        fleet.arrive_unlike_any(fleet.lab.t, name, tokens, session=its_session, program=program)

    def again(name):
        if fleet.lab.t < until_s:
            program, session, _ = name.split("/")
            ask(program, session)

    fleet.on_end = again
    for program, (sessions, _) in programs.items():
        for session in range(sessions):
            ask(program, session)
    fleet.pass_time(60.0)  # all begin at once, with nothing attained
    fleet.ended.clear()
    fleet.pass_time(until_s)
    return served(fleet, {program: tokens for program, (_, tokens) in programs.items()})


def test_f42_fairness_counts_tokens_not_requests():
    """R#1182: fairness takes a request for a request, so long prompts get ten times the machine."""
    got = compete({"long": (10, 10_000), "short": (20, 1_000)})
    assert 0.8 < got["long"] / got["short"] < 1.25


def test_f42_an_agent_s_children_are_charged_to_it():
    """R#2794: child agents with ids of their own multiply their parent's share."""
    programs = {"parent": (20, 4_000), "other": (4, 4_000)}
    got = compete(programs)
    assert 0.8 < got["parent"] / got["other"] < 1.25


@pytest.mark.parametrize("ends", ["queue", "waiting room", "requests"])
def test_f45_overload_is_told_as_429_or_503(ends):
    """L#1582: overload ends in 500 from the proxy."""
    lab = lab_of("a", max_requests=30, max_waiting=5, other_bands=BandLimits(max_requests=10))
    if ends == "waiting room":
        lab.tell(EndpointDown, endpoint="a", cause="health")
    if ends == "requests":
        lab = lab_of("a", max_requests=5)
    told = set()
    for i in range(40):
        answer = lab.ask(f"r{i}", prompt(i, 3_000))
        if isinstance(answer, Refuse):
            told.add((answer.status, answer.reason))
    assert told == {(429, "rejected-saturated")}
    lab.t += 400.0
    lab.tell(EndpointDown, endpoint="a", cause="health")
    told = set(refusals(lab.tell(Tick)).values())
    assert told <= {(503, "rejected-no-endpoints"), (429, "rejected-ttl-expired")}
    assert held(lab) == lab.router.counters().waiting_now == 0


def test_f39_a_request_that_ends_before_it_was_admitted_is_no_error():
    """Turned down by the shell (a wrong key, a bad field): nothing is held, nothing is counted as refused."""
    lab = lab_of("a")
    lab.tell(Arrived, request="r", model=MODEL, keys=[], prompt_tokens=5)
    told = lab.tell(Finished, request="r", attempt=0, reason=FinishReason.REJECTED, answered=True)
    assert (told, lab.router.counters().refused, lab.router.counters().requests_now) == ([], {}, 0)

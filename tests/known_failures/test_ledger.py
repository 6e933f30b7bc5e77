"""F10-F13: load that leaks, is reaped alive, goes below zero, or halts when metrics are old."""

import pytest
from routing_lab import MODEL, Lab, prompt

from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatch,
    EndpointDown,
    EndpointUp,
    Finished,
    FinishReason,
    FirstToken,
    Signals,
    Tick,
)
from sumibi.routing.policies import POLICIES
from sumibi.routing.router import Router

GPU = LatencyModel(a_s=0.01, b_s=1e-4, q_s=1e-9, d0_s=0.01, d1_s=1e-4, d2_s=1e-9)


def load(lab, endpoint):
    view = lab.view(endpoint)
    return view.inflight, view.prefilling, view.decoding, view.prefill_tokens, view.wait_s


NOTHING = (0, 0, 0, 0, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_f10_cancelled_requests_leave_no_load(policy):
    """vr#215: each cancelled request leaks a unit of load, 400 a worker and day; dead state pins workers.
    Clients leave before the dispatch, in the prefill, in the decode, twice, and after a retry.
    """
    lab = Lab(policy=policy, check=False)
    lab.up("a", "b")
    for i in range(400):
        name, gone = f"r{i}", FinishReason.CLIENT_GONE
        if i % 5 == 0:
            lab.tell(Arrived, request=name, model=MODEL, keys=[], prompt_tokens=9)
        else:
            lab.ask(name, prompt(i, 100), session=f"s{i}")
        if i % 5 == 2:
            lab.first(name, dt=0.1)
        if i % 5 == 3:
            lab.finish(name, FinishReason.ENGINE_ERROR, answered=False)
        lab.finish(name, gone, answered=i % 5 == 2, dt=0.01)
        if i % 5 == 4:
            lab.finish(name, gone, answered=False)
    lab.router.check_integrity()
    assert len(lab.router._ledger) == 0
    assert lab.router.counters().requests_now == 0
    assert load(lab, "a") == load(lab, "b") == NOTHING


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"random", "session-sticky"}))
def test_f10_after_cancels_at_one_endpoint_both_are_equal_again(policy):
    """The same, as traffic sees it: what was cancelled at one endpoint does not turn later requests away."""
    lab = Lab(policy=policy, check=False)
    lab.up("a")
    for i in range(100):
        lab.ask(f"r{i}", prompt(i, 50))
        lab.finish(f"r{i}", FinishReason.CLIENT_GONE, answered=False)
    lab.tell(EndpointDown, endpoint="a", cause="restarted", removed=True)
    lab.up("a", "b")
    for i in range(50):
        lab.ask(f"c{i}", prompt(f"c{i}", 50))
        lab.finish(f"c{i}", FinishReason.CLIENT_GONE, answered=False)
    taken = [lab.ask(f"s{i}", prompt(f"s{i}", 50)) for i in range(40)]
    assert {"a", "b"} == set(taken)
    assert abs(taken.count("a") - taken.count("b")) <= 1


@pytest.mark.parametrize("reason", list(FinishReason))
@pytest.mark.parametrize("then", ["nothing", "flap", "new process"])
def test_f10_the_ledger_is_zero_after_any_exit(reason, then):
    """The fairness README of llm-d: abandoned requests pin the state of their program."""
    lab = Lab()
    lab.up("a", process_start_s=1.0)
    for i in range(3):
        lab.ask(f"r{i}", prompt(i, 64))
    lab.first("r0")
    if then == "flap":
        lab.tell(EndpointDown, endpoint="a", cause="health")
        lab.up("a", process_start_s=1.0)
    elif then == "new process":
        lab.up("a", process_start_s=2.0)
    for i in range(3):
        lab.finish(f"r{i}", reason, answered=i == 0)
    assert load(lab, "a") == NOTHING
    assert lab.router.counters().requests_now == 0
    assert len(lab.router._ledger) == 0


def test_f11_a_request_of_ten_minutes_keeps_its_entry():
    """R#2295, R#2137, R#2138: a reaper deletes accounting after 5 minutes; 24 % of the requests had a time to
    first token of more than 300 s.
    """
    lab = Lab()
    lab.up("a", "b")
    home = lab.ask("long", prompt("long", 5000), max_tokens=10)
    other = "b" if home == "a" else "a"
    for minute in range(10):
        lab.tell(Tick, dt=30.0)
        lab.tell(Signals, dt=30.0, endpoint=home, scraped_t=lab.t, running=1, waiting=0)
        assert load(lab, home)[:4] == (1, 1, 0, 5000)
        assert lab.run(f"minute{minute}", prompt(minute, 100)) == other
    lab.first("long")
    lab.tell(Tick, dt=600.0)
    assert load(lab, home)[:4] == (1, 0, 1, 0)
    lab.finish("long")
    assert load(lab, home) == NOTHING


@pytest.mark.parametrize("late", ["first token", "finish", "both"])
@pytest.mark.parametrize("flap", ["removed", "restarted", "restarted, seen by a scrape"])
def test_f12_a_late_release_after_a_flap_takes_nothing_from_the_new_life(flap, late):
    """L#1950, R#1739: an endpoint flaps; the requests of its old life are released from the new one's
    counter, which goes below zero.
    """
    lab = Lab()
    lab.up("a", process_start_s=1.0)
    for i in range(5):
        lab.ask(f"old{i}", prompt(i, 100))
    if flap == "restarted, seen by a scrape":
        lab.tell(Signals, endpoint="a", scraped_t=lab.t, process_start_s=2.0)
    else:
        lab.tell(EndpointDown, endpoint="a", cause="pod gone", removed=flap == "removed")
        lab.up("a", process_start_s=2.0)
    lab.ask("new", prompt("new", 100))
    before = load(lab, "a")
    for i in range(5):
        if late != "finish":
            lab.first(f"old{i}")
        if late != "first token":
            lab.finish(f"old{i}", FinishReason.ENGINE_GONE, answered=True)
            lab.finish(f"old{i}", FinishReason.CLIENT_GONE, answered=True)
        assert load(lab, "a") == before
    assert before[:4] == (1, 1, 0, 100)
    lab.finish("new")
    assert load(lab, "a") == NOTHING


@pytest.mark.parametrize("age_s", [0.3, 15.0, 3600.0])
def test_f13_old_metrics_do_not_halt_dispatch(age_s):
    """R#2100, R#2408, R#2475, R#2492, R#2514, R#2547: metrics older than 200 ms count as saturated, so
    dispatch halts; with a scrape every 15 s requests wait 11-13 s. Here the own ledger speaks meanwhile.
    """
    lab = Lab()
    lab.up("a", "b")
    for name in ("a", "b"):
        lab.tell(Signals, endpoint=name, scraped_t=lab.t, running=0, waiting=0, kv_usage=0.2)
    lab.t += age_s
    taken = []
    for i in range(10):
        instructions = lab.arrive(f"r{i}", prompt(i, 300))
        taken += [each.endpoint for each in instructions if isinstance(each, Dispatch)]
    assert (taken.count("a"), taken.count("b")) == (5, 5)


def test_f13_requests_between_two_scrapes_of_15_s_wait_for_nothing():
    """The same over a minute of traffic, scraped every 15 s by pages that say what was true then."""
    router = Router(RouterConfig(hold_above_s=None))  # these engines take their time
    for name in ("a", "b", "c"):
        router.handle(EndpointUp(t=0.0, endpoint=name, models=[MODEL], latency=GPU))
    due, taken = [], []
    for tick in range(600):
        t = tick / 10
        for end, request, endpoint in [d for d in due if d[0] <= t]:
            router.handle(FirstToken(t=t, request=request, attempt=1))
            router.handle(Finished(t=t, request=request, attempt=1, reason=FinishReason.STOP, answered=True))
            due.remove((end, request, endpoint))
        if tick % 150 == 0:
            for name in ("a", "b", "c"):
                running = sum(d[2] == name for d in due)
                router.handle(Signals(t=t, endpoint=name, scraped_t=t, running=running, waiting=0))
        name = f"r{tick}"
        router.handle(Arrived(t=t, request=name, model=MODEL, keys=[], prompt_tokens=5000, stream=True))
        (placed,) = router.handle(Admitted(t=t, request=name))
        assert isinstance(placed, Dispatch)
        taken.append(placed.endpoint)
        due.append((t + 2.0, name, placed.endpoint))
    assert max(map(taken.count, "abc")) <= 1.05 * 200

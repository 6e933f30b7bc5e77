"""When requests end whose answers nobody sees."""

import asyncio
from types import SimpleNamespace

import pytest

from sumibi.gateway import legs
from sumibi.gateway.epp.estimates import Estimates
from sumibi.routing.events import FinishReason, Prefilled, Signals

pytestmark = pytest.mark.interpreted
"""A shell and requests that are not."""


class Lab:
    """Estimates on a clock of their own; every request takes 1 s to its first token and 3 s more."""

    def __init__(self, interval_s=0.5):
        self.t = 0.0
        self.over = []
        self.started = []
        shell = SimpleNamespace(now=lambda: self.t, expected_s=lambda request: (1.0, 3.0))
        self.estimates = Estimates(shell, interval_s)

    def add(self, name, endpoint="a"):
        request = SimpleNamespace(id=name, endpoint=endpoint)
        request.estimated_first_token = lambda: self.started.append(name)
        request.estimated_end = lambda: self.over.append(name)
        self.estimates.add(request)
        return request

    def wait(self, seconds):
        """Time passes, in small steps."""
        end = self.t + seconds
        while self.t < end:
            self.t = min(end, self.t + 0.05)
            self.estimates._tick()

    def scrape(self, running, endpoint="a", waiting=0, ago_s=0.0):
        t = self.t
        self.estimates.scraped(
            Signals(t=t, endpoint=endpoint, scraped_t=t - ago_s, running=running, waiting=waiting)
        )


async def test_without_scrapes_requests_last_as_long_as_was_predicted():
    lab = Lab()
    lab.add("r")
    lab.wait(0.9)
    assert (lab.started, lab.over) == ([], [])
    lab.wait(0.2)
    assert lab.started == ["r"]
    lab.wait(2.8)
    assert lab.over == []
    lab.wait(0.2)
    assert (lab.over, len(lab.estimates), lab.estimates.total) == (["r"], 0, 1)


async def test_a_scrape_ends_those_that_are_due_soonest():
    lab = Lab()
    for name in "abc":
        lab.add(name)
        lab.wait(0.3)
    lab.scrape(running=1, waiting=1)
    assert lab.over == ["a"]
    lab.scrape(running=0)
    assert lab.over == ["a", "b", "c"]
    assert lab.started == ["a", "b", "c"]  # an end is not before its first token


async def test_requests_sent_after_a_scrape_are_not_missed_in_it():
    lab = Lab()
    lab.add("r")
    lab.scrape(running=0)
    lab.wait(0.05)
    lab.scrape(running=0)
    assert lab.over == []
    lab.wait(0.5)
    lab.scrape(running=0, ago_s=0.5)
    assert lab.over == []
    lab.scrape(running=0)
    assert lab.over == ["r"]


async def test_one_that_still_runs_is_counted_on_for_a_while():
    lab = Lab()
    lab.add("r")
    for _ in range(40):
        lab.wait(0.25)
        lab.scrape(running=1)
    assert lab.over == []  # 10 s: it was to take 4
    for _ in range(40):
        lab.wait(0.25)
        lab.scrape(running=1)
    assert lab.over == ["r"]  # others' requests may be what is seen: not longer than four times that


async def test_other_endpoints_and_scrapes_that_say_nothing_change_nothing():
    lab = Lab()
    lab.add("r")
    lab.wait(1.0)
    lab.scrape(running=0, endpoint="b")
    lab.scrape(running=None, waiting=None)
    assert lab.over == []


async def test_one_that_moved_or_ended_is_not_looked_for_where_it_was():
    lab = Lab()
    moved = lab.add("moved")
    lab.add("ended")
    lab.wait(0.5)
    moved.endpoint = "b"
    lab.estimates.moved(moved)
    lab.estimates.over("ended")
    lab.scrape(running=0)
    assert (lab.over, len(lab.estimates)) == ([], 1)
    lab.wait(0.5)
    lab.scrape(running=0, endpoint="b")
    assert (lab.over, len(lab.estimates)) == (["moved"], 0)


async def test_the_timer_is_set_for_the_next_that_is_due():
    lab = Lab()
    lab.add("r")
    assert lab.estimates._timer is not None
    when = lab.estimates._timer.when() - asyncio.get_running_loop().time()
    assert 0.8 < when <= 1.1
    lab.estimates.close()
    assert len(lab.estimates) == 0


@pytest.mark.parametrize(
    "event",
    [
        Prefilled(t=1.0, request="r", attempt=1),
        Prefilled(t=1.0, request="r", attempt=1, prompt_tokens=7),
        Prefilled(t=1.0, request="r", attempt=1, prompt_tokens=7, cached_tokens=0),
        *(Prefilled(t=1.0, request="r", attempt=1, failed=reason) for reason in FinishReason),
    ],
)
def test_what_a_sidecar_writes_is_read(event):
    assert legs.read(legs.written(event), t=1.0, request="r", attempt=1) == event


@pytest.mark.parametrize("value", [b"", b"\xff", b"ok2", b"failed", b"failed; reason=x", b"x" * 10_000])
def test_what_nobody_writes_is_nothing(value):
    assert legs.read(value, t=1.0, request="r", attempt=1) is None


def test_counts_that_are_none_are_left_out():
    got = legs.read(b"ok; prompt_tokens=-1; cached_tokens=9999999999999", t=1.0, request="r", attempt=1)
    assert got == Prefilled(t=1.0, request="r", attempt=1)

"""Garbage in cycles goes, when nobody waits for it."""

import asyncio
import gc
import weakref

import pytest

from sumibi.gateway.collector import FULL_S, IDLE_S, YOUNG_S, Collector, keep_collecting


class Knot:
    """Holds on to itself."""

    def __init__(self):
        self.me = self


@pytest.fixture
def served():
    """Whether anybody is; whatever happens the collector is as before afterwards."""
    assert gc.isenabled()
    yield [True]
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def collector(served):
    return Collector(lambda: served[0], 0.0)


def knot():
    """(a knot, how to see whether it is still there)"""
    made = Knot()
    return made, weakref.ref(made)


def old_knot():
    made, seen = knot()
    gc.collect(1)  # it has survived: only a look at everything finds it
    return made, seen


def test_nothing_is_collected_in_the_middle_of_a_request(collector):
    made, seen = knot()
    del made
    for _ in range(100_000):
        Knot().me = None
    assert seen() is not None
    before = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(100_000)]
    assert gc.get_stats()[0]["collections"] == before
    assert len(kept) == 100_000


def test_young_garbage_goes_within_a_second_under_load(collector):
    made, seen = knot()
    del made
    collector.look(YOUNG_S)
    assert seen() is None


@pytest.mark.parametrize(("busy", "due_s"), [(True, FULL_S), (False, IDLE_S)])
def test_old_garbage_goes_sooner_if_nobody_is_served(collector, served, busy, due_s):
    served[0] = busy
    made, seen = old_knot()
    del made
    collector.look(due_s - 1.0)
    assert seen() is not None
    collector.look(due_s)
    assert seen() is None


def test_what_a_look_under_load_took_for_permanent_goes_when_nobody_is_served(collector, served):
    made, seen = old_knot()
    collector.look(FULL_S)
    del made
    collector.look(2 * FULL_S)
    assert seen() is not None
    served[0] = False
    collector.look(3 * FULL_S)
    assert seen() is None


async def test_python_collects_by_itself_again_at_the_end(served):
    task = asyncio.create_task(keep_collecting(lambda: True, lambda: 0.0))
    await asyncio.sleep(0)
    assert not gc.isenabled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0

"""Idle conversations that are brought up before they ask: when a hint is due, by hand, and when none is.

The agent here has made 140 turns and was always back after 20 s. Return times are counted in bins of a sixth
of a doubling of 1 + idle seconds: 20 s lies in the one from 19.2 to 21.6 s. So it is expected within a window
of 1 s and a tenth of its idle time once that reaches there: from about 16 s on.
"""

import pytest
from routing_lab import BLOCK, Lab, prompt
from test_lower import START, Told

from sumibi.core.kvevents import BlockRemoved
from sumibi.routing.events import (
    EndpointDown,
    EndpointSuspect,
    EndpointUp,
    FinishReason,
    Prefetch,
    Signals,
    Tick,
    Tier,
    WakeAt,
)
from sumibi.routing.returns import REFRESH_USES, ReturnTimes

TURNS = 140
IDLE_S = 20.0
HISTORY = prompt("agent", (TURNS + 10) * BLOCK)
HOST = Tier(name="cpu", tokens=400 * BLOCK, gb_per_s=20.0)
DISK = Tier(name="storage", tokens=10_000 * BLOCK, gb_per_s=1.0)


class Fleet:
    """A lab that ticks when the router wants to be woken, and keeps the hints."""

    def __init__(self, *, prefetches=True, tiers=(HOST, DISK), names=("a",)):
        self.lab = Lab(check=False, latency=START)
        self.lab.up(
            *names,
            tiers=list(tiers),
            has_events=True,
            prefetches=prefetches,
            kv_bytes_per_token=1_000_000,
            process_start_s=1.0,
        )
        self.told = {name: Told(self.lab, name) for name in names}
        self.hints = []
        self.wakes = []
        self.turns = 0

    def turn(self, name, tokens):
        """A whole turn of 1 s. Returns its endpoint."""
        endpoint = self.lab.ask(name, tokens)
        self.lab.first(name, dt=0.5)
        self.wakes += [i.at for i in self.lab.finish(name, dt=0.5) if isinstance(i, WakeAt)]
        return endpoint

    def agent(self):
        """The agent's next turn."""
        self.turns += 1
        return self.turn(f"turn-{self.turns}", HISTORY[: (10 + self.turns) * BLOCK])

    def teach(self):
        """Its turns so far; the last one is over just now."""
        for _ in range(TURNS - 1):
            self.agent()
            self.wait(IDLE_S)
        self.agent()

    def wait(self, seconds):
        """Let time pass. Only what the router wanted to be woken for happens."""
        end_t = self.lab.t + seconds
        for _ in range(1_000):
            due = [at for at in self.wakes if at <= end_t]
            if not due:
                break
            self.wakes.remove(min(due))
            self.lab.t = max(self.lab.t, min(due))
            for instruction in self.lab.tell(Tick):
                if isinstance(instruction, Prefetch):
                    self.hints.append((self.lab.t, instruction))
                elif isinstance(instruction, WakeAt):
                    self.wakes.append(instruction.at)
        else:
            pytest.fail("woken without end")
        self.lab.t = end_t

    def sink(self, tokens=HISTORY[: (TURNS + 10) * BLOCK], first=0, name="a"):
        """Its blocks are on disk only."""
        self.told[name].stored(first, tokens, "STORAGE")


@pytest.fixture
def taught():
    def make(**options):
        fleet = Fleet(**options)
        fleet.teach()
        return fleet

    return make


def test_a_conversation_is_brought_up_once_shortly_before_it_should_be_back(taught):
    fleet = taught()
    fleet.sink()
    idle_t = fleet.lab.t
    fleet.wait(100.0)
    ((t, hint),) = fleet.hints
    assert hint == Prefetch(endpoint="a", request=f"turn-{TURNS}")
    assert 15.0 < t - idle_t < 19.0
    assert fleet.lab.router.counters().hints == 1
    # It goes on, and is idle again: one more.
    fleet.agent()
    assert fleet.lab.router.counters().hints_returned == 1
    fleet.wait(100.0)
    assert [hint.request for _, hint in fleet.hints] == [f"turn-{TURNS}", f"turn-{TURNS + 1}"]


def test_not_while_its_blocks_are_on_the_device_or_in_host_memory(taught):
    fleet = taught()
    whole = HISTORY[: (TURNS + 10) * BLOCK]
    fleet.told["a"].stored(0, whole, "GPU")
    fleet.sink()
    fleet.wait(15.0)
    assert fleet.hints == []
    fleet.told["a"].stored(0, whole, "CPU")
    fleet.told["a"].tell(BlockRemoved([*range(TURNS + 10)], medium="GPU"))
    fleet.wait(2.0)
    assert fleet.hints == []
    # Now its end sinks as well, while it is still expected.
    fleet.told["a"].tell(BlockRemoved([*range(50, TURNS + 10)], medium="CPU"))
    fleet.wait(6.0)
    assert len(fleet.hints) == 1


def test_not_one_that_has_gone_on_or_was_not_answered(taught):
    fleet = taught()
    fleet.sink()
    fleet.wait(5.0)
    fleet.lab.ask("next", HISTORY[: (TURNS + 11) * BLOCK])
    fleet.wait(100.0)
    assert fleet.hints == []
    fleet.lab.finish("next", FinishReason.CLIENT_GONE, answered=True)
    fleet.wait(100.0)
    assert fleet.hints == []


def test_not_one_whose_endpoint_is_another_process_down_in_doubt_or_gone(taught):
    for event, fields in (
        (Signals, {"scraped_t": 0.0, "process_start_s": 77.0}),
        (EndpointDown, {"cause": "dead"}),
        (EndpointDown, {"cause": "gone", "removed": True}),
        (EndpointSuspect, {"cause": "a refused connection"}),
    ):
        fleet = taught()
        fleet.sink()
        fleet.lab.tell(event, endpoint="a", **fields)
        fleet.wait(100.0)
        assert fleet.hints == [], event


def test_not_by_engines_that_cannot_or_have_no_use_for_it(taught):
    slow = Tier(name="storage", tokens=10_000 * BLOCK, gb_per_s=20.0)
    for options in ({"prefetches": False}, {"tiers": (DISK,)}, {"tiers": (HOST, slow)}):
        fleet = taught(**options)
        fleet.sink()
        fleet.wait(100.0)
        assert fleet.hints == [], options
    # It can from now on.
    fleet = taught(prefetches=False)
    fields = {"models": ["m"], "engine_block_tokens": BLOCK, "tiers": [HOST, DISK], "has_events": True}
    fleet.lab.tell(EndpointUp, endpoint="a", prefetches=True, process_start_s=1.0, **fields)
    fleet.agent()
    fleet.sink()
    fleet.wait(100.0)
    assert len(fleet.hints) == 1


def test_not_by_a_policy_that_learns_no_return_times():
    fleet = Fleet()
    fleet.lab = Lab(check=False, policy="round-robin")
    fleet.lab.up("a", tiers=[HOST, DISK], has_events=True, prefetches=True, process_start_s=1.0)
    fleet.told = {"a": Told(fleet.lab, "a")}
    fleet.teach()
    fleet.sink()
    fleet.wait(100.0)
    assert fleet.hints == []


@pytest.mark.parametrize(("others", "hinted"), [("strangers", True), ("agents", False)])
def test_host_memory_is_not_taken_from_those_who_are_due_as_well(taught, others, hinted):
    """It is full of prompts that were asked once and never since, or of agents who are idle for as long."""
    host = Tier(name="cpu", tokens=300 * BLOCK, gb_per_s=20.0)
    fleet = taught(tiers=(host, DISK))
    texts = [prompt(f"{others}-{number}", 100 * BLOCK) for number in range(3)]
    # An agent's was used four times, the last time as long ago as that of the one who is looked at.
    for turn in range(4 if others == "agents" else 1):
        for number, text in enumerate(texts):
            fleet.turn(f"{others}-{number}-{turn}", text)
    for number, text in enumerate(texts):
        fleet.told["a"].stored(1_000 * (number + 1), text, "CPU")
    fleet.agent()
    fleet.told["a"].stored(0, HISTORY[: (TURNS + 11) * BLOCK], "STORAGE")
    fleet.wait(18.0)  # by then the others are not late yet
    assert bool(fleet.hints) is hinted


def test_where_what_is_brought_up_does_not_stay_hints_become_rare(taught):
    fleet = taught()
    told = fleet.told["a"]

    def turns(count, *, stays):
        """Idle for 20 s each time, with all of it on disk; host memory has it when it is back, or not."""
        hinted = []
        for _ in range(count):
            keys = HISTORY[: (10 + fleet.turns) * BLOCK]
            told.stored(0, keys, "STORAGE")
            before = len(fleet.hints)
            fleet.wait(IDLE_S)
            hinted.append(len(fleet.hints) > before)
            if stays and hinted[-1]:
                told.stored(0, keys, "CPU")
            if fleet.turns < TURNS:
                fleet.agent()
            else:
                fleet.turn(f"again-{fleet.lab.t}", keys)
            told.tell(BlockRemoved([*range(len(keys) // BLOCK)], medium="CPU"))
        return hinted

    assert turns(10, stays=True) == [True] * 10
    # After n hints in vain 0.8^n is left of its belief; below SOON nobody is brought up who is surely back.
    in_vain = turns(30, stays=False)
    assert in_vain[:5] == [True] * 5
    assert sum(in_vain) < 12
    assert sum(in_vain[10:]) <= 4
    # Long after that it is tried once more, and if it stays now it goes on.
    fleet.lab.t += 3600.0
    fleet.agent()
    assert turns(5, stays=True) == [True] * 5


def test_the_chance_to_be_back_within_a_time():
    returns = ReturnTimes(100_000)
    # Made up at the start: of those used often 19 of 20 return, evenly over the 44 bins from 1 s to 300 s.
    # Bin 18 begins at an idle time of 7 s, bin 24 at 15 s; the first bin is number 6.
    each = 0.95 / 44
    assert returns.back_within(9, 7.0, 8.0) == pytest.approx(6 * each / (1 - 12 * each))
    assert returns.back_within(9, 7.0, 0.0) == 0.0
    assert returns.back_within(9, 0.0, 1e9) == pytest.approx(0.95)
    assert returns.back_within(9, 400.0, 1e9) == 0.0
    for turn in range(REFRESH_USES):
        returns.used(list(range(turn + 1)), 30.0 * turn)
        returns.ended(list(range(turn + 1)), 30.0 * turn + 10.0)
    # 124 more came back, after 20 s; the bin that these are in begins at 19.16 s and ends at 21.6 s.
    assert returns.back_within(9, 10.0, 8.0) < 0.06
    assert returns.back_within(9, 10.0, 14.0) > 0.8
    assert returns.uses(list(range(REFRESH_USES))) == REFRESH_USES
    assert returns.uses([-1]) == 0

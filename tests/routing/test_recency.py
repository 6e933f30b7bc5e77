"""What an endpoint's cache gives up next, and what that is worth, by hand."""

from math import inf

import pytest

from sumibi.core.latency import LatencyModel
from sumibi.routing.recency import FRESH_S, SEGMENTS, Recency
from sumibi.routing.returns import BUSY_S

TOKENS = 10
"""Of a block."""
FLAT = LatencyModel(a_s=5.0, b_s=0.01, q_s=0.0, d0_s=0.0, d1_s=0.0, d2_s=0.0)
"""A block is computed in 0.1 s, wherever it stands; the fixed cost is not that of a block."""


NO_DELAYS = (0.0,) * len(BUSY_S)


class Chances:
    """Returns with a chance, and delays, that a test names by hand."""

    def __init__(self, chance=0.5, delays=NO_DELAYS):
        self._chance, self._delays = chance, delays
        self.asked = []

    def forecast(self, uses, idle_s):
        self.asked.append((uses, idle_s))
        return self._chance(uses, idle_s) if callable(self._chance) else self._chance, self._delays


def chain(name, blocks):
    """Keys that no other name shares."""
    return [hash((name, i)) & (1 << 64) - 1 for i in range(blocks)]


def lies(recency, keys, t, *, ended_t=None):
    """A prompt was computed and is over."""
    recency.end(recency.begin(keys, t), t if ended_t is None else ended_t)


def look(recency, t, returns=None, *, resident=lambda key: True, latency=FLAT):
    recency.refresh(t, latency=latency, block_tokens=TOKENS, returns=returns or Chances(), resident=resident)
    return recency


def three():
    """10, 20 and 30 blocks in a cache of 100, in this order of age."""
    recency = Recency(100)
    for t, (name, blocks) in enumerate((("old", 10), ("middle", 20), ("young", 30))):
        lies(recency, chain(name, blocks), float(t))
    return recency


@pytest.mark.interpreted
def test_victims_go_in_order_of_age_and_cost_their_prefill_times_the_chance():
    by_idle = {10.0: 0.2, 9.0: 0.5, 8.0: 1.0}
    recency = look(three(), 10.0, Chances(lambda uses, idle_s: by_idle[idle_s]))
    old, middle, young = 10 * 0.1 * 0.2, 20 * 0.1 * 0.5, 30 * 0.1 * 1.0
    losses = {0: 0.0, 5: old / 2, 10: old, 15: old + middle / 4, 30: old + middle, 60: old + middle + young}
    assert {blocks: recency.loss_s(blocks) for blocks in losses} == pytest.approx(losses)
    # More than lies there: what is to come is worth what the others are.
    assert recency.loss_s(120) == pytest.approx(2 * (old + middle + young))
    assert recency.live_blocks == pytest.approx(10 * 0.2 + 20 * 0.5 + 30 * 1.0)


@pytest.mark.interpreted
def test_deeper_blocks_cost_more_to_compute_again():
    recency = Recency(100)
    lies(recency, chain("a", 20), 0.0)
    grown = LatencyModel(a_s=0.0, b_s=0.01, q_s=1e-4, d0_s=0.0, d1_s=0.0, d2_s=0.0)
    look(recency, 1.0, Chances(1.0), latency=grown)
    assert recency.loss_s(20) == pytest.approx(grown.prefill_s(20 * TOKENS))
    # Its end goes first.
    rear_s = grown.prefill_s(20 * TOKENS) - grown.prefill_s(15 * TOKENS)
    assert recency.loss_s(5) == pytest.approx(rear_s) == pytest.approx(grown.prefill_s(50, 150))
    # Two parts of one chain: the rear one hangs from 10 blocks that another prompt used later.
    lies(recency, chain("a", 10), 5.0)
    look(recency, 10.0, Chances(1.0), latency=grown)
    assert recency.loss_s(10) == pytest.approx(grown.prefill_s(10 * TOKENS, 10 * TOKENS))


@pytest.mark.interpreted
def test_what_the_engine_has_evicted_is_no_victim_any_more():
    recency = three()
    gone = set(chain("old", 10)[4:])
    look(recency, 10.0, Chances(1.0), resident=lambda key: key not in gone)
    assert recency.loss_s(4) == pytest.approx(0.4)
    assert recency.loss_s(4 + 20) == pytest.approx(2.4)
    assert recency.live_blocks == pytest.approx(54)
    assert recency.reach(chain("old", 10)) == 4


@pytest.mark.interpreted
def test_of_those_it_has_evicted_whole_the_next_one_is_the_oldest():
    recency = three()
    gone = {*chain("old", 10), *chain("middle", 20)[15:]}
    look(recency, 10.0, Chances(1.0), resident=lambda key: key not in gone)
    assert recency.live_blocks == pytest.approx(15 + 30)
    assert recency.loss_s(15) == pytest.approx(1.5)
    assert [recency.reach(chain(name, 30)) for name in ("old", "middle", "young")] == [0, 15, 30]


@pytest.mark.interpreted
def test_blocks_in_use_are_no_victims_and_live():
    recency = three()
    running = recency.begin(chain("old", 10), 5.0)
    look(recency, 10.0, Chances(0.5))
    assert recency.pinned_blocks == 10
    assert recency.live_blocks == pytest.approx(10 + (20 + 30) * 0.5)
    assert recency.loss_s(20) == pytest.approx(20 * 0.1 * 0.5)  # the middle one is the oldest now
    recency.end(running, 12.0)
    asked = Chances()
    look(recency, 20.0, asked)
    assert asked.asked == [(1, 19.0), (1, 18.0), (2, 8.0)]  # used once, once, twice; idle since it ended
    assert recency.pinned_blocks == 0


@pytest.mark.interpreted
def test_an_order_is_used_for_a_while():
    recency, asked = three(), Chances()
    look(recency, 10.0, asked)
    look(recency, 10.0 + FRESH_S, asked)
    assert len(asked.asked) == 3
    look(recency, 10.1 + FRESH_S, asked)
    assert len(asked.asked) == 6


@pytest.mark.interpreted
def test_what_went_on_elsewhere_is_asked_for_as_if_it_were_idle_for_ever():
    recency, asked = three(), Chances()
    recency.moved_away([*chain("middle", 20), 7])
    look(recency, 10.0, asked)
    assert [idle_s for _, idle_s in asked.asked] == [10.0, inf, 8.0]  # the engine's order stays


@pytest.mark.interpreted
def test_what_others_share_has_not_moved_away():
    recency, asked = Recency(100), Chances()
    shared = chain("shared", 10)
    lies(recency, shared + chain("one", 5), 0.0)
    lies(recency, shared + chain("two", 5), 1.0)
    recency.moved_away([*shared, 7])  # a third one of those that share it goes elsewhere
    recency.moved_away([*shared, *chain("one", 3), 7])  # it forks from within: not the same conversation
    look(recency, 10.0, asked)
    assert inf not in {idle_s for _, idle_s in asked.asked}
    recency.moved_away([*shared, *chain("one", 5), 7])
    asked.asked.clear()
    look(recency, 10.1, asked)  # at once, fresh or not
    assert [idle_s for _, idle_s in asked.asked].count(inf) == 1


@pytest.mark.interpreted
def test_delays_lie_between_those_that_were_computed():
    squares = tuple(busy_s**2 for busy_s in BUSY_S)
    recency = Recency(100)
    lies(recency, chain("a", 5), 0.0)
    lies(recency, chain("b", 5), 0.0)
    look(recency, 1.0, Chances(0.5, squares))
    for busy_s, delay_s in zip(BUSY_S, squares, strict=True):
        assert recency.delay_s(busy_s) == pytest.approx(2 * delay_s)  # of both
    assert recency.delay_s(3.0) == pytest.approx(2 * (4.0 + 16.0) / 2)
    assert recency.delay_s(0.0) == 0.0
    assert recency.delay_s(BUSY_S[0] / 2) == pytest.approx(2 * squares[0] / 4)  # who returns, and how long
    assert recency.delay_s(2 * BUSY_S[-1]) == pytest.approx(2 * 2 * squares[-1])


@pytest.mark.interpreted
def test_only_those_are_waited_for_that_may_return_and_each_once():
    ones = (1.0,) * len(BUSY_S)
    recency = Recency(100)
    shared = chain("shared", 10)
    for t, name in enumerate("abc"):
        lies(recency, shared + chain(name, 5), float(t))
    look(recency, 10.0, Chances(lambda uses, idle_s: 0.01 if idle_s > 9.5 else 0.5, ones))
    # Four stretches lie there. What all share is no conversation, and the first one is as good as gone.
    assert recency.delay_s(BUSY_S[2]) == pytest.approx(2.0)


@pytest.mark.interpreted
def test_beyond_those_looked_at_singly_all_are_as_the_last_one():
    recency = Recency(10_000)
    for i in range(SEGMENTS + 50):
        lies(recency, chain(i, 2), float(i))
    look(recency, 1000.0, Chances(lambda uses, idle_s: 0.25))
    assert recency.live_blocks == pytest.approx(0.25 * 2 * (SEGMENTS + 50))
    assert recency.loss_s(2 * (SEGMENTS + 50)) == pytest.approx(0.25 * 0.2 * (SEGMENTS + 50))


@pytest.mark.interpreted
def test_a_new_process_has_nothing():
    recency = look(three(), 10.0)
    recency.clear()
    look(recency, 10.1)
    assert (
        recency.live_blocks,
        recency.loss_s(10),
        recency.delay_s(4.0),
        recency.reach(chain("old", 10)),
    ) == (0, 0, 0, 0)

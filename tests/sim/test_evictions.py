"""Orders of eviction: LRU against reference values and the other implementation, expected value by hand."""

from pathlib import Path

import pytest
from benchmarks.tiers.evictions import placed

from sumibi.bench.traffic import prepared
from sumibi.sim.arithmetic import Stream, in_order, pooled_belady, pooled_lru
from sumibi.sim.evictions import Cache, ExpectedValue, Lru, counted, streams_of

ONE_EACH = [1, 1, 1]
"""Three chains of one block."""


@pytest.mark.traces
@pytest.mark.parametrize(("blocks", "reference"), [(4_096, 0.4211), (8_192, 0.6528)])
def test_where_sessions_stay_expected_value_takes_a_quarter_of_what_foresight_adds(
    traces: Path, blocks: int, reference: float
):
    stream = in_order(prepared("weka", None, 0, traces), 64)
    where = placed(stream, blocks, "sticky")
    lru = counted(stream, where, 8, blocks, Lru)
    best = sum(pooled_belady(part, blocks).hit_tokens for part in streams_of(stream, where, 8))
    ours = counted(stream, where, 8, blocks, ExpectedValue)
    assert lru.hit_rate == pytest.approx(reference, abs=5e-5), "reference, eight sticky replicas"
    assert lru.hit_tokens + (best - lru.hit_tokens) / 4 <= ours.hit_tokens < best


@pytest.mark.traces
def test_lru_is_the_stack_algorithm_where_prompts_fit(traces: Path):
    stream = in_order(prepared("weka", None, 0, traces), 64)
    short = Stream(stream.block_tokens, [r for r in stream.requests if len(r.keys) <= 4_096], stream.lengths)
    (stack,) = pooled_lru(short, [4_096])
    assert counted(short, [0] * len(short.requests), 1, 4_096, Lru).hit_tokens == stack.hit_tokens


def test_what_comes_often_stays_although_something_else_is_younger():
    """Chain 0 every 10 s, chain 1 once in a while: at 101 s chain 2 needs room. Last - usual: 0 has
    99 - ~10, 1 has 100 - ~60 (the first usual interval); LRU would have let go of 0.
    """
    for order, stays in ((ExpectedValue, 0), (Lru, 1)):
        cache = Cache(ONE_EACH, 2, order(ONE_EACH, 2))
        for t_s in range(9, 100, 10):
            cache.touch([0], t_s)
        cache.touch([1], 100.0)
        cache.touch([2], 101.0)
        assert cache.touch([stays], 102.0) == 1, order


def test_what_has_gone_is_remembered_in_bounds():
    """Usual intervals of one chain: new 60 (first), then 0.8 * 60 + 0.2 * 10 = 50 where it is remembered."""
    remembers = ExpectedValue(ONE_EACH, 1, sampled=1, remembered=1)
    remembers.touched([0], [False], 0.0)
    remembers.gone(0)
    remembers.touched([0], [False], 10.0)
    assert remembers.rank(0) == pytest.approx(10.0 - 50.0)
    remembers.gone(0)
    remembers.touched([1], [False], 11.0)
    remembers.gone(1)  # one block is remembered at most: 0 no more
    mean_s = 60 + 0.01 * (10 - 60)
    remembers.touched([0], [False], 20.0)
    assert remembers.rank(0) == pytest.approx(20.0 - mean_s)


def test_the_deepest_blocks_go_first():
    cache = Cache([2, 3, 3], 5, Lru([2, 3, 3], 5))
    cache.touch([0, 1], 0.0)
    assert cache.touch([0, 2], 1.0) == 2
    assert cache.touch([0, 1], 2.0) == 2, "1 made room for 2, their common beginning stayed"

"""The real router in cache arithmetic: its index must be the caches, its choices those that are counted."""

from pathlib import Path

import pytest

from sumibi.bench.cachegrid import RouterChooser, play_router
from sumibi.bench.playing import NO_QUEUE
from sumibi.bench.traces import read
from sumibi.bench.workloads import generate
from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.sim.arithmetic import Request, RoundRobin, bound, in_order, play, pooled_lru, prepare

SPEED = LatencyModel(a_s=0.01, b_s=1e-4, q_s=1e-9, d0_s=0.01, d1_s=1e-4, d2_s=1e-8)


@pytest.mark.parametrize("policy", ["cost", "llmd-precise"])
@pytest.mark.parametrize("capacity", [1_000, 6_000])
def test_the_router_knows_every_cache(policy: str, capacity: int):
    """What it says that the picked replica has is what is found there, evictions included. (Where nothing
    is being computed: of a full replica that has work it says what will be left after that.)
    """
    workload = generate("agents:sessions=12,users=6,context_tokens=60000")
    stream = in_order(prepare(workload), 6)
    idle, wrong = [], []

    class Watching(RouterChooser):
        def placed(
            self, request: Request, replica: int, hit_tokens: int, matched: int, removed: list
        ) -> None:
            (decision,) = self.router.decisions(1)
            if not decision.picked.prefill_tokens:
                idle.append(decision)
                if decision.picked.matched_tokens != hit_tokens:
                    wrong.append((decision, hit_tokens))
            super().placed(request, replica, hit_tokens, matched, removed)

    chooser = Watching(
        RouterConfig(policy=policy), 4, capacity, stream.block_tokens, speed=NO_QUEUE, names_sessions=True
    )
    count = play(stream, 4, capacity, chooser)
    assert not wrong
    assert len(idle) > 0.9 * len(stream.requests)
    chooser.router.check_integrity()
    assert 0 < count.hit_rate <= bound(stream).hit_rate
    assert sum(count.uncached_by_replica) == count.uncached_tokens


@pytest.mark.traces
def test_round_robin_is_the_reference_s(traces: Path):
    """8 x 2,048 blocks: 54,399,364 uncached tokens, by others' code (see tests/sim/test_arithmetic.py)."""
    stream = in_order(prepare(read(traces / "mooncake" / "synthetic_trace.jsonl.xz")))
    config = RouterConfig(policy="round-robin")
    assert play_router(stream, 8, 2_048, config, speed=SPEED).uncached_tokens == 54_399_364


def test_sessions_stay_where_they_are_warm():
    workload = generate("agents:sessions=12,users=6,context_tokens=60000")
    stream = in_order(prepare(workload), 6)
    kept = play_router(stream, 4, 4_000, RouterConfig(), speed=SPEED, names_sessions=True)
    turned = play(stream, 4, 4_000, RoundRobin())
    (pooled,) = pooled_lru(stream, [16_000])
    assert kept.hit_rate > 0.9 * pooled.hit_rate
    assert kept.hit_rate > turned.hit_rate + 0.1

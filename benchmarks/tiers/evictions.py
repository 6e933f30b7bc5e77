"""`python -m benchmarks.tiers.evictions`: which block a full tier should let go of.

Cache arithmetic over the recorded agents' sessions, as in the cache grid of `sumibi bench routing`: eight
replicas, a cache each. Who gets which request is chosen with LRU caches and then fixed, so that orders are
compared on the same requests; Belady's rule on each replica's requests is what foresight would give. The
caches are counted without time: device and tiers below it together, each block in one of them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sumibi.bench.cachegrid import RouterChooser
from sumibi.bench.playing import NO_QUEUE
from sumibi.bench.report import Figure, figure, finish, machine, statement
from sumibi.bench.traffic import default_traces, prepared
from sumibi.routing.config import RouterConfig
from sumibi.sim.arithmetic import (
    Chooser,
    Fleet,
    Hash,
    Request,
    Sticky,
    Stream,
    in_order,
    play,
    pooled_belady,
)
from sumibi.sim.evictions import ORDERS, counted, streams_of

ROOT = Path(__file__).resolve().parents[2]
CMD = "python -m benchmarks.tiers.evictions"
REPLICAS = 8
NEEDED = 0.25
"""Of the gap between LRU and foresight, for an order to become the default."""
DECIDING = tuple((64, blocks) for blocks in (4_096, 8_192))
OTHERS = ((64, 16_384), (32, 8_192), (16, 4_096))
SEEDS = 3


class _Recorded:
    """A chooser that remembers what it chose."""

    def __init__(self, inner: Chooser) -> None:
        self._inner = inner
        self.where: list[int] = []

    def choose(self, request: Request, fleet: Fleet) -> int:
        self.where.append(self._inner.choose(request, fleet))
        return self.where[-1]

    def placed(
        self, request: Request, replica: int, hit_tokens: int, matched: int, removed: list[Sequence[int]]
    ) -> None:
        self._inner.placed(request, replica, hit_tokens, matched, removed)


def placed(stream: Stream, blocks: int, by: str) -> list[int]:
    """The replica of every request."""
    made: dict[str, Chooser] = {"sticky": Sticky(REPLICAS), "hash": Hash()}
    chooser = made.get(by) or RouterChooser(
        RouterConfig(policy=by), REPLICAS, blocks, stream.block_tokens, speed=NO_QUEUE, names_sessions=False
    )
    recorded = _Recorded(chooser)
    play(stream, REPLICAS, blocks, recorded)
    return recorded.where


def study(
    traces: Path, points: Sequence[tuple[int, int]], routing: Sequence[str], seeds: int, *, deciding: bool
) -> list[Figure]:
    """Hit rates and the part of the gap that each order takes, at each point (users, blocks of a replica)."""
    figures = []
    for users, blocks in points:
        for by in routing:
            rates: dict[str, list[float]] = {}
            for seed in range(seeds):
                stream = in_order(prepared("weka", None, seed, traces), users)
                where = placed(stream, blocks, by)
                for name, order in ORDERS.items():
                    rates.setdefault(name, []).append(
                        counted(stream, where, REPLICAS, blocks, order).hit_rate
                    )
                best = sum(
                    pooled_belady(part, blocks).hit_tokens for part in streams_of(stream, where, REPLICAS)
                )
                rates.setdefault("Belady", []).append(best / stream.tokens)
            at = f"{users} users, {blocks:,} blocks, {by}"
            figures += [
                figure(f"{at}: hit rate, {name}", values, "", cmd=CMD, of_mean=True)
                for name, values in rates.items()
            ]
            for name in list(ORDERS)[1:]:
                shares = [
                    (ours - lru) / (most - lru)
                    for ours, lru, most in zip(rates[name], rates["LRU"], rates["Belady"], strict=True)
                ]
                target = NEEDED if deciding and name == "expected value" else None
                what = "least of the seeds" if deciding else "mean"
                values = [min(shares)] if deciding else shares
                figures.append(
                    figure(
                        f"{at}: part of the gap, {name}, {what}",
                        values,
                        "",
                        at_least=target,
                        cmd=CMD,
                        of_mean=True,
                    )
                )
    return figures


def main() -> int:
    """Play, write, print; 1 if the deciding figures miss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=default_traces(ROOT))
    parser.add_argument("--json", type=Path, default=Path("out/bench-evictions.json"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/tiers/EVICTIONS.md")
    args = parser.parse_args()
    if args.traces is None:
        parser.error("--traces DIR: the directory with weka/sessions.jsonl.xz")
    figures = [
        machine(),
        statement("command", CMD),
        statement("workload", "120 recorded agents' sessions (8,465 requests, 64-token blocks), 8 replicas"),
        statement(
            "deciding",
            "64 users with 0.26 and 0.52 M tokens a replica: expected value is the default order if it takes"
            " a quarter of what foresight would add to LRU, with every seed",
        ),
        statement(
            "not measured",
            "time; inclusive tiers (here every touch is seen, also of what is on the device); a router that"
            " sees the evictions of the order under test: it saw LRU's, which favours LRU under `cost`",
        ),
    ]
    figures += study(args.traces, DECIDING, ("sticky",), SEEDS, deciding=True)
    figures += study(args.traces, DECIDING, ("hash", "cost"), 1, deciding=True)
    figures += study(args.traces, OTHERS, ("sticky",), 1, deciding=False)
    return finish(figures, args.json, args.results, "Which block a full tier lets go of")


if __name__ == "__main__":
    raise SystemExit(main())

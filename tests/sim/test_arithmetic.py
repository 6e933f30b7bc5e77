"""Cache arithmetic against reference values computed by others' code, to the token or the printed digit.

The reference for both recorded traces was made twice, in two languages with other data structures (tables
of bounds, pooled LRU and Belady, eight replicas). A second, foreign oracle is PyPI `kvcache-simulator`.
"""

import random
import statistics
from array import array
from collections import OrderedDict
from pathlib import Path

import msgspec
import pytest

from sumibi.bench.traces import read
from sumibi.bench.traces.lines import read_lines
from sumibi.bench.traces.weka import read as read_weka
from sumibi.sim.arithmetic import (
    Chooser,
    Hash,
    LeastLoad,
    PrefixLoad,
    Request,
    RoundRobin,
    Sticky,
    Stream,
    belady_runs,
    bound,
    endless_runs,
    in_order,
    infinite_cache,
    lru_runs,
    play,
    pooled_belady,
    pooled_lru,
    prepare,
)
from sumibi.sim.workload import Session, Turn, Workload

traced = pytest.mark.traces


@pytest.fixture(scope="module")
def weka(traces: Path) -> Stream:
    return prepare(read(traces / "weka" / "sessions.jsonl.xz"))


@pytest.fixture(scope="module")
def shared(traces: Path) -> Stream:
    """The variant in which sessions share their tools and system prompts, 32 users."""
    path = traces / "weka" / "sessions.jsonl.xz"
    return in_order(prepare(read_weka(path, read_lines(path), shared_prefix=True)), 32)


@pytest.fixture(scope="module")
def mooncake(traces: Path) -> Stream:
    return in_order(prepare(read(traces / "mooncake" / "synthetic_trace.jsonl.xz")))


@pytest.fixture(scope="module")
def first_ids(traces: Path) -> dict[str, str]:
    """Mooncake: a request's first block id, in decimals: the key of `hash` and `sticky`."""
    path = traces / "mooncake" / "synthetic_trace.jsonl.xz"
    return {
        f"request-{number}": str(msgspec.json.decode(line)["hash_ids"][0])
        for number, line in read_lines(path)
    }


@traced
def test_the_recorded_sessions_are_what_was_recorded(weka: Stream):
    assert len(weka.requests) == 8_465
    assert weka.tokens == 1_025_544_336
    assert sum(request.turn.output_tokens for request in weka.requests) == 3_788_967
    assert weka.distinct_blocks == 614_390


@traced
@pytest.mark.parametrize("users", [16, 32, 64])
def test_no_order_of_users_changes_the_bound(weka: Stream, users: int):
    assert bound(in_order(weka, users)).uncached_tokens == 39_588_176


@traced
def test_the_bound_by_session(weka: Stream):
    rates: dict[str, list[int]] = {}
    for request, hit in zip(weka.requests, infinite_cache(weka), strict=True):
        total = rates.setdefault(request.session.name, [0, 0])
        total[0] += hit
        total[1] += request.tokens
    shares = [hit / tokens for hit, tokens in rates.values()]
    tenths = statistics.quantiles(shares, n=10, method="inclusive")
    assert [round(x, 3) for x in (statistics.mean(shares), tenths[0], tenths[4])] == [0.932, 0.847, 0.952]


@traced
@pytest.mark.parametrize(("tokens", "rate"), [(256, 0.9606), (512, 0.9596), (1_024, 0.9575)])
def test_the_bound_at_coarser_blocks(weka: Stream, tokens: int, rate: float):
    factor = tokens // 64
    coarse = Workload("coarse", tokens)
    for request in weka.requests:
        turn = Turn(
            blocks=request.turn.blocks[factor - 1 :: factor],
            prompt_tokens=request.turn.prompt_tokens,
            output_tokens=0,
        )
        coarse.sessions.append(Session(name="", keys=request.session.keys, turns=[turn]))
    assert round(bound(prepare(coarse)).hit_rate, 4) == rate


@traced
@pytest.mark.parametrize(
    ("users", "hours", "live", "context_mean", "context_max"),
    [(16, 8.53, 14.9, None, None), (32, 6.31, 27.3, 3.86, 5.83), (64, 6.05, 45.5, 6.43, 10.05)],
)
def test_who_is_live_and_how_much_they_hold(
    weka: Stream, users: int, hours: float, live: float, context_mean: float | None, context_max: float | None
):
    stream = in_order(weka, users)
    ends = {request.position[0]: request.arrival_ms for request in stream.requests}
    latest: dict[int, int] = {}
    counts, contexts = [], []
    for request in stream.requests:
        latest[request.position[0]] = request.tokens
        latest = {one: tokens for one, tokens in latest.items() if ends[one] >= request.arrival_ms}
        counts.append(len(latest))
        contexts.append(sum(latest.values()))
    assert round(stream.requests[-1].arrival_ms / 3.6e6, 2) == hours
    assert round(statistics.mean(counts), 1) == live
    if context_mean is not None:
        assert round(statistics.mean(contexts) / 1e6, 2) == context_mean
        assert round(max(contexts) / 1e6, 2) == context_max


CAPACITIES = [4_096, 8_192, 16_384, 32_768, 65_536, 131_072, 262_144]
POOLED_LRU = {
    16: [0.0996, 0.2895, 0.6276, 0.8808, 0.9604, 0.9614, 0.9614],
    32: [0.0590, 0.1316, 0.3204, 0.6681, 0.9022, 0.9613, 0.9614],
    64: [0.0529, 0.1001, 0.2107, 0.4025, 0.7408, 0.9258, 0.9614],
}
POOLED_BELADY = {
    16: [0.3782, 0.5858, 0.7977, 0.9368, 0.9614, 0.9614, 0.9614],
    32: [0.2776, 0.4398, 0.6415, 0.8299, 0.9478, 0.9614, 0.9614],
    64: [0.2196, 0.3469, 0.5156, 0.7030, 0.8705, 0.9562, 0.9614],
}


@traced
@pytest.mark.parametrize("users", [16, 32, 64])
def test_one_pooled_cache(weka: Stream, users: int):
    stream = in_order(weka, users)
    assert [round(c.hit_rate, 4) for c in pooled_lru(stream, CAPACITIES)] == POOLED_LRU[users]
    assert [round(pooled_belady(stream, c).hit_rate, 4) for c in CAPACITIES] == POOLED_BELADY[users]


@traced
def test_one_pooled_cache_to_the_token(weka: Stream, mooncake: Stream):
    stream = in_order(weka, 32)
    assert pooled_lru(stream, [32_768])[0].uncached_tokens == 340_399_632
    assert pooled_belady(stream, 32_768).uncached_tokens == 174_430_352
    assert pooled_lru(mooncake, [10_000])[0].uncached_tokens == 34_800_516
    assert pooled_belady(mooncake, 10_000).uncached_tokens == 22_734_212


@traced
def test_sessions_that_share_tools_and_system_prompts(shared: Stream):
    assert bound(shared).uncached_tokens == 38_468_688
    lru = [0.0691, 0.1474, 0.3431, 0.6872, 0.9100, 0.9623, 0.9624]
    belady = [0.2910, 0.4541, 0.6550, 0.8393, 0.9516, 0.9625, 0.9625]
    assert [round(c.hit_rate, 4) for c in pooled_lru(shared, CAPACITIES)] == lru
    assert [round(pooled_belady(shared, c).hit_rate, 4) for c in CAPACITIES] == belady


@traced
@pytest.mark.parametrize(
    ("blocks", "turns", "sticky", "load"),
    [(8_192, 0.2479, 0.8509, 0.8445), (16_384, 0.3818, 0.9468, 0.9447), (32_768, 0.5412, 0.9618, 0.9514)],
)
def test_shared_prefixes_on_eight_replicas(
    shared: Stream, blocks: int, turns: float, sticky: float, load: float
):
    choosers: list[Chooser] = [RoundRobin(), Sticky(8), PrefixLoad(8, 64)]
    rates = [round(play(shared, 8, blocks, one).hit_rate, 4) for one in choosers]
    assert rates == [turns, sticky, load]


# users, blocks a replica; hit rates of round-robin, least-load, hash, sticky, prefix+load; work shares of
# the last three
WEKA_FLEETS = [
    (16, 4_096, (0.2081, 0.1994, 0.7120, 0.7617, 0.7051), (2.26, 1.79, 1.05)),
    (16, 8_192, (0.3445, 0.3270, 0.8623, 0.9117, 0.9255), (3.04, 1.76, 1.15)),
    (16, 16_384, (0.5051, 0.5006, 0.9484, 0.9601, 0.9521), (3.07, 1.35, 1.10)),
    (16, 32_768, (0.6888, 0.6907, 0.9614, 0.9614, 0.9527), (1.62, 1.21, 1.13)),
    (32, 4_096, (0.1364, 0.1361, 0.5893, 0.5755, 0.5617), (1.97, 1.16, 1.04)),
    (32, 8_192, (0.2349, 0.2319, 0.8066, 0.8372, 0.8411), (2.68, 1.46, 1.07)),
    (32, 16_384, (0.3645, 0.3627, 0.9311, 0.9505, 0.9454), (3.36, 1.87, 1.17)),
    (32, 32_768, (0.5213, 0.5111, 0.9613, 0.9614, 0.9520), (1.64, 1.13, 1.13)),
    (32, 65_536, (0.7005, 0.7014, 0.9614, 0.9614, 0.9513), (1.63, 1.13, 1.09)),
    (64, 4_096, (0.1036, 0.0960, 0.4383, 0.4211, 0.3787), (1.67, 1.27, 1.01)),
    (64, 8_192, (0.1753, 0.1703, 0.6753, 0.6528, 0.6546), (1.97, 1.22, 1.01)),
    (64, 16_384, (0.2842, 0.2775, 0.8857, 0.8988, 0.8606), (3.13, 1.44, 1.06)),
    (64, 32_768, (0.4199, 0.4111, 0.9593, 0.9578, 0.9486), (1.96, 2.16, 1.10)),
    (64, 65_536, (0.5668, 0.5718, 0.9614, 0.9614, 0.9481), (1.63, 1.63, 1.10)),
]


@traced
@pytest.mark.parametrize(("users", "blocks", "rates", "shares"), WEKA_FLEETS)
def test_eight_replicas(
    weka: Stream, users: int, blocks: int, rates: tuple[float, ...], shares: tuple[float, ...]
):
    stream = in_order(weka, users)
    choosers: list[Chooser] = [RoundRobin(), LeastLoad(8), Hash(), Sticky(8), PrefixLoad(8, 64)]
    counts = [play(stream, 8, blocks, one) for one in choosers]
    assert tuple(round(count.hit_rate, 4) for count in counts) == rates
    assert tuple(round(count.work_share, 2) for count in counts[2:]) == shares


@traced
def test_eight_replicas_to_the_token(weka: Stream):
    stream = in_order(weka, 32)
    choosers: list[Chooser] = [RoundRobin(), Hash(), Sticky(8), PrefixLoad(8, 64)]
    uncached = [play(stream, 8, 16_384, one).uncached_tokens for one in choosers]
    assert uncached == [651_689_552, 70_709_712, 50_715_024, 56_029_840]


@traced
def test_a_trace_with_global_ids(mooncake: Stream):
    assert len(mooncake.requests) == 3_993
    assert mooncake.tokens == 61_194_628
    assert sum(len(request.keys) for request in mooncake.requests) == 121_877
    assert mooncake.distinct_blocks == 43_924
    assert bound(mooncake).uncached_tokens == 21_391_748
    # 44.6 % find their first block (some of them, shorter than it, cannot use it)
    assert len({request.keys[0] for request in mooncake.requests}) == 2_211
    sizes = [1_000, 2_000, 5_000, 10_000, 20_000, 50_000]
    lru = [0.0857, 0.1491, 0.2843, 0.4313, 0.5816, 0.6504]
    belady = [0.2817, 0.3863, 0.5354, 0.6285, 0.6504, 0.6504]
    assert [round(c.hit_rate, 4) for c in pooled_lru(mooncake, sizes)] == lru
    assert [round(pooled_belady(mooncake, c).hit_rate, 4) for c in sizes] == belady


MOONCAKE_FLEETS = [
    (512, (0.0417, 0.0319, 0.2416, 0.2465, 0.2175), (1.33, 1.13, 1.02)),
    (1_024, (0.0665, 0.0662, 0.3723, 0.3807, 0.3364), (1.29, 1.08, 1.02)),
    (2_048, (0.1110, 0.1245, 0.5421, 0.5414, 0.4870), (1.31, 1.06, 1.02)),
    (4_096, (0.1687, 0.1685, 0.6424, 0.6414, 0.5983), (1.25, 1.03, 1.03)),
    (5_000, (0.1850, 0.1861, 0.6482, 0.6497, 0.6211), (1.23, 1.04, 1.04)),
    (8_192, (0.2170, 0.2415, 0.6504, 0.6504, 0.6205), (1.18, 1.03, 1.05)),
]


@traced
@pytest.mark.parametrize(("blocks", "rates", "shares"), MOONCAKE_FLEETS)
def test_a_trace_with_global_ids_on_eight_replicas(
    mooncake: Stream,
    first_ids: dict[str, str],
    blocks: int,
    rates: tuple[float, ...],
    shares: tuple[float, ...],
):
    def key(request: Request) -> str:
        return first_ids[request.session.name]

    choosers: list[Chooser] = [RoundRobin(), LeastLoad(8), Hash(key), Sticky(8, key), PrefixLoad(8, 512)]
    counts = [play(mooncake, 8, blocks, one) for one in choosers]
    assert tuple(round(count.hit_rate, 4) for count in counts) == rates
    assert tuple(round(count.work_share, 2) for count in counts[2:]) == shares
    if blocks == 2_048:
        uncached = [counts[i].uncached_tokens for i in (0, 2, 3, 4)]
        assert uncached == [54_399_364, 28_022_148, 28_061_572, 31_393_156]


# blocks, hit tokens of LRU, of the optimal rule: `kvcache-simulator` 0.1.3 on the last 1,997 requests
# (scripts/kvcache_oracle.py prints them)
ORACLE = [
    (90, 326_656, 3_266_037),
    (181, 766_776, 5_372_169),
    (362, 1_735_939, 8_092_656),
    (725, 3_840_883, 11_515_717),
    (1_450, 6_580_028, 15_789_496),
    (2_900, 10_323_230, 21_062_293),
    (5_801, 16_502_897, 26_248_431),
    (11_602, 23_445_039, 31_007_896),
    (23_205, 29_416_722, 31_535_563),
]


@traced
def test_a_foreign_simulator_counts_the_same(mooncake: Stream):
    def hit_tokens(runs: list[int]) -> int:
        """By its rules: an exactly repeated partial last block is a hit, and so is the last token."""
        counted = zip(runs[1_996:], mooncake.requests[1_996:], strict=True)
        return sum(min(run * 512, request.tokens) for run, request in counted)

    assert sum(request.tokens for request in mooncake.requests[1_996:]) == 36_552_394
    assert hit_tokens(endless_runs(mooncake)) == 31_535_563
    lru = lru_runs(mooncake, [blocks for blocks, _, _ in ORACLE])
    assert [hit_tokens(runs) for runs in lru] == [hits for _, hits, _ in ORACLE]
    optimal = [belady_runs(mooncake, blocks) for blocks, _, _ in ORACLE]
    assert [hit_tokens(runs) for runs in optimal] == [hits for _, _, hits in ORACLE]


def random_stream(rng: random.Random, requests: int) -> Stream:
    """Prompts that grow, fork and begin anew, each a session of its own with keys of its own."""
    names: dict[tuple[int, ...], int] = {}
    chains: list[tuple[int, ...]] = [()]
    workload = Workload("random", 4)
    for number in range(requests):
        base = rng.choice(chains)
        base = base[: rng.randint(0, len(base))] if rng.random() < 0.4 else base
        chain = base + tuple(rng.randint(0, 2) for _ in range(rng.randint(1, 10)))
        chains = [*chains[-15:], chain]
        keys = [names.setdefault(chain[: i + 1], len(names) + 7) for i in range(len(chain))]
        turn = Turn(
            blocks=array("I", range(len(keys))),
            prompt_tokens=4 * len(keys) + rng.randint(0, 3),
            output_tokens=1,
            offset_ms=number,
        )
        workload.sessions.append(Session(name=str(number), keys=keys, turns=[turn]))
    return in_order(prepare(workload))


@pytest.mark.parametrize("seed", range(20))
def test_trees_count_as_block_by_block(seed: int):
    stream = random_stream(random.Random(seed), 120)
    for capacity in (1, 3, 10, 40, 200):
        order: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for request in stream.requests:
            run = 0
            while run < len(request.keys) and request.keys[run] in order:
                run += 1
            hits += min(run, request.usable) * 4
            for key in reversed(request.keys):
                order[key] = None
                order.move_to_end(key)
            while len(order) > capacity:
                order.popitem(last=False)
        assert pooled_lru(stream, [7, capacity])[1].hit_tokens == hits
        assert play(stream, 1, capacity, RoundRobin()).hit_tokens == hits


@pytest.mark.parametrize("seed", range(20))
def test_the_optimal_rule_counts_as_block_by_block(seed: int):
    stream = random_stream(random.Random(seed), 100)
    uses: dict[int, list[int]] = {}
    for number, request in enumerate(stream.requests):
        for key in request.keys:
            uses.setdefault(key, []).append(number)
    for capacity in (1, 3, 10, 40):
        resident: dict[int, tuple[int, int]] = {}
        hits = 0
        for number, request in enumerate(stream.requests):
            run = 0
            while run < len(request.keys) and request.keys[run] in resident:
                run += 1
            hits += min(run, request.usable) * 4
            for depth, key in enumerate(request.keys):
                resident.pop(key, None)
                following = [use for use in uses[key] if use > number]
                if following:
                    resident[key] = (following[0], depth)
            while len(resident) > capacity:
                del resident[max(resident, key=lambda one: resident[one])]
        assert pooled_belady(stream, capacity).hit_tokens == hits


@pytest.mark.interpreted
def test_a_chooser_learns_what_came_and_went():
    seen = []

    class Watching(RoundRobin):
        def placed(self, request, replica, hit_tokens, matched, removed):
            seen.append((request.session.name, replica, hit_tokens, matched, [list(r) for r in removed]))

    workload = Workload("three", 4)
    for name, keys, tokens in (("a", [1, 2, 3], 12), ("b", [1, 2, 4], 13), ("c", [1, 2, 3], 12)):
        turn = Turn(blocks=array("I", range(3)), prompt_tokens=tokens, output_tokens=1)
        workload.sessions.append(Session(name=name, keys=keys, turns=[turn]))
    count = play(in_order(prepare(workload)), 1, 3, Watching())
    # the third prompt finds two of its blocks and could use two: its last token is always computed
    assert seen == [("a", 0, 0, 0, []), ("b", 0, 8, 2, [[3]]), ("c", 0, 8, 2, [[4]])]
    assert (count.hit_tokens, count.prompt_tokens, count.uncached_by_replica) == (16, 37, [21])

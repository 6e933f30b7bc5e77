"""What counts as reached, on numbers worked out by hand."""

from math import nan

import pytest

from sumibi.bench.grid import UNDISTURBED
from sumibi.bench.judging import Runs, gather
from sumibi.bench.judging import judge as judge_rows
from sumibi.bench.report import Figure
from sumibi.bench.scenes import Caches, Outcome, Part, Point, Scene
from sumibi.bench.verdicts import against_best, clear_lead, part_better, worst
from sumibi.sim.fleet import FleetSpec, Group

FLEET = FleetSpec(name="f", groups=[Group(count=1, latency="glm-5.2/8xh200", kv_tokens=1_000)])


def part(**figures: float) -> Part:
    usual = {
        "requests": 100,
        "served": 100,
        "hit_rate": 0.9,
        "ttft_mean_s": 1.0,
        "ttft_p90_s": 2.0,
        "ttft_p99_s": 3.0,
        "output_tokens_per_s": 1_000.0,
    }
    return Part(**(usual | figures))


def outcome(policy: str, seed: int = 0, whole: Part | None = None, **figures: object) -> Outcome:
    usual = {"work_share": 1.0, "bound_hit_rate": 0.96, "pooled_lru_hit_rate": 0.92}
    return Outcome(policy=policy, seed=seed, whole=whole or part(), **(usual | figures))


def runs(row: str, name: str, outcomes: list[Outcome], **scene: object) -> Runs:
    usual = {"traffic": "weka", "users": 32, "fleet": FLEET, "seeds": 1 + max(one.seed for one in outcomes)}
    made = Scene(row=row, name=name, **(usual | scene))
    (gathered,) = gather([(Point(made, one.policy, one.seed), one) for one in outcomes])
    return gathered


def judge(scenes: list[Runs], cmd: str) -> list[Figure]:
    (row,) = judge_rows(scenes, cmd)
    return [*row.figures, row.count()]


def named(figures: list[Figure], *parts: str) -> Figure:
    (found,) = [each for each in figures if all(part in each.name for part in parts)]
    return found


def test_the_best_baseline_is_the_best_over_the_seeds():
    by_policy = {"cost": [2.0, 3.0], "a": [1.0, 6.0], "b": [3.0, 3.0], "c": [nan, 1.0]}
    lower = against_best(by_policy, "lower")
    assert lower is not None
    assert (lower.best, lower.baseline, lower.values) == ("b", 3.0, [2 / 3, 1.0])
    assert lower.mean == pytest.approx(5 / 6)
    higher = against_best(by_policy, "higher")
    assert higher is not None
    assert (higher.best, higher.values) == ("a", [2.0, 0.5])


def test_nothing_to_compare_is_no_verdict():
    assert against_best({"a": [1.0]}, "lower") is None
    assert against_best({"cost": [1.0]}, "lower") is None
    assert against_best({"cost": [nan], "a": [1.0]}, "lower") is None


def test_points_that_are_equal_are_not_better():
    ratios = [against_best({"cost": [ours], "a": [1.0]}, "lower") for ours in (0.9, 1.0, 1.01)]
    known = [ratio for ratio in ratios if ratio is not None]
    assert part_better(known, "lower") == pytest.approx(1 / 3)
    assert worst(known, "lower").mean == pytest.approx(1.01)
    assert worst(known, "higher").mean == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("output", "e2e_s", "clear"),
    [
        (1_050.0, 10.0, True),  # 5 % more output
        (1_000.0, 9.0, True),  # 10 % less time
        (1_049.0, 9.1, False),  # nearly both is neither
        (900.0, 8.0, True),  # one of the two is enough
    ],
)
def test_clearly_best_is_either_of_two(output: float, e2e_s: float, clear: bool):
    more = against_best({"cost": [output], "a": [1_000.0], "b": [500.0]}, "higher")
    less = against_best({"cost": [e2e_s], "a": [12.0], "b": [10.0]}, "lower")
    assert more is not None
    assert less is not None
    assert (clear_lead(more, less) >= 1.0) is clear


def test_the_cache_grid_asks_more_where_the_working_set_fits():
    def hits(rate: float) -> Part:
        return part(hit_rate=rate)

    def at(fits: bool, share: float, users: int = 32) -> list[Figure]:
        ours = outcome("cost", whole=hits(0.85), fits=fits, work_share=share)
        theirs = outcome("llmd-precise", whole=hits(0.84), fits=fits)
        scene = runs("cache grid", "p", [ours, theirs], fleet=Caches(replicas=8, blocks=1), users=users)
        return judge([scene], "cmd")

    tight, roomy = at(False, 1.2), at(True, 1.2)
    # 0.85 of a pooled 0.92 is 0.924: enough for 0.90, not for 0.98
    assert named(tight, "pooled LRU").value == pytest.approx(0.9239, abs=1e-4)
    assert named(tight, "pooled LRU").held is True
    assert named(roomy, "pooled LRU").held is False
    assert named(tight, "hit rate / llmd-precise's").held is True
    assert named(tight, "work share").held is False
    assert named(at(False, 1.2, users=16), "work share").held is True
    # of hit rate, share of the pool, work share and requests served three are reached
    count = named(tight, "targets reached, of 4")
    assert (count.value, count.held) == (3.0, False)


def test_the_serving_grid_wants_two_thirds_and_nowhere_worse():
    def point(name: str, ours_s: float) -> Runs:
        mine = outcome("cost", whole=part(ttft_mean_s=ours_s), warm_ttft_p99_s=ours_s, busy_spread_p95=1.3)
        best = outcome("a", whole=part(ttft_mean_s=1.0), warm_ttft_p99_s=1.0)
        other = outcome("b", whole=part(ttft_mean_s=9.0), warm_ttft_p99_s=9.0)
        return runs("serving grid", name, [mine, best, other])

    figures = judge([point("p1", 0.5), point("p2", 0.9), point("p3", 1.02)], "cmd")
    lower = named(figures, "part of the points", "mean TTFT")
    assert lower.value == pytest.approx(2 / 3, abs=1e-4)
    assert lower.held is True
    assert named(figures, "p3: mean TTFT / a's").held is True
    assert named(figures, "p3: busy").held is True
    figures = judge([point("p1", 0.5), point("p2", 1.0), point("p3", 1.021)], "cmd")
    assert named(figures, "part of the points", "p99 TTFT").held is False
    assert named(figures, "p3: mean TTFT / a's").held is False


def test_serving_less_is_no_way_to_be_fast():
    mine = outcome("cost", whole=part(served=99), busy_spread_p95=1.0)
    figures = judge(
        [runs("serving grid", "p", [mine, outcome("a"), outcome("b", whole=part(served=50))])], "c"
    )
    lack = named(figures, "a baseline served and ours did not")
    assert (lack.value, lack.held) == (1.0, False)


def test_the_ladder_is_judged_at_every_rate_and_not_at_the_warm_up():
    def stages(output: float, hit: float) -> dict[int, Part]:
        return {1: part(output_tokens_per_s=output), 2: part(output_tokens_per_s=output, hit_rate=hit)}

    mine, theirs = outcome("cost", stages=stages(981.0, 0.95)), outcome("a", stages=stages(1_000.0, 0.99))
    figures = judge([runs("W2", "W2", [mine, theirs], rates=(15, 10, 50))], "cmd")
    assert not [each for each in figures if "15 requests" in each.name]
    assert named(figures, "W2, 10 requests/s: output").held is True  # 0.981 >= 1 / 1.02
    assert not [each for each in figures if "10 requests/s: hit rate" in each.name]
    assert named(figures, "W2, 50 requests/s: hit rate").held is False


def test_priorities_are_judged_one_by_one():
    levels = {100: part(ttft_mean_s=0.5), -10: part(ttft_mean_s=3.0)}
    even = {100: part(ttft_mean_s=1.0), -10: part(ttft_mean_s=1.0)}
    mine = outcome("cost", stages={1: part()}, priorities=levels)
    scene = runs("W15", "W15", [mine, outcome("a", stages={1: part()}, priorities=even)], rates=(1, 2))
    figures = judge([scene], "cmd")
    assert named(figures, "priority 100").held is True
    assert named(figures, "priority -10").held is False


def test_a_fault_is_compared_with_the_same_time_undisturbed():
    def scene(name: str, p99_s: float, mean_s: float) -> Runs:
        mine = outcome("cost", whole=part(ttft_mean_s=mean_s), windows=part(ttft_p99_s=p99_s))
        return runs("faults", name, [mine, outcome("a", windows=part(ttft_p99_s=1.0))])

    figures = judge([scene(UNDISTURBED, 2.0, 1.0), scene("slow", 3.0, 1.0), scene("gone", 3.1, 1.1)], "cmd")
    assert named(figures, "slow: p99 TTFT from fault").held is True
    assert named(figures, "gone: p99 TTFT from fault").held is False
    assert named(figures, "slow: mean TTFT").held is True
    assert named(figures, "gone: mean TTFT").held is False
    assert not [each for each in figures if each.name.startswith(f"faults, {UNDISTURBED}")]


def test_a_target_without_a_number_is_missed():
    nothing = part(served=0, ttft_mean_s=nan, ttft_p90_s=nan, output_tokens_per_s=0.0)
    figures = judge([runs("W9", "W9", [outcome("cost", whole=nothing), outcome("a")])], "cmd")
    assert named(figures, "mean TTFT").held is False
    assert named(figures, "mean TTFT").value == "no number: nothing was served"
    assert named(figures, "targets reached, of 4").value == 0.0


def test_a_policy_without_all_seeds_is_left_out():
    outcomes = [outcome("cost", 0), outcome("cost", 1), outcome("a", 0), outcome("a", 1), outcome("b", 0)]
    assert list(runs("W9", "W9", outcomes).played) == ["cost", "a"]

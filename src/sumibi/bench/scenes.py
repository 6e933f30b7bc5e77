"""What a benchmark of the router plays: scenes as plain data, one policy and one seed of them at a time."""

from collections.abc import Sequence

import msgspec

from sumibi.sim.fleet import FleetSpec


class Caches(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of which only the caches count: no time passes on it."""

    replicas: int
    blocks: int
    """That each of them holds."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic and a fleet; every policy plays it alike."""

    row: str
    """The row of the benchmark's table that it belongs to."""
    name: str
    """Within its row."""
    traffic: str
    """`weka` or `mooncake` (recorded), or what `workloads.generate` takes."""
    part: int | None = None
    """0 or 1: that half of the sessions; None: all."""
    users: int | None = None
    """None: as the traffic says."""
    fleet: FleetSpec | Caches
    rates: tuple[int, ...] = ()
    """Open loop: requests a second of each stage. The first warms up and counts nowhere."""
    windows_s: tuple[tuple[float, float], ...] = ()
    """Times (from, until) that are looked at by themselves: faults and what follows."""
    seeds: int = 1


class Point(msgspec.Struct, frozen=True):
    """One run."""

    scene: Scene
    policy: str
    seed: int


class Part(msgspec.Struct, kw_only=True):
    """Some of a run's requests in a few figures; times and rates are of those that were served."""

    requests: int
    served: int
    hit_rate: float
    """Part of prompt tokens that a cache had."""
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    output_tokens_per_s: float
    """From the first arrival to the last end."""


class Outcome(msgspec.Struct, kw_only=True):
    """One run in a few figures. NaN where a figure means nothing (times in cache arithmetic)."""

    policy: str
    seed: int
    whole: Part
    work_share: float
    """Uncached tokens of the busiest replica over the mean."""
    bound_hit_rate: float
    """With an endless cache."""
    pooled_lru_hit_rate: float = float("nan")
    """With one cache as large as all replicas' together; known of `cost`'s runs."""
    fits: bool = False
    """Cache arithmetic: all replicas together hold what all live sessions asked last, at any time."""
    ttft_p50_s: float = float("nan")
    warm_ttft_p99_s: float = float("nan")
    """Over turns that an endless cache leaves at most 8,192 tokens."""
    least_ttft_mean_s: float = float("nan")
    """Bound: every request alone on the fastest replica with an endless cache."""
    least_ttft_p50_s: float = float("nan")
    least_warm_ttft_p99_s: float = float("nan")
    itl_p50_s: float = float("nan")
    itl_p99_s: float = float("nan")
    e2e_mean_s: float = float("nan")
    even_e2e_mean_s: float = float("nan")
    """Closed loop without pauses on equal replicas: about what they take if users are spread evenly at all
    times and nothing is computed twice. (Of steps that grow evenly with the batch, even batches do the most.)
    """
    served_by_hour: list[int] = []
    """Requests served by the end of each hour, in all so far."""
    busy_spread_p95: float = float("nan")
    """95th percentile over ten-minute windows of the busiest replica's time over the mean."""
    least_busy_spread_p95: float = float("nan")
    """Bound: the same if only single requests could not be divided."""
    staying_busy_spread_p95: float = float("nan")
    """The least with conversations that stay where they are for ten minutes."""
    stages: dict[int, Part] = {}
    priorities: dict[int, Part] = {}
    windows: Part | None = None
    """Requests that arrived in the scene's windows."""
    wall_s: float = 0.0


def points(scenes: Sequence[Scene], policies: Sequence[str]) -> list[Point]:
    """All runs, those of the same traffic one after the other."""
    return [
        Point(scene, policy, seed) for scene in scenes for seed in range(scene.seeds) for policy in policies
    ]

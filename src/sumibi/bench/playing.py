"""Play one point of a benchmark and put what came out into a few figures."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from time import perf_counter

from sumibi.bench.bounds import BoundsOf
from sumibi.bench.cachegrid import play_router
from sumibi.bench.least import even_e2e_s, least_busy_spread, least_of, warm
from sumibi.bench.scenes import Caches, Outcome, Part, Point
from sumibi.bench.traffic import live_tokens, played_by, prepared, workload
from sumibi.core.latency import LatencyModel
from sumibi.routing.config import BandLimits, RouterConfig
from sumibi.sim.arithmetic import Stream, bound, in_order, pooled_lru
from sumibi.sim.calibration import calibrated
from sumibi.sim.fleet import FleetSpec
from sumibi.sim.results import NAN, Calls, Status, mean, percentile
from sumibi.sim.simulate import simulate
from sumibi.sim.workload import Workload
from sumibi.sim.world import wrong

NO_QUEUE = LatencyModel(
    a_s=4.7e-5, b_s=6.2e-7, q_s=0.0, d0_s=1.5e-4, d1_s=3.2e-7, d2_s=2.6e-10
)  # fmt: skip
"""Engines of cache arithmetic: a hundred times as fast as a 70B model on four H100, so that of the shipped
agent sessions hardly any request finds its replica busy. Still not nothing: seconds are what `cost` balances.
Every token takes the same: the arithmetic counts tokens, so the end of a long prompt is worth no more.
"""


PATIENT = RouterConfig(other_bands=BandLimits(max_requests=100_000, max_bytes=1_000_000_000_000, ttl_s=None))
"""No policy refuses what could be served: else who sheds load looks fast. Clients still may give up."""


def play(point: Point, traces: Path | None) -> Outcome:
    """One run. Equal points give equal outcomes but for `wall_s`. Raises ConfigError, TraceError."""
    began_s = perf_counter()
    scene = point.scene
    if isinstance(scene.fleet, Caches):
        outcome = _arithmetic(point, scene.fleet, traces)
    else:
        outcome = _simulated(point, scene.fleet, traces)
    outcome.wall_s = perf_counter() - began_s
    return outcome


def _arithmetic(point: Point, fleet: Caches, traces: Path | None) -> Outcome:
    scene, seed = point.scene, point.seed
    named = workload(scene.traffic, scene.part, seed, traces)
    users = scene.users or named.users
    stream: Stream = in_order(prepared(scene.traffic, scene.part, seed, traces), users)
    count = play_router(
        stream,
        fleet.replicas,
        fleet.blocks,
        RouterConfig(policy=point.policy),
        speed=NO_QUEUE,
        told=wrong(NO_QUEUE, seed, 0),
        names_sessions=played_by(point.policy, named).names_sessions,
    )
    blocks = fleet.replicas * fleet.blocks
    (pooled,) = pooled_lru(stream, [blocks])
    whole = Part(
        requests=len(stream.requests),
        served=len(stream.requests),
        hit_rate=count.hit_rate,
        ttft_mean_s=NAN,
        ttft_p90_s=NAN,
        ttft_p99_s=NAN,
        output_tokens_per_s=NAN,
    )
    return Outcome(
        policy=point.policy,
        seed=seed,
        whole=whole,
        work_share=count.work_share,
        bound_hit_rate=bound(stream).hit_rate,
        pooled_lru_hit_rate=pooled.hit_rate,
        fits=live_tokens(stream.requests) <= blocks * stream.block_tokens,
    )


@lru_cache(maxsize=1)
def _bounds(traffic: str, part: int | None, seed: int, traces: Path | None) -> BoundsOf:
    return BoundsOf(workload(traffic, part, seed, traces))


def _simulated(point: Point, fleet: FleetSpec, traces: Path | None) -> Outcome:
    scene, seed = point.scene, point.seed
    played = workload(scene.traffic, scene.part, seed, traces)
    run = simulate(
        played_by(point.policy, played),
        fleet,
        policy=point.policy,
        users=scene.users,
        seed=seed,
        config=calibrated(fleet, PATIENT),
    )
    pooled = NAN
    if point.policy == "cost":
        # the policy changes little of it: only the order of arrivals
        pooled = _bounds(scene.traffic, scene.part, seed, traces).run(run.calls, fleet).pooled_lru
    calls, figures = run.calls, run.summary
    rows = range(len(calls))
    least = least_of(calls, fleet)
    stages = sorted(set(calls.stage)) if scene.rates else []
    priorities = sorted(set(calls.priority))
    return Outcome(
        policy=point.policy,
        seed=seed,
        whole=part_of(calls, rows),
        work_share=figures.work_share,
        bound_hit_rate=figures.bound_token_hit_rate,
        pooled_lru_hit_rate=pooled,
        ttft_p50_s=figures.ttft_p50_s,
        warm_ttft_p99_s=figures.warm_ttft_p99_s,
        least_ttft_mean_s=mean(least.ttft_s),
        least_ttft_p50_s=percentile(least.ttft_s, 0.5),
        least_warm_ttft_p99_s=percentile(warm(calls, least), 0.99),
        itl_p50_s=figures.itl_p50_s,
        itl_p99_s=figures.itl_p99_s,
        e2e_mean_s=figures.e2e_mean_s,
        even_e2e_mean_s=NAN if _users_think(played) else even_e2e_s(run, fleet, least.ttft_s),
        served_by_hour=_by_hour(calls),
        busy_spread_p95=figures.busy_spread_p95,
        least_busy_spread_p95=least_busy_spread(run, least, lambda i: i),
        staying_busy_spread_p95=least_busy_spread(
            run,
            least,
            lambda i: (calls.session[i], played.sessions[calls.session[i]].turns[calls.turn[i]].agent),
        ),
        stages={at: part_of(calls, [i for i in rows if calls.stage[i] == at]) for at in stages if at},
        priorities={
            priority: part_of(
                calls,
                [i for i in rows if calls.priority[i] == priority and not (stages and calls.stage[i] == 0)],
            )
            for priority in (priorities if len(priorities) > 1 else [])
        },
        windows=part_of(calls, _within(calls, scene.windows_s)) if scene.windows_s else None,
    )


def part_of(calls: Calls, rows: Sequence[int]) -> Part:
    """Figures of these rows."""
    status = calls.status
    served = [i for i in rows if status[i] == Status.DONE]
    ttft_s = calls.ttft_s(served)
    prompt = sum(calls.prompt_tokens[i] for i in served)
    span_s = max(calls.end_s[i] for i in rows) - min(calls.arrival_s[i] for i in rows) if rows else 0.0
    return Part(
        requests=len(rows),
        served=len(served),
        hit_rate=sum(calls.cached_tokens[i] for i in served) / prompt if prompt else NAN,
        ttft_mean_s=mean(ttft_s),
        ttft_p90_s=percentile(ttft_s, 0.9),
        ttft_p99_s=percentile(ttft_s, 0.99),
        output_tokens_per_s=sum(calls.output_tokens[i] for i in served) / span_s if span_s else NAN,
    )


def _by_hour(calls: Calls) -> list[int]:
    """Requests that were served by the end of each hour."""
    counts: list[int] = []
    for i in calls.done():
        hour = int(calls.end_s[i] // 3600)
        counts += [0] * (hour + 1 - len(counts))
        counts[hour] += 1
    return list(accumulate(counts))


def _within(calls: Calls, windows_s: Sequence[tuple[float, float]]) -> list[int]:
    return [i for i, at in enumerate(calls.arrival_s) if any(begin <= at < end for begin, end in windows_s)]


def _users_think(played: Workload) -> bool:
    """Are there times in which a user waits for nothing?"""
    return played.pause_s > 0 or any(turn.delay_s for session in played.sessions for turn in session.turns)

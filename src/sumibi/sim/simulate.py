"""The one entry point: play a workload on a fleet under a policy."""

from collections.abc import Callable
from time import perf_counter, process_time
from typing import BinaryIO

import msgspec

from sumibi.routing.config import RouterConfig
from sumibi.routing.events import Event
from sumibi.routing.recording import Started
from sumibi.sim.calibration import calibrated
from sumibi.sim.fleet import FleetSpec
from sumibi.sim.histogram import Histogram
from sumibi.sim.results import (
    WARM_TOKENS,
    Run,
    Status,
    Summary,
    busy_spread,
    mean,
    percentile,
    uncached_by_replica,
)
from sumibi.sim.workload import Workload
from sumibi.sim.world import World


def simulate(
    workload: Workload,
    fleet: FleetSpec,
    *,
    policy: str = "cost",
    users: int | None = None,
    seed: int = 0,
    wrong_constants: bool = True,
    noise: float = 0.15,
    config: RouterConfig | None = None,
    log: BinaryIO | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Play `workload` on `fleet`, routed by `policy`. Equal arguments give equal results.

    users            how many play at once, where sessions have no start of their own; None: as the workload
                     says
    seed             order of the sessions (0: as they come), noise, and how constants are wrong
    wrong_constants  the router is told coefficients off by a factor between 1/3 and 3
    noise            steps take up to this part more or less
    config           the router's other settings (`policy` replaces the one in it); None: the defaults, with
                     the baselines calibrated for the fleet as their authors do
    log              takes the events that the router was given, as `routing.recording` reads them
    progress         is told (requests over, requests in all) now and then

    Raises ConfigError for a policy that there is not, or a workload that does not go with the fleet.
    """
    users = users or workload.users
    config = msgspec.structs.replace(config or calibrated(fleet), policy=policy)
    wall_s, cpu_s = perf_counter(), process_time()
    world = World(
        workload,
        fleet,
        config,
        users=users,
        seed=seed,
        wrong_constants=wrong_constants,
        noise=noise,
        observer=_writer(log, config) if log is not None else None,
        progress=progress,
    )
    virtual_s = world.run()
    wall_s, cpu_s = perf_counter() - wall_s, process_time() - cpu_s
    return _run(world, workload, fleet, policy, seed, users, virtual_s, wall_s, cpu_s)


def _writer(log: BinaryIO, config: RouterConfig) -> Callable[[Event], None]:
    encoder = msgspec.json.Encoder()
    log.write(encoder.encode(Started(config)) + b"\n")

    def write(event: Event) -> None:
        log.write(encoder.encode(event) + b"\n")

    return write


def _run(
    world: World,
    workload: Workload,
    fleet: FleetSpec,
    policy: str,
    seed: int,
    users: int | None,
    virtual_s: float,
    wall_s: float,
    cpu_s: float,
) -> Run:
    calls, replicas = world.calls, [site.replica for site in world.sites]
    intervals = Histogram()
    for replica in replicas:
        intervals.merge(replica.intervals)
    busy_s = [replica.busy_s for replica in replicas]
    rows = calls.done()
    warm = [i for i in rows if calls.unavoidable_tokens[i] <= WARM_TOKENS]
    prompt = sum(calls.prompt_tokens[i] for i in rows)
    ttft_s, e2e_s = calls.ttft_s(rows), calls.e2e_s(rows)
    work = uncached_by_replica(calls, len(replicas))
    span_s = max(calls.end_s) - min(calls.arrival_s) if len(calls) else 0.0
    status = list(calls.status)
    summary = Summary(
        workload=workload.name,
        fleet=fleet.name,
        policy=policy,
        seed=seed,
        users=users,
        requests=len(calls),
        rejected=status.count(Status.REJECTED) + status.count(Status.REFUSED),
        failed=status.count(Status.FAILED) + status.count(Status.TIMEOUT),
        preemptions=sum(replica.preemptions for replica in replicas),
        token_hit_rate=sum(calls.cached_tokens[i] for i in rows) / prompt if prompt else 0.0,
        bound_token_hit_rate=1 - sum(calls.unavoidable_tokens[i] for i in rows) / prompt if prompt else 0.0,
        work_share=max(work) / mean(work) if any(work) else 1.0,
        ttft_mean_s=mean(ttft_s),
        ttft_p50_s=percentile(ttft_s, 0.5),
        ttft_p90_s=percentile(ttft_s, 0.9),
        ttft_p99_s=percentile(ttft_s, 0.99),
        warm_ttft_p99_s=percentile(calls.ttft_s(warm), 0.99),
        itl_p50_s=intervals.quantile(0.5),
        itl_p99_s=intervals.quantile(0.99),
        e2e_mean_s=mean(e2e_s),
        e2e_p50_s=percentile(e2e_s, 0.5),
        output_tokens_per_s=sum(calls.output_tokens[i] for i in rows) / span_s if span_s else 0.0,
        busy_spread_p95=busy_spread(busy_s),
        virtual_s=virtual_s,
        wall_s=wall_s,
        cpu_s=cpu_s,
    )
    return Run(summary, calls, [replica.name for replica in replicas], intervals, busy_s)

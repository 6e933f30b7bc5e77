"""How good any router could have been: caches that pool the fleet, over the requests of a run."""

from dataclasses import dataclass

from sumibi.sim.arithmetic import Count, Request, Stream, bound, pooled_belady, pooled_lru, prepare
from sumibi.sim.fleet import FleetSpec
from sumibi.sim.results import Calls
from sumibi.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Bounds:
    """Token hit rates with every block resident for the next request at once."""

    infinite: float
    """An endless cache: no router does better."""
    pooled_belady: float
    """One cache as large as all replicas' together that knows the future: no fleet so large does better."""
    pooled_lru: float
    """The same one without foresight."""


class BoundsOf:
    """Bounds for runs of one workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._prepared = prepare(workload)
        self._requests: dict[tuple[int, int], Request] = {
            request.position: request for request in self._prepared.requests
        }

    def run(self, calls: Calls, fleet: FleetSpec) -> Bounds:
        """Of the requests that were served, in the order in which they arrived."""
        rows = sorted(calls.done(), key=lambda row: calls.arrival_s[row])
        requests = [self._requests[calls.session[row], calls.turn[row]] for row in rows]
        stream = Stream(self._prepared.block_tokens, requests, self._prepared.lengths)
        blocks = capacity_tokens(fleet) // self._prepared.block_tokens
        (lru,) = pooled_lru(stream, [blocks])
        counts: tuple[Count, ...] = (bound(stream), pooled_belady(stream, blocks), lru)
        return Bounds(*(count.hit_rate for count in counts))


def capacity_tokens(fleet: FleetSpec) -> int:
    """KV that the fleet can keep for prompts: device and host memory and a shared store together."""
    return (fleet.store.tokens if fleet.store else 0) + sum(
        group.kv_tokens + (group.host.tokens if group.host else 0)
        for _, group in fleet.endpoints()
        if group.role != "decode"
    )

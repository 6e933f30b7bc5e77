"""What goes wrong with replicas: slow ones, dead ones, lost events, stale metrics; and how it ends."""

from collections.abc import Callable
from math import inf

from sumibi.routing.events import FinishReason
from sumibi.sim.fleet import Fault, FleetSpec
from sumibi.sim.hearing import Hearing, Push
from sumibi.sim.job import Job
from sumibi.sim.pairs import Pairs
from sumibi.sim.site import Call, Site


class Faults:
    """Has the faults of a fleet happen."""

    def __init__(
        self,
        fleet: FleetSpec,
        by_name: dict[str, Site],
        hearing: Hearing,
        pairs: Pairs,
        *,
        push: Push,
        arm: Callable[[Site], None],
        attempt_failed: Callable[[float, Call, FinishReason], None],
    ) -> None:
        """`push` an action for later, `arm` the clock of a site, tell of calls whose `attempt_failed`."""
        self._fleet = fleet
        self._by_name = by_name
        self._hearing = hearing
        self._pairs = pairs
        self._push = push
        self._arm = arm
        self._attempt_failed = attempt_failed

    def begin(self, t: float, what: object) -> None:
        """A `Fault` happens; its end, if it has one, will."""
        assert isinstance(what, Fault)
        fault, site = what, self._by_name[what.endpoint]
        until_s, detect_s = fault.until_s, self._fleet.detect_s
        match fault.kind:
            case "slow":
                site.replica.slow(fault.factor, t)
                self._arm(site)
            case "down":
                self._push(t + detect_s, self._hearing.down, site)
                if until_s is not None:
                    self._push(until_s + detect_s, self._hearing.up, site)
            case "restart":
                self._die(t, site.peers)
            case "lose-events":
                site.stream.lost_until_s = until_s if until_s is not None else inf
            case "scrape":
                site.scrape_interval_s = fault.factor
        if until_s is not None and fault.kind in ("slow", "restart", "scrape"):
            self._push(until_s, self._mend, fault)

    def _mend(self, t: float, what: object) -> None:
        assert isinstance(what, Fault)
        fault, site = what, self._by_name[what.endpoint]
        match fault.kind:
            case "slow":
                site.replica.slow(1.0, t)
                self._arm(site)
            case "restart":
                for each in site.peers:
                    each.alive = True
                    each.start_s = t
                    self._push(t + self._fleet.detect_s, self._hearing.up, each)
            case _:
                site.scrape_interval_s = self._fleet.scrape_interval_s

    def _die(self, t: float, sites: list[Site]) -> None:
        """The process ends. Connections break at once; health checks notice later."""
        lost: list[Job] = []
        kept: list[Job] = []
        for site in sites:
            site.alive = False
            kept += site.replica.kept()
            site.stream.restart()
            site.scraped = -1
            lost += site.replica.die()
            self._push(t + self._fleet.detect_s, self._down_if_dead, site)
        self._arm(sites[0])
        for job in kept:
            call = job.owner
            assert isinstance(call, Call)
            self._pairs.gone(t, call)
        for job in lost:
            call = job.owner
            assert isinstance(call, Call)
            if job is not call.job:
                self._pairs.lost(t, call, job)
                continue
            call.job = None
            self._attempt_failed(t, call, FinishReason.ENGINE_GONE)

    def _down_if_dead(self, t: float, what: object) -> None:
        assert isinstance(what, Site)
        if not what.alive:
            self._hearing.down(t, what)

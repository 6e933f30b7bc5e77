"""What the router hears of replicas, and when: that they are up or down, KV events, metrics."""

from collections.abc import Callable

from sumibi.core.latency import LinkModel
from sumibi.routing.events import EndpointDown, EndpointUp, Event, Role, Signals, Tier
from sumibi.routing.router import Router
from sumibi.sim.fleet import FleetSpec, Group
from sumibi.sim.memory import DISK, HOST
from sumibi.sim.site import Site
from sumibi.sim.stream import Batch, Stream

STORE = "store"
"""As endpoints name what they share."""
Push = Callable[[float, Callable[[float, object], None], object], None]


class Hearing:
    """Tells the router."""

    def __init__(
        self,
        fleet: FleetSpec,
        block_tokens: int,
        sites: list[Site],
        router: Router,
        *,
        push: Push,
        tell: Callable[[Event], None],
    ) -> None:
        """`push` an action for later, `tell` the router."""
        self._fleet = fleet
        self._block_tokens = block_tokens
        self._sites = sites
        self._router = router
        self._push = push
        self._tell = tell

    def up(self, t: float, what: object) -> None:
        """A `Site` takes requests."""
        assert isinstance(what, Site)
        site = what
        group: Group = site.replica.group
        self._tell(
            EndpointUp(
                t=t,
                endpoint=site.replica.name,
                models=[group.model, *group.adapters],
                engine_block_tokens=self._block_tokens,
                kv_tokens=group.kv_tokens,
                max_sequences=group.max_sequences,
                tiers=self._tiers(group),
                has_events=self._fleet.kv_event_delay_s is not None,
                has_replay=self._fleet.kv_replay,
                latency=site.latency,
                process_start_s=site.start_s,
                role=Role(group.role),
                revision=group.revision,
                kv_bytes_per_token=group.kv_bytes_per_token,
                prefetches=group.prefetches,
                link=LinkModel(group.link.gb_per_s * 1e9, group.link.setup_s) if group.link else None,
            )
        )

    def _tiers(self, group: Group) -> list[Tier]:
        """As an endpoint of this group tells of them."""
        host, store = group.host, self._fleet.store
        tiers = []
        if host is not None:
            tiers.append(
                Tier(name=HOST, tokens=host.tokens, gb_per_s=host.gb_per_s, latency_s=host.latency_s)
            )
        if group.disk is not None:
            disk = group.disk
            tiers.append(
                Tier(name=DISK, tokens=disk.tokens, gb_per_s=disk.gb_per_s, latency_s=disk.latency_s)
            )
        if store is not None:
            tiers.append(
                Tier(
                    name=STORE,
                    shared=True,
                    tokens=store.tokens,
                    gb_per_s=store.read_gb_per_s,
                    latency_s=store.latency_s,
                )
            )
        return tiers

    def publish(self, t: float, site: Site) -> None:
        """One batch of KV events."""
        memory = site.replica.memory
        changes, memory.changes = memory.changes, []
        delay_s = self._fleet.kv_event_delay_s
        if delay_s is None:
            return
        batch = site.stream.publish(changes, t)
        if batch is not None:
            self._push(t + delay_s, self._deliver, (site.stream, site.stream.life, batch))

    def _deliver(self, t: float, what: object) -> None:
        assert isinstance(what, tuple)
        delivery: tuple[Stream, int, Batch] = what
        stream, life, batch = delivery
        if life == stream.life:
            stream.deliver(batch, t)

    def replay(self, t: float, what: object) -> None:
        """A site, and from which batch on it was asked for KV events again."""
        assert isinstance(what, tuple)
        site, from_seq = what
        site.stream.replay(from_seq, t, alive=site.alive)

    def last_taken(self, endpoint: str) -> int | None:
        """The last KV event batch of an endpoint that the router has applied, as it shows it itself."""
        for view in self._router.fleet_view():
            if view.endpoint == endpoint:
                return view.last_sequence
        return None

    def down(self, t: float, what: object) -> None:
        """A `Site` takes none any more."""
        assert isinstance(what, Site)
        self._tell(EndpointDown(t=t, endpoint=what.replica.name, cause="health check failed"))

    def scrape(self, t: float) -> None:
        """Read the metrics pages that are due. One that says what it said last is not told again."""
        for site in self._sites:
            replica = site.replica
            if replica.changed == site.scraped or t < site.scrape_next_s or not site.alive:
                continue
            site.scrape_next_s = t + site.scrape_interval_s - 1e-9
            site.scraped = replica.changed
            memory = replica.memory
            self._tell(
                Signals(
                    t=t,
                    endpoint=replica.name,
                    scraped_t=t,
                    running=replica.running,
                    waiting=replica.queued,
                    kv_usage=min(1.0, memory.in_use() / memory.cache.capacity),
                    process_start_s=site.start_s,
                )
            )

"""What is where below the device, and what happened: the state that ways up and ways down share."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sumibi.tiers.catalog import Entry, Order
from sumibi.tiers.disk import DiskFiles
from sumibi.tiers.host import HostMemory
from sumibi.tiers.store import SharedStore
from sumibi.tiers.words import Tier, TierEvent, TiersStats, TierStats

Lower = DiskFiles | SharedStore

_EVENTS = 1 << 18
_STAGING_BYTES = 64 << 20


@dataclass(slots=True)
class Events:
    """What came and went, until somebody drains it; the oldest go first."""

    waiting: deque[TierEvent] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    lost: int = 0

    def add(self, event: TierEvent) -> None:
        """One more."""
        self.lost += len(self.waiting) == _EVENTS
        self.waiting.append(event)


class Books:
    """`lock` is held around everything here, by the caller where a method does not say that it takes it."""

    def __init__(self, host_bytes: int, block_bytes: int, order: Order, *, below: bool) -> None:
        """`host_bytes` 0: no host tier. `below`: something lies below it, so there is at least memory for
        what waits to be written.
        """
        self.lock = threading.Lock()
        self.block_bytes = block_bytes
        self.epoch = 0
        """Which life of the namespace this is: `clear` begins a new one."""
        self.closed = False
        self.events = Events()
        self.misses = 0
        self.brought: set[bytes] = set()
        """Blocks of host memory that were brought up before anybody asked, and not used since."""
        self.prefetched = self.prefetch_used = self.prefetch_wasted = 0
        self.keeps_host = host_bytes > 0
        keep = host_bytes // block_bytes
        slots = max(keep, 8, _STAGING_BYTES // block_bytes) if below else keep
        self.host = HostMemory(slots, block_bytes, order, self._left_host, keep=keep)
        self.host_stats = TierStats(limit_bytes=host_bytes)
        self.disk: DiskFiles | None = None
        self.store: SharedStore | None = None

    @property
    def lowers(self) -> list[Lower]:
        """The tiers below host memory that there are, fastest first."""
        return [lower for lower in (self.disk, self.store) if lower is not None]

    def where(self, content_id: bytes) -> Tier | None:
        """The fastest tier that is known to have a block and can give it now."""
        if content_id in self.host.catalog:
            return Tier.HOST
        if self.disk and content_id in self.disk.catalog and not self.disk.stuck.resting:
            return Tier.DISK
        if self.store and content_id in self.store:
            return Tier.STORE
        return None

    def is_below(self, entry: Entry) -> bool:
        """Does a block of host memory lie in a slower tier too?"""
        return any(has(lower, entry.content_id) for lower in self.lowers)

    def take_slot(self, parent: bytes | None, *, to_write: bool = False) -> int | None:
        """An empty slot of host memory, not at the cost of the block that the new one follows. `to_write`:
        for a block that will lie in a slower tier, too.
        """
        spare = self.is_below if to_write else None
        before = self.host.catalog.get(parent) if parent else None
        if before is None:
            return self.host.take(spare, beyond=to_write)
        before.pins += 1
        try:
            return self.host.take(spare, beyond=to_write)
        finally:
            before.pins -= 1

    def used_in_host(self, ids: Sequence[bytes]) -> None:
        """What is used in host memory is not old in the slower tiers."""
        if self.disk:
            for content_id in ids:
                self.disk.catalog.touch(content_id)
        self.used_outside(ids)

    def used_outside(self, ids: Sequence[bytes]) -> None:
        """What is used in a tier of this process is not old in the store."""
        if self.store:
            self.store.used(ids)

    def announce(self, stored: bool, content_id: bytes, parent: bytes | None, tier: Tier) -> None:
        """A block came to a tier or left it."""
        if tier is not Tier.HOST or self.keeps_host:
            self.events.add(TierEvent(stored, content_id, parent, tier))

    def stats(self) -> TiersStats:
        """Counts so far and what is held now; a copy. Takes the lock."""
        with self.lock:
            tiers = {Tier.HOST: _copy(self.host_stats), Tier.DISK: TierStats(), Tier.STORE: TierStats()}
            if self.keeps_host:
                tiers[Tier.HOST].bytes = self.host.catalog.bytes
                tiers[Tier.HOST].blocks = len(self.host.catalog)
            if self.disk:
                tiers[Tier.DISK] = _copy(self.disk.stats)
                tiers[Tier.DISK].bytes = self.disk.catalog.bytes
                tiers[Tier.DISK].blocks = len(self.disk.catalog)
            if self.store:
                tiers[Tier.STORE] = _copy(self.store.stats)
                tiers[Tier.STORE].bytes = self.store.held_bytes
                tiers[Tier.STORE].blocks = self.store.blocks_known
            return TiersStats(
                tiers,
                self.misses,
                self.events.lost,
                prefetched=self.prefetched,
                prefetch_used=self.prefetch_used,
                prefetch_wasted=self.prefetch_wasted,
            )

    def _left_host(self, entry: Entry) -> None:
        if self.keeps_host:
            self.host_stats.evicted += 1
        if entry.content_id in self.brought:
            self.brought.discard(entry.content_id)
            self.prefetch_wasted += 1
        self.announce(False, entry.content_id, entry.parent, Tier.HOST)


def has(lower: Lower, content_id: bytes) -> bool:
    """Is a block believed to be in that tier? The lock is held."""
    return content_id in (lower.catalog if isinstance(lower, DiskFiles) else lower)


def _copy(stats: TierStats) -> TierStats:
    return TierStats(**{name: getattr(stats, name) for name in TierStats.__slots__})

"""What one bounded tier holds, and which block goes when there must be room.

A block whose descendant lies in the same tier is kept: without its ancestors a block is of no use, so
chains go from the end. Among the others the one of lowest rank goes. An `Order` gives a block its rank
each time it is used; the default is the time of last use (LRU). Blocks that lie in one file are one entry:
they are used, followed and removed together.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True)
class Entry:
    """One block in one tier, or a run of a chain that lies in one place there."""

    content_id: bytes
    """Of the first block."""
    parent: bytes | None
    """Of the first block."""
    size_bytes: int
    place: int = -1
    """Slot number in host memory; not used on disk."""
    used: int = 0
    """Number of the use at which it was touched last, from a counter of its tier."""
    uses: int = 0
    """How often it was touched after it came."""
    rank: float = 0.0
    marked_s: float = float("-inf")
    """When its file's time was last set (monotonic clock)."""
    pins: int = 0
    """How many are reading it just now; it stays while that is not 0."""
    waiting: int = 0
    """Slower tiers whose queues hold it, one bit each."""
    checksum: bytes = b""
    """Of its bytes, once somebody needed it."""
    doomed: bool = False
    """It left its tier while pinned; its place is free once the last reader is done."""
    queued: bool = False
    """It stands in the heap of candidates (with this rank or an older one)."""
    more: tuple[bytes, ...] = ()
    """Blocks of the same place that follow the first, in order."""

    @property
    def ids(self) -> tuple[bytes, ...]:
        """All its blocks, in order."""
        return (self.content_id, *self.more)


Order = Callable[[Entry], float]
"""A block's rank, asked whenever it is touched; the lowest goes first. A rank must not fall from one touch
to the next: a block is looked at again only when its last known rank is the lowest."""


def least_recent(entry: Entry) -> float:
    """LRU."""
    return entry.used


class Catalog:
    """Blocks by content id, at most `limit_bytes` if the owner asks `victim` before adding. No locks."""

    def __init__(self, limit_bytes: int, order: Order = least_recent) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._order = order
        self._entries: dict[bytes, Entry] = {}
        # How many entries here follow each id, which may itself be elsewhere.
        self._followers: dict[bytes, int] = {}
        # Entries without followers, by rank; stale entries are sorted out as they come up.
        self._heap: list[tuple[float, int, Entry]] = []
        self._uses = count(1)
        self._ties = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, content_id: bytes) -> bool:
        return content_id in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return (entry for content_id, entry in self._entries.items() if content_id == entry.content_id)

    def get(self, content_id: bytes) -> Entry | None:
        """The entry that a block is in, or None."""
        return self._entries.get(content_id)

    def add(
        self,
        content_id: bytes,
        parent: bytes | None,
        size_bytes: int,
        *,
        place: int = -1,
        used: int | None = None,
        more: tuple[bytes, ...] = (),
    ) -> Entry:
        """A block came, and `more` in the same place. None of them may be here yet. `used`: when it was used
        last, None for just now; numbers below 0 are before all that happens in this life.
        """
        if parent == content_id or parent in more:
            parent = None
        if used is None:
            used = next(self._uses)
        entry = Entry(content_id, parent, size_bytes, place, used, more=more)
        entry.rank = self._order(entry)
        for each in entry.ids:
            self._entries[each] = entry
        self.bytes += size_bytes
        if parent is not None:
            self._followers[parent] = self._followers.get(parent, 0) + 1
        self._offer(entry)
        return entry

    def touch(self, content_id: bytes) -> Entry | None:
        """A block was used."""
        entry = self._entries.get(content_id)
        if entry is not None:
            entry.used = next(self._uses)
            entry.uses += 1
            entry.rank = self._order(entry)
        return entry

    def remove(self, content_id: bytes) -> Entry | None:
        """A block left, with all that lie in the same place."""
        entry = self._entries.get(content_id)
        if entry is None:
            return None
        for each in entry.ids:
            del self._entries[each]
        self.bytes -= entry.size_bytes
        parent = entry.parent
        if parent is not None:
            left = self._followers[parent] - 1
            if left:
                self._followers[parent] = left
            else:
                del self._followers[parent]
                if parent in self._entries:
                    self._offer(self._entries[parent])
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._rebuild()
        return entry

    def victim(self) -> Entry | None:
        """What should go next; None where each chain's end is pinned. It stays until `remove`."""
        aside: list[Entry] = []
        found = None
        while self._heap and found is None:
            rank, _, entry = heapq.heappop(self._heap)
            entry.queued = False
            if self._entries.get(entry.content_id) is not entry or self._followed(entry):
                continue
            if entry.pins:
                aside.append(entry)
            elif rank != entry.rank:
                self._offer(entry)
            else:
                found = entry
                aside.append(entry)
        for entry in aside:
            self._offer(entry)
        if found is None and not aside:
            # Only ids that follow each other in a ring: no honest writer makes them, and they must go too.
            found = min((e for e in self if not e.pins), key=lambda e: e.rank, default=None)
        return found

    def _offer(self, entry: Entry) -> None:
        if not entry.queued and not self._followed(entry):
            entry.queued = True
            heapq.heappush(self._heap, (entry.rank, next(self._ties), entry))

    def _followed(self, entry: Entry) -> bool:
        return any(each in self._followers for each in entry.ids)

    def _rebuild(self) -> None:
        self._heap.clear()
        for entry in self:
            entry.queued = False
        for entry in self:
            self._offer(entry)

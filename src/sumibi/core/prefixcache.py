"""A prefix cache with exact block-level LRU, kept by segments of prompts instead of single blocks.

Engines age the blocks of one prompt from its end to its start, so the blocks that one prompt touched, and no
later one, are a few stretches of chains: *segments*. The oldest segment loses its deepest block first. So a
turn costs what it adds, not all that was said before, while the order of eviction is that of an LRU over
blocks, to the block.

A segment is never older than those that hang from it (a prompt touches its chain from the root), and pins
are set on whole chains; so the oldest segment without a pin has no children, and whatever is resident is
resident from its root on.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sumibi.core.keys import common


class Segment:
    """A stretch of one chain: blocks `keys[start:end]` of a prompt."""

    __slots__ = ("children", "end", "keys", "parent", "pins", "start", "used_t", "uses")

    def __init__(self, keys: Sequence[int], start: int, end: int, parent: "Segment | None") -> None:
        self.keys = keys
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[int, Segment] = {}
        """By their first key."""
        self.pins = 0
        """Running requests that use it."""
        self.used_t = 0.0
        """When it was last touched, or let go by the last that used it."""
        self.uses = 0
        """Times it was touched: by the turns of one conversation, or by all that share it."""


class PrefixCache:
    """Resident blocks of one replica or tier, at most `capacity` of them. Keys are chained routing keys."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks = 0
        """Resident blocks that have a key."""
        self.pinned = 0
        """Of these, blocks in use: not to be evicted."""
        self.held = 0
        """Blocks without a key (partial ones, output): not to be evicted either. See `hold`."""
        self._roots: dict[int, Segment] = {}
        self._order: OrderedDict[Segment, None] = OrderedDict()
        """Segments without pins, least recently used first."""
        self.removed: list[Sequence[int]] = []
        """Stretches of keys evicted since the caller last emptied this list."""

    @property
    def available(self) -> int:
        """Blocks that can be had, evicting whatever is not in use."""
        return self.capacity - self.pinned - self.held

    def match(self, keys: Sequence[int]) -> int:
        """Leading blocks of `keys` that are resident."""
        return self.find(keys)[0]

    def find(self, keys: Sequence[int]) -> tuple[int, Segment | None]:
        """Leading blocks of `keys` that are resident, and the segment that the last of them is in."""
        at, last, children = 0, None, self._roots
        while at < len(keys):
            segment = children.get(keys[at])
            if segment is None:
                break
            last = segment
            common = _common(keys, segment)
            at += common
            if common < segment.end - segment.start:
                break
            children = segment.children
        return at, last

    def oldest(self) -> Iterator[Segment]:
        """Segments that are not in use in the order in which they will be evicted, each from its end."""
        return iter(self._order)

    def touch(self, keys: Sequence[int], t: float = 0.0) -> int:
        """Use a prompt at `t` and be done with it: look it up, insert what is missing, evict.

        Returns how many leading blocks were resident. Of a prompt longer than the cache the beginning stays.
        """
        if len(keys) > self.capacity:
            keys = keys[: self.capacity]
        matched, path = self._walk(keys, len(keys))
        missing = len(keys) - matched
        if missing:
            last = path[-1] if path else None
            if last is not None and not last.children and not last.pins:
                last.keys, last.end = keys, len(keys)
                self.blocks += missing
            else:
                path.append(self._add(keys, matched, len(keys), last))
        order = self._order
        for segment in reversed(path):
            segment.used_t = t
            segment.uses += 1
            if not segment.pins:
                order[segment] = None
                order.move_to_end(segment)
        if len(path) > 1:
            self._merge(path[-1], keys)
        if self.blocks + self.held > self.capacity:
            self.evict(self.blocks + self.held - self.capacity)
        return matched

    def pin(self, keys: Sequence[int], blocks: int) -> Segment | None:
        """Put the first `blocks` of `keys`, all of them resident, in use; None if `blocks` is 0.

        The answer is for `extend` and `unpin`.
        """
        _, path = self._walk(keys, blocks)
        for segment in path:
            self._pin(segment)
        return path[-1] if path else None

    def extend(self, last: Segment | None, keys: Sequence[int], end: int) -> Segment | None:
        """A request that has `last` in use has computed its prompt up to block `end`: they are resident and
        in use now. Room must have been made (`make_room`).

        A block that another request made resident meanwhile is shared, not stored twice.
        """
        start = last.end if last is not None else 0
        while start < end:
            child = (last.children if last is not None else self._roots).get(keys[start])
            if child is not None:
                common = min(_common(keys, child), end - start)
                if common < child.end - child.start:
                    child = self._split(child, common)
                self._pin(child)
                last, start = child, child.end
            elif last is not None and last.pins == 1 and not last.children:
                self.blocks += end - start
                self.pinned += end - start
                last.keys, last.end = keys, end
                start = end
            else:
                last = self._add(keys, start, end, last)
                self._pin(last)
                start = end
        return last

    def unpin(self, last: Segment | None, t: float = 0.0) -> None:
        """A request is done with its blocks: they are the youngest now, its first block the very youngest."""
        segment = last
        while segment is not None:
            segment.pins -= 1
            segment.used_t = t
            if not segment.pins:
                self.pinned -= segment.end - segment.start
                self._order[segment] = None
            segment = segment.parent
        if last is not None and not last.pins:
            self._merge(last, last.keys)

    def hold(self, blocks: int) -> None:
        """Take blocks that get no key (a negative number gives them back). Room must have been made."""
        self.held += blocks

    def make_room(self, blocks: int) -> bool:
        """Evict until `blocks` more fit. False, with nothing evicted, if they cannot."""
        if blocks > self.available:
            return False
        need = blocks - (self.capacity - self.blocks - self.held)
        if need > 0:
            self.evict(need)
        return True

    def evict(self, blocks: int) -> None:
        """Let go of the least recently used `blocks` blocks (of fewer if not so many are unused)."""
        order = self._order
        while blocks > 0 and order:
            segment = next(iter(order))
            take = min(blocks, segment.end - segment.start)
            cut = segment.end - take
            self.removed.append(segment.keys[cut : segment.end])
            segment.end = cut
            self.blocks -= take
            blocks -= take
            if cut == segment.start:
                del order[segment]
                siblings = segment.parent.children if segment.parent is not None else self._roots
                del siblings[segment.keys[cut]]

    def clear(self) -> None:
        """Lose everything, also what is in use: the process died."""
        self.blocks = self.pinned = self.held = 0
        self._roots.clear()
        self._order.clear()
        self.removed.clear()

    def _walk(self, keys: Sequence[int], blocks: int) -> tuple[int, list[Segment]]:
        """Resident leading blocks of `keys[:blocks]`, and the segments that are exactly these, root first."""
        at, path = 0, list[Segment]()
        children = self._roots
        while at < blocks:
            segment = children.get(keys[at])
            if segment is None:
                break
            common = min(_common(keys, segment), blocks - at)
            at += common
            if common < segment.end - segment.start:
                path.append(self._split(segment, common))
                break
            path.append(segment)
            children = segment.children
        return at, path

    def _split(self, segment: Segment, blocks: int) -> Segment:
        """Cut a segment after its first `blocks`, which become a new one above it; the old one keeps the
        rest, its place in the order and those who have it in use. The new one is about to be touched.
        """
        middle = segment.start + blocks
        upper = Segment(segment.keys, segment.start, middle, segment.parent)
        siblings = segment.parent.children if segment.parent is not None else self._roots
        siblings[segment.keys[segment.start]] = upper
        upper.children[segment.keys[middle]] = segment
        upper.pins, upper.used_t, upper.uses = segment.pins, segment.used_t, segment.uses
        if not upper.pins:
            self._order[upper] = None
        segment.start, segment.parent = middle, upper
        return upper

    def _add(self, keys: Sequence[int], start: int, end: int, parent: Segment | None) -> Segment:
        segment = Segment(keys, start, end, parent)
        (parent.children if parent is not None else self._roots)[keys[start]] = segment
        self.blocks += end - start
        return segment

    def _pin(self, segment: Segment) -> None:
        if not segment.pins:
            self.pinned += segment.end - segment.start
            self._order.pop(segment, None)
        segment.pins += 1

    def _merge(self, last: Segment, keys: Sequence[int]) -> None:
        """Join `last`, just touched, with those above it: touched with it, and without another child."""
        upper = last.parent
        while upper is not None and len(upper.children) == 1 and not upper.pins:
            upper.keys, upper.end, upper.children = keys, last.end, last.children
            upper.uses = max(upper.uses, last.uses)
            for child in upper.children.values():
                child.parent = upper
            del self._order[last]
            last, upper = upper, upper.parent


def _common(keys: Sequence[int], segment: Segment) -> int:
    """Leading blocks that `keys` and `segment` have in common from `segment.start` on: 1 at least."""
    low, high = segment.start + 1, min(segment.end, len(keys))
    return common(keys, segment.keys, low, high) - segment.start if high > low else high - segment.start

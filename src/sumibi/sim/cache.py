"""A prefix cache with exact block-level LRU, kept by segments of prompts instead of single blocks.

Engines age the blocks of one prompt from its end to its start, so what was touched by the same prompt and by
no later one is a stretch of consecutive blocks of one chain: a *segment*. The oldest segment loses its
deepest block first. So a turn costs what it adds, not all that was said before, and the order of eviction is
that of an LRU over blocks, to the block.

Invariant: a segment is never younger than the one it hangs from (a prompt touches its whole chain), so the
oldest unpinned segment never has resident children younger than itself, and eviction from the tail of the
oldest keeps every resident block's prefix resident.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Segment:
    """A stretch of one chain that was last touched by the same prompt."""

    __slots__ = ("children", "end", "keys", "parent", "pins", "start")

    def __init__(self, keys: Sequence[int], start: int, end: int, parent: "Segment | None") -> None:
        self.keys = keys
        """Keys of a whole prompt; this segment is `keys[start:end]`."""
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[int, Segment] = {}
        """By their first key."""
        self.pins = 0
        """Running requests that use it."""


class PrefixCache:
    """Blocks of one replica (or one tier), at most `capacity` of them. Keys are chained routing keys."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks = 0
        """Resident blocks."""
        self.pinned = 0
        """Of these, blocks that running requests use."""
        self._roots: dict[int, Segment] = {}
        self._order: OrderedDict[Segment, None] = OrderedDict()
        """Unpinned segments, least recently used first."""

    def match(self, keys: Sequence[int]) -> int:
        """Leading blocks of `keys` that are resident."""
        at, children = 0, self._roots
        while at < len(keys):
            segment = children.get(keys[at])
            if segment is None:
                break
            common = _common(keys, segment, at)
            at += common
            if common < segment.end - segment.start:
                break
            children = segment.children
        return at

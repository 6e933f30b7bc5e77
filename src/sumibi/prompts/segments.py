"""What is known of prompts that were read before: a trie of text segments with their tokens and keys.

A prompt's text is cut where that changes none of its tokens (`sumibi.prompts.texts`), so a segment can be
tokenised alone. A conversation is a path in the trie; one that grows or forks shares the path up to its
first new segment. Each segment holds what extending the path by it added: token ids, and the keys of the
routing blocks that became full.

Segments are compared by their text, not by a hash of it: what comes out is exact, an engine may compute
with it. Memory is bounded in bytes. What goes first is the path whose end was used longest ago, from its
end up to where another path branches off: no segment goes before those that follow it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from sys import getsizeof
from typing import Final, NamedTuple

from sumibi.core.keys import extend_keys

_SEGMENT_BYTES: Final = 550
"""A segment without its text, tokens and keys: measured, with its part of the dicts that hold it."""
_KEY_BYTES: Final = 8
"""One key, in an array."""
_NAME_BYTES: Final = 400
"""One name with its place."""
_NAMES_PER_SEGMENT: Final = 8
_NEAR: Final = 64
"""So few segments after one that holds all keys no other one need hold them: a few microseconds."""
_NO_KEYS: "array[int]" = array("Q")


class Segment:
    """One segment after one path. `name` is its text, or anything hashable that stands for it."""

    __slots__ = (
        "children",
        "held_keys",
        "key",
        "keys",
        "last_use",
        "name",
        "names",
        "parent",
        "pending",
        "size_bytes",
        "token_ids",
        "tokens",
    )

    def __init__(self, parent: "Segment | None", name: Hashable, tokens: int, key: int) -> None:
        self.parent = parent
        """None for the trie's own root, and for a segment that was dropped."""
        self.name = name
        self.tokens = tokens
        """Tokens on the whole path up to and including this segment."""
        self.key = key
        """Key of the path's last full block; the root key before the first."""
        self.keys: array[int] = _NO_KEYS
        """Keys of the blocks that this segment filled up."""
        self.held_keys: array[int] | None = None
        """Keys of the whole path up to here, where a conversation is likely to go on."""
        self.pending: array[int] | None = None
        """Tokens after the last full block; None if there are none."""
        self.token_ids: array[int] | None = None
        self.size_bytes = 0
        self.last_use = 0
        """Count of uses in the store when this segment was last the end of one, or made."""
        self.children: dict[Hashable, Segment] = {}
        self.names: list[bytes] = []
        """Names of places that end here, oldest first."""

    @property
    def alive(self) -> bool:
        """False once the store has dropped it."""
        return self.parent is not None


class Place(NamedTuple):
    """A path that has a name: where it ended, and where it would go on."""

    end: Segment
    base: Segment | None = None
    """On the path to `end`: further text is put here. None: the path is not known to go on."""
    tail: str = ""
    """Text between `base` and that further text."""


class SegmentStore:
    """A bounded trie of segments for one tokenizer and block size. Not thread-safe."""

    def __init__(self, block_tokens: int, *, limit_bytes: int, keep_token_ids: bool) -> None:
        """`keep_token_ids` is for engines; a router needs only keys and saves half of the memory."""
        self._block_tokens = block_tokens
        self._limit_bytes = limit_bytes
        self._keep_token_ids = keep_token_ids
        self._top = Segment(None, "", 0, 0)
        self._uses = 0
        # Oldest first. A segment that others follow may stand anywhere: it goes after them.
        self._order: OrderedDict[Segment, None] = OrderedDict()
        self.bytes = 0
        self.evicted = 0
        """Segments dropped for want of room, ever."""
        self._places: dict[bytes, Place] = {}

    def __len__(self) -> int:
        return len(self._order)

    def root(self, key: int, prefix_ids: Sequence[int] = ()) -> Segment:
        """The start of paths under root key `key`, `prefix_ids` (a BOS) included."""
        name = (key, tuple(prefix_ids))
        found = self._top.children.get(name)
        if found is None:
            found = self._insert(self._top, name, array("I", prefix_ids), key)
        return found

    def walk(self, start: Segment, names: Sequence[Hashable]) -> tuple[Segment, int]:
        """Follow `names` from `start` as far as they are known; the last segment and how many matched."""
        at = start
        for count, name in enumerate(names):
            child = at.children.get(name)
            if child is None:
                return at, count
            at = child
        return at, len(names)

    def add(self, parent: Segment, name: Hashable, token_ids: Iterable[int]) -> Segment:
        """A new segment after `parent`, which must not have a child of this name yet."""
        return self._insert(parent, name, array("I", token_ids), parent.key)

    def name(self, name: bytes, place: Place) -> None:
        """Make `place` known as `name` for as long as its end is kept. A name keeps its first place.

        An end has a few names at most (spellings of one conversation); the oldest goes first.
        """
        if name in self._places:
            return
        end = place.end
        if len(end.names) == _NAMES_PER_SEGMENT:
            del self._places[end.names.pop(0)]
        else:
            self._resize(end, _NAME_BYTES + getsizeof(place.tail))
        end.names.append(name)
        self._places[name] = place
        if place.base is not None:
            self._hold_keys(place.base)

    def clear(self) -> None:
        """Drop everything; not counted as evicted."""
        for segment in self._order:
            segment.parent = None
        self._order.clear()
        self._places.clear()
        self._top.children.clear()
        self.bytes = 0

    def find(self, name: bytes) -> Place | None:
        """The place known as `name`."""
        return self._places.get(name)

    def use(self, end: Segment) -> "tuple[array[int], list[int] | None]":
        """Keys and, if kept, token ids of the whole path to `end`. Marks it as used, then makes room."""
        self._uses += 1
        end.last_use = self._uses
        self._order.move_to_end(end)
        path, holder = self._climb(end)
        keys = array("Q", holder.held_keys or _NO_KEYS)
        for segment in path:
            if segment.keys:
                keys += segment.keys
        token_ids = self._token_ids(end) if self._keep_token_ids else None
        self._make_room()
        return keys, token_ids

    def _climb(self, end: Segment) -> tuple[list[Segment], Segment]:
        """The path to `end` after the last segment that holds all keys up to itself, and that segment."""
        path = []
        at = end
        while at.parent is not None and at.held_keys is None:
            path.append(at)
            at = at.parent
        path.reverse()
        return path, at

    def _hold_keys(self, base: Segment) -> None:
        """Let `base` hold all keys of its path, taken over from the segment before it that held them.

        Not if that one is near: then many paths may go on from it.
        """
        path, holder = self._climb(base)
        if not path or (holder.held_keys is not None and len(path) < _NEAR):
            return
        keys = holder.held_keys or array("Q")
        self._resize(holder, -_KEY_BYTES * len(keys))
        holder.held_keys = None
        for segment in path:
            keys += segment.keys
        base.held_keys = keys
        self._resize(base, _KEY_BYTES * len(keys))

    @staticmethod
    def _token_ids(end: Segment) -> list[int]:
        parts = []
        at = end
        while at.parent is not None:
            if at.token_ids:
                parts.append(at.token_ids)
            at = at.parent
        ids = array("I")
        for part in reversed(parts):
            ids += part
        return ids.tolist()

    def _resize(self, segment: Segment, more_bytes: int) -> None:
        segment.size_bytes += more_bytes
        self.bytes += more_bytes

    def _insert(self, parent: Segment, name: Hashable, token_ids: "array[int]", key: int) -> Segment:
        segment = Segment(parent, name, parent.tokens + len(token_ids), key)
        block = parent.pending + token_ids if parent.pending else token_ids
        if len(block) >= self._block_tokens:
            segment.keys = extend_keys(key, block, self._block_tokens)
            segment.key = segment.keys[-1]
            block = block[len(segment.keys) * self._block_tokens :]
        segment.pending = block or None
        if self._keep_token_ids:
            segment.token_ids = token_ids
        parent.children[name] = segment
        self._order[segment] = None
        segment.last_use = self._uses
        texts_and_tokens = sum(map(getsizeof, (name, segment.pending, segment.token_ids)))
        self._resize(segment, _SEGMENT_BYTES + _KEY_BYTES * len(segment.keys) + texts_and_tokens)
        return segment

    def _make_room(self) -> None:
        order = self._order
        while self.bytes > self._limit_bytes:
            segment = next(iter(order))
            if segment.children:
                order.move_to_end(segment)
                continue
            parent = segment.parent
            assert parent is not None
            del parent.children[segment.name]
            del order[segment]
            segment.parent = None
            self.bytes -= segment.size_bytes
            self.evicted += 1
            for name in segment.names:
                del self._places[name]
            if parent in order and not parent.children and parent.last_use <= segment.last_use:
                order.move_to_end(parent, last=False)  # it was kept for this one's sake: now it is next

    def check_integrity(self) -> None:
        """Raise AssertionError if the books are wrong; for tests, linear in the size of the store."""
        assert self.bytes == sum(segment.size_bytes for segment in self._order)
        assert self.bytes <= self._limit_bytes
        reached = 0
        waiting = [self._top]
        while waiting:
            at = waiting.pop()
            for name, child in at.children.items():
                assert child in self._order
                assert child.parent is at
                assert child.name == name
                reached += 1
                waiting.append(child)
        assert reached == len(self._order)
        for name, place in self._places.items():
            assert place.end in self._order
            assert name in place.end.names

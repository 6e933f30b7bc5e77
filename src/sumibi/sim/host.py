"""Host memory below one replica's device cache: a block is in one of the two, the oldest leaves first."""

from collections.abc import Iterable, Sequence


class HostCache:
    """Blocks by key, least recently stored first. Reads take their turns on one link."""

    __slots__ = ("_blocks", "capacity", "free_at_s", "removed")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: dict[int, None] = {}
        self.removed: list[int] = []
        """Keys dropped for lack of room since the caller last emptied this list."""
        self.free_at_s = 0.0
        """When the link has done all restores asked for."""

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, keys: Sequence[int]) -> None:
        """Blocks that the device lets go of, in the order of a chain: the deepest is the oldest."""
        blocks = self._blocks
        for key in reversed(keys):
            blocks.pop(key, None)
            blocks[key] = None
        while len(blocks) > self.capacity:
            oldest = next(iter(blocks))
            del blocks[oldest]
            self.removed.append(oldest)

    def match(self, keys: Sequence[int], start: int, end: int) -> int:
        """How many of `keys[start:end]` are here without a gap."""
        at, blocks = start, self._blocks
        while at < end and keys[at] in blocks:
            at += 1
        return at - start

    def take(self, keys: Iterable[int]) -> list[int]:
        """These are on the device now. Returns the ones that were here."""
        blocks = self._blocks
        here = [key for key in keys if key in blocks]
        for key in here:
            del blocks[key]
        return here

    def clear(self) -> None:
        """The process died."""
        self._blocks.clear()
        self.removed.clear()

"""Where KV comes from if it is not on the device: host memory, a disk, a shared store, adapters, another
replica.

All of them deliver over a link: set-up time, then bytes over bandwidth. Bytes go one transfer after the
other; while one is set up (a handshake, a look-up at the far end, a disk's first byte) those of others move.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Link:
    """A way for bytes, in order."""

    __slots__ = ("_bytes_per_s", "_free_s", "_setup_s")

    def __init__(self, gb_per_s: float, setup_s: float) -> None:
        self._bytes_per_s = gb_per_s * 1e9
        self._setup_s = setup_s
        self._free_s = 0.0

    def transfer(self, size_bytes: float, t: float) -> float:
        """When a transfer asked for at `t` is done."""
        self._free_s = max(self._free_s, t + self._setup_s) + size_bytes / self._bytes_per_s
        return self._free_s


class Blocks:
    """Blocks by key, at most `capacity`, least recently stored first."""

    __slots__ = ("_blocks", "capacity", "link", "removed")

    def __init__(self, capacity: int, link: Link) -> None:
        self.capacity = capacity
        self.link = link
        """Over which they are read."""
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.removed: list[int] = []
        """Keys dropped for lack of room since the caller last emptied this list."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def store(self, keys: Sequence[int]) -> None:
        """Blocks in the order of a chain: the deepest is the oldest. What is there already is young again."""
        blocks = self._blocks
        for key in reversed(keys):
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = None
        while len(blocks) > self.capacity:
            oldest, _ = blocks.popitem(last=False)
            self.removed.append(oldest)

    def use(self, keys: Sequence[int]) -> None:
        """Those of a chain that are here are young again."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def match(self, keys: Sequence[int], start: int, end: int) -> int:
        """How many of `keys[start:end]` are here without a gap."""
        at, blocks = start, self._blocks
        while at < end and keys[at] in blocks:
            at += 1
        return at - start

    def take(self, keys: Iterable[int]) -> list[int]:
        """Let go of these. Returns the ones that were here."""
        blocks = self._blocks
        here = [key for key in keys if key in blocks]
        for key in here:
            del blocks[key]
        return here

    def clear(self) -> None:
        """Lose everything."""
        self._blocks.clear()
        self.removed.clear()


class Adapters:
    """Which adapters are loaded in one replica: so many at most, the least recently used unloaded first."""

    __slots__ = ("_load_s", "_loaded", "_slots")

    def __init__(self, slots: int, load_s: float) -> None:
        self._slots, self._load_s = slots, load_s
        self._loaded: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Name -> (ready at, jobs that use it)."""

    def acquire(self, name: str, t: float) -> float | None:
        """A job begins to use it: when it is ready. None: every slot is in use by others."""
        ready_s, users = self._loaded.get(name, (t + self._load_s, 0))
        if name not in self._loaded and len(self._loaded) >= self._slots:
            idle = next((other for other, (_, n) in self._loaded.items() if not n), None)
            if idle is None:
                return None
            del self._loaded[idle]
        self._loaded[name] = (ready_s, users + 1)
        self._loaded.move_to_end(name)
        return ready_s

    def release(self, name: str) -> None:
        """A job is done with it."""
        ready_s, users = self._loaded[name]
        self._loaded[name] = (ready_s, users - 1)

    def clear(self) -> None:
        """The process died."""
        self._loaded.clear()

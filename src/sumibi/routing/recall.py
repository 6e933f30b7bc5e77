"""What an endpoint without KV events probably has: the prompts we sent there, least recently used out first.

The order imitates the engine's: the blocks of one prompt age from its end to its start, so a chain is
given up from the back. `usage.cached_tokens` corrects it. If the engine had less of a prompt than we
believed, the first block it lacked was evicted, and an engine that evicts by age has lost all that is older
too. If it had more, it has room for more: tiers below the device that it does not tell of either.

A prompt is used as a whole, so only where it ends is put in order of use: a block is as young as the
youngest end at or behind it. An agent's turn thus costs what it adds, not all that was said before.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from sumibi.routing.index import BlockIndex


class Recall:
    """Remembered blocks of one endpoint, in the index under a holder of its own."""

    def __init__(self, index: BlockIndex, device_blocks: int, most_below_blocks: int = 0) -> None:
        self._index = index
        self.holder = index.new_holder()
        self.device_blocks = device_blocks
        """Room of its device cache, as far as known."""
        self._most_below_blocks = most_below_blocks
        self.below_blocks = 0
        """Room that it seems to have beyond that."""
        self._parents: dict[int, int | None] = {}
        """Every remembered block's. A block is there only with all before it."""
        self._children: dict[int, int] = {}
        """How many blocks hang from it, if any do."""
        self._ends: OrderedDict[int, None] = OrderedDict()
        """Last blocks of prompts in order of use, the oldest first; all blocks without children are here."""
        self._models: dict[int, str] = {}
        """The model of each chain, by its first block."""

    @property
    def limit_blocks(self) -> int:
        """Blocks that are remembered at most."""
        return self.device_blocks + self.below_blocks

    def remember(self, keys: Sequence[int], model: str = "") -> None:
        """A prompt with these blocks, hashed under this name, was computed there just now."""
        known = self._known(keys)
        parent = keys[known - 1] if known else None
        if known < len(keys):
            new = keys[known : self.limit_blocks]
            new = new[: len(new) - self._index.add(self.holder, parent, new)]
            if new and parent is not None:
                self._ends.pop(parent, None)
            elif new:
                self._models[new[0]] = model
            for key in new:
                self._parents[key] = parent
                if parent is not None:
                    self._children[parent] = self._children.get(parent, 0) + 1
                parent = key
        if parent is not None:
            self._ends[parent] = None
            self._ends.move_to_end(parent)
        gone: list[int] = []
        while len(self._parents) > self.limit_blocks:
            self._forget_oldest(gone)
        self._index.remove(self.holder, gone)

    def correct(self, keys: Sequence[int], cached_blocks: int) -> None:
        """The engine had only `cached_blocks` of these: it lost the next one, and all that is older."""
        if cached_blocks < len(keys):
            lost = keys[cached_blocks]
            gone: list[int] = []
            while lost in self._parents:
                self._forget_oldest(gone)
            self._index.remove(self.holder, gone)
            # It has no room for what it lost beside what is left.
            self.below_blocks = min(self.below_blocks, max(0, len(self._parents) - self.device_blocks))

    def found(self, keys: Sequence[int], cached_blocks: int) -> None:
        """The engine had `cached_blocks` of these: as many as are not remembered fit in beside the others."""
        more = cached_blocks - self._known(keys)
        if more > 0:
            self.below_blocks = min(self.below_blocks + more, self._most_below_blocks)

    def forget(self, models: Collection[str]) -> None:
        """What was hashed under these names is worth nothing any more."""
        gone: dict[int, None] = {}
        # In the order in which they came, so parents are before their children.
        for key, parent in self._parents.items():
            if parent in gone if parent is not None else self._models[key] in models:
                gone[key] = None
        for key in gone:
            for known in (self._parents, self._children, self._ends, self._models):
                known.pop(key, None)
        self._index.remove(self.holder, gone)

    def clear(self) -> None:
        """The endpoint lost everything."""
        self._drop_all()
        self._index.clear(self.holder)

    def close(self) -> None:
        """Leave the index for good."""
        self._drop_all()
        self._index.remove_holder(self.holder)

    def _drop_all(self) -> None:
        self._parents.clear()
        self._children.clear()
        self._ends.clear()
        self._models.clear()
        self.below_blocks = 0

    def _known(self, keys: Sequence[int]) -> int:
        """How many leading blocks are remembered; what is remembered is whole from its start."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in self._parents:
                low = middle
            else:
                high = middle - 1
        return low

    def _forget_oldest(self, gone: list[int]) -> None:
        """Forget the block that was used longest ago; none if it is an end that has younger ones behind.

        It is noted in `gone`, for the index.
        """
        oldest, _ = self._ends.popitem(last=False)
        if oldest in self._children:
            return
        parent = self._parents.pop(oldest)
        gone.append(oldest)
        if parent is None:
            del self._models[oldest]
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent not in self._ends:
                self._ends[parent] = None
                self._ends.move_to_end(parent, last=False)

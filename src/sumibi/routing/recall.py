"""What an endpoint without KV events probably has: the prompts we sent there, least recently used out first.

The order imitates the engine's: the blocks of one prompt age from its end to its start, so a chain is
given up from the back. `usage.cached_tokens` corrects it. If the engine had less of a prompt than we
believed, the first block it lacked was evicted, and an engine that evicts by age has lost all that is older
too.
"""

from collections import OrderedDict
from collections.abc import Sequence

from sumibi.routing.index import BlockIndex


class Recall:
    """Remembered blocks of one endpoint, in the index under a holder of its own."""

    def __init__(self, index: BlockIndex, limit_blocks: int) -> None:
        self._index = index
        self.holder = index.new_holder()
        self.limit_blocks = limit_blocks
        self._used: OrderedDict[int, None] = OrderedDict()
        """Blocks in order of last use, the oldest first."""

    def remember(self, keys: Sequence[int]) -> None:
        """A prompt with these blocks was computed there just now."""
        keys = keys[: self.limit_blocks]
        for key in reversed(keys):
            self._used[key] = None
            self._used.move_to_end(key)
        self._index.add(self.holder, None, keys)
        while len(self._used) > self.limit_blocks:
            self._forget_oldest()

    def correct(self, keys: Sequence[int], cached_blocks: int) -> None:
        """The engine had only `cached_blocks` of these: it lost the next one, and all that is older."""
        if cached_blocks < len(keys):
            lost = keys[cached_blocks]
            while lost in self._used:
                self._forget_oldest()

    def clear(self) -> None:
        """The endpoint lost everything."""
        self._used.clear()
        self._index.clear(self.holder)

    def close(self) -> None:
        """Leave the index for good."""
        self._used.clear()
        self._index.remove_holder(self.holder)

    def _forget_oldest(self) -> None:
        oldest, _ = self._used.popitem(last=False)
        self._index.remove(self.holder, (oldest,))

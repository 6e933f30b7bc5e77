"""What llm-d's approximate prefix index knows: the blocks of the prompts that this router sent somewhere.

For each endpoint an LRU of blocks, filled when a request is placed, at the capacity that the engine reports
(`autoTune`, the default) or 31,250 blocks. The prompt is looked at up to 131,072 tokens, in blocks of at
least 64. Source: llm-d-router, approximateprefix (Aug 2026), defaults of its configuration.

Known holes, kept: it is blind to what the engine really evicts, to its other clients and to its restarts;
the first blocks of a prompt are the oldest in the LRU and go first; a match counts the blocks that an
endpoint has up to the first one that nobody has, whether or not the run is whole.

One difference: the original hashes a partial last block, too. Here only full blocks have keys.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from sumibi.routing.endpoint import Endpoint
from sumibi.routing.policies.base import Ask

LRU_BLOCKS: Final = 31_250
"""Blocks remembered for an endpoint that does not report its capacity."""
MIN_BLOCK_TOKENS: Final = 64
"""Smaller blocks are joined: each entry costs the router memory (llm-d-router issue 1158)."""


class ApproximateIndex:
    """Blocks by key, with the endpoints that are believed to have them."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """Block -> bit set of endpoints."""
        self._caches: dict[str, _Lru] = {}

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Leading blocks of `keys` by endpoint; none for those that have none of them."""
        found: list[int | None] = list(map(self._holders.get, keys))
        if None in found:
            del found[found.index(None) :]
        blocks: dict[str, int] = {}
        for holders in set(found):
            assert holders is not None
            count = found.count(holders)
            for name, cache in self._caches.items():
                if holders & cache.bit:
                    blocks[name] = blocks.get(name, 0) + count
        return blocks

    def add(self, endpoint: str, keys: Sequence[int], limit_blocks: int) -> None:
        """`endpoint` gets a prompt with these blocks; it keeps its `limit_blocks` youngest."""
        cache = self._caches.get(endpoint)
        if cache is None:
            cache = self._caches[endpoint] = _Lru(_unused(c.bit for c in self._caches.values()))
        bit, holders = cache.bit, self._holders
        for key in cache.use(keys):
            holders[key] = holders.get(key, 0) | bit
        self._drop(bit, cache.evict(limit_blocks))

    def remove(self, endpoint: str) -> None:
        """Forget an endpoint."""
        cache = self._caches.pop(endpoint, None)
        if cache is not None:
            self._drop(cache.bit, cache.evict(0))

    def _drop(self, bit: int, keys: list[int]) -> None:
        holders = self._holders
        for key in keys:
            left = holders[key] ^ bit
            if left:
                holders[key] = left
            else:
                del holders[key]


class _Lru:
    """An LRU of blocks that are used a prompt at a time: the order is that of prompts, then within them."""

    __slots__ = ("_ends", "_looked_at", "_prompts", "_used", "_uses", "bit")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self._uses = 0
        self._used: dict[int, int] = {}
        """Block -> number of its last use."""
        self._prompts: OrderedDict[int, Sequence[int]] = OrderedDict()
        """Number of a use -> the prompt's blocks, the oldest first. A block counts at its last use only."""
        self._ends: dict[int, int] = {}
        """Last block of a prompt -> number of that use."""
        self._looked_at = (0, 0)
        """(number of the oldest use, how many of its blocks were evicted or found younger)."""

    def use(self, keys: Sequence[int]) -> list[int]:
        """The prompt's blocks are the youngest now. Returns those that are new."""
        if not keys:
            return []
        self._uses += 1
        before = len(self._used)
        self._used.update(dict.fromkeys(keys, self._uses))
        new = list(islice(reversed(self._used), len(self._used) - before))
        # Keys are chained: a prompt whose last block is in this one is in it as a whole.
        for end in {keys[len(keys) - len(new) - 1], keys[-1]}:
            whole = self._ends.pop(end, None)
            if whole is not None:
                del self._prompts[whole]
        self._prompts[self._uses] = keys
        self._ends[keys[-1]] = self._uses
        return new

    def evict(self, limit_blocks: int) -> list[int]:
        """Drop the oldest blocks down to the limit, and return them."""
        used, dropped = self._used, []
        while len(used) > limit_blocks:
            number, keys = next(iter(self._prompts.items()))
            start = self._looked_at[1] if self._looked_at[0] == number else 0
            for i in range(start, len(keys)):
                if used.get(keys[i]) == number:
                    dropped.append(keys[i])
                    del used[keys[i]]
                    if len(used) <= limit_blocks:
                        self._looked_at = (number, i + 1)
                        break
            else:
                del self._prompts[number]
                if self._ends.get(keys[-1]) == number:
                    del self._ends[keys[-1]]
        return dropped


def prompt_blocks(ask: Ask, match_tokens: int) -> tuple[Sequence[int], int]:
    """(keys of the prompt's blocks as the index sees them, tokens of such a block)."""
    step = max(1, MIN_BLOCK_TOKENS // ask.block_tokens)
    block_tokens = step * ask.block_tokens
    return ask.keys[step - 1 : step * (match_tokens // block_tokens) : step], block_tokens


def capacity_blocks(endpoint: Endpoint, block_tokens: int) -> int:
    """Blocks to remember for an endpoint."""
    return endpoint.kv_tokens // block_tokens if endpoint.kv_tokens else LRU_BLOCKS


def _unused(bits: Iterable[int]) -> int:
    used, bit = set(bits), 1
    while bit in used:
        bit <<= 1
    return bit

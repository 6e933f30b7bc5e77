"""What llm-d's approximate prefix index knows: the blocks of the prompts that this router sent somewhere.

For each endpoint an LRU of blocks, filled when a request is placed, at the capacity that the engine reports
(`autoTune`, the default) or 31,250 blocks. The prompt is looked at up to 131,072 tokens, in blocks of at
least 64. Source: llm-d-router, approximateprefix (Aug 2026), defaults of its configuration.

Known holes, kept: it is blind to what the engine really evicts, to its other clients and to its restarts;
the first blocks of a prompt are the oldest in the LRU and go first; a match counts the blocks that an
endpoint has up to the first one that nobody has, whether or not the run is whole.

One difference: the original hashes a partial last block, too. Here only full blocks have keys.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, repeat

from sumibi.routing.fleet import Endpoint
from sumibi.routing.policies.base import Ask

LRU_BLOCKS = 31_250
"""Blocks remembered for an endpoint that does not report its capacity."""
MIN_BLOCK_TOKENS = 64
"""Smaller blocks are joined: each entry costs the router memory (llm-d-router issue 1158)."""


class ApproximateIndex:
    """Blocks by key, with the endpoints that are believed to have them."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """Block -> bit set of endpoints."""
        self._bits: dict[str, int] = {}
        self._blocks: dict[str, dict[int, None]] = {}
        """Per endpoint its blocks in order of use, the oldest first."""

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Leading blocks of `keys` by endpoint; none for those that have none of them."""
        found = list(map(self._holders.get, keys))
        if None in found:
            del found[found.index(None) :]
        counts: dict[int, int] = {}
        for holders in found:
            assert holders is not None
            counts[holders] = counts.get(holders, 0) + 1
        blocks = {
            name: sum(n for have, n in counts.items() if have & bit) for name, bit in self._bits.items()
        }
        return {name: n for name, n in blocks.items() if n}

    def add(self, endpoint: str, keys: Sequence[int], limit_blocks: int) -> None:
        """`endpoint` gets a prompt with these blocks; it keeps its `limit_blocks` youngest."""
        if endpoint not in self._bits:
            self._bits[endpoint] = _unused(self._bits.values())
            self._blocks[endpoint] = {}
        bit, blocks, holders = self._bits[endpoint], self._blocks[endpoint], self._holders
        for key in [key for key in keys if key not in blocks]:
            holders[key] = holders.get(key, 0) | bit
        deque(map(blocks.pop, keys, repeat(None)), maxlen=0)  # what is there moves to the young end
        blocks.update(dict.fromkeys(keys))
        self._drop(endpoint, list(islice(blocks, max(0, len(blocks) - limit_blocks))))

    def remove(self, endpoint: str) -> None:
        """Forget an endpoint."""
        if endpoint in self._bits:
            self._drop(endpoint, list(self._blocks[endpoint]))
            del self._bits[endpoint], self._blocks[endpoint]

    def _drop(self, endpoint: str, keys: list[int]) -> None:
        bit, blocks, holders = self._bits[endpoint], self._blocks[endpoint], self._holders
        for key in keys:
            del blocks[key]
            left = holders[key] ^ bit
            if left:
                holders[key] = left
            else:
                del holders[key]


def prompt_blocks(ask: Ask, match_tokens: int) -> tuple[list[int], int]:
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

"""Routing keys: 64-bit chained hashes of prompt blocks.

A routing key names "these tokens after exactly that prefix, under this model, adapter and salt". It is
a hint for placement, nothing more: no stored or received KV block is ever accepted on it (see
`sumibi.core.content` for ids that are).

Chain: `key_i = xxh3_64(tokens of block i as little-endian uint32, seed = key_{i-1})`, and the root is
xxh3_64 over the length-prefixed separators. Gateway, event feed and simulator share this one function.

A prompt's keys are an array of 8 bytes each: a list would have an object of 32 bytes for each, and to copy it
for a request would touch them all.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

DEFAULT_BLOCK_TOKENS: Final = 32
"""Router block size when a model's engines do not say theirs."""


def root_key(model: str, *, adapter: str = "", adapter_version: str = "", salt: str = "") -> int:
    """The key of the empty prefix: everything that separates caches, before any token.

    Example: `root_key("smollm2", salt="tenant-7")`.
    """
    parts = [p.encode() for p in (model, adapter, adapter_version, salt)]
    return xxh3_64_intdigest(b"".join(len(p).to_bytes(4, "little") + p for p in parts))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form that is hashed. Raises OverflowError outside 0..2^32-1."""
    return array("I", token_ids).tobytes()


def extend_keys(parent: int, token_ids: Sequence[int], block_tokens: int) -> "array[int]":
    """Keys of the *full* blocks of `token_ids`, chained onto `parent`; a partial last block has none.

    `parent` is a root key or the key of the block before `token_ids[0]`. One hash per block:
    a 100k-token prompt in blocks of 64 (1,563 keys) takes well under a millisecond.
    """
    return extend_packed(parent, pack_tokens(token_ids), block_tokens)


def extend_packed(parent: int, packed: bytes, block_tokens: int) -> "array[int]":
    """`extend_keys` for tokens that `pack_tokens` has packed."""
    width = 4 * block_tokens
    keys = array("Q")
    for start in range(0, len(packed) - width + 1, width):
        parent = xxh3_64_intdigest(packed[start : start + width], parent)
        keys.append(parent)
    return keys


def common(ours: Sequence[int], theirs: Sequence[int], low: int, high: int, shift: int = 0) -> int:
    """How many leading keys of two prompts are equal: `low` at least (not 0), `high` at most.

    Keys are chained: two prompts agree up to some block and nowhere behind it. So this bisects, after a look
    at the end. `shift`: what is ours at n is theirs at n + shift.
    """
    if ours[high - 1] == theirs[high - 1 + shift]:
        return high
    high -= 1
    while low < high:
        middle = (low + high + 1) >> 1
        if ours[middle - 1] == theirs[middle - 1 + shift]:
            low = middle
        else:
            high = middle - 1
    return low

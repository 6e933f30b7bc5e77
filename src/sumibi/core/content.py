"""Content ids: what engine caches, tiers and transfers go by.

128 bits of BLAKE2b, chained over blocks and keyed by the tenant's salt, so equal ids mean equal KV
within one namespace and a tenant cannot probe another's cache. The namespace covers everything that
changes the numbers in a block: model, weight version, dtype, block size, layout, adapter version.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from sumibi.core.keys import pack_tokens

CONTENT_ID_BYTES: Final = 16


def content_root(namespace: str, *, salt: str = "") -> bytes:
    """The id of the empty prefix in `namespace`, keyed by `salt` (any length: it is digested first)."""
    key = blake2b(salt.encode(), digest_size=32).digest() if salt else b""
    return blake2b(namespace.encode(), digest_size=CONTENT_ID_BYTES, key=key).digest()


def content_id(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The id (16 bytes) of one full block holding `token_ids` after the prefix named by `parent`."""
    return blake2b(parent + pack_tokens(token_ids), digest_size=CONTENT_ID_BYTES).digest()

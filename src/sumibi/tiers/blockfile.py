"""How a block lies in a file or object: a header of 128 bytes, then the block's bytes as they are.

All numbers little-endian:

    offset  bytes  what
    0       8      magic "SUMIBIKV"
    8       2      version, 1
    10      1      length of the content id (1 to 32)
    11      1      length of the parent's id, 0 for the first block of a prompt
    12      4      zero
    16      8      bytes of payload
    24      16     digest of the namespace
    40      32     content id, padded with zeros
    72      32     parent's id, padded with zeros
    104     16     XXH3-128 of the payload
    120     8      XXH3-64 of the 120 bytes before

A reader believes nothing that it has not checked: magic, version, the header's own sum, namespace, id, sizes,
and the payload's sum, which is computed over the bytes that it hands on. XXH3 finds what breaks by itself
(torn writes, bad sectors, files mixed up); it is no signature against someone who may write there.
"""

import struct
from dataclasses import dataclass
from hashlib import blake2b

import xxhash

from sumibi.tiers.words import Buffer

HEADER_BYTES = 128
VERSION = 1
NAMESPACE_BYTES = 16
MAX_ID_BYTES = 32

_MAGIC = b"SUMIBIKV"
_HEAD = struct.Struct("<8sHBB4xQ16s32s32s16s")
_SUM = struct.Struct("<Q")


class Corrupt(Exception):
    """The bytes are not those of the block that was asked for, whole."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says, after its own sum was found right."""

    namespace: bytes
    content_id: bytes
    parent: bytes | None
    payload_bytes: int
    checksum: bytes


def namespace_digest(namespace: str, block_bytes: int) -> bytes:
    """16 bytes that stand for everything that makes blocks of one kind unlike those of another."""
    text = f"sumibi tiers {VERSION}\n{block_bytes}\n{namespace}"
    return blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()


def checksum(payload: Buffer) -> bytes:
    """XXH3-128 of a block's bytes, 16 bytes."""
    return xxhash.xxh3_128_digest(payload)


def encode_header(header: Header) -> bytes:
    """The 128 bytes in front of a payload."""
    parent = header.parent or b""
    head = _HEAD.pack(
        _MAGIC,
        VERSION,
        len(header.content_id),
        len(parent),
        header.payload_bytes,
        header.namespace,
        header.content_id,
        parent,
        header.checksum,
    )
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def decode_header(raw: Buffer) -> Header:
    """Read 128 bytes. Raises Corrupt where they are no header of this version."""
    if len(raw) != HEADER_BYTES:
        raise Corrupt(f"{len(raw)} bytes where a header has {HEADER_BYTES}")
    head = bytes(raw[: _HEAD.size])
    if _SUM.unpack(raw[_HEAD.size :])[0] != xxhash.xxh3_64_intdigest(head):
        raise Corrupt("the header's sum is wrong")
    magic, version, id_bytes, parent_bytes, payload_bytes, namespace, content_id, parent, payload_sum = (
        _HEAD.unpack(head)
    )
    if magic != _MAGIC or version != VERSION:
        raise Corrupt(f"magic {magic!r}, version {version}: not ours")
    if not 0 < id_bytes <= MAX_ID_BYTES or parent_bytes > MAX_ID_BYTES:
        raise Corrupt(f"ids of {id_bytes} and {parent_bytes} bytes")
    return Header(
        namespace,
        content_id[:id_bytes],
        parent[:parent_bytes] or None,
        payload_bytes,
        payload_sum,
    )


def check(raw_header: Buffer, payload: Buffer, *, namespace: bytes, content_id: bytes) -> Header:
    """The header, if `payload` is, whole and unchanged, block `content_id` of `namespace`; else Corrupt."""
    header = decode_header(raw_header)
    if header.namespace != namespace:
        raise Corrupt("a block of another namespace")
    if header.content_id != content_id:
        raise Corrupt(f"block {header.content_id.hex()} where {content_id.hex()} should be")
    if header.payload_bytes != len(payload):
        raise Corrupt(f"{header.payload_bytes} bytes of payload where a block has {len(payload)}")
    if checksum(payload) != header.checksum:
        raise Corrupt("the payload's sum is wrong")
    return header

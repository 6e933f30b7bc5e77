"""KV cache events as vLLM and SGLang put them on the wire: decode every known layout, encode the current one.

A message is three ZMQ frames `[topic, sequence (8 bytes, big-endian), payload (msgpack)]`. The payload is
`[timestamp, [events], data_parallel_rank]`; an event is a map with a `type` (vLLM since June 2026, SGLang
since September 2026) or, from older releases, a positional array. Unknown events are counted and skipped,
never the batch; unknown map keys and extra array slots are ignored.
"""

from typing import Annotated, Any

import msgspec

from sumibi.core.errors import WireError

EngineHash = int | bytes
"""A block hash as the engine sent it: opaque, compared for equality only."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""Token ids are hashed as 32 bits; an event with others is of no known kind."""

_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises; the last is for brackets nested too deep."""

REPLAY_END = (1 << 64) - 1
"""Sequence of the empty message that ends a replay (all ones)."""


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """Full blocks now in `medium`: `token_ids` holds len(block_hashes) * block_size ids, in order."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[TokenId]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """One physical copy of each block left `medium`."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True):
    """The device pool of the engine was emptied (lower tiers live on)."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct):
    """One decoded message. `skipped` counts events of unknown type or shape in it."""

    seq: int
    ts: float
    events: list[KVEvent]
    rank: int = 0
    skipped: int = 0


class _Usual(msgspec.Struct, array_like=True):
    """A batch as engines send it today, all its events known."""

    ts: float
    events: list[KVEvent]
    rank: int | None = None


# Positional events: names of their slots in order, and how many must be there.
_SLOTS: dict[str, tuple[list[str], int]] = {
    "BlockStored": (
        [
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
        ],
        4,
    ),
    "BlockRemoved": (["block_hashes", "medium", "group_idx"], 1),
    "AllBlocksCleared": ([], 0),
}
_usual = msgspec.msgpack.Decoder(_Usual)
_typed = msgspec.msgpack.Decoder(KVEvent)
_batch = msgspec.msgpack.Decoder(list[msgspec.Raw])
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])
_encoder = msgspec.msgpack.Encoder()


def encode_batch(ts: float, events: list[KVEvent], rank: int = 0) -> bytes:
    """The payload frame in the current wire format (map events)."""
    return _encoder.encode([ts, events, rank])


def decode_batch(seq: int, payload: bytes) -> EventBatch:
    """Decode one payload frame. Raises WireError when the batch itself is not a batch."""
    try:
        usual = _usual.decode(payload)
    except _MALFORMED:
        return _decode_with_care(seq, payload)
    return EventBatch(seq, usual.ts, usual.events, usual.rank or 0)


def _decode_with_care(seq: int, payload: bytes) -> EventBatch:
    """Any layout, event by event."""
    try:
        head = payload[:1]
        if head and (head[0] & 0xF0 == 0x80 or head[0] in (0xDE, 0xDF)):
            fields = msgspec.msgpack.decode(payload, type=dict[str, msgspec.Raw])
            parts = [fields["ts"], fields["events"]]
            if "data_parallel_rank" in fields:
                parts.append(fields["data_parallel_rank"])
        else:
            parts = _batch.decode(payload)
        ts = float(msgspec.msgpack.decode(parts[0]))
        rank = msgspec.msgpack.decode(parts[2]) if len(parts) > 2 else 0
        raws = _raws.decode(parts[1])
    except (*_MALFORMED, KeyError, IndexError, TypeError, ValueError) as cause:
        raise WireError(f"KV event batch {seq} is not [ts, [events], rank]: {cause}") from cause
    events: list[KVEvent] = []
    skipped = 0
    for raw in raws:
        event = _decode_event(raw)
        if event is None:
            skipped += 1
        else:
            events.append(event)
    return EventBatch(
        seq=seq, ts=ts, events=events, rank=rank if isinstance(rank, int) else 0, skipped=skipped
    )


def _decode_event(raw: msgspec.Raw) -> KVEvent | None:
    try:
        return _typed.decode(raw)
    except _MALFORMED:
        pass
    try:
        slots = msgspec.msgpack.decode(raw)
    except _MALFORMED:
        return None
    if not isinstance(slots, list) or not slots or not isinstance(slots[0], str) or slots[0] not in _SLOTS:
        return None
    names, required = _SLOTS[slots[0]]
    values = slots[1 : 1 + len(names)]
    if len(values) < required:
        return None
    fields = dict(zip(names, values, strict=False))
    # SGLang put a metadata map where vLLM has lora_name (dyn#14530): take its salt, it is no adapter.
    if isinstance(fields.get("lora_name"), dict):
        fields["cache_salt"] = fields.pop("lora_name").get("cache_salt")
    try:
        event: KVEvent = msgspec.convert({"type": slots[0], **fields}, KVEvent)
    except _MALFORMED:
        return None
    return event

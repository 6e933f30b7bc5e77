"""What an engine's blocks are in routing keys.

Engine blocks and routing blocks may differ in size, in any ratio. A routing block is there if every engine
block that overlaps it is. With equal sizes a block is one key, and where some small engine blocks make one
routing block they share one record; anything else is a span of its own.

Plain data, and functions from a stored event to it; what is where is in `kvpools`.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from sumibi.core.keys import extend_packed, pack_tokens
from sumibi.core.kvevents import BlockStored, EngineHash

DEVICE: Final = "gpu"
"""The tier of events that name no medium. Media are compared in lower case."""


class Part(NamedTuple):
    """A routing block that ends in some engine block."""

    key: int
    above: int | None
    """The routing block before it, None at the root."""
    blocks: tuple[EngineHash, ...]
    """Engine blocks that overlap it, in order."""


class Joint(NamedTuple):
    """Engine blocks that together make one routing block, or its beginning; the record of each of them."""

    key: int | None
    """None: it is not complete."""
    above: int | None
    """The routing block before it, None at the root."""
    blocks: tuple[EngineHash, ...]
    seed: int
    """`above`, or the root key."""
    packed: bytes
    """Tokens of all `blocks`."""


class Span(NamedTuple):
    """An engine block of a size that fits no better: what ends in it, what the next one continues."""

    seed: int
    """Key of the last routing block that ended (the root key if none did)."""
    above: int | None
    """The same, None if none did."""
    tail: bytes
    """Tokens since then."""
    blocks: tuple[EngineHash, ...]
    """Engine blocks that hold them."""
    parts: tuple[Part, ...]
    """Routing blocks that end in this engine block."""


class Start(NamedTuple):
    """What the first block of an event continues: as in `Span`."""

    seed: int
    above: int | None
    tail: bytes
    blocks: tuple[EngineHash, ...]


Chain = int | Joint | Span | None
"""What a stored block is: a routing block (its key), less than one, anything else, unknown (an orphan)."""


def joints_of(event: BlockStored, start: Start, block_tokens: int) -> list[Joint]:
    """The routing blocks that the event's blocks make with those before them; the last may lack some."""
    width, ratio = 4 * block_tokens, block_tokens // event.block_size
    packed = start.tail + pack_tokens(event.token_ids)
    blocks = (*start.blocks, *event.block_hashes)
    keys: list[int | None] = [*extend_packed(start.seed, packed, block_tokens), None]
    seed, above = start.seed, start.above
    joints = []
    for i in range(-(-len(blocks) // ratio)):
        key, part = keys[i], packed[i * width : (i + 1) * width]
        joints.append(Joint(key, above, blocks[i * ratio : (i + 1) * ratio], seed, part))
        if key is not None:
            seed = above = key
    return joints


def chains_of(
    event: BlockStored, start: Start, extras: list[bytes] | None, block_tokens: int
) -> Iterator[tuple[int | Span, Sequence[Part]]]:
    """Each block of the event with the routing blocks that end in it; for any sizes."""
    size, width = 4 * event.block_size, block_tokens
    seed, above, tail, blocks = start
    packed = pack_tokens(event.token_ids)
    for i, block in enumerate(event.block_hashes):
        if extras is not None and extras[i]:
            seed = xxh3_64_intdigest(extras[i], seed)
        tokens = tail + packed[i * size : (i + 1) * size]
        blocks = (*blocks, block)
        parts = []
        for key in extend_packed(seed, tokens, width):
            parts.append(Part(key, above, blocks))
            seed = above = key
            blocks = (block,)
        tail = tokens[len(parts) * 4 * width :]
        if not tail:
            blocks = ()
        if not tail and len(parts) == 1 and len(parts[0].blocks) == 1:
            yield parts[0].key, parts
        else:
            yield Span(seed, above, tail, blocks, tuple(parts)), parts


def after(chain: int | Joint | Span, block: EngineHash) -> Start:
    """What comes behind `block`, which is `chain`, continues."""
    if isinstance(chain, int):
        return Start(chain, chain, b"", ())
    if isinstance(chain, Span):
        return Start(chain.seed, chain.above, chain.tail, chain.blocks)
    blocks = chain.blocks[: chain.blocks.index(block) + 1]
    if chain.key is not None and len(blocks) == len(chain.blocks):
        return Start(chain.key, chain.key, b"", ())
    width = len(chain.packed) // len(chain.blocks)
    return Start(chain.seed, chain.above, chain.packed[: width * len(blocks)], blocks)


def same(one: Part | Joint, other: Part | Joint) -> bool:
    """Whether they are the same routing block over the same engine blocks."""
    return one.key == other.key and one.blocks == other.blocks


# --- what an event says beside tokens ---


def tier_of(medium: str | None) -> str:
    """The tier that an event is about."""
    return medium.lower() if medium else DEVICE


def adapter_of(event: BlockStored) -> str:
    """The adapter that it was computed with, by the engine's name for it; empty for none."""
    return event.lora_name or ("" if event.lora_id is None else f"lora-{event.lora_id}")


def salt_of(event: BlockStored) -> str | None:
    """The cache salt among the extra keys of a prompt's first block, where vLLM puts it last."""
    first = _own_extras(event, 0)
    return first[-1] if first and isinstance(first[-1], str) else None


def _own_extras(event: BlockStored, i: int) -> list[object]:
    """Extra keys of one block without the adapter's name, which all blocks repeat."""
    extras = event.extra_keys[i] if event.extra_keys and i < len(event.extra_keys) else None
    return [extra for extra in extras or () if extra != event.lora_name]


def extras_of(event: BlockStored) -> list[bytes] | None:
    """What else goes into each block's key (images, say), as bytes; None if nothing does, as for all text."""
    if not event.extra_keys:
        return None
    own = [_own_extras(event, i) for i in range(len(event.block_hashes))]
    if own and event.parent_block_hash is None and event.cache_salt is None and salt_of(event) is not None:
        own[0] = own[0][:-1]
    return [msgspec.json.encode(extras) if extras else b"" for extras in own] if any(own) else None

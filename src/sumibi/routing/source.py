"""From one engine's KV events to changes in routing keys.

The engine names its blocks by hashes that mean nothing to us. A stored block comes with its token ids and
its parent's hash, so its routing key follows from the parent's: the map from engine hash to key is all that
is needed, and events without tokens (another tier's copy of a known block) are resolved through it.

Engine blocks and routing blocks may differ in size, in any ratio. A routing block is there if every engine
block that overlaps it is. Most of this file is for that; with equal sizes a block is one dictionary entry,
and where some small engine blocks make one routing block they share one record.

What counts as there, per tier:
- each (tier, attention group) is a *pool* that counts copies of a hash; engines store a hash more than
  once and remove each copy. Counts never go below zero.
- only groups of full attention prove residency. If an engine has several, all must hold a block.
- a block whose parent is unknown (an *orphan*) is kept until the parent comes, within a bound.

Knows nothing of sequence numbers, endpoints or the index. In recorded logs its output stands for the events.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from sumibi.core.keys import extend_keys, extend_packed, pack_tokens, root_key
from sumibi.core.kvevents import BlockRemoved, BlockStored, EngineHash, KVEvent
from sumibi.routing.counters import Counters
from sumibi.routing.events import Change, KeysAdded, KeysCopied, KeysRemoved, TierCleared

DEVICE = "gpu"
"""The tier of events that name no medium. Media are compared in lower case."""

FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache whose blocks spare the prefill; a windowed or recurrent state does not."""


MAX_POOLS = 32
"""Tiers and groups of one engine that are told apart; an engine has two or three."""


class _Part(NamedTuple):
    """A routing block that ends in some engine block."""

    key: int
    above: int | None
    """The routing block before it, None at the root."""
    blocks: tuple[EngineHash, ...]
    """Engine blocks that overlap it, in order."""


class _Joint(NamedTuple):
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


class _Span(NamedTuple):
    """An engine block of a size that fits no better: what ends in it, what the next one continues."""

    seed: int
    """Key of the last routing block that ended (the root key if none did)."""
    above: int | None
    """The same, None if none did."""
    tail: bytes
    """Tokens since then."""
    blocks: tuple[EngineHash, ...]
    """Engine blocks that hold them."""
    parts: tuple[_Part, ...]
    """Routing blocks that end in this engine block."""


class _Start(NamedTuple):
    """What the first block of an event continues: as in `_Span`."""

    seed: int
    above: int | None
    tail: bytes
    blocks: tuple[EngineHash, ...]


_Chain = int | _Joint | _Span | None
"""What a stored block is: a routing block (its key), less than one, anything else, unknown (an orphan)."""


class _Pool:
    """Copies of blocks in one tier, by one attention group."""

    __slots__ = ("chains", "copies", "limit", "tier")

    def __init__(self, tier: str, limit: int) -> None:
        self.tier = tier
        self.limit = limit
        self.chains: dict[EngineHash, _Chain] = {}
        """Blocks that are there, in the order in which they came."""
        self.copies: dict[EngineHash, int] = {}
        """Copies beyond the first."""

    def count(self, block: EngineHash) -> None:
        """One more copy (the first is counted by its chain)."""
        if block in self.chains:
            self.copies[block] = self.copies.get(block, 0) + 1

    def put(self, blocks: Sequence[EngineHash], chains: Sequence[_Chain]) -> None:
        """One more copy of each."""
        known = self.chains
        before = len(known)
        if known.keys().isdisjoint(blocks):
            known.update(zip(blocks, chains, strict=True))
            if len(known) == before + len(blocks):
                return
            for block in blocks:
                known.pop(block, None)  # some are named twice
        for block, chain in zip(blocks, chains, strict=True):
            self.count(block)
            known[block] = chain


class _Orphans(NamedTuple):
    """A stored event that waits for its parent."""

    pool: _Pool
    event: BlockStored


class Source:
    """What the events of one engine (one rank of it) said so far."""

    def __init__(
        self,
        model: str,
        served: Sequence[str],
        block_tokens: int,
        count: Counters,
        *,
        max_device_blocks: int,
        max_lower_tier_blocks: int,
        max_orphan_blocks: int,
    ) -> None:
        self.model = model
        self.served = served
        """Names that requests may ask for. An adapter among them is a model of its own to prompts' keys."""
        self.block_tokens = block_tokens
        self.orphan_blocks = 0
        self._count = count
        self._limits = (max_device_blocks, max_lower_tier_blocks, max_orphan_blocks)
        self._pools: dict[tuple[str, int], _Pool] = {}
        self._other_groups: set[int] = set()
        """Groups that are not of full attention."""
        self._shared: dict[EngineHash, list[_Part | _Joint]] = {}
        """By engine block: routing blocks that it has a part in and that its own record does not name."""
        self._orphans: dict[EngineHash, list[_Orphans]] = {}
        """By the parent they wait for, the oldest first."""
        self._adapters: dict[str, dict[EngineHash, None]] = {}
        """Blocks of each served adapter, and some that are gone already."""

    def apply(self, events: Sequence[KVEvent]) -> list[Change]:
        """Take the events of one batch, in order; the changes they make, in order."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(event, changes)
            elif isinstance(event, BlockRemoved):
                self._removed(event, changes)
            else:
                self._cleared(changes)
        return changes

    def clear(self) -> None:
        """Forget all blocks."""
        self._pools.clear()
        self._other_groups.clear()
        self._shared.clear()
        self._orphans.clear()
        self._adapters.clear()
        self.orphan_blocks = 0

    def serve(self, names: Sequence[str]) -> list[Change]:
        """These are the names that requests may ask for from now on.

        What was stored for an adapter that is no longer among them counts for nothing: it may come back with
        other weights. The engine may well have the blocks still, so what they are stays known: it says when
        they are evicted, and if it stores them anew they are there.
        """
        changes: list[Change] = []
        for adapter in [adapter for adapter in self._adapters if adapter not in names]:
            blocks = self._adapters.pop(adapter)
            for pool in self._pools.values():
                here = [block for block in blocks if block in pool.chains]
                keys = [key for block in here for key in self._keys(pool, block)]
                if keys:
                    changes.append(KeysRemoved(pool.tier, keys))
        self.served = names
        return changes

    def drop_orphans(self) -> None:
        """Give up the blocks whose parent has not come."""
        while self._orphans:
            self._drop_oldest_orphans()

    # --- stored ---

    def _stored(self, event: BlockStored, changes: list[Change]) -> None:
        pool = self._pool(event, changes)
        if pool is not None:
            self._note_adapter(event)
        if pool is None:
            self._count.skipped_events += 1
        elif event.block_size <= 0 or len(event.token_ids) != len(event.block_hashes) * event.block_size:
            self._stored_without_tokens(pool, event, changes)
        else:
            start = self._start(event)
            if start is None:
                self._keep_orphan(pool, event)
                return
            extras = _extras(event)
            size, width = event.block_size, self.block_tokens
            if extras is not None:
                self._stored_uneven(pool, event, start, extras, changes)
            elif size == width and not start.tail:
                self._stored_equal(pool, event, start, changes)
            elif size < width and not width % size and len(start.tail) == 4 * size * len(start.blocks):
                self._stored_smaller(pool, event, start, changes)
            else:
                self._stored_uneven(pool, event, start, None, changes)
            if self._orphans:
                self._adopt(event, changes)
        while pool is not None and len(pool.chains) > pool.limit:
            self._drop_oldest(pool, changes)

    def _pool(self, event: BlockStored, changes: list[Change]) -> _Pool | None:
        """Where this event counts; None if it proves nothing (or names one tier or group too many)."""
        group = event.group_idx or 0
        kind = event.kv_cache_spec_kind
        if kind is not None and kind not in FULL_ATTENTION:
            if len(self._other_groups) < MAX_POOLS:
                self._other_groups.add(group)
            return None
        if group in self._other_groups:
            return None
        tier = _tier(event.medium)
        pool = self._pools.get((tier, group))
        if pool is None and len(self._pools) < MAX_POOLS:
            for other in self._pools.values():
                if other.tier == tier:
                    # Another full-attention group: what the first one holds is of no use without it.
                    keys = [key for block in other.chains for key in self._keys(other, block)]
                    changes.append(KeysRemoved(tier, keys))
            pool = _Pool(tier, self._limits[0] if tier == DEVICE else self._limits[1])
            self._pools[(tier, group)] = pool
        return pool

    def _start(self, event: BlockStored) -> _Start | None:
        """What the event's first block continues; None if that is not known."""
        parent = event.parent_block_hash
        if parent is None:
            return _Start(self._root(event), None, b"", ())
        chain = self._known(parent)
        return None if chain is None else _after(chain, parent)

    def _root(self, event: BlockStored) -> int:
        salt = event.cache_salt or _salt(event) or ""
        adapter = _adapter(event)
        if adapter in self.served:
            return root_key(adapter, salt=salt)
        return root_key(self.model, adapter=adapter, salt=salt)

    def _note_adapter(self, event: BlockStored) -> None:
        """Remember whose blocks these are, if they are an adapter's that requests may ask for."""
        adapter = _adapter(event)
        if not adapter or adapter not in self.served:
            return
        noted = self._adapters.setdefault(adapter, {})
        if len(noted) > 2 * sum(len(pool.chains) for pool in self._pools.values()):
            for block in [block for block in noted if self._known(block) is None]:
                del noted[block]
        noted.update(dict.fromkeys(event.block_hashes))

    def _known(self, block: EngineHash) -> _Chain:
        for pool in self._pools.values():
            chain = pool.chains.get(block)
            if chain is not None:
                return chain
        return None

    def _stored_equal(self, pool: _Pool, event: BlockStored, start: _Start, changes: list[Change]) -> None:
        """The common case: engine blocks are routing blocks."""
        keys = extend_keys(start.seed, event.token_ids, event.block_size)
        pool.put(event.block_hashes, keys)
        above = start.above
        if self._alone(pool):
            # Said again even if known: it heals an index that dropped a block on other evidence.
            changes.append(KeysAdded(pool.tier, above, keys))
            return
        for block, key in zip(event.block_hashes, keys, strict=True):
            if self._present(pool.tier, block):
                changes.append(KeysAdded(pool.tier, above, [key]))
            above = key

    def _stored_smaller(self, pool: _Pool, event: BlockStored, start: _Start, changes: list[Change]) -> None:
        """A number of engine blocks make one routing block."""
        hashes, joints = event.block_hashes, self._joints(event, start)
        records = [joint for joint in joints for _ in joint.blocks][len(start.blocks) :]
        # The usual case: nothing was known of these blocks, so they can only be in these routing blocks.
        fresh = len(self._pools) == 1 and pool.chains.keys().isdisjoint(hashes)
        fresh = fresh and not any(block in self._shared for block in hashes)
        if fresh:
            pool.put(hashes, records)
        else:
            for block, joint in zip(hashes, records, strict=True):
                chain = self._known(block)
                pool.count(block)
                pool.chains[block] = joint if chain is None else chain
                self._rejoin(block, joint)
        for block in start.blocks:
            self._rejoin(block, joints[0])
        if not fresh:
            for block in hashes:
                self._appeared(pool, block, changes)
            return
        first = 0 if all(block in pool.chains for block in start.blocks) else 1
        keys = [joint.key for joint in joints[first:] if joint.key is not None]
        if keys:
            changes.append(KeysAdded(pool.tier, joints[first].above, keys))

    def _joints(self, event: BlockStored, start: _Start) -> list[_Joint]:
        """The routing blocks that the event's blocks make with those before them; the last may lack some."""
        width, ratio = 4 * self.block_tokens, self.block_tokens // event.block_size
        packed = start.tail + pack_tokens(event.token_ids)
        blocks = (*start.blocks, *event.block_hashes)
        keys: list[int | None] = [*extend_packed(start.seed, packed, self.block_tokens), None]
        seed, above = start.seed, start.above
        joints = []
        for i in range(-(-len(blocks) // ratio)):
            key, part = keys[i], packed[i * width : (i + 1) * width]
            joints.append(_Joint(key, above, blocks[i * ratio : (i + 1) * ratio], seed, part))
            if key is not None:
                seed = above = key
        return joints

    def _rejoin(self, block: EngineHash, joint: _Joint) -> None:
        """`block` is in `joint`, too: its record, if that is less of the same, or one more beside it."""
        absent = True
        for pool in self._pools.values():
            chain = pool.chains.get(block)
            if chain is None:
                continue
            absent = False
            if isinstance(chain, _Joint) and chain.key is None:
                if joint.key is not None or len(joint.blocks) > len(chain.blocks):
                    pool.chains[block] = joint
            elif joint.key is not None and not (isinstance(chain, _Joint) and _same(chain, joint)):
                self._share(block, joint)
        if absent and joint.key is not None:
            # It may come back while the others are there.
            self._share(block, joint)

    def _stored_uneven(
        self,
        pool: _Pool,
        event: BlockStored,
        start: _Start,
        extras: list[bytes] | None,
        changes: list[Change],
    ) -> None:
        """Any sizes, and blocks that are more than their tokens."""
        chains = self._chains(event, start, extras)
        for block, (chain, parts) in zip(event.block_hashes, chains, strict=True):
            pool.count(block)
            pool.chains[block] = chain
            self._appeared(pool, block, changes, parts)

    def _stored_without_tokens(self, pool: _Pool, event: BlockStored, changes: list[Change]) -> None:
        for block in event.block_hashes:
            chain = self._known(block)
            if chain is None:
                self._count.skipped_events += 1
                continue
            pool.count(block)
            pool.chains[block] = chain
            self._appeared(pool, block, changes)

    def _chains(
        self, event: BlockStored, start: _Start, extras: list[bytes] | None
    ) -> Iterator[tuple[int | _Span, Sequence[_Part]]]:
        """Each block of the event with the routing blocks that end in it; for any sizes."""
        size, width = 4 * event.block_size, self.block_tokens
        seed, above, tail, blocks = start
        packed = pack_tokens(event.token_ids)
        for i, block in enumerate(event.block_hashes):
            if extras is not None and extras[i]:
                seed = xxh3_64_intdigest(extras[i], seed)
            tokens = tail + packed[i * size : (i + 1) * size]
            blocks = (*blocks, block)
            parts = []
            for key in extend_packed(seed, tokens, width):
                parts.append(_Part(key, above, blocks))
                seed = above = key
                blocks = (block,)
            tail = tokens[len(parts) * 4 * width :]
            if not tail:
                blocks = ()
            if not tail and len(parts) == 1 and len(parts[0].blocks) == 1:
                yield parts[0].key, parts
            else:
                yield _Span(seed, above, tail, blocks, tuple(parts)), parts

    def _appeared(
        self, pool: _Pool, block: EngineHash, changes: list[Change], ending: Sequence[_Part] = ()
    ) -> None:
        """`block` is in `pool`: say which of its routing blocks are complete in that tier now.

        `ending` are those that end in it, if they are not known yet.
        """
        for part in ending:
            if len(part.blocks) > 1:
                for each in part.blocks:
                    self._share(each, part)
        above = ending[0].above if ending else None
        chain = pool.chains[block]
        if isinstance(chain, int) and self._present(pool.tier, block):
            changes.append(KeysAdded(pool.tier, above, [chain]) if ending else KeysCopied(pool.tier, [chain]))
        for whole in self._parts(pool, block):
            if all(self._present(pool.tier, each) for each in whole.blocks):
                assert whole.key is not None
                changes.append(KeysAdded(pool.tier, whole.above, [whole.key]))

    def _parts(self, pool: _Pool, block: EngineHash) -> list[_Part | _Joint]:
        """Routing blocks that `block` has a part in."""
        chain = pool.chains[block]
        shared = self._shared.get(block, ())
        if isinstance(chain, _Joint):
            return [*([chain] if chain.key is not None else ()), *shared]
        if isinstance(chain, _Span):
            return [*(part for part in chain.parts if len(part.blocks) == 1), *shared]
        return [*shared]

    def _present(self, tier: str, block: EngineHash) -> bool:
        """Whether all pools of `tier` hold it."""
        return all(block in pool.chains for pool in self._pools.values() if pool.tier == tier)

    def _alone(self, pool: _Pool) -> bool:
        """Whether no other pool is of its tier."""
        return len(self._pools) == 1 or sum(p.tier == pool.tier for p in self._pools.values()) == 1

    def _share(self, block: EngineHash, part: _Part | _Joint) -> None:
        shared = self._shared.setdefault(block, [])
        if not any(_same(each, part) for each in shared):
            shared.append(part)

    # --- orphans ---

    def _keep_orphan(self, pool: _Pool, event: BlockStored) -> None:
        parent = event.parent_block_hash
        assert parent is not None
        for block in event.block_hashes:
            pool.count(block)
            pool.chains.setdefault(block, None)
        self._orphans.setdefault(parent, []).append(_Orphans(pool, event))
        self.orphan_blocks += len(event.block_hashes)
        while self.orphan_blocks > self._limits[2]:
            self._drop_oldest_orphans()

    def _drop_oldest_orphans(self) -> None:
        oldest = next(iter(self._orphans))
        for pool, event in self._orphans.pop(oldest):
            self.orphan_blocks -= len(event.block_hashes)
            self._count.orphans_dropped += len(event.block_hashes)
            for block in event.block_hashes:
                if block in pool.chains and pool.chains[block] is None:
                    del pool.chains[block]
                    pool.copies.pop(block, None)

    def _adopt(self, event: BlockStored, changes: list[Change]) -> None:
        """The blocks of `event` are known now: so are those that waited for them, and so on."""
        known: dict[EngineHash, _Start] = {}
        parents = list(event.block_hashes)
        while parents and self._orphans:
            parent = parents.pop()
            waiting = self._orphans.pop(parent, None)
            if waiting is None:
                continue
            start = known.get(parent)
            if start is None:
                chain = self._known(parent)
                assert chain is not None
                start = _after(chain, parent)
            for pool, orphan in waiting:
                self.orphan_blocks -= len(orphan.block_hashes)
                chains = self._chains(orphan, start, _extras(orphan))
                for block, (chain, parts) in zip(orphan.block_hashes, chains, strict=True):
                    known[block] = _after(chain, block)
                    # One that was removed meanwhile still says what its children are.
                    if block in pool.chains and pool.chains[block] is None:
                        pool.chains[block] = chain
                        self._appeared(pool, block, changes, parts)
                parents.extend(orphan.block_hashes)

    # --- removed ---

    def _removed(self, event: BlockRemoved, changes: list[Change]) -> None:
        pool = self._pools.get((_tier(event.medium), event.group_idx or 0))
        if pool is None:
            self._count.skipped_events += 1
            return
        # Engines remove block by block: what follows one another is one change.
        last = changes[-1] if changes else None
        together = isinstance(last, KeysRemoved) and last.tier == pool.tier
        keys = last.keys if isinstance(last, KeysRemoved) and together else []
        for block in event.block_hashes:
            more = pool.copies.get(block, 0)
            if more > 1:
                pool.copies[block] = more - 1
            elif more:
                del pool.copies[block]
            elif block in pool.chains:
                keys.extend(self._lost(pool, block))
            else:
                self._count.skipped_events += 1
        if keys and not together:
            changes.append(KeysRemoved(pool.tier, keys))

    def _lost(self, pool: _Pool, block: EngineHash) -> list[int]:
        """The last copy left `pool`: routing blocks that are no longer complete there."""
        chain = pool.chains[block]
        if isinstance(chain, int) and block not in self._shared:
            del pool.chains[block]
            return [chain]
        keys, parts = self._keys(pool, block), self._parts(pool, block)
        del pool.chains[block]
        for part in parts:
            if len(part.blocks) > 1:
                if self._any_present(part):
                    self._share(block, part)
                else:
                    self._unshare(part)
        return keys

    def _any_present(self, part: _Part | _Joint) -> bool:
        """Whether any pool holds any of its blocks."""
        return any(each in pool.chains for each in part.blocks for pool in self._pools.values())

    def _keys(self, pool: _Pool, block: EngineHash) -> list[int]:
        """Routing blocks that `block` is or has a part in."""
        chain = pool.chains[block]
        own = [chain] if isinstance(chain, int) else []
        return own + [part.key for part in self._parts(pool, block) if part.key is not None]

    def _unshare(self, part: _Part | _Joint) -> None:
        for each in part.blocks:
            others = [other for other in self._shared.pop(each, ()) if not _same(other, part)]
            if others:
                self._shared[each] = others

    def _drop_oldest(self, pool: _Pool, changes: list[Change]) -> None:
        """The pool is over its limit (a tier that reports no removals): its oldest sixteenth goes."""
        keys: list[int] = []
        for block in list(islice(pool.chains, pool.limit // 16 + 1)):
            pool.copies.pop(block, None)
            keys.extend(self._lost(pool, block))
        changes.append(KeysRemoved(pool.tier, keys))

    def _cleared(self, changes: list[Change]) -> None:
        """The device pools are empty. Lower tiers live by their own events."""
        self.drop_orphans()
        for name in [name for name, pool in self._pools.items() if pool.tier == DEVICE]:
            del self._pools[name]
        parts = [part for shared in self._shared.values() for part in shared]
        for pool in self._pools.values():
            # Joints of lower tiers: what the device had of them may come back.
            records = {id(chain): chain for chain in pool.chains.values() if isinstance(chain, _Joint)}
            for joint in records.values():
                for block in joint.blocks if joint.key is not None else ():
                    if self._known(block) is None:
                        self._share(block, joint)
        for part in parts:
            if not self._any_present(part):
                self._unshare(part)
        changes.append(TierCleared(DEVICE))


def _after(chain: int | _Joint | _Span, block: EngineHash) -> _Start:
    """What comes behind `block`, which is `chain`, continues."""
    if isinstance(chain, int):
        return _Start(chain, chain, b"", ())
    if isinstance(chain, _Span):
        return _Start(chain.seed, chain.above, chain.tail, chain.blocks)
    blocks = chain.blocks[: chain.blocks.index(block) + 1]
    if chain.key is not None and len(blocks) == len(chain.blocks):
        return _Start(chain.key, chain.key, b"", ())
    width = len(chain.packed) // len(chain.blocks)
    return _Start(chain.seed, chain.above, chain.packed[: width * len(blocks)], blocks)


def _same(one: _Part | _Joint, other: _Part | _Joint) -> bool:
    """Whether they are the same routing block over the same engine blocks."""
    return one.key == other.key and one.blocks == other.blocks


def _tier(medium: str | None) -> str:
    return medium.lower() if medium else DEVICE


def _adapter(event: BlockStored) -> str:
    """The adapter that it was computed with, by the engine's name for it; empty for none."""
    return event.lora_name or ("" if event.lora_id is None else f"lora-{event.lora_id}")


def _salt(event: BlockStored) -> str | None:
    """The cache salt among the extra keys of a prompt's first block, where vLLM puts it last."""
    first = _own_extras(event, 0)
    return first[-1] if first and isinstance(first[-1], str) else None


def _own_extras(event: BlockStored, i: int) -> list[object]:
    """Extra keys of one block without the adapter's name, which all blocks repeat."""
    extras = event.extra_keys[i] if event.extra_keys and i < len(event.extra_keys) else None
    return [extra for extra in extras or () if extra != event.lora_name]


def _extras(event: BlockStored) -> list[bytes] | None:
    """What else goes into each block's key (images, say), as bytes; None if nothing does, as for all text."""
    if not event.extra_keys:
        return None
    own = [_own_extras(event, i) for i in range(len(event.block_hashes))]
    if event.parent_block_hash is None and event.cache_salt is None and _salt(event) is not None:
        own[0] = own[0][:-1]
    return [msgspec.json.encode(extras) if extras else b"" for extras in own] if any(own) else None

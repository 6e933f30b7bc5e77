"""From one engine's KV events to changes in routing keys.

The engine names its blocks by hashes that mean nothing to us. A stored block comes with its token ids and
its parent's hash, so its routing key follows from the parent's: the map from engine hash to key is all that
is needed, and events without tokens (another tier's copy of a known block) are resolved through it.

Engine blocks and routing blocks may differ in size, in any ratio. A routing block is there if every engine
block that overlaps it is. Most of this file is for that; with equal sizes a block is one dictionary entry.

What counts as there, per tier:
- each (tier, attention group) is a *pool* that counts copies of a hash; engines store a hash more than
  once and remove each copy. Counts never go below zero.
- only groups of full attention prove residency. If an engine has several, all must hold a block.
- a block whose parent is unknown (an *orphan*) is kept until the parent comes, within a bound.

Knows nothing of sequence numbers, endpoints or the index. In recorded logs its output stands for the events.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from sumibi.core.keys import extend_keys, root_key
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


class _Span(NamedTuple):
    """An engine block that is not just one routing block: what ends in it, what the next one continues."""

    seed: int
    """Key of the last routing block that ended (the root key if none did)."""
    above: int | None
    """The same, None if none did."""
    tail: tuple[int, ...]
    """Tokens since then."""
    blocks: tuple[EngineHash, ...]
    """Engine blocks that hold them."""
    parts: tuple[_Part, ...]
    """Routing blocks that end in this engine block."""


_Chain = int | _Span | None
"""What a stored block is: a routing block (its key), a span, or unknown (an orphan)."""


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
        self._shared: dict[EngineHash, list[_Part]] = {}
        """Routing blocks that several engine blocks overlap, by each of those."""
        self._orphans: dict[EngineHash, list[_Orphans]] = {}
        """By the parent they wait for, the oldest first."""

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
        self.orphan_blocks = 0

    def drop_orphans(self) -> None:
        """Give up the blocks whose parent has not come."""
        while self._orphans:
            self._drop_oldest_orphans()

    # --- stored ---

    def _stored(self, event: BlockStored, changes: list[Change]) -> None:
        pool = self._pool(event, changes)
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
            if event.block_size == self.block_tokens and not start.tail and extras is None:
                self._stored_equal(pool, event, start, changes)
            else:
                chains = self._chains(event, start, extras)
                for block, (chain, parts) in zip(event.block_hashes, chains, strict=True):
                    pool.count(block)
                    pool.chains[block] = chain
                    self._appeared(pool, block, parts, changes)
            if self._orphans:
                self._adopt(event, changes)
        if pool is not None and len(pool.chains) > pool.limit:
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

    def _start(self, event: BlockStored) -> _Span | None:
        """What the event's first block continues; None if that is not known."""
        parent = event.parent_block_hash
        if parent is None:
            return _Span(self._root(event), None, (), (), ())
        chain = self._known(parent)
        return _Span(chain, chain, (), (), ()) if isinstance(chain, int) else chain

    def _root(self, event: BlockStored) -> int:
        salt = event.cache_salt or _salt(event) or ""
        adapter = event.lora_name or ("" if event.lora_id is None else f"lora-{event.lora_id}")
        if adapter in self.served:
            return root_key(adapter, salt=salt)
        return root_key(self.model, adapter=adapter, salt=salt)

    def _known(self, block: EngineHash) -> _Chain:
        for pool in self._pools.values():
            chain = pool.chains.get(block)
            if chain is not None:
                return chain
        return None

    def _stored_equal(self, pool: _Pool, event: BlockStored, start: _Span, changes: list[Change]) -> None:
        """The common case: engine blocks are routing blocks."""
        keys = extend_keys(start.seed, event.token_ids, event.block_size)
        for block, key in zip(event.block_hashes, keys, strict=True):
            pool.count(block)
            pool.chains[block] = key
        above = start.above
        if sum(other.tier == pool.tier for other in self._pools.values()) == 1:
            # Said again even if known: it heals an index that dropped a block on other evidence.
            changes.append(KeysAdded(pool.tier, above, keys))
            return
        for block, key in zip(event.block_hashes, keys, strict=True):
            self._appeared(pool, block, (_Part(key, above, (block,)),), changes)
            above = key

    def _stored_without_tokens(self, pool: _Pool, event: BlockStored, changes: list[Change]) -> None:
        for block in event.block_hashes:
            chain = self._known(block)
            if chain is None:
                self._count.skipped_events += 1
                continue
            pool.count(block)
            pool.chains[block] = chain
            if isinstance(chain, _Span):
                self._appeared(pool, block, chain.parts, changes)
            elif self._present(pool.tier, block):
                changes.append(KeysCopied(pool.tier, [chain]))

    def _chains(
        self, event: BlockStored, start: _Span, extras: list[bytes] | None
    ) -> Iterable[tuple[int | _Span, Sequence[_Part]]]:
        """Each block of the event as a chain, with the routing blocks that end in it; for any sizes."""
        size, width = event.block_size, self.block_tokens
        seed, above, tail, blocks, _ = start
        for i, block in enumerate(event.block_hashes):
            if extras is not None and extras[i]:
                seed = xxh3_64_intdigest(extras[i], seed)
            tokens = (*tail, *event.token_ids[i * size : (i + 1) * size])
            blocks = (*blocks, block)
            parts = []
            for key in extend_keys(seed, tokens, width):
                parts.append(_Part(key, above, blocks))
                seed = above = key
                blocks = (block,)
            tail = tokens[len(parts) * width :]
            if not tail:
                blocks = ()
            if not tail and len(parts) == 1 and len(parts[0].blocks) == 1:
                yield parts[0].key, parts
            else:
                yield _Span(seed, above, tail, blocks, tuple(parts)), parts

    def _appeared(
        self, pool: _Pool, block: EngineHash, parts: Sequence[_Part], changes: list[Change]
    ) -> None:
        """`block`, in which `parts` end, is in `pool`: say what is complete in that tier now."""
        for part in parts:
            if len(part.blocks) > 1:
                for each in part.blocks:
                    shared = self._shared.setdefault(each, [])
                    if part not in shared:
                        shared.append(part)
        waiting = [part for part in self._shared.get(block, ()) if part not in parts]
        for part in (*parts, *waiting):
            if all(self._present(pool.tier, each) for each in part.blocks):
                changes.append(KeysAdded(pool.tier, part.above, [part.key]))

    def _present(self, tier: str, block: EngineHash) -> bool:
        """Whether all pools of `tier` hold it."""
        return all(block in pool.chains for pool in self._pools.values() if pool.tier == tier)

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
        known: dict[EngineHash, _Span] = {}
        parents = list(event.block_hashes)
        while parents and self._orphans:
            parent = parents.pop()
            waiting = self._orphans.pop(parent, None)
            if waiting is None:
                continue
            start = known.get(parent)
            if start is None:
                chain = self._known(parent)
                start = _Span(chain, chain, (), (), ()) if isinstance(chain, int) else chain
                assert start is not None
            for pool, orphan in waiting:
                self.orphan_blocks -= len(orphan.block_hashes)
                chains = self._chains(orphan, start, _extras(orphan))
                for block, (chain, parts) in zip(orphan.block_hashes, chains, strict=True):
                    known[block] = _Span(chain, chain, (), (), ()) if isinstance(chain, int) else chain
                    # One that was removed meanwhile still says what its children are.
                    if block in pool.chains and pool.chains[block] is None:
                        pool.chains[block] = chain
                        self._appeared(pool, block, parts, changes)
                parents.extend(orphan.block_hashes)

    # --- removed ---

    def _removed(self, event: BlockRemoved, changes: list[Change]) -> None:
        pool = self._pools.get((_tier(event.medium), event.group_idx or 0))
        if pool is None:
            self._count.skipped_events += 1
            return
        keys: list[int] = []
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
        if keys:
            changes.append(KeysRemoved(pool.tier, keys))

    def _lost(self, pool: _Pool, block: EngineHash) -> list[int]:
        """The last copy left `pool`: routing blocks that are no longer complete there."""
        keys = self._keys(pool, block)
        del pool.chains[block]
        for part in list(self._shared.get(block, ())):
            if not any(each in p.chains for each in part.blocks for p in self._pools.values()):
                self._unshare(part)
        return keys

    def _keys(self, pool: _Pool, block: EngineHash) -> list[int]:
        """Routing blocks that `block` has a part in."""
        chain = pool.chains[block]
        if isinstance(chain, int):
            return [chain]
        keys = [part.key for part in self._shared.get(block, ())]
        if chain is not None:
            keys += [part.key for part in chain.parts if len(part.blocks) == 1]
        return keys

    def _unshare(self, part: _Part) -> None:
        for each in part.blocks:
            others = self._shared[each]
            others.remove(part)
            if not others:
                del self._shared[each]

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
        for part in {part for shared in self._shared.values() for part in shared}:
            if not any(each in p.chains for each in part.blocks for p in self._pools.values()):
                self._unshare(part)
        changes.append(TierCleared(DEVICE))


def _tier(medium: str | None) -> str:
    return medium.lower() if medium else DEVICE


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

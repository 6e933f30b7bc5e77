"""From one engine's KV events to changes in routing keys.

The engine names its blocks by hashes that mean nothing to us. A stored block comes with its token ids and
its parent's hash, so its routing key follows from the parent's: the map from engine hash to key is all that
is needed, and events without tokens (another tier's copy of a known block) are resolved through it.

What a block is in routing keys is in `kvblocks`, what is where in `kvpools`. Only groups of full attention
prove residency. A block whose parent is unknown (an *orphan*) is kept until the parent comes, within a bound.

Knows nothing of sequence numbers, endpoints or the index. In recorded logs its output stands for the events.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from sumibi.core.keys import extend_keys, root_key
from sumibi.core.kvevents import BlockRemoved, BlockStored, EngineHash, KVEvent
from sumibi.routing.counters import Counters
from sumibi.routing.events import Change, KeysAdded, KeysRemoved, TierCleared
from sumibi.routing.kvblocks import (
    DEVICE,
    Start,
    adapter_of,
    after,
    chains_of,
    extras_of,
    joints_of,
    salt_of,
    tier_of,
)
from sumibi.routing.kvpools import Pool, Pools

FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache whose blocks spare the prefill; a windowed or recurrent state does not."""


MAX_POOLS: Final = 32
"""Tiers and groups of one engine that are told apart; an engine has two or three."""


class _Orphans(NamedTuple):
    """A stored event that waits for its parent."""

    pool: Pool
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
        self._pools = Pools()
        self._other_groups: set[int] = set()
        """Groups that are not of full attention."""
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
            for pool in self._pools.by_name.values():
                here = [block for block in blocks if block in pool.chains]
                keys = [key for block in here for key in self._pools.keys(pool, block)]
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
            extras = extras_of(event)
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

    def _pool(self, event: BlockStored, changes: list[Change]) -> Pool | None:
        """Where this event counts; None if it proves nothing (or names one tier or group too many)."""
        group = event.group_idx or 0
        kind = event.kv_cache_spec_kind
        if kind is not None and kind not in FULL_ATTENTION:
            if len(self._other_groups) < MAX_POOLS:
                self._other_groups.add(group)
            return None
        if group in self._other_groups:
            return None
        tier = tier_of(event.medium)
        pool = self._pools.by_name.get((tier, group))
        if pool is None and len(self._pools.by_name) < MAX_POOLS:
            for other in self._pools.by_name.values():
                if other.tier == tier:
                    # Another full-attention group: what the first one holds is of no use without it.
                    keys = [key for block in other.chains for key in self._pools.keys(other, block)]
                    changes.append(KeysRemoved(tier, keys))
            pool = Pool(tier, self._limits[0] if tier == DEVICE else self._limits[1])
            self._pools.by_name[(tier, group)] = pool
        return pool

    def _start(self, event: BlockStored) -> Start | None:
        """What the event's first block continues; None if that is not known."""
        parent = event.parent_block_hash
        if parent is None:
            return Start(self._root(event), None, b"", ())
        chain = self._pools.known(parent)
        return None if chain is None else after(chain, parent)

    def _root(self, event: BlockStored) -> int:
        salt = event.cache_salt or salt_of(event) or ""
        adapter = adapter_of(event)
        if adapter in self.served:
            return root_key(adapter, salt=salt)
        return root_key(self.model, adapter=adapter, salt=salt)

    def _note_adapter(self, event: BlockStored) -> None:
        """Remember whose blocks these are, if they are an adapter's that requests may ask for."""
        adapter = adapter_of(event)
        if not adapter or adapter not in self.served:
            return
        noted = self._adapters.setdefault(adapter, {})
        if len(noted) > 2 * sum(len(pool.chains) for pool in self._pools.by_name.values()):
            for block in [block for block in noted if self._pools.known(block) is None]:
                del noted[block]
        noted.update(dict.fromkeys(event.block_hashes))

    def _stored_equal(self, pool: Pool, event: BlockStored, start: Start, changes: list[Change]) -> None:
        """The common case: engine blocks are routing blocks."""
        keys = extend_keys(start.seed, event.token_ids, event.block_size).tolist()
        pool.put(event.block_hashes, keys)
        above = start.above
        if self._pools.alone(pool):
            # Said again even if known: it heals an index that dropped a block on other evidence.
            changes.append(KeysAdded(pool.tier, above, keys))
            return
        for block, key in zip(event.block_hashes, keys, strict=True):
            if self._pools.present(pool.tier, block):
                changes.append(KeysAdded(pool.tier, above, [key]))
            above = key

    def _stored_smaller(self, pool: Pool, event: BlockStored, start: Start, changes: list[Change]) -> None:
        """A number of engine blocks make one routing block."""
        hashes, joints = event.block_hashes, joints_of(event, start, self.block_tokens)
        records = [joint for joint in joints for _ in joint.blocks][len(start.blocks) :]
        # The usual case, as a shortcut.
        fresh = self._pools.fresh(pool, hashes)
        if fresh:
            pool.put(hashes, records)
        else:
            for block, joint in zip(hashes, records, strict=True):
                chain = self._pools.known(block)
                pool.count(block)
                pool.chains[block] = joint if chain is None else chain
                self._pools.rejoin(block, joint)
        for block in start.blocks:
            self._pools.rejoin(block, joints[0])
        if not fresh:
            for block in hashes:
                self._pools.appeared(pool, block, changes)
            return
        first = 0 if all(block in pool.chains for block in start.blocks) else 1
        keys = [joint.key for joint in joints[first:] if joint.key is not None]
        if keys:
            changes.append(KeysAdded(pool.tier, joints[first].above, keys))

    def _stored_uneven(
        self,
        pool: Pool,
        event: BlockStored,
        start: Start,
        extras: list[bytes] | None,
        changes: list[Change],
    ) -> None:
        """Any sizes, and blocks that are more than their tokens."""
        chains = chains_of(event, start, extras, self.block_tokens)
        for block, (chain, parts) in zip(event.block_hashes, chains, strict=True):
            pool.count(block)
            pool.chains[block] = chain
            self._pools.appeared(pool, block, changes, parts)

    def _stored_without_tokens(self, pool: Pool, event: BlockStored, changes: list[Change]) -> None:
        for block in event.block_hashes:
            chain = self._pools.known(block)
            if chain is None:
                self._count.skipped_events += 1
                continue
            pool.count(block)
            pool.chains[block] = chain
            self._pools.appeared(pool, block, changes)

    # --- orphans ---

    def _keep_orphan(self, pool: Pool, event: BlockStored) -> None:
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
        known: dict[EngineHash, Start] = {}
        parents = list(event.block_hashes)
        while parents and self._orphans:
            parent = parents.pop()
            waiting = self._orphans.pop(parent, None)
            if waiting is None:
                continue
            start = known.get(parent)
            if start is None:
                chain = self._pools.known(parent)
                assert chain is not None
                start = after(chain, parent)
            for pool, orphan in waiting:
                self.orphan_blocks -= len(orphan.block_hashes)
                chains = chains_of(orphan, start, extras_of(orphan), self.block_tokens)
                for block, (chain, parts) in zip(orphan.block_hashes, chains, strict=True):
                    known[block] = after(chain, block)
                    # One that was removed meanwhile still says what its children are.
                    if block in pool.chains and pool.chains[block] is None:
                        pool.chains[block] = chain
                        self._pools.appeared(pool, block, changes, parts)
                parents.extend(orphan.block_hashes)

    # --- removed ---

    def _removed(self, event: BlockRemoved, changes: list[Change]) -> None:
        pool = self._pools.by_name.get((tier_of(event.medium), event.group_idx or 0))
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
                keys.extend(self._pools.lost(pool, block))
            else:
                self._count.skipped_events += 1
        if keys and not together:
            changes.append(KeysRemoved(pool.tier, keys))

    def _drop_oldest(self, pool: Pool, changes: list[Change]) -> None:
        """The pool is over its limit (a tier that reports no removals): its oldest sixteenth goes."""
        keys: list[int] = []
        for block in list(islice(pool.chains, pool.limit // 16 + 1)):
            pool.copies.pop(block, None)
            keys.extend(self._pools.lost(pool, block))
        changes.append(KeysRemoved(pool.tier, keys))

    def _cleared(self, changes: list[Change]) -> None:
        """The device pools are empty. Lower tiers live by their own events."""
        self.drop_orphans()
        self._pools.clear_tier(DEVICE)
        changes.append(TierCleared(DEVICE))

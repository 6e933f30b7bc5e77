"""Which of an engine's blocks are where, and which routing blocks are complete there.

Each (tier, attention group) is a *pool* that counts copies of a hash: engines store a hash more than once and
remove each copy. Counts never go below zero. If a tier has several groups, all must hold a block.

Most of this file is for engine blocks and routing blocks of different sizes: a routing block comes with the
last of the engine blocks that it needs and goes with the first.
"""

from collections.abc import Sequence

from sumibi.core.kvevents import EngineHash
from sumibi.routing.events import Change, KeysAdded, KeysCopied
from sumibi.routing.kvblocks import Chain, Joint, Part, Span, same


class Pool:
    """Copies of blocks in one tier, by one attention group."""

    __slots__ = ("chains", "copies", "limit", "tier")

    def __init__(self, tier: str, limit: int) -> None:
        self.tier = tier
        self.limit = limit
        self.chains: dict[EngineHash, Chain] = {}
        """Blocks that are there, in the order in which they came."""
        self.copies: dict[EngineHash, int] = {}
        """Copies beyond the first."""

    def count(self, block: EngineHash) -> None:
        """One more copy (the first is counted by its chain)."""
        if block in self.chains:
            self.copies[block] = self.copies.get(block, 0) + 1

    def put(self, blocks: Sequence[EngineHash], chains: Sequence[Chain]) -> None:
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


class Pools:
    """All pools of one engine."""

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, int], Pool] = {}
        """By tier and group."""
        self._shared: dict[EngineHash, list[Part | Joint]] = {}
        """By engine block: routing blocks that it has a part in and that its own record does not name."""

    def clear(self) -> None:
        """Forget all blocks."""
        self.by_name.clear()
        self._shared.clear()

    def clear_tier(self, tier: str) -> None:
        """Its pools are empty."""
        for name in [name for name, pool in self.by_name.items() if pool.tier == tier]:
            del self.by_name[name]
        parts = [part for shared in self._shared.values() for part in shared]
        for pool in self.by_name.values():
            # Joints of other tiers: what this one had of them may come back.
            records = {id(chain): chain for chain in pool.chains.values() if isinstance(chain, Joint)}
            for joint in records.values():
                for block in joint.blocks if joint.key is not None else ():
                    if self.known(block) is None:
                        self._share(block, joint)
        for part in parts:
            if not self._any_present(part):
                self._unshare(part)

    # --- asked ---

    def fresh(self, pool: Pool, blocks: Sequence[EngineHash]) -> bool:
        """Whether nothing was known of these blocks, which come to `pool`: so they can only be in the routing
        blocks that they make now.
        """
        new = len(self.by_name) == 1 and pool.chains.keys().isdisjoint(blocks)
        return new and not any(block in self._shared for block in blocks)

    def known(self, block: EngineHash) -> Chain:
        """What it is, whichever pool has it; None if that is not known."""
        for pool in self.by_name.values():
            chain = pool.chains.get(block)
            if chain is not None:
                return chain
        return None

    def present(self, tier: str, block: EngineHash) -> bool:
        """Whether all pools of `tier` hold it."""
        return all(block in pool.chains for pool in self.by_name.values() if pool.tier == tier)

    def alone(self, pool: Pool) -> bool:
        """Whether no other pool is of its tier."""
        return len(self.by_name) == 1 or sum(p.tier == pool.tier for p in self.by_name.values()) == 1

    def _any_present(self, part: Part | Joint) -> bool:
        """Whether any pool holds any of its blocks."""
        return any(each in pool.chains for each in part.blocks for pool in self.by_name.values())

    def keys(self, pool: Pool, block: EngineHash) -> list[int]:
        """Routing blocks that `block` is or has a part in."""
        chain = pool.chains[block]
        own = [chain] if isinstance(chain, int) else []
        return own + [part.key for part in self._parts(pool, block) if part.key is not None]

    def _parts(self, pool: Pool, block: EngineHash) -> list[Part | Joint]:
        """Routing blocks that `block` has a part in."""
        chain = pool.chains[block]
        shared = self._shared.get(block, ())
        if isinstance(chain, Joint):
            return [*([chain] if chain.key is not None else ()), *shared]
        if isinstance(chain, Span):
            return [*(part for part in chain.parts if len(part.blocks) == 1), *shared]
        return [*shared]

    # --- changed ---

    def rejoin(self, block: EngineHash, joint: Joint) -> None:
        """`block` is in `joint`, too: its record, if that is less of the same, or one more beside it."""
        absent = True
        for pool in self.by_name.values():
            chain = pool.chains.get(block)
            if chain is None:
                continue
            absent = False
            if isinstance(chain, Joint) and chain.key is None:
                if joint.key is not None or len(joint.blocks) > len(chain.blocks):
                    pool.chains[block] = joint
            elif joint.key is not None and not (isinstance(chain, Joint) and same(chain, joint)):
                self._share(block, joint)
        if absent and joint.key is not None:
            # It may come back while the others are there.
            self._share(block, joint)

    def appeared(
        self, pool: Pool, block: EngineHash, changes: list[Change], ending: Sequence[Part] = ()
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
        if isinstance(chain, int) and self.present(pool.tier, block):
            changes.append(KeysAdded(pool.tier, above, [chain]) if ending else KeysCopied(pool.tier, [chain]))
        for whole in self._parts(pool, block):
            if all(self.present(pool.tier, each) for each in whole.blocks):
                assert whole.key is not None
                changes.append(KeysAdded(pool.tier, whole.above, [whole.key]))

    def lost(self, pool: Pool, block: EngineHash) -> list[int]:
        """The last copy left `pool`: routing blocks that are no longer complete there."""
        chain = pool.chains[block]
        if isinstance(chain, int) and block not in self._shared:
            del pool.chains[block]
            return [chain]
        keys, parts = self.keys(pool, block), self._parts(pool, block)
        del pool.chains[block]
        for part in parts:
            if len(part.blocks) > 1:
                if self._any_present(part):
                    self._share(block, part)
                else:
                    self._unshare(part)
        return keys

    def _share(self, block: EngineHash, part: Part | Joint) -> None:
        shared = self._shared.setdefault(block, [])
        if not any(same(each, part) for each in shared):
            shared.append(part)

    def _unshare(self, part: Part | Joint) -> None:
        for each in part.blocks:
            others = [other for other in self._shared.pop(each, ()) if not same(other, part)]
            if others:
                self._shared[each] = others

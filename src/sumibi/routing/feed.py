"""What KV events say of one endpoint's cache: batches put in order, turned into keys, kept in the index.

Joins `sequence` (which batches count), `source` (what they mean) and the index (who holds what). The device
is a holder in the index; every lower tier that reports is a holder of its own, but for stores, whose holder
all endpoints that read one have in common.
"""

from typing import Final

from sumibi.core.kvevents import EventBatch
from sumibi.routing.config import RouterConfig
from sumibi.routing.counters import Counters
from sumibi.routing.events import Change, KeysAdded, KeysCopied, KeysRemoved, TierCleared
from sumibi.routing.index import BlockIndex
from sumibi.routing.kvblocks import DEVICE
from sumibi.routing.lower import Store
from sumibi.routing.sequence import Sequence
from sumibi.routing.source import Source

LAG_START_S: Final = 1.0
LAG_BOUNDS_S = (0.1, 5.0)
"""Within these, how long after a prefill its blocks are expected to be announced is learnt."""


class Feed:
    """One endpoint's KV events and what is known from them."""

    __slots__ = ("_count", "_index", "device", "lag_s", "left_out", "sequence", "source", "stores", "tiers")

    def __init__(
        self,
        index: BlockIndex,
        config: RouterConfig,
        count: Counters,
        model: str,
        served: list[str],
        block_tokens: int,
    ) -> None:
        self._index = index
        self._count = count
        self.sequence = Sequence(config, count)
        self.source = Source(
            model,
            served,
            block_tokens,
            count,
            max_device_blocks=config.max_index_blocks,
            max_lower_tier_blocks=config.max_lower_tier_blocks,
            max_orphan_blocks=config.max_orphan_blocks,
        )
        self.device = index.new_holder()
        self.tiers = {DEVICE: self.device}
        """Holder of each tier that was told of, but for stores."""
        self.stores: dict[str, Store] = {}
        """By name: what it says of these is not about it alone."""
        self.left_out = 0
        """Blocks that the index had no room for."""
        self.lag_s = LAG_START_S
        """How long after a prefill its blocks may be announced."""

    @property
    def gap(self) -> str:
        """Why the index may differ from the cache. Empty: it does not, up to the events' delay."""
        if self.left_out:
            return f"the index has no room for {self.left_out} of its blocks"
        return self.sequence.gap

    def read(self, batch: EventBatch) -> list[Change]:
        """What a batch changes. Nothing is changed yet."""
        self._count.batches += 1
        self._count.skipped_events += batch.skipped
        return self.source.apply(batch.events)

    def change(self, changes: list[Change]) -> None:
        """Take changes into the index."""
        index = self._index
        for change in changes:
            holder = self.tiers.get(change.tier)
            if holder is None:
                store = self.stores.get(change.tier)
                if store is not None:
                    store.hear()
                    holder = store.told
                else:
                    holder = self.tiers[change.tier] = index.new_holder()
            match change:
                case KeysAdded(_, parent, keys):
                    left_out = index.add(holder, parent, keys)
                    self.left_out += left_out if holder == self.device else 0
                case KeysCopied(_, keys):
                    index.copy(holder, keys)
                case KeysRemoved(_, keys):
                    index.remove(holder, keys)
                case TierCleared(tier):
                    index.clear(holder)
                    if tier == DEVICE:
                        self.sequence.cleared()
                        self.left_out = 0

    def learn_lag(self, lag_s: float) -> None:
        """Blocks were announced `lag_s` after their prefill ended: expect up to twice that, fading slowly."""
        low, high = LAG_BOUNDS_S
        self.lag_s = min(max(0.9 * self.lag_s, 2 * lag_s, low), high)

    def forget(self) -> None:
        """Nothing is known any more."""
        self.source.clear()
        self.left_out = 0
        for holder in self.tiers.values():
            self._index.clear(holder)

    def close(self) -> None:
        """Leave the index for good."""
        for holder in self.tiers.values():
            self._index.remove_holder(holder)

"""KV below the device: blocks in host memory, on a local disk and in a shared store (docs/kv-tiers.md).

`BlockTiers` is imported when it is asked for: it needs numpy, which an installation without an engine lacks.
"""

from typing import TYPE_CHECKING, Any

from sumibi.tiers.catalog import Entry, Order, least_recent
from sumibi.tiers.config import DiskTier, StoreTier, TiersConfig
from sumibi.tiers.words import Tier, TierEvent, TiersStats, TierStats

if TYPE_CHECKING:
    from sumibi.tiers.tiers import BlockTiers

__all__ = [
    "BlockTiers",
    "DiskTier",
    "Entry",
    "Order",
    "StoreTier",
    "Tier",
    "TierEvent",
    "TierStats",
    "TiersConfig",
    "TiersStats",
    "least_recent",
]


def __getattr__(name: str) -> Any:
    if name != "BlockTiers":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sumibi.tiers.tiers import BlockTiers

    return BlockTiers

"""KV below the device: blocks in host memory, on a local disk and in a shared store (docs/kv-tiers.md)."""

from sumibi.tiers.catalog import Entry, Order, least_recent
from sumibi.tiers.config import DiskTier, StoreTier, TiersConfig
from sumibi.tiers.tiers import BlockTiers
from sumibi.tiers.words import Tier, TierEvent, TiersStats, TierStats

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

"""Words of the tiers: where a block lies, what changed, what was counted."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Tier(StrEnum):
    """A place below the device, fastest first."""

    HOST = "host"
    DISK = "disk"
    STORE = "store"

    @property
    def medium(self) -> str:
        """What KV events call it: vLLM's `CPU` for host memory, `STORAGE` for everything slower."""
        return "CPU" if self is Tier.HOST else "STORAGE"


Buffer = Any
"""Anything with the buffer protocol, contiguous; one block's bytes."""


@dataclass(frozen=True, slots=True)
class TierEvent:
    """A block came to a tier (`stored`) or left it. Each tier speaks for its own copy."""

    stored: bool
    content_id: bytes
    parent: bytes | None
    tier: Tier

    @property
    def medium(self) -> str:
        """The tier as KV events name it."""
        return self.tier.medium


@dataclass(slots=True)
class TierStats:
    """One tier's counts since the start, and what it holds now."""

    limit_bytes: int = 0
    bytes: int = 0
    blocks: int = 0
    hits: int = 0
    """Blocks that `load` took from here, checked and whole."""
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    """Blocks offered to this tier that it did not take: queue full, tier full of blocks in use, no room
    on the device, tier resting after failures."""
    corrupt: int = 0
    """Blocks found here whose bytes were not what was written. They are removed, never served."""
    late: int = 0
    """Answers that came after their deadline and were thrown away."""
    errors: int = 0
    """Reads, writes and questions that failed."""
    queue_blocks: int = 0
    """Blocks that wait to be written here."""
    read_s: float = 0.0
    write_s: float = 0.0


@dataclass(slots=True)
class TiersStats:
    """Counts of all tiers. A tier that is not configured has a limit of 0 and stays at 0."""

    tiers: dict[Tier, TierStats] = field(default_factory=dict)
    misses: int = 0
    """Blocks that `load` was asked for and found nowhere (corrupt and late ones included)."""
    events_lost: int = 0
    """Events that nobody drained in time; the oldest go first."""
    prefetch_dropped: int = 0
    """Blocks not brought up: too many were asked for at once, or somebody was loading all the time."""
    prefetched: int = 0
    """Blocks brought up to host memory before anybody asked for them. Those reads count as the lower tier's
    hits, too."""
    prefetch_used: int = 0
    """Of these, loaded by somebody before they were evicted from host memory."""
    prefetch_wasted: int = 0
    """Of these, evicted from it without."""


class Refused(OSError):
    """A store that cannot be used as it was said, which waiting does not mend; `fix` says what does."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.fix = fix


TIER_GAUGES = ("bytes", "blocks", "limit_bytes", "queue_blocks")
"""Of `TierStats`, as metrics pages show it: what is so now ..."""
TIER_COUNTS = {
    "hits": "Blocks taken from the tier, checked",
    "stored": "Blocks stored in it",
    "evicted": "Blocks that had to leave it",
    "dropped": "Blocks that it did not take",
    "corrupt": "Blocks that were not what was written; never served",
    "late": "Answers that came after their deadline",
    "errors": "Reads, writes and questions that failed",
}
"""... and what was counted, each with its meaning."""

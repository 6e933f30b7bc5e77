"""How long work counts in an endpoint's share of what a fleet did."""

from typing import Final

SHARE_HALF_LIFE_S: Final = 1800.0
"""What an endpoint computed counts half after this time in its share of the work."""
SHARE_EPOCH_S = 64 * SHARE_HALF_LIFE_S
"""What endpoints computed is summed as of times this far apart."""


def faded_s(worked_s: float, for_s: float) -> float:
    """What work counts after so many seconds."""
    fade: float = 0.5 ** (for_s / SHARE_HALF_LIFE_S)
    return worked_s * fade


def share_epoch_t(t: float) -> float:
    """A time not after `t`, and the same for a long while: all work counts half at the same pace, so sums as
    of then need no renewal as time goes on.
    """
    return t // SHARE_EPOCH_S * SHARE_EPOCH_S

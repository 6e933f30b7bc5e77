"""What an engine's `usage` says beside counts that all engines have."""

import msgspec

_MAX_TIERS = 8
MAX_TOKENS = 1 << 31
"""Of one answer; more is not believed: one such count would drown all others in every sum."""


def tiers_of(said: object) -> dict[str, int] | None:
    """`cached_tokens_by_tier`: tokens by the tier (device, host, disk, store, ...) that had their KV. None if
    it is absent, or something else under this name.
    """
    if said is None:
        return None
    try:
        tiers = msgspec.convert(said, dict[str, int])
    except msgspec.ValidationError:
        return None
    return tiers if len(tiers) <= _MAX_TIERS and min(tiers.values(), default=0) >= 0 else None

"""How long a queue may get and when one begins: words of `--band` and `--hold-above` become settings.

A band is the queue of one priority. The words are those of the stack file's `gateway.bands`,
`gateway.other_bands` and `gateway.hold_above_s`; the supervisor hands them over as a user would type them.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from sumibi.core.errors import ConfigError
from sumibi.gateway.options import HOLD_ABOVE_S
from sumibi.routing.config import BandLimits

NEVER: Final = "none"
"""In place of a number of seconds: no limit."""
OTHERS: Final = "other"
"""In place of a priority: every one without limits of its own."""
SHORTEST_HOLD_S: Final = 0.01
"""Less would wake the router again and again for nothing: engines' steps take longer."""

_WANT: Final = (
    "want PRIORITY:max_requests=N,max_bytes=N,ttl_s=SECONDS, for example 100:max_requests=50,ttl_s=5"
)


def bands_of(words: Iterable[str]) -> tuple[list[BandLimits], BandLimits]:
    """Limits of the priorities that have their own, and of the others, from `--band` words.

    What a word does not say of its priority is as for the others. Example: `bands_of(["other:ttl_s=60",
    "100:max_requests=50"])`: at most 50 requests of priority 100 wait, and each for 60 s. Raises ConfigError
    naming flag and word.
    """
    told: dict[str, dict[str, Any]] = {}
    for word in words:
        name, colon, limits = word.partition(":")
        if not colon or not limits or not (name == OTHERS or _whole(name, signed=True)):
            raise ConfigError(f"--band {word!r}: {_WANT}, or {OTHERS}:... for priorities without their own")
        name = name if name == OTHERS else str(int(name))
        if name in told:
            raise ConfigError(f"--band: {name} is named twice")
        told[name] = _limits(word, limits)
    others = BandLimits(**told.pop(OTHERS, {}))
    return [
        msgspec.structs.replace(others, priority=int(name), **limits) for name, limits in told.items()
    ], others


def hold_above_of(word: str | None) -> float | None:
    """Seconds of a `--hold-above` word; None (no word): the router's default. Raises ConfigError."""
    if word is None:
        return HOLD_ABOVE_S
    seconds = _seconds(word)
    if word != NEVER and (seconds is None or seconds < SHORTEST_HOLD_S):
        raise ConfigError(f"--hold-above {word!r}: want seconds, {SHORTEST_HOLD_S} or more, or {NEVER}")
    return seconds


def _limits(word: str, text: str) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name in limits:
            raise ConfigError(f"--band {word!r}: {name} is named twice")
        if name in ("max_requests", "max_bytes") and _whole(value):
            limits[name] = int(value)
        elif name == "ttl_s" and (value == NEVER or _seconds(value)):
            limits[name] = _seconds(value)
        else:
            raise ConfigError(f"--band {word!r}: {part!r} is no limit: {_WANT}; ttl_s={NEVER} is no limit")
    return limits


def _whole(text: str, *, signed: bool = False) -> bool:
    digits = text.removeprefix("-") if signed else text
    return digits.isascii() and digits.isdigit() and len(digits) <= 18


def _seconds(text: str) -> float | None:
    """Finite seconds, not negative; None: anything else."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None

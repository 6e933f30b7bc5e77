"""How often something happened lately: a count that fades, and the rate that follows from it."""

from math import log
from typing import Final

HALF_LIFE_S: Final = 60.0


class Pace:
    """Of one kind of event. A rate that holds is known by half after `HALF_LIFE_S`; until then it is less."""

    __slots__ = ("_count", "_t")

    def __init__(self) -> None:
        self._count = self._t = 0.0

    def one(self, t: float) -> None:
        """It happened."""
        self._count = self._faded(t) + 1.0
        self._t = t

    def per_s(self, t: float) -> float:
        """So many times a second."""
        return self._faded(t) * log(2) / HALF_LIFE_S

    def _faded(self, t: float) -> float:
        fade: float = 0.5 ** ((t - self._t) / HALF_LIFE_S)
        return self._count * fade

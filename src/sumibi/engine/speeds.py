"""How fast KV comes from each tier, as measured by the loads that prompts waited for.

A load of n bytes takes latency + n / bandwidth. Both follow from what loads of different lengths took: a line
by least squares, older loads fading. What is told changes only when it is clearly wrong, for whoever reads it
prices by it: a number that trembles with each load would be news each time it is asked for.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from sumibi.tiers import Tier

_FADE = 0.95
"""Weight of a load beside the next one: the last twenty count most."""
_LEAST_LOADS = 3
"""Until so many nothing is told."""
_NEWS = 1.25
"""By so much the measured time of a usual load has to differ from what was told."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of reading a tier into the device's cache."""

    gb_per_s: float
    """10^9 bytes a second, between the first byte and the last."""
    latency_s: float
    """Before the first byte."""

    def takes_s(self, size_bytes: float) -> float:
        """Seconds for so many bytes."""
        return self.latency_s + size_bytes / (self.gb_per_s * 1e9)


class _Line:
    """Fading sums of (bytes, seconds)."""

    def __init__(self) -> None:
        self.loads = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, size_bytes: float, seconds: float) -> None:
        self.loads += 1
        self._n = self._n * _FADE + 1
        self._x = self._x * _FADE + size_bytes
        self._y = self._y * _FADE + seconds
        self._xx = self._xx * _FADE + size_bytes * size_bytes
        self._xy = self._xy * _FADE + size_bytes * seconds

    @property
    def usual_bytes(self) -> float:
        return self._x / self._n

    def speed(self) -> Speed:
        """The line through the loads; through their mean and no latency where their lengths are too alike to
        tell, or the line would begin below zero or not rise.
        """
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        byte_s, latency_s = mean_y / mean_x, 0.0
        if spread > (0.1 * mean_x) ** 2:
            slope = (self._xy / self._n - mean_x * mean_y) / spread
            if slope > 0 and mean_y - slope * mean_x >= 0:
                byte_s, latency_s = slope, mean_y - slope * mean_x
        return Speed(1e-9 / byte_s, latency_s)


class Speeds:
    """Of all tiers of one engine. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[Tier, _Line] = {}
        self._told: dict[Tier, Speed] = {}

    def loaded(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """A load took so long; all of it came from one tier."""
        if size_bytes <= 0 or seconds <= 0:
            return
        with self._lock:
            line = self._lines.setdefault(tier, _Line())
            line.add(size_bytes, seconds)
            if line.loads < _LEAST_LOADS:
                return
            measured, told = line.speed(), self._told.get(tier)
            if told is not None:
                ratio = measured.takes_s(line.usual_bytes) / told.takes_s(line.usual_bytes)
                if 1 / _NEWS < ratio < _NEWS:
                    return
            self._told[tier] = Speed(_short(measured.gb_per_s), _short(measured.latency_s))

    def told(self) -> Mapping[Tier, Speed]:
        """What to tell of each tier that was measured."""
        with self._lock:
            return dict(self._told)


def _short(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")

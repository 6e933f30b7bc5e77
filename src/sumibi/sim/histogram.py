"""A histogram of durations on a logarithmic scale: counts with weights, quantiles within one percent."""

from math import exp, log

_BINS_PER_E = 100.0
"""Bins are a hundredth of a factor e wide: a value is known to half a percent."""


class Histogram:
    """Weighted durations."""

    __slots__ = ("bins", "total")

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.total = 0

    def add(self, seconds: float, count: int) -> None:
        """`count` durations of `seconds` (> 0)."""
        at = round(log(seconds) * _BINS_PER_E)
        self.bins[at] = self.bins.get(at, 0) + count
        self.total += count

    def merge(self, other: "Histogram") -> None:
        """Add what another one has counted."""
        for at, count in other.bins.items():
            self.bins[at] = self.bins.get(at, 0) + count
        self.total += other.total

    def quantile(self, q: float) -> float:
        """The smallest duration that at least the part `q` of all does not exceed; 0 if there is none."""
        need = q * self.total
        below = 0
        for at in sorted(self.bins):
            below += self.bins[at]
            if below >= need:
                return exp(at / _BINS_PER_E)
        return 0.0

    def points(self) -> list[tuple[float, float]]:
        """(seconds, part of all that is not longer), ascending: a distribution to plot."""
        below, points = 0, []
        for at in sorted(self.bins):
            below += self.bins[at]
            points.append((exp(at / _BINS_PER_E), below / self.total))
        return points

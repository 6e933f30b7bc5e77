"""What counts as reached: targets of the benchmark as functions of plain numbers.

Times, rates and parts are given by policy; `OURS` is compared with all others that are there. Ratios are
ours over the best other's: its own best value in this figure, whoever that is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal

OURS = "cost"
Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over the best baseline's, one value a seed."""

    values: list[float]
    best: str
    """The baseline that was best over all seeds."""
    baseline: float
    """Its mean over the seeds."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.values) / len(self.values)


def against_best(by_policy: Mapping[str, Sequence[float]], better: Better) -> Ratio | None:
    """Our values over those of the baseline whose mean over the seeds is best, seed by seed.

    None if there is nothing to compare: ours or all baselines missing, or without a number.
    """
    ours = by_policy.get(OURS)
    means = {
        policy: sum(values) / len(values)
        for policy, values in by_policy.items()
        if policy != OURS and values and not any(map(isnan, values))
    }
    if not ours or any(map(isnan, ours)) or not means:
        return None
    pick = min if better == "lower" else max
    best = pick(means, key=lambda policy: means[policy])
    pairs = list(zip(ours, by_policy[best], strict=True))
    return Ratio([_over(mine, theirs) for mine, theirs in pairs], best, means[best])


def _over(mine: float, theirs: float) -> float:
    if theirs:
        return mine / theirs
    return 1.0 if not mine else float("inf")


def worst(ratios: Sequence[Ratio], better: Better) -> Ratio:
    """The point at which we stand worst."""
    pick = max if better == "lower" else min
    return pick(ratios, key=lambda ratio: ratio.mean)


def part_better(ratios: Sequence[Ratio], better: Better) -> float:
    """Part of the points at which we are better than every baseline."""
    count = sum(ratio.mean < 1.0 if better == "lower" else ratio.mean > 1.0 for ratio in ratios)
    return count / len(ratios)


def clear_lead(output: Ratio, e2e: Ratio, *, more: float = 1.05, less: float = 0.90) -> float:
    """How far we are towards 5 % more output or 10 % less time than the second: at least 1 is reached."""
    return max(output.mean / more, less / e2e.mean if e2e.mean else float("inf"))

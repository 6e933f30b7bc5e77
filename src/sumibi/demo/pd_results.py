"""What `sumibi demo pd` measures: plain records."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of one stream; `at_s` is when the second one came. From the beginning on."""

    at_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One of those that arrive meanwhile."""

    asked_s: float
    first_s: float | None
    """When its first token came; None: not in time."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One pair of engines."""

    name: str
    itl_p50_s: float
    itl_p99_s: float
    itl_most_s: float
    """Between two tokens of a stream."""
    gaps: list[Gap]
    prompts: list[LongPrompt]

    @property
    def ttft_s(self) -> float | None:
        """Median of the long prompts that got a first token."""
        waits = [each.first_s - each.asked_s for each in self.prompts if each.first_s is not None]
        return statistics.median(waits) if waits else None

"""What a run says: one row a request, and the figures made of them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from sumibi.sim.histogram import Histogram

NAN = float("nan")
WARM_TOKENS = 8192
"""A turn is warm if an infinite cache would leave it no more than this to compute."""


class Status(IntEnum):
    """How a request ended."""

    DONE = 0
    REJECTED = 1
    """It can never fit on the replica that it was sent to."""
    REFUSED = 2
    """By the router: no endpoint, or too many requests."""
    FAILED = 3
    """Its replica died and no retry was possible."""
    TIMEOUT = 4
    """The client gave up."""


class Calls:
    """Columns with one value a request, in the order in which they ended. Times in virtual seconds."""

    __slots__ = (
        "arrival_s",
        "attempts",
        "cached_tokens",
        "dispatch_s",
        "end_s",
        "endpoint",
        "first_s",
        "lower_tokens",
        "output_tokens",
        "predicted_tokens",
        "prefill",
        "priority",
        "prompt_tokens",
        "session",
        "stage",
        "status",
        "turn",
        "unavoidable_tokens",
    )

    def __init__(self) -> None:
        self.arrival_s = array("d")
        self.dispatch_s = array("d")
        """Last attempt; NaN if there was none."""
        self.first_s = array("d")
        """First token; NaN if none came."""
        self.end_s = array("d")
        self.endpoint = array("i")
        """Index of the replica; -1: none."""
        self.prefill = array("i")
        """Index of the replica that computed the prompt; -1: none."""
        self.prompt_tokens = array("q")
        self.cached_tokens = array("q")
        """Found on the replica, in any tier."""
        self.lower_tokens = array("q")
        """Of these, fetched from below the device: host memory or the shared store."""
        self.predicted_tokens = array("q")
        """Of the prompt, what the router expected there."""
        self.unavoidable_tokens = array("q")
        """Of the prompt, what an infinite cache over all that arrived before would still compute."""
        self.output_tokens = array("q")
        """Asked for; delivered if it is done."""
        self.status = array("b")
        self.attempts = array("b")
        self.priority = array("i")
        self.stage = array("i")
        self.session = array("i")
        """Index in the workload."""
        self.turn = array("i")
        """Index in the session."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def ttft_s(self, rows: Sequence[int]) -> list[float]:
        """Arrival to first token."""
        first, arrival = self.first_s, self.arrival_s
        return [first[i] - arrival[i] for i in rows]

    def e2e_s(self, rows: Sequence[int]) -> list[float]:
        """Arrival to last token."""
        end, arrival = self.end_s, self.arrival_s
        return [end[i] - arrival[i] for i in rows]

    def done(self) -> list[int]:
        """Rows of requests that were served in full."""
        return [i for i, status in enumerate(self.status) if status == Status.DONE]


class Summary(msgspec.Struct, kw_only=True):
    """One run in a few figures. Requests that were not served count in none of the times."""

    workload: str
    fleet: str
    policy: str
    seed: int
    users: int | None
    requests: int
    rejected: int
    """Could never fit, or were refused by the router."""
    failed: int
    """Lost with their replica, or given up by the client."""
    preemptions: int
    token_hit_rate: float
    bound_token_hit_rate: float
    """With an infinite cache, over the same requests."""
    work_share: float
    """Largest replica's uncached prompt tokens over their mean: 1 is even."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    warm_ttft_p99_s: float
    """Over turns that need no more than `WARM_TOKENS` of prefill."""
    itl_p50_s: float
    itl_p99_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    output_tokens_per_s: float
    busy_spread_p95: float
    """95th percentile, over windows of ten minutes, of the busiest replica's time over their mean."""
    virtual_s: float
    wall_s: float
    cpu_s: float


@dataclass(slots=True)
class Run:
    """All that came out of a simulation."""

    summary: Summary
    calls: Calls
    endpoints: list[str]
    intervals: Histogram
    """Between two tokens of a sequence, all replicas."""
    busy_s: list[dict[int, float]] = field(default_factory=list)
    """By replica and minute: seconds in which it worked."""


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    if not values:
        return NAN
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return sum(values) / len(values) if values else NAN


def uncached_by_replica(calls: Calls, replicas: int) -> list[int]:
    """Prompt tokens of the requests served by each replica that no cache had."""
    work = [0] * replicas
    for i in calls.done():
        work[calls.prefill[i]] += calls.prompt_tokens[i] - calls.cached_tokens[i]
    return work


def busy_spread(
    busy_s: Sequence[dict[int, float]], *, window_minutes: int = 10, least_s: float = 60.0
) -> float:
    """95th percentile over windows of max / mean of the replicas' busy time; NaN without a window.

    Windows in which the replicas together worked less than `least_s` each say nothing about balance.
    """
    windows: dict[int, list[float]] = {}
    for replica, minutes in enumerate(busy_s):
        for minute, seconds in minutes.items():
            row = windows.setdefault(minute // window_minutes, [0.0] * len(busy_s))
            row[replica] += seconds
    spreads = [max(row) / mean(row) for row in windows.values() if mean(row) >= least_s]
    return percentile(spreads, 0.95)


def hit_rate_over_time(calls: Calls, window_s: float = 600.0) -> list[tuple[float, float]]:
    """(start of window, token hit rate of the requests that arrived in it)."""
    windows: dict[int, list[int]] = {}
    for i in calls.done():
        row = windows.setdefault(int(calls.arrival_s[i] // window_s), [0, 0])
        row[0] += calls.cached_tokens[i]
        row[1] += calls.prompt_tokens[i]
    return [(at * window_s, hit / total) for at, (hit, total) in sorted(windows.items())]


def busy_over_time(
    busy_s: Sequence[dict[int, float]], window_minutes: int = 10
) -> list[list[tuple[float, float]]]:
    """For each replica: (start of window in seconds, part of the window in which it worked)."""
    series = []
    for minutes in busy_s:
        windows: dict[int, float] = {}
        for minute, seconds in minutes.items():
            windows[minute // window_minutes] = windows.get(minute // window_minutes, 0.0) + seconds
        width_s = window_minutes * 60.0
        series.append([(at * width_s, seconds / width_s) for at, seconds in sorted(windows.items())])
    return series


def output_rate_by_stage(calls: Calls) -> dict[int, float]:
    """Output tokens a second of each stage, from its first arrival to its last end, as load clients count."""
    spans: dict[int, list[float]] = {}
    for i in range(len(calls)):
        row = spans.setdefault(calls.stage[i], [calls.arrival_s[i], calls.end_s[i], 0.0])
        row[0] = min(row[0], calls.arrival_s[i])
        row[1] = max(row[1], calls.end_s[i])
        if calls.status[i] == Status.DONE:
            row[2] += calls.output_tokens[i]
    return {stage: tokens / (end - start) for stage, (start, end, tokens) in sorted(spans.items())}

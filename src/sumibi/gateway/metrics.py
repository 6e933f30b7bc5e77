"""What the gateway counts, and the one table of names under which it is exported.

Counting is on the hot path, so it is plain integers here; the prometheus client renders them when somebody
scrapes. Each of our own names (`sumibi_*`) may have a twin under llm-d's name for the same quantity, so
that dashboards made for its endpoint picker work. Labels are bounded: models beyond a limit count as
`other`.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

_MAX_MODELS = 1000
_OTHER = "other"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FINE_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288)


@dataclass(frozen=True, slots=True)
class Name:
    """One row of the table: our name, its twin at llm-d if that measures the same, label, help text."""

    ours: str
    help: str
    twin: str | None = None
    label: str | None = None


class Histogram:
    """Counts in fixed buckets. `observe` costs about as much as a dictionary update."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count), as Prometheus has them."""
        cumulative, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            cumulative += count
            rows.append((bound, float(cumulative)))
        return rows


class ModelCounters:
    """What is counted per model."""

    def __init__(self) -> None:
        self.requests = 0
        self.in_flight = 0
        self.errors: dict[str, int] = {}
        """Requests that got no (whole) answer, by cause."""
        self.estimated_usage = 0
        """Answers whose token counts the engine did not give."""
        self.duration_s = Histogram(_SECONDS)
        self.ttft_s = Histogram(_SECONDS)
        self.per_token_s = Histogram(_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.cached_tokens = Histogram(_TOKENS)
        self.output_tokens = Histogram(_TOKENS)

    def error(self, cause: str) -> None:
        """Count a request that ended in `cause` (one of a closed list)."""
        self.errors[cause] = self.errors.get(cause, 0) + 1


class EndpointCounters:
    """What is known and counted per endpoint."""

    def __init__(self) -> None:
        self.up = False
        self.grade = "none"
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.event_batches = 0
        self.malformed_messages = 0
        self.streams_lost = 0
        self.streaming = False
        self.replays = 0
        self.replays_failed = 0
        self.scrape_errors = 0


class Metrics:
    """Everything counted by this gateway. Other parts add to it by plain assignment."""

    def __init__(self) -> None:
        self.models: dict[str, ModelCounters] = {}
        self.endpoints: dict[str, EndpointCounters] = {}
        self.attempts: dict[str, int] = {}
        """Ended attempts, by reason."""
        self.keys_s = Histogram(_FINE_SECONDS)
        self.placement_s = Histogram(_FINE_SECONDS)
        self.gauges: dict[str, Callable[[], float]] = {}
        """Our name -> current value, for what other parts know (connections, index size, ...)."""

    def model(self, name: str) -> ModelCounters:
        """The counters of a model; beyond the limit on names, those of `other`."""
        counters = self.models.get(name)
        if counters is None:
            if len(self.models) >= _MAX_MODELS:
                name = _OTHER
            counters = self.models.setdefault(name, ModelCounters())
        return counters

    def endpoint(self, endpoint: str) -> EndpointCounters:
        """The counters of an endpoint (as many as are configured)."""
        return self.endpoints.setdefault(endpoint, EndpointCounters())

    def attempt(self, reason: str) -> None:
        """Count an ended attempt."""
        self.attempts[reason] = self.attempts.get(reason, 0) + 1

"""What the gateway counts, as plain integers: counting is on the hot path, showing is not.

Labels are bounded: models that no engine has named, or beyond a limit, count as `other`; endpoints are as
many as are configured, reasons are closed lists. `exposition` gives the names under which all this is
exported.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from sumibi.gateway.agreement import Agreement
from sumibi.gateway.views import TransferView

_MAX_MODELS: Final = 1000
_OTHER: Final = "other"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FINE_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288)


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


def seconds() -> Histogram:
    """For waits and durations."""
    return Histogram(_SECONDS)


class ModelCounters:
    """What is counted per model."""

    __slots__ = (
        "agreement",
        "cached_tokens",
        "duration_s",
        "errors",
        "estimated_usage",
        "in_flight",
        "output_tokens",
        "per_token_s",
        "prompt_tokens",
        "requests",
        "ttft_s",
    )

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
        self.agreement = Agreement()

    def error(self, cause: str) -> None:
        """Count a request that ended in `cause` (one of a closed list)."""
        self.errors[cause] = self.errors.get(cause, 0) + 1


@dataclass(slots=True)
class EndpointCounters:
    """What is known and counted per endpoint."""

    up: bool = False
    grade: str = "none"
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    streaming: bool = False
    event_batches: int = 0
    malformed_messages: int = 0
    streams_lost: int = 0
    replays: int = 0
    replays_failed: int = 0
    scrape_errors: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Attempts that failed there, by reason."""
    transfer: TransferView = field(default_factory=TransferView)
    hints: dict[str, int] = field(default_factory=dict)
    """Hints to bring KV up, by what became of them."""
    connections: int = 0
    connections_opened: int = 0
    stale_connections: int = 0


class Metrics:
    """Everything counted by this gateway."""

    def __init__(self) -> None:
        self.models: dict[str, ModelCounters] = {}
        self.endpoints: dict[str, EndpointCounters] = {}
        self.refused_requests: dict[str, int] = {}
        """Requests answered with an error before any placement (malformed, unknown model), by status."""
        self.queue_s: dict[str, Histogram] = {}
        """How long requests waited for their first endpoint, by what ended it."""
        self.legs: dict[tuple[str, str], int] = {}
        """Prefill halves of pairs, by connector and outcome (a closed list)."""
        self.token_counts: dict[str, int] = {}
        """Questions for the length of a prompt, by who answered (`gateway`, `engine`, or `refused`)."""
        self.keys_s = Histogram(_FINE_SECONDS)
        self.placement_s = Histogram(_FINE_SECONDS)

    def serve(self, name: str) -> None:
        """An engine serves a model by this name: count for it from now on."""
        if len(self.models) < _MAX_MODELS:
            self.models.setdefault(name, ModelCounters())

    def model(self, name: str) -> ModelCounters:
        """The counters of a model that an engine serves; any other name is a client's word."""
        return self.models.get(name) or self.models.setdefault(_OTHER, ModelCounters())

    def endpoint(self, endpoint: str) -> EndpointCounters:
        """The counters of an endpoint."""
        return self.endpoints.setdefault(endpoint, EndpointCounters())

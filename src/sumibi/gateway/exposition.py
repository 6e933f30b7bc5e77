"""The one table of metric names, and its rendering by the prometheus client when somebody scrapes.

Each of our own names (`sumibi_*`) may have a twin under llm-d's name for the same quantity, so that
dashboards made for its endpoint picker work.
"""

from collections.abc import Callable, Iterable, Iterator
from statistics import fmean, pstdev
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from sumibi.gateway.metrics import EndpointCounters, Histogram, Metrics, ModelCounters
from sumibi.routing.counters import Counters, HeldNow


class Snapshot(NamedTuple):
    """What one scrape shows: all the table's rows are read from it."""

    metrics: Metrics
    router: Counters
    client_connections: int
    request_bytes: int
    usage_dropped: int
    pauses: int
    reader_fallbacks: dict[str, int]
    """Model -> prompts that got approximate keys although its reader has a tokenizer."""
    reader_mismatches: dict[str, int]
    reader_sources: dict[str, str]
    """Model -> where its tokens come from."""


Labels = tuple[str, ...]
Value = float | Histogram
Samples = Iterable[tuple[Labels, Value]]


class Row(NamedTuple):
    """One quantity: our name, help text, label names, how to read it, and its twin at llm-d."""

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: Labels
    read: Callable[[Snapshot], Samples]
    twin: str | None = None


def _per_model(
    read: Callable[[ModelCounters], Value],
) -> Callable[[Snapshot], Samples]:
    return lambda s: [((name,), read(counters)) for name, counters in s.metrics.models.items()]


def _per_endpoint(
    read: Callable[[EndpointCounters], float],
) -> Callable[[Snapshot], Samples]:
    return lambda s: [((name,), read(counters)) for name, counters in s.metrics.endpoints.items()]


def _one(read: Callable[[Snapshot], Value]) -> Callable[[Snapshot], Samples]:
    return lambda s: [((), read(s))]


def _over_endpoints(
    reduce: Callable[[list[float]], float], read: Callable[[EndpointCounters], float]
) -> Callable[[Snapshot], Samples]:
    def value(s: Snapshot) -> float:
        values = [read(counters) for counters in s.metrics.endpoints.values() if counters.up]
        return reduce(values) if values else 0.0

    return _one(value)


def _errors(s: Snapshot) -> Iterator[tuple[Labels, Value]]:
    for model, counters in s.metrics.models.items():
        for cause, count in counters.errors.items():
            yield (model, cause), count


def _failures(s: Snapshot) -> Iterator[tuple[Labels, Value]]:
    for endpoint, counters in s.metrics.endpoints.items():
        for reason, count in counters.failures.items():
            yield (endpoint, reason), count


def _hints(s: Snapshot) -> Iterator[tuple[Labels, Value]]:
    for endpoint, counters in s.metrics.endpoints.items():
        for outcome, count in counters.hints.items():
            yield (endpoint, outcome), count


def _by_key(
    read: Callable[[Snapshot], dict[str, int]],
) -> Callable[[Snapshot], Samples]:
    return lambda s: [((key,), count) for key, count in read(s).items()]


def _disagg(s: Snapshot) -> Iterator[tuple[Labels, Value]]:
    for kind, reasons in s.router.disagg.items():
        for reason, count in reasons.items():
            yield (kind, reason), count


def _held(read: Callable[[HeldNow], float]) -> Callable[[Snapshot], Samples]:
    return lambda s: [((held.model, str(held.priority)), read(held)) for held in s.router.held_now]


def _per_pool(read: Callable[[Counters], dict[str, float]]) -> Callable[[Snapshot], Samples]:
    return lambda s: [((model,), value) for model, value in read(s.router).items()]


_MODEL = ("model",)
_ENDPOINT = ("endpoint",)

TABLE = (
    # What clients see.
    Row("sumibi_requests_total", "Requests for generated text, by model.", "counter", _MODEL,
        _per_model(lambda m: m.requests), "llm_d_epp_request_total"),
    Row("sumibi_request_errors_total", "Requests without a whole answer, by model and cause.", "counter",
        ("model", "cause"), _errors, "llm_d_epp_request_error_total"),
    Row("sumibi_requests_refused_total", "Requests answered with an error before placement, by status.",
        "counter", ("status",), _by_key(lambda s: s.metrics.refused_requests)),
    Row("sumibi_requests_in_flight", "Requests being answered now, by model.", "gauge", _MODEL,
        _per_model(lambda m: m.in_flight), "llm_d_epp_request_running"),
    Row("sumibi_request_duration_seconds", "Arrival to last byte.", "histogram", _MODEL,
        _per_model(lambda m: m.duration_s), "llm_d_epp_request_duration_seconds"),
    Row("sumibi_ttft_seconds", "Arrival to the first byte of generated text.", "histogram", _MODEL,
        _per_model(lambda m: m.ttft_s), "llm_d_epp_request_ttft_seconds"),
    Row("sumibi_time_per_output_token_seconds", "Of streams: first byte to last, per token after the first.",
        "histogram", _MODEL, _per_model(lambda m: m.per_token_s), "llm_d_epp_request_streaming_tpot_seconds"),
    Row("sumibi_prompt_tokens", "Prompt tokens of answered requests.", "histogram", _MODEL,
        _per_model(lambda m: m.prompt_tokens), "llm_d_epp_request_input_tokens"),
    Row("sumibi_cached_tokens", "Prompt tokens found in the engine's cache, as it said.", "histogram", _MODEL,
        _per_model(lambda m: m.cached_tokens), "llm_d_epp_request_cached_tokens"),
    Row("sumibi_output_tokens", "Generated tokens.", "histogram", _MODEL,
        _per_model(lambda m: m.output_tokens), "llm_d_epp_request_output_tokens"),
    Row("sumibi_usage_estimated_total", "Answers whose tokens were counted here, not by the engine.",
        "counter", _MODEL, _per_model(lambda m: m.estimated_usage)),
    # What placing costs.
    Row("sumibi_prompt_keys_seconds", "To parse a request and find its prompt's keys.", "histogram", (),
        _one(lambda s: s.metrics.keys_s), "llm_d_epp_request_processing_duration_seconds"),
    Row("sumibi_placement_seconds", "To choose, reserve and send.", "histogram", (),
        _one(lambda s: s.metrics.placement_s), "llm_d_epp_scheduler_e2e_duration_seconds"),
    Row("sumibi_decisions_total", "Choices of an endpoint.", "counter", (),
        _one(lambda s: s.router.decisions), "llm_d_epp_scheduler_attempts_total"),
    Row("sumibi_retries_total", "Requests sent to a second endpoint.", "counter", (),
        _one(lambda s: s.router.retries)),
    Row("sumibi_disagg_decision_total",
        "Choices where prefill and decode could have been on two endpoints: whether they are, and why.",
        "counter", ("decision_type", "reason"), _disagg, "llm_d_epp_disagg_decision_total"),
    Row("sumibi_disagg_legs_total",
        "Prefill halves of pairs: ok, or why there was a whole run or an error instead.", "counter",
        ("connector", "outcome"), lambda s: s.metrics.legs.items()),
    Row("sumibi_token_counts_total",
        "Questions for a prompt's length: answered here, by an engine, or refused.", "counter", ("by",),
        _by_key(lambda s: s.metrics.token_counts)),
    Row("sumibi_attempts_finished_total", "Ended attempts, by reason.", "counter", ("reason",),
        _by_key(lambda s: s.router.finished)),
    Row("sumibi_refusals_total", "Requests that the router refused, by reason.", "counter", ("reason",),
        _by_key(lambda s: s.router.refused)),
    Row("sumibi_requests_waiting", "Requests whose model has no endpoint that is up.", "gauge", (),
        _one(lambda s: s.router.waiting_now)),
    # Flow control.
    Row("sumibi_requests_held", "Requests held until an endpoint can begin soon.", "gauge",
        ("model", "priority"), _held(lambda h: h.requests), "llm_d_epp_flow_control_queue_size"),
    Row("sumibi_held_bytes", "Of their bodies, estimated from their tokens.", "gauge",
        ("model", "priority"), _held(lambda h: h.bytes), "llm_d_epp_flow_control_queue_bytes"),
    Row("sumibi_requests_held_total", "Requests that were not placed at once.", "counter", (),
        _one(lambda s: s.router.held)),
    Row("sumibi_queue_seconds", "Wait for a first endpoint, by what ended it.", "histogram", ("outcome",),
        lambda s: [((outcome,), waited) for outcome, waited in s.metrics.queue_s.items()],
        "llm_d_epp_flow_control_request_queue_duration_seconds"),
    Row("sumibi_pool_saturation", "1 if no endpoint can begin soon; while requests are held.", "gauge",
        _MODEL, _per_pool(lambda c: c.saturation_now), "llm_d_epp_flow_control_pool_saturation"),
    Row("sumibi_programs_jain_index", "How evenly programs were served lately: 1/n to 1.", "gauge", _MODEL,
        _per_pool(lambda c: c.jain_now), "llm_d_epp_program_aware_jains_fairness_index"),
    # What is known of caches.
    Row("sumibi_cached_tokens_predicted_total", "Cached tokens foreseen, of requests whose engine told.",
        "counter", (), _one(lambda s: s.router.predicted_cached_tokens)),
    Row("sumibi_cached_tokens_actual_total", "Cached tokens of the same requests, as engines told.",
        "counter", (), _one(lambda s: s.router.actual_cached_tokens)),
    Row("sumibi_cached_tokens_disagree", "1 while predicted and actual cached tokens are far apart.", "gauge",
        _MODEL, _per_model(lambda m: float(bool(m.agreement.alarm)))),
    Row("sumibi_index_blocks", "Blocks in the index.", "gauge", (),
        _one(lambda s: s.router.index_blocks_now)),
    Row("sumibi_index_bytes", "Memory of the index, estimated.", "gauge", (),
        _one(lambda s: s.router.index_bytes_now)),
    Row("sumibi_index_refused_blocks_total", "Blocks left out because the index was full.", "counter", (),
        _one(lambda s: s.router.index_refused_blocks)),
    Row("sumibi_kv_events_skipped_total", "KV events without effect.", "counter", (),
        _one(lambda s: s.router.skipped_events)),
    Row("sumibi_engine_lives_total", "Restarts of engines noticed.", "counter", (),
        _one(lambda s: s.router.lives)),
    Row("sumibi_endpoint_grade", "1 for the grade of what is known of an endpoint's cache.", "gauge",
        ("endpoint", "grade"),
        lambda s: [((name, e.grade), 1) for name, e in s.metrics.endpoints.items()]),
    Row("sumibi_prompt_source", "1 for where a model's tokens come from: local, engine or bytes.", "gauge",
        ("model", "source"), lambda s: [((m, source), 1) for m, source in s.reader_sources.items()]),
    Row("sumibi_prompt_fallbacks_total", "Prompts that got approximate keys despite a tokenizer.", "counter",
        _MODEL, _by_key(lambda s: s.reader_fallbacks)),
    Row("sumibi_prompt_mismatches_total", "Checked prompts whose fast reading was wrong.", "counter", _MODEL,
        _by_key(lambda s: s.reader_mismatches)),
    # Endpoints.
    Row("sumibi_endpoints_up", "Endpoints that take requests.", "gauge", (),
        _one(lambda s: sum(e.up for e in s.metrics.endpoints.values())), "llm_d_epp_ready_endpoints"),
    Row("sumibi_endpoint_up", "1 if the endpoint takes requests.", "gauge", _ENDPOINT,
        _per_endpoint(lambda e: e.up)),
    Row("sumibi_endpoint_running", "Sequences being computed, as scraped.", "gauge", _ENDPOINT,
        _per_endpoint(lambda e: e.running)),
    Row("sumibi_endpoint_waiting", "Requests in the engine's queue, as scraped.", "gauge", _ENDPOINT,
        _per_endpoint(lambda e: e.waiting)),
    Row("sumibi_endpoint_kv_usage", "Share of its KV cache in use (1 = full), as scraped.", "gauge",
        _ENDPOINT, _per_endpoint(lambda e: e.kv_usage)),
    Row("sumibi_average_kv_usage", "Mean over endpoints that are up.", "gauge", (),
        _over_endpoints(fmean, lambda e: e.kv_usage), "llm_d_epp_average_kv_cache_utilization"),
    Row("sumibi_average_waiting", "Mean over endpoints that are up.", "gauge", (),
        _over_endpoints(fmean, lambda e: e.waiting), "llm_d_epp_average_queue_size"),
    Row("sumibi_average_running", "Mean over endpoints that are up.", "gauge", (),
        _over_endpoints(fmean, lambda e: e.running), "llm_d_epp_average_running_requests"),
    Row("sumibi_std_dev_kv_usage", "Standard deviation over endpoints that are up.", "gauge", (),
        _over_endpoints(pstdev, lambda e: e.kv_usage), "llm_d_epp_std_dev_kv_cache_utilization"),
    Row("sumibi_std_dev_waiting", "Standard deviation over endpoints that are up.", "gauge", (),
        _over_endpoints(pstdev, lambda e: e.waiting), "llm_d_epp_std_dev_queue_size"),
    Row("sumibi_std_dev_running", "Standard deviation over endpoints that are up.", "gauge", (),
        _over_endpoints(pstdev, lambda e: e.running), "llm_d_epp_std_dev_running_requests"),
    Row("sumibi_endpoint_failures_total", "Attempts that failed at the endpoint, by reason.", "counter",
        ("endpoint", "reason"), _failures),
    Row("sumibi_scrape_errors_total", "Reads of an engine's metrics that failed.", "counter", _ENDPOINT,
        _per_endpoint(lambda e: e.scrape_errors), "llm_d_epp_datalayer_poll_errors_total"),
    Row("sumibi_kv_event_streams", "KV event streams connected now.", "gauge", (),
        _one(lambda s: sum(e.streaming for e in s.metrics.endpoints.values())),
        "llm_d_epp_kv_cache_events_active_subscribers"),
    Row("sumibi_kv_event_batches_total", "KV event batches received.", "counter", _ENDPOINT,
        _per_endpoint(lambda e: e.event_batches), "llm_d_epp_kv_cache_events_messages_received_total"),
    Row("sumibi_kv_event_malformed_total", "KV event messages that do not decode.", "counter", _ENDPOINT,
        _per_endpoint(lambda e: e.malformed_messages)),
    Row("sumibi_kv_event_streams_lost_total", "Times a KV event stream broke.", "counter", _ENDPOINT,
        _per_endpoint(lambda e: e.streams_lost), "llm_d_epp_kv_cache_events_zmq_errors_total"),
    Row("sumibi_kv_prefetch_hints_total", "Hints to bring an idle conversation's KV up to host memory.",
        "counter", ("endpoint", "outcome"), _hints),
    Row("sumibi_kv_prefetch_decided_total", "Conversations for which the router decided on a hint.",
        "counter", (), _one(lambda s: s.router.hints)),
    Row("sumibi_kv_prefetch_returned_total", "Those of them that went on afterwards.",
        "counter", (), _one(lambda s: s.router.hints_returned)),
    Row("sumibi_kv_event_replays_total", "Replays of missed KV events asked for.", "counter", _ENDPOINT,
        _per_endpoint(lambda e: e.replays)),
    Row("sumibi_kv_event_replays_failed_total", "Replays that did not come to their end.", "counter",
        _ENDPOINT, _per_endpoint(lambda e: e.replays_failed)),
    Row("sumibi_upstream_connections", "Open connections to the engine.", "gauge", _ENDPOINT,
        _per_endpoint(lambda e: e.connections)),
    Row("sumibi_upstream_connections_opened_total", "Connections made to the engine.", "counter", _ENDPOINT,
        _per_endpoint(lambda e: e.connections_opened)),
    Row("sumibi_upstream_stale_total", "Reused connections found closed: sent again on a new one.", "counter",
        _ENDPOINT, _per_endpoint(lambda e: e.stale_connections)),
    # The process.
    Row("sumibi_client_connections", "Open client connections.", "gauge", (),
        _one(lambda s: s.client_connections)),
    Row("sumibi_request_bytes_held", "Bytes of request bodies in memory.", "gauge", (),
        _one(lambda s: s.request_bytes)),
    Row("sumibi_usage_records_dropped_total", "Usage records lost.", "counter", (),
        _one(lambda s: s.usage_dropped)),
    Row("sumibi_process_pauses_total", "Times that it did not run for more than a second.", "counter",
        (), _one(lambda s: s.pauses)),
)  # fmt: skip


class _TableCollector(Collector):
    """Shows a snapshot to the prometheus client, row by row, each under its name and its twin's."""

    def __init__(self, snapshot: Snapshot, rows: Iterable[Row]) -> None:
        self._snapshot = snapshot
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        """The metric families of the whole table."""
        for row in self._rows:
            samples = list(row.read(self._snapshot))
            yield _family(row, row.name, row.labels, samples)
            if row.twin is not None:
                labels = tuple("model_name" if label == "model" else label for label in row.labels)
                yield _family(row, row.twin, labels, samples)


def _family(row: Row, name: str, labels: Labels, samples: list[tuple[Labels, Value]]) -> Metric:
    if row.kind == "histogram":
        histogram = HistogramMetricFamily(name, row.help, labels=labels)
        for values, value in samples:
            assert isinstance(value, Histogram)
            histogram.add_metric(values, buckets=value.buckets(), sum_value=value.total)
        return histogram
    family = (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(
        name, row.help, labels=labels
    )
    for values, value in samples:
        assert not isinstance(value, Histogram)
        family.add_metric(values, float(value))
    return family


def render(snapshot: Snapshot, more: Iterable[Row] = ()) -> bytes:
    """The metrics page in Prometheus' text form; `more`: rows beside the table's."""
    return generate_latest(_TableCollector(snapshot, (*TABLE, *more)))

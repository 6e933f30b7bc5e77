"""What the engine measures, under vLLM's metric names, so that dashboards and routers need no change;
what vLLM has no name for is `sumibi:...`.

Prefix counters count tokens. Times are seconds between the moments that `Sequence` records. Everything is
labelled `model_name` and `engine` (the data-parallel rank, always 0 here).
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from sumibi.engine.kvtiers import TierLink
from sumibi.engine.loading import Load
from sumibi.engine.scheduler import Scheduler
from sumibi.engine.sequence import FinishReason, Sequence
from sumibi.tiers.words import TIER_COUNTS, TIER_GAUGES

_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

_VLLM_SOURCES = {"store": "external_unspecified"}
"""What vLLM calls a source of cached tokens, where it is not what we call it."""


class EngineMetrics:
    """The registry of one engine. Observations come from the engine's thread, pages from the server's."""

    def __init__(
        self,
        model: str,
        scheduler: Scheduler,
        *,
        dropped_batches: Callable[[], int],
        tiers: TierLink | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        ProcessCollector(registry=self._registry)  # process_start_time_seconds, memory, CPU
        pool = scheduler.pool
        self._gauge("num_requests_running", "Sequences in the current steps", lambda: len(scheduler.running))
        self._gauge(
            "num_requests_waiting",
            "Sequences that wait for a place or for their KV",
            lambda: len(scheduler.waiting) + scheduler.loading,
        )
        self._gauge(
            "num_requests_loading",
            "Those of them that wait for KV from outside",
            lambda: scheduler.loading,
            prefix="sumibi",
        )
        self._gauge("kv_cache_usage_perc", "Held KV blocks, 0 to 1", lambda: pool.held / pool.num_blocks)
        self._gauge(
            "max_num_seqs", "Sequences computed at once", lambda: scheduler.max_sequences, prefix="sumibi"
        )
        self._info(
            "cache_config_info",
            "KV cache",
            block_size=str(pool.block_tokens),
            num_gpu_blocks=str(pool.num_blocks),
            kv_cache_size_tokens=str(pool.num_blocks * pool.block_tokens),
        )
        self._registry.register(
            _Counts(
                [
                    ("vllm:num_preemptions", "Sequences sent back to wait", lambda: scheduler.preemptions),
                    ("sumibi:kv_batches_dropped", "KV event batches not published", dropped_batches),
                ],
                self._labels,
            )
        )
        if tiers is not None:
            self._registry.register(TierCounts(tiers, self._labels))
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache")
        self._external_queries = self._counter(
            "external_prefix_cache_queries", "Prompt tokens that the device lacked, looked up outside"
        )
        self._external_hits = self._counter(
            "external_prefix_cache_hits", "Prompt tokens that were loaded from outside"
        )
        self._scheduler = scheduler
        self._by_source = self._labelled(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source"
        )
        self._cached_by_source = self._labelled(
            "prompt_tokens_cached_by_source", "Cached prompt tokens by where they were", "source"
        )
        self._load_s = self._histogram(
            "kv_load_seconds", "Loads from outside", _FIRST_TOKEN_S, prefix="sumibi"
        )
        self._loaded_tokens = self._counter("kv_load_tokens", "Tokens they brought", prefix="sumibi")
        self._lost_tokens = self._counter(
            "kv_load_failed_tokens", "Tokens they should have brought and did not", prefix="sumibi"
        )
        self.load_timeouts = self._counter(
            "kv_load_timeouts", "Loads that took too long to wait for", prefix="sumibi"
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that got a token")
        self._cached = self._counter("prompt_tokens_cached", "Those of them that came from the cache")
        self._generated = self._counter("generation_tokens", "Output tokens")
        self.rejected = self._counter("admission_rejections", "Requests refused because too many were there")
        self._success = Counter(
            "vllm:request_success",
            "Finished sequences",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._steps = self._histogram("iteration_tokens_total", "Tokens computed in a step", _STEP_TOKENS)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step", _REQUEST_S)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First step to first token", _REQUEST_S
        )
        self._decode = self._histogram("request_decode_time_seconds", "First to last token", _REQUEST_S)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def step(self, tokens: int) -> None:
        """A step has computed `tokens` tokens, prefill and decode together."""
        self._steps.observe(tokens)

    def loaded(self, load: Load, tokens: int, now_s: float) -> None:
        """`load` has ended; it brought `tokens` tokens to the sequence that waited for it."""
        self._load_s.observe(now_s - load.begun_s)
        self._loaded_tokens.inc(tokens)
        if not load.abandoned:
            self._lost_tokens.inc(load.tokens - tokens)

    def token(self, sequence: Sequence, now_s: float) -> None:
        """`sequence` got a token; its times are updated."""
        self._generated.inc()
        if sequence.last_token_s is None:
            self._first_token(sequence, now_s)
        else:
            self._itl.observe(now_s - sequence.last_token_s)
        sequence.last_token_s = now_s

    def finished(self, sequence: Sequence, now_s: float) -> None:
        """`sequence` ended, for the reason it holds."""
        assert sequence.finish is not None
        self._success.labels(**self._labels, finished_reason=sequence.finish.value).inc()
        if sequence.finish is FinishReason.ABORT or sequence.first_token_s is None:
            return
        self._e2e.observe(now_s - sequence.arrived_s)
        self._decode.observe(now_s - sequence.first_token_s)

    def _first_token(self, sequence: Sequence, now_s: float) -> None:
        sequence.first_token_s = now_s
        self._ttft.observe(now_s - sequence.arrived_s)
        if sequence.started_s is None:  # a sibling: its prompt is counted with the first choice
            return
        self._queue.observe(sequence.started_s - sequence.arrived_s)
        self._prefill.observe(now_s - sequence.started_s)
        cached = sequence.cached_tokens or 0
        self._prompt.inc(sequence.prompt_tokens)
        self._cached.inc(cached)
        device = sequence.cached_by_source.get("device", 0)
        self._queries.inc(sequence.prompt_tokens)
        self._hits.inc(device)
        if self._scheduler.source is not None:
            self._external_queries.inc(sequence.prompt_tokens - device)
            self._external_hits.inc(cached - device)
        self._by_source("local_compute", sequence.prompt_tokens - cached)
        self._by_source("local_cache_hit", device)
        self._by_source("external_kv_transfer", cached - device)
        for source, tokens in sequence.cached_by_source.items():
            self._cached_by_source(_VLLM_SOURCES.get(source, source), tokens)

    def _gauge(self, name: str, text: str, value: Callable[[], float], *, prefix: str = "vllm") -> None:
        gauge = Gauge(f"{prefix}:{name}", text, [*self._labels], registry=self._registry)
        gauge.labels(**self._labels).set_function(value)

    def _info(self, name: str, text: str, **labels: str) -> None:
        labels = {**self._labels, **labels}
        Gauge(f"vllm:{name}", text, [*labels], registry=self._registry).labels(**labels).set(1)

    def _counter(self, name: str, text: str, *, prefix: str = "vllm") -> Counter:
        counter = Counter(f"{prefix}:{name}", text, [*self._labels], registry=self._registry)
        return counter.labels(**self._labels)

    def _labelled(self, name: str, text: str, label: str) -> Callable[[str, int], None]:
        """A counter with one more label: call it with the label's value and what to add."""
        counter = Counter(f"vllm:{name}", text, [*self._labels, label], registry=self._registry)
        return lambda value, count: counter.labels(**self._labels, **{label: value}).inc(count)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *, prefix: str = "vllm"
    ) -> Histogram:
        histogram = Histogram(
            f"{prefix}:{name}", text, [*self._labels], buckets=buckets, registry=self._registry
        )
        return histogram.labels(**self._labels)


class _Counts:
    """Counters that others keep as plain integers."""

    def __init__(self, counts: list[tuple[str, str, Callable[[], int]]], labels: dict[str, str]) -> None:
        self._counts = counts
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each page."""
        for name, text, value in self._counts:
            family = CounterMetricFamily(name, text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], value())
            yield family


_TIER_TIMES = {"read_s": "Time spent reading", "write_s": "Time spent writing"}


class TierCounts:
    """What the KV tiers count, one series a tier."""

    def __init__(self, tiers: TierLink, labels: dict[str, str]) -> None:
        self._tiers = tiers
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each page."""
        stats = self._tiers.stats()
        names = [*self._labels, "tier"]
        for name in TIER_GAUGES:
            gauge = GaugeMetricFamily(f"sumibi:kv_tier_{name}", f"KV tier: {name}", labels=names)
            for tier, counts in stats.tiers.items():
                gauge.add_metric([*self._labels.values(), tier.value], getattr(counts, name))
            yield gauge
        for name, text in (TIER_COUNTS | _TIER_TIMES).items():
            full = name.replace("_s", "_seconds") if name.endswith("_s") else name
            family = CounterMetricFamily(f"sumibi:kv_tier_{full}", text, labels=names)
            for tier, counts in stats.tiers.items():
                family.add_metric([*self._labels.values(), tier.value], getattr(counts, name))
            yield family
        speeds = self._tiers.speeds.told()
        for name, text in (
            ("gb_per_s", "10^9 bytes a second of a load"),
            ("latency_s", "Before its first byte"),
        ):
            full = name.replace("latency_s", "latency_seconds")
            gauge = GaugeMetricFamily(f"sumibi:kv_tier_{full}", f"{text}, as measured and told", labels=names)
            for tier, speed in speeds.items():
                gauge.add_metric([*self._labels.values(), tier.value], getattr(speed, name))
            yield gauge
        for name, text, value in (
            ("copy_dropped", "Blocks not copied to the tiers because too many waited", self._tiers.dropped),
            ("misses", "Blocks that a load found nowhere", stats.misses),
            ("events_lost", "Events of the tiers that were not published", stats.events_lost),
            ("prefetched", "Blocks brought up to host memory on a hint", stats.prefetched),
            ("prefetch_used", "Those of them that were used before they were evicted", stats.prefetch_used),
            ("prefetch_wasted", "Those of them that were evicted unused", stats.prefetch_wasted),
            ("prefetch_dropped", "Blocks that a hint named and that were not read", stats.prefetch_dropped),
        ):
            family = CounterMetricFamily(f"sumibi:kv_tier_{name}", text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], value)
            yield family
        hints = CounterMetricFamily(
            "sumibi:kv_prefetch_hints", "Hints to bring KV up", labels=[*self._labels, "outcome"]
        )
        for outcome, count in self._tiers.hints.items():
            hints.add_metric([*self._labels.values(), outcome.value], count)
        yield hints

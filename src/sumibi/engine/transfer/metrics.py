"""What transfers are measured by: vLLM's names for its NIXL connector, and our own where it has none."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

_XFER_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 30)
_BYTES = tuple(float(1 << power) for power in range(16, 36, 2))


class TransferMetrics:
    """Counted from any thread; `page` is appended to the engine's."""

    def __init__(self, model: str, *, kept: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self.xfer_s = self._histogram("nixl_xfer_time_seconds", "Pulls that brought blocks", _XFER_S)
        self.bytes = self._histogram("nixl_bytes_transferred", "Bytes a pull brought", _BYTES)
        self.failed = self._counter("vllm:nixl_num_failed_transfers", "Pulls that brought not all")
        self.failed_notifications = self._counter(
            "vllm:nixl_num_failed_notifications", "Releases and heartbeats that did not reach the peer"
        )
        self.expired = self._counter("vllm:nixl_num_kv_expired_reqs", "Requests whose lease ran out")
        self.corrupt = self._counter("sumibi:kv_transfer_corrupt_blocks", "Blocks whose checksum was wrong")
        self.not_shared = self._counter(
            "sumibi:kv_transfer_shm_fallbacks", "Pulls over TCP that asked for shared memory"
        )
        self.bad_connections = self._counter(
            "sumibi:kv_transfer_bad_connections", "Connections to the side channel that were not understood"
        )
        self.busy = self._counter(
            "sumibi:kv_transfer_connections_refused", "Connections closed because too many were open"
        )
        self._failures = Counter(
            "sumibi:kv_transfer_failures",
            "Failed pulls by reason",
            [*self._labels, "reason"],
            registry=self._registry,
        )
        self._refusals = Counter(
            "sumibi:kv_transfer_refusals",
            "Peers that were turned away at the side channel, by reason",
            [*self._labels, "reason"],
            registry=self._registry,
        )
        self._pulled = Counter(
            "sumibi:kv_transfer_blocks",
            "Blocks that came",
            [*self._labels, "transport"],
            registry=self._registry,
        )
        gauge = Gauge(
            "sumibi:kv_transfer_kept",
            "Requests whose blocks are kept for a peer",
            [*self._labels],
            registry=self._registry,
        )
        gauge.labels(**self._labels).set_function(kept)

    def failure(self, reason: str) -> None:
        """A pull brought not all that was asked for."""
        self.failed.inc()
        self._failures.labels(**self._labels, reason=reason).inc()

    def refusal(self, reason: str) -> None:
        """A peer was turned away."""
        self._refusals.labels(**self._labels, reason=reason).inc()

    def pulled(self, transport: str, blocks: int, block_bytes: int, seconds: float) -> None:
        """A pull has ended; it brought `blocks` blocks."""
        if blocks:
            self.xfer_s.observe(seconds)
            self.bytes.observe(blocks * block_bytes)
            self._pulled.labels(**self._labels, transport=transport).inc(blocks)

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, [*self._labels], registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, [*self._labels], buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)

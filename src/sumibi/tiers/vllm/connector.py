"""The connector: vLLM's hooks on one side, `sumibi.tiers.connector` on the other.

vLLM builds it twice, in two processes. Loads are asynchronous: a request that waits for blocks is in no step,
and others go on. Stores reach host memory within the step that filled the blocks, so vLLM need not keep any.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from sumibi.core.errors import ConfigError
from sumibi.tiers import BlockTiers, Tier, TiersConfig
from sumibi.tiers.connector.asker import StoreAsker
from sumibi.tiers.connector.book import Happened, Told
from sumibi.tiers.connector.messages import Hello, Orders, Report
from sumibi.tiers.connector.names import files_digest
from sumibi.tiers.connector.planner import Planner
from sumibi.tiers.connector.worker import TierWorker
from sumibi.tiers.vllm.device import namespace, open_device
from sumibi.tiers.vllm.metrics import StatsReader, TierMetrics, TierStatsDelta

_log = init_logger(f"vllm.{__name__}")
_SCAN_S = 10.0
_WHERE = "kv_connector_extra_config"
_SOURCES = {
    Tier.HOST: CacheHitSource.HOST,
    Tier.DISK: CacheHitSource.DISK,
    Tier.STORE: CacheHitSource.EXTERNAL_UNSPECIFIED,
}
_ADAPTER_FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")


@dataclass
class _Metadata(KVConnectorMetadata):
    orders: Orders


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):
    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """There is one worker."""
        raise NotImplementedError("sumibi's tiers with more than one worker")


class SumibiTiersConnector(KVConnectorBase_V1):
    """`kv_connector_extra_config` is what `sumibi engine --kv-tiers` takes, and `weights`: what to call the
    weights, where vLLM was not given a directory or repository with their files.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for what is not supported, before anything is served."""
        super().__init__(vllm_config, role, kv_cache_config)
        extra = dict(self._kv_transfer_config.kv_connector_extra_config or {})
        self._weights: str | None = extra.pop("weights", None)
        self._config = TiersConfig.parse(extra, where=_WHERE)
        _check(vllm_config, self._kv_transfer_config, kv_cache_config)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._worker: TierWorker | None = None
        self._planner: Planner | None = None
        self._failed: set[int] = set()
        self._stats = StatsReader()
        self._adapters: dict[tuple[object, ...], bytes] = {}
        if role is KVConnectorRole.SCHEDULER:
            store = self._config.store
            asker = (lambda hello: StoreAsker(store, hello)) if store else None
            self._planner = Planner(self._block_tokens, self._describe, asker)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: nobody waits for what it drops."""
        return False

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        """See the base."""
        assert self._planner
        self._planner.arrived(request, self._adapter(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base."""
        assert self._planner
        if request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._planner.offer(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base."""
        assert self._planner
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """See the base."""
        assert self._planner
        sources: dict[CacheHitSource, int] = {}
        for tier in self._planner.loading(request.request_id):
            source = _SOURCES[tier]
            sources[source] = sources.get(source, 0) + self._block_tokens
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See the base."""
        assert self._planner
        scheduled = scheduler_output.num_scheduled_tokens
        before = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed = [(request_id, before[request_id] + count) for request_id, count in scheduled.items()]
        return _Metadata(self._planner.orders(computed, self._table))

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base."""
        assert self._planner
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, _WorkerMetadata):
            self._planner.reported(said.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base."""
        assert self._planner
        self._planner.ended(request.request_id)
        return False, None

    def take_events(self) -> Iterable[Any]:
        """See the base."""
        assert self._planner
        return [_event(happened, self._block_tokens) for happened in self._planner.book.take_events()]

    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping until it has heard how its writes ended."""
        return self._planner is not None and self._planner.unsettled

    def reset_cache(self) -> bool:
        """All that lies below is of no use to this engine from now on. Its host memory and disk are cleared
        with the next step; the shared store is left to the other engines.
        """
        assert self._planner
        self._planner.clear()
        return True

    def _table(self, request_id: str) -> list[int]:
        assert self._kv_cache_manager is not None
        table: list[int] = self._kv_cache_manager.get_block_ids(request_id)[0]
        return table

    def _describe(self, request: Any, index: int) -> Told:
        first, end = index * self._block_tokens, (index + 1) * self._block_tokens
        extra, _ = generate_block_hash_extra_keys(request, first, end, 0)
        lora = request.lora_request
        return Told(
            bytes(request.block_hashes[index]),
            bytes(request.block_hashes[index - 1]) if index else None,
            array("I", request.all_token_ids[first:end]),
            (lora.adapter_id if lora else None, lora.name if lora else None, extra),
        )

    def _adapter(self, request: Any) -> bytes:
        """What tells one adapter's bytes from others' of that name and path; read again when files change."""
        lora = request.lora_request
        if lora is None:
            return b""
        where = Path(lora.path)
        files = sorted(where.iterdir()) if where.is_dir() else []
        seen = (lora.name, *((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files))
        if seen not in self._adapters:
            if len(self._adapters) > 1024:
                self._adapters.clear()
            digest = files_digest(where, _ADAPTER_FILES) if files else lora.path
            self._adapters[seen] = blake2b(f"{lora.name} {digest}".encode(), digest_size=16).digest()
        return self._adapters[seen]

    # Worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Open the tiers. Raises ConfigError or EnvironmentProblem."""
        device = open_device(kv_caches, self._kv_cache_config.num_blocks)
        name = namespace(self._vllm_config, kv_caches, self._weights)
        tiers = BlockTiers(self._config, block_bytes=device.block_bytes, namespace=name)
        if not tiers.flush(_SCAN_S):
            _log.warning("KV tiers: not all files are known after %.0f s; found as they are read", _SCAN_S)
        self._worker = TierWorker(
            tiers, device, Hello(name, device.block_bytes), keeps_host=self._config.host_bytes > 0
        )
        _log.info("KV tiers: blocks of %d bytes, %s", device.block_bytes, self._config)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See the base. Loads begin here: `start_load_kv` comes after the step's computing."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker:
            self._worker.begin(_orders(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base: they have begun."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See the base: no request in this step waits for any."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See the base: blocks are taken whole, after the step."""

    def wait_for_save(self) -> None:
        """See the base."""
        if self._worker:
            self._worker.save(_orders(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base."""
        if self._worker is None:
            return None, None
        idle = _orders(self._get_connector_metadata()).idle
        done, self._failed = self._worker.finished(idle=idle)
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base. Called after `get_finished`, in the same step."""
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See the base."""
        if self._worker is None:
            return None
        return _WorkerMetadata(self._worker.report(idle=_orders(self._get_connector_metadata()).idle))

    def get_kv_connector_stats(self) -> TierStatsDelta | None:
        """See the base."""
        return self._stats.since(self._worker.stats()) if self._worker else None

    def shutdown(self) -> None:
        """See the base."""
        if self._worker:
            self._worker.close()
        if self._planner:
            self._planner.close()

    # Both

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStatsDelta:
        """See the base."""
        return TierStatsDelta(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> TierMetrics:
        """See the base."""
        return TierMetrics(*arguments)


def _orders(metadata: KVConnectorMetadata) -> Orders:
    assert isinstance(metadata, _Metadata)
    return metadata.orders


def _event(happened: Happened, block_tokens: int) -> Any:
    told = happened.told
    name = maybe_convert_block_hash(happened.block_hash)
    where = {
        "medium": happened.tier.medium,
        "group_idx": 0,
        "locality": "REMOTE" if happened.tier is Tier.STORE else "LOCAL",
        "ownership": f"sumibi-{happened.tier}",
    }
    if told is None:
        return BlockRemoved(block_hashes=[name], **where)
    lora_id, lora_name, extra = told.more
    return BlockStored(
        block_hashes=[name],
        parent_block_hash=maybe_convert_block_hash(told.parent_hash) if told.parent_hash else None,
        token_ids=told.token_ids.tolist(),
        block_size=block_tokens,
        lora_id=lora_id,
        lora_name=lora_name,
        extra_keys=to_event_extra_keys([extra]),
        kv_cache_spec_kind="full_attention",
        **where,
    )


def _check(vllm_config: Any, transfer: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError naming the flag, for what would be wrong or slow in silence."""
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block that vanished would end "
            'its request; give "recompute" (in a MultiConnector both here and at the top)'
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f'kv_role is {transfer.kv_role!r}; tiers are read and written: give "kv_both"')
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError("KV tiers need prefix caching: leave out --no-enable-prefix-caching")
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"--prefix-caching-hash-algo is {algorithm!r}, which is no cryptographic hash: "
            "give sha256 or sha256_cbor"
        )
    workers = vllm_config.parallel_config.world_size
    if workers != 1:
        raise ConfigError(f"KV tiers with {workers} workers a replica are not supported yet; give one")
    if vllm_config.speculative_config is not None:
        raise ConfigError("KV tiers with speculative decoding are not supported yet; leave one of them out")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in (FullAttentionSpec, MLAAttentionSpec):
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ConfigError(
            f"KV tiers are for models with full attention only; this one has {', '.join(kinds)}"
        )


if SumibiTiersConnector.__name__ not in KVConnectorFactory._registry:
    # A MultiConnector finds the class by its name where it reads our counts.
    KVConnectorFactory.register_connector(
        SumibiTiersConnector.__name__, "sumibi.tiers.vllm", SumibiTiersConnector.__name__
    )

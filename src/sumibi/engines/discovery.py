"""What an engine says of itself: its models, its data-parallel ranks, where its KV events are published.

One engine is one HTTP address. Each of its ranks is an endpoint with a canonical id `http://host:port#rank`,
the same everywhere (ledger, index, metrics, logs), so that two spellings of one address never become two
endpoints.
"""

from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from sumibi.core.errors import EngineUnavailable, WireError
from sumibi.engines.http import ask
from sumibi.engines.signals import EngineSignals, parse_signals

_MAX_RANKS = 64
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises; the last is for brackets nested too deep."""


class HintOutcome(StrEnum):
    """What became of a hint to bring KV up."""

    TAKEN = "taken"
    UNKNOWN = "unknown"
    """The engine does not remember the request."""
    BUSY = "busy"
    """The engine has enough to do."""
    FAILED = "failed"
    """No answer in time, or another one."""
    DROPPED = "dropped"
    """Not sent: too many were on their way to this engine."""


_HINT_OUTCOMES = {202: HintOutcome.TAKEN, 404: HintOutcome.UNKNOWN, 503: HintOutcome.BUSY}


class EventSource(msgspec.Struct, frozen=True):
    """Where one rank's KV events come from."""

    address: str
    """ZMQ address as seen from here."""
    bind: bool = False
    """True if the publisher connects: then the subscriber binds."""
    replay: str | None = None
    """Address of the replay socket; None: no replay."""


class TierInfo(msgspec.Struct, frozen=True):
    """A place below an engine's device, as the embedded engine tells it (others tell none)."""

    name: str
    """The medium of its KV events, in lower case."""
    shared: bool = False
    tokens: int | None = None
    gb_per_s: float | None = None
    latency_s: float | None = None


class TransferInfo(msgspec.Struct, frozen=True):
    """How an engine hands KV over, as the embedded engine says (`GET /kv_transfer`); others say nothing."""

    kv_connector: str
    """vLLM's name for it, or `stream`."""
    kv_role: str
    """`kv_producer`, `kv_consumer` or `kv_both`."""
    remote_host: str = ""
    """Where its side channel listens; with port 0 nowhere: it keeps nothing for others."""
    remote_port: int = 0
    namespace: str = ""
    """KV goes only between engines that say the same here: model, weights, dtype, block size."""
    secured: bool | None = None
    """Its peers have to know a secret; None: it does not say."""


class RankInfo(msgspec.Struct, frozen=True):
    """One data-parallel rank of an engine."""

    endpoint: str
    """Canonical id."""
    rank: int
    signals: EngineSignals
    events: EventSource | None
    tiers: tuple[TierInfo, ...] = ()
    kv_bytes_per_token: int | None = None
    prefetches: bool = False
    """It takes hints to bring KV up (`hint`)."""


class EngineInfo(msgspec.Struct, frozen=True):
    """One engine that is up."""

    url: str
    models: tuple[str, ...]
    """Served models and adapters."""
    roots: tuple[str, ...]
    """For each model where its weights came from, as the engine says (a path on *its* machine, or a name)."""
    parents: tuple[str | None, ...]
    """For each model the one it is an adapter of."""
    aliases: tuple[str, ...]
    """Of `models`, the names of the first one: it has the same weights under all of them."""
    max_model_tokens: int | None
    """Longest prompt + output it takes."""
    ranks: tuple[RankInfo, ...]
    transfer: TransferInfo | None = None
    """None: it does not say that it hands KV over."""


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _EventConfig(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    kv_tiers: tuple[TierInfo, ...] = ()
    kv_bytes_per_token: Annotated[int, msgspec.Meta(gt=0)] | None = None
    kv_prefetch: bool = False

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


_MOST_GB_PER_S = 1e6
_MOST_LATENCY_S = 3600.0


def _believed(tier: TierInfo) -> TierInfo:
    """A tier without numbers that cannot be: a speed below zero would draw every request there."""
    speed, latency_s, tokens = tier.gb_per_s, tier.latency_s, tier.tokens
    return msgspec.structs.replace(
        tier,
        tokens=tokens if tokens is not None and tokens > 0 else None,
        gb_per_s=speed if speed is not None and 0 < speed <= _MOST_GB_PER_S else None,
        latency_s=latency_s if latency_s is not None and 0 <= latency_s <= _MOST_LATENCY_S else None,
    )


def endpoint_id(url: str, rank: int = 0) -> str:
    """The canonical id of one rank of the engine at `url`."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{parts.port or 80}#{rank}"


def address_of(url: str) -> tuple[str, int]:
    """(host, port) of `http://host:port`."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


async def healthy(url: str, *, timeout_s: float = 2.0) -> bool:
    """True if the engine answers its health check. Raises EngineUnavailable if it does not answer at all."""
    return (await ask(*address_of(url), "/health", timeout_s=timeout_s)).status == 200


async def scrape(url: str, *, timeout_s: float = 2.0) -> bytes:
    """The engine's metrics page, for `parse_signals`. Raises EngineUnavailable."""
    reply = await ask(*address_of(url), "/metrics", timeout_s=timeout_s)
    if reply.status != 200:
        raise EngineUnavailable(f"{url}/metrics answered {reply.status}")
    return reply.body


async def discover(url: str, *, timeout_s: float = 5.0) -> EngineInfo:
    """Ask the engine at `url` what it is.

    Raises EngineUnavailable while it is not (yet) up or leaves a question open, WireError when it answers
    something else than an engine would. An engine that says it has no /metrics or /kv_event_sources is
    fine: it is known less well.
    """
    if not await healthy(url, timeout_s=timeout_s):
        raise EngineUnavailable(f"{url}/health says it is not ready")
    models = await _models(url, timeout_s)
    page = await _page(url, "/metrics", timeout_s)
    sources = await _event_sources(url, timeout_s)
    published = [rank for rank, config in sources.items() if config.publishes]
    ranks = max(published, default=0) + 1
    host = address_of(url)[0]
    return EngineInfo(
        url=url,
        models=tuple(model.id for model in models),
        roots=tuple(model.root or "" for model in models),
        parents=tuple(model.parent for model in models),
        aliases=_aliases(models),
        max_model_tokens=min((m.max_model_len for m in models if m.max_model_len), default=None),
        ranks=tuple(
            RankInfo(
                endpoint=endpoint_id(url, rank),
                rank=rank,
                signals=parse_signals(page, rank=rank, ranks=ranks),
                events=_events(sources.get(rank), host),
                tiers=tuple(map(_believed, sources[rank].kv_tiers)) if rank in sources else (),
                kv_bytes_per_token=sources[rank].kv_bytes_per_token if rank in sources else None,
                prefetches=rank in sources and sources[rank].kv_prefetch,
            )
            for rank in range(ranks)
        ),
        transfer=await transfer_info(url, timeout_s),
    )


async def hint(url: str, request_id: str, *, timeout_s: float) -> HintOutcome:
    """Tell the engine at `url` that a request it answered should go on soon (`POST /kv_prefetch`). Never
    raises: it is a hint.
    """
    body = msgspec.json.encode({"request_id": request_id})
    try:
        reply = await ask(*address_of(url), "/kv_prefetch", body=body, timeout_s=timeout_s)
    except EngineUnavailable:
        return HintOutcome.FAILED
    return _HINT_OUTCOMES.get(reply.status, HintOutcome.FAILED)


async def _models(url: str, timeout_s: float) -> list[_Model]:
    reply = await ask(*address_of(url), "/v1/models", timeout_s=timeout_s)
    if reply.status != 200:
        raise EngineUnavailable(f"{url}/v1/models answered {reply.status}")
    try:
        models = msgspec.json.decode(reply.body, type=_Models).data
    except _MALFORMED as cause:
        raise WireError(f"{url}/v1/models is not a list of models: {cause}") from cause
    if not models:
        raise WireError(f"{url}/v1/models names no model")
    return models


def _aliases(models: list[_Model]) -> tuple[str, ...]:
    """Names of the first model: entries of the same root, unless one is an adapter (it has a parent)."""
    first, *others = models
    same = (m.id for m in others if m.root and m.root == first.root and m.parent is None)
    return (first.id, *same)


async def _event_sources(url: str, timeout_s: float) -> dict[int, _EventConfig]:
    """Rank -> what it says of its KV, the resolved configuration; empty if the engine cannot say."""
    try:
        page = await _page(url, "/kv_event_sources", timeout_s)
        configs = msgspec.json.decode(page or b"{}", type=dict[int, _EventConfig | None])
    except _MALFORMED:
        return {}
    return {rank: config for rank, config in configs.items() if 0 <= rank < _MAX_RANKS and config is not None}


async def transfer_info(url: str, timeout_s: float) -> TransferInfo | None:
    """What the engine at `url` says of handing KV over; None if it cannot say. Raises EngineUnavailable."""
    page = await _page(url, "/kv_transfer", timeout_s)
    try:
        return msgspec.json.decode(page, type=TransferInfo) if page else None
    except _MALFORMED:
        return None


def _events(config: _EventConfig | None, host: str) -> EventSource | None:
    if config is None or not config.publishes:
        return None
    return event_source(config.endpoint, config.replay_endpoint, host)


async def _page(url: str, path: str, timeout_s: float) -> bytes:
    """What an engine may have to say; empty if it has no such page. Raises EngineUnavailable."""
    reply = await ask(*address_of(url), path, timeout_s=timeout_s)
    if reply.status >= 500:
        raise EngineUnavailable(f"{url}{path} answered {reply.status}")
    return reply.body if reply.status == 200 else b""


def event_source(endpoint: str, replay: str | None, engine_host: str) -> EventSource:
    """Addresses as seen from here, by the engine's own configuration.

    vLLM's rule of who binds: the publisher does if its endpoint holds `*` or `::` or is ipc/inproc, else it
    connects and the subscriber must bind. The replay socket always binds.
    """
    publisher_binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    return EventSource(
        address=_reachable(endpoint, engine_host) if publisher_binds else endpoint,
        bind=not publisher_binds,
        replay=None if replay is None else _reachable(replay, engine_host),
    )


def _reachable(endpoint: str, engine_host: str) -> str:
    """A bound wildcard address, as a peer reaches it: through the engine's host."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    host, _, port = rest.rpartition(":")
    if host in ("*", "0.0.0.0", "[::]", "::", "[::0]"):
        host = f"[{engine_host}]" if ":" in engine_host else engine_host
    return f"tcp://{host}:{port}"

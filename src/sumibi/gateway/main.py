"""Assembles the gateway and runs it: the only place that knows all its parts, signals and the clock.

`main` is what `sumibi serve` calls; tests start and stop a `Gateway` themselves.
"""

import asyncio
import logging
import resource
import time
from typing import Final

import uvloop

from sumibi.core.errors import ConfigError
from sumibi.engines.discovery import EngineInfo
from sumibi.gateway.admin import AdminDoor, admin_key
from sumibi.gateway.app import App, ModelCard, Served
from sumibi.gateway.assembly import Assembly
from sumibi.gateway.collector import keep_collecting
from sumibi.gateway.exposition import Snapshot, render
from sumibi.gateway.http1 import Limits
from sumibi.gateway.options import GatewayOptions
from sumibi.gateway.paths import state_directory
from sumibi.gateway.server import HttpServer
from sumibi.gateway.stopping import on_signals
from sumibi.gateway.tenants import Tenants
from sumibi.routing import router
from sumibi.routing.events import Role

MOST_CLIENTS: Final = 20_000
"""Connected at once; fewer where the system allows fewer open files."""
OTHER_FILES: Final = 200
"""Kept for what is neither a client nor its connection to an engine: health checks, KV events, logs."""
ABORT_S: Final = 2.0
"""After the drain time: for error events and answers to reach their clients."""

log = logging.getLogger(__name__)


class Gateway(Assembly):
    """A whole gateway in the running loop. `start`, then `stop`."""

    def __init__(self, options: GatewayOptions) -> None:
        """Checks everything that can be checked without a socket. Raises ConfigError, ModelError."""
        if all(engine.role is Role.PREFILL for engine in options.engines):
            log.warning(
                "all engines have role=prefill: nobody generates, every request will be refused; add one with"
                " role=decode or role=both"
            )
        super().__init__(options)
        self.admin_key = admin_key(options, self.state) if options.admin_port is not None else None
        self._served = Served(ready=lambda: self.ready)
        self._app = App(
            self.shell,
            self.readers,
            self._served,
            Tenants.load(options.api_keys),
            options.objectives,
            admin_key=self.admin_key,
            render_metrics=lambda: render(self.snapshot()),
        )
        self.server = HttpServer(self._app.respond, self._limits(), self.deadlines)
        self.admin_server: HttpServer | None = None
        if self.admin_key is not None:
            in_flight = self.shell.completions.__contains__
            door = AdminDoor(self.admin_key, self.router, self.metrics, self.readers, in_flight)
            self.admin_server = HttpServer(door.respond, Limits(body_bytes=64 * 1024), self.deadlines)

    async def start(self) -> None:
        """Bind both ports and begin to look for engines. Raises EnvironmentProblem naming a port in use."""
        options = self.options
        await self.server.start(options.host, options.port, flag="--port")
        if self.admin_server is not None and options.admin_port is not None:
            await self.admin_server.start(options.admin_host, options.admin_port, flag="--admin-port")
        self.begin()

    async def stop(self, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """Take no more requests, let those in flight finish for `grace_s` (or until `hurry` is set), end
        them, close everything. Not to be cancelled: sockets would stay open behind their context.
        """
        self._app.draining = True
        self.server.stop_accepting()
        if not await self.server.drain(grace_s, hurry):
            unfinished = list(self.shell.completions.values())
            if unfinished:
                log.warning("%d requests did not finish in time and are cut off", len(unfinished))
            for completion in unfinished:
                completion.shut_down()
            self.server.close_idle()
            await self.server.drain(ABORT_S)
            self.server.abort()
        if self.admin_server is not None:
            self.admin_server.stop_accepting()
            self.admin_server.abort()
        await self.end()

    def came_up(self, info: EngineInfo) -> None:
        """Its models are named to clients."""
        super().came_up(info)
        for model in info.models:
            card = ModelCard(id=model, max_model_len=info.max_model_tokens, created=int(time.time()))
            self._served.cards.setdefault(model, card)

    def snapshot(self) -> Snapshot:
        """Everything that a scrape of our own metrics shows."""
        server = self.server
        return self.show(client_connections=server.connections, request_bytes=server.buffered_bytes)

    # -- inside

    def _limits(self) -> Limits:
        options = self.options
        timeouts = options.timeouts
        return Limits(
            connections=clients_within(open_files()),
            body_bytes=options.max_body_bytes,
            head_s=timeouts.request_head_s,
            body_s=timeouts.request_body_s,
            keep_alive_s=timeouts.keep_alive_s,
            write_s=timeouts.client_write_s,
        )


def open_files() -> int:
    """Raise this process's limit of open files as far as is of use, and allowed; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CLIENTS + OTHER_FILES
    may = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < may:
        resource.setrlimit(resource.RLIMIT_NOFILE, (may, hard))
        soft = may
    return wanted if soft == resource.RLIM_INFINITY else soft


def clients_within(files: int) -> int:
    """Clients that may be connected with so many open files: each may need a connection to an engine, too."""
    return max(1, min(MOST_CLIENTS, (files - OTHER_FILES) // 2))


async def serve(options: GatewayOptions) -> int:
    """Run until SIGTERM or SIGINT, then drain; a second signal cuts the draining short."""
    if not options.engines:
        raise ConfigError("--engine: name at least one engine")
    gateway = Gateway(options)
    await gateway.start()
    _announce(gateway)
    stop, hurry = on_signals()
    completions = gateway.shell.completions
    collecting = asyncio.create_task(keep_collecting(lambda: bool(completions), time.monotonic))
    await stop.wait()
    collecting.cancel()
    log.info("stopping: %d requests in flight", len(completions))
    await gateway.stop(options.timeouts.drain_s, hurry)
    return 0


def _announce(gateway: Gateway) -> None:
    options = gateway.options
    code = "compiled" if str(router.__file__).endswith(".so") else "not compiled"
    log.info("serving on http://%s:%d (%s)", options.host, gateway.server.port, code)
    most = gateway.server.limits.connections
    if most < MOST_CLIENTS:
        log.warning("at most %d clients at once: the system allows no more open files (ulimit -n)", most)
    if gateway.admin_server is not None:
        log.info("admin door on http://%s:%d", options.admin_host, gateway.admin_server.port)
        if options.admin_key is None and options.admin_key_file is None:
            log.info("admin key in %s", state_directory() / "admin.key")


def main(options: GatewayOptions) -> int:
    """Run the gateway until it is told to stop. Raises SumibiError when it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return uvloop.run(serve(options))

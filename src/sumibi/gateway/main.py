"""Assembles the gateway and runs it: the only place that knows all its parts, signals and the clock.

`main` is what `sumibi serve` calls; tests start and stop a `Gateway` themselves.
"""

import asyncio
import logging
import signal
import time
from typing import Final

import uvloop
import zmq.asyncio

from sumibi.core.errors import ConfigError
from sumibi.engines.discovery import EngineInfo
from sumibi.gateway.admin import AdminDoor, admin_key
from sumibi.gateway.app import App, ModelCard, Served
from sumibi.gateway.collector import keep_collecting
from sumibi.gateway.deadlines import Deadlines
from sumibi.gateway.exposition import Snapshot, render
from sumibi.gateway.http1 import Limits
from sumibi.gateway.jsonl import JsonlLog
from sumibi.gateway.metrics import Metrics
from sumibi.gateway.options import GatewayOptions
from sumibi.gateway.paths import state_directory
from sumibi.gateway.prompting import ModelReaders
from sumibi.gateway.record import Recorder
from sumibi.gateway.server import HttpServer
from sumibi.gateway.shell import Shell
from sumibi.gateway.supervision import EngineWatch
from sumibi.gateway.tenants import Tenants
from sumibi.routing import router
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import Role
from sumibi.routing.policies import PAIRING, check_pairing
from sumibi.routing.router import Router

ABORT_S: Final = 2.0
"""After the drain time: for error events and answers to reach their clients."""

log = logging.getLogger(__name__)


def router_config(options: GatewayOptions, *, gateway_epoch: int) -> RouterConfig:
    """The router's settings by the gateway's options."""
    return RouterConfig(
        policy=options.policy,
        gateway_epoch=gateway_epoch,
        hold_above_s=options.hold_above_s,
        bands=list(options.bands),
        other_bands=options.other_bands,
    )


class Gateway:
    """A whole gateway in the running loop. `start`, then `stop`."""

    def __init__(self, options: GatewayOptions) -> None:
        """Checks everything that can be checked without a socket. Raises ConfigError, ModelError."""
        self.options = options
        if any(engine.role not in (None, Role.BOTH) for engine in options.engines):
            check_pairing(options.policy)
        if all(engine.role is Role.PREFILL for engine in options.engines):
            log.warning(
                "all engines have role=prefill: nobody generates, every request will be refused; add one with"
                " role=decode or role=both"
            )
        state = state_directory()
        self.admin_key = admin_key(options, state) if options.admin_port is not None else None
        self.metrics = Metrics()
        recorder = Recorder(options.record) if options.record is not None else None
        config = router_config(options, gateway_epoch=int(time.time()))
        self.router = Router(config, observer=recorder.event if recorder is not None else None)
        if recorder is not None:
            recorder.started(config)
        self.usage_log = JsonlLog(options.usage_log or state / "usage.jsonl")
        self.readers = ModelReaders(options.tokenizer, self.router.block_tokens, self.router.key_name)
        self.readers.load_given()
        self._logs = [self.usage_log, *(recorder.logs() if recorder is not None else ())]
        self.shell = Shell(
            self.router,
            self.metrics,
            record_usage=self.usage_log.append,
            recorder=recorder,
            wall_clock=time.time,
        )
        self.shell.decode_wait_s = options.timeouts.decode_wait_s
        self._deadlines = Deadlines(asyncio.get_running_loop())
        self._context = zmq.asyncio.Context()
        self._served = Served(ready=lambda: any(watch.up for watch in self.watches))
        self.watches = [self._watch(number) for number in range(len(options.engines))]
        self.shell.look_at = self._look_at
        self.shell.ask_replay = self._ask_replay
        self.shell.hint = self._hint
        self._app = App(
            self.shell,
            self.readers,
            self._served,
            Tenants.load(options.api_keys),
            options.objectives,
            admin_key=self.admin_key,
            render_metrics=lambda: render(self.snapshot()),
        )
        self.server = HttpServer(self._app.respond, self._limits(), self._deadlines)
        self.admin_server: HttpServer | None = None
        if self.admin_key is not None:
            in_flight = self.shell.completions.__contains__
            door = AdminDoor(self.admin_key, self.router, self.metrics, self.readers, in_flight)
            self.admin_server = HttpServer(door.respond, Limits(body_bytes=64 * 1024), self._deadlines)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Bind both ports and begin to look for engines. Raises EnvironmentProblem naming a port in use."""
        options, loop = self.options, asyncio.get_running_loop()
        await self.server.start(options.host, options.port, flag="--port")
        if self.admin_server is not None and options.admin_port is not None:
            await self.admin_server.start(options.admin_host, options.admin_port, flag="--admin-port")
        for watch in self.watches:
            self._tasks.append(loop.create_task(watch.run()))
        for jsonl in self._logs:
            self._tasks.append(loop.create_task(jsonl.run()))

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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.shell.close()
        self._deadlines.close()
        self._context.destroy(linger=0)
        for jsonl in self._logs:
            jsonl.flush()

    def snapshot(self) -> Snapshot:
        """Everything that a scrape of our own metrics shows."""
        for watch in self.watches:
            for endpoint in watch.endpoints:
                counters, upstream = self.metrics.endpoint(endpoint), watch.upstream
                counters.connections = upstream.open
                counters.connections_opened = upstream.opened_total
                counters.stale_connections = upstream.stale_total
        readers = {name: reader for name, reader in self.readers.readers.items() if name == reader.name}
        shared = {id(reader.reader): name for name, reader in reversed(readers.items())}
        stats = {name: readers[name].reader.stats() for name in shared.values()}
        return Snapshot(
            metrics=self.metrics,
            router=self.router.counters(),
            client_connections=self.server.connections,
            request_bytes=self.server.buffered_bytes,
            usage_dropped=self.usage_log.dropped,
            pauses=self._deadlines.pauses,
            reader_fallbacks={model: seen.approximate for model, seen in stats.items()},
            reader_mismatches={model: seen.mismatches for model, seen in stats.items()},
            reader_sources={name: reader.source.value for name, reader in readers.items()},
        )

    # -- inside

    def _limits(self) -> Limits:
        options = self.options
        timeouts = options.timeouts
        return Limits(
            body_bytes=options.max_body_bytes,
            head_s=timeouts.request_head_s,
            body_s=timeouts.request_body_s,
            keep_alive_s=timeouts.keep_alive_s,
            write_s=timeouts.client_write_s,
        )

    def _watch(self, number: int) -> EngineWatch:
        options = self.options
        return EngineWatch(
            options.engines[number],
            self.shell,
            self._deadlines,
            options.timeouts,
            self._context,
            interval_s=options.scrape_interval_s,
            max_sequences=options.max_sequences,
            pairs=options.policy in PAIRING,
            found=self.readers.find,
            came_up=self._came_up,
        )

    def _came_up(self, info: EngineInfo) -> None:
        self.readers.bind(info)
        for model in info.models:
            card = ModelCard(id=model, max_model_len=info.max_model_tokens, created=int(time.time()))
            self._served.cards.setdefault(model, card)
            self.metrics.serve(model)

    def _look_at(self, endpoint: str) -> None:
        for watch in self.watches:
            if endpoint in watch.endpoints:
                watch.look()

    def _ask_replay(self, endpoint: str, from_seq: int) -> None:
        for watch in self.watches:
            if endpoint in watch.endpoints:
                watch.ask_replay(endpoint, from_seq)

    def _hint(self, endpoint: str, request: str) -> None:
        for watch in self.watches:
            if endpoint in watch.endpoints:
                watch.hint(endpoint, request)


async def serve(options: GatewayOptions) -> int:
    """Run until SIGTERM or SIGINT, then drain; a second signal cuts the draining short."""
    if not options.engines:
        raise ConfigError("--engine: name at least one engine")
    gateway = Gateway(options)
    await gateway.start()
    _announce(gateway)
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
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
    if gateway.admin_server is not None:
        log.info("admin door on http://%s:%d", options.admin_host, gateway.admin_server.port)
        if options.admin_key is None and options.admin_key_file is None:
            log.info("admin key in %s", state_directory() / "admin.key")


def main(options: GatewayOptions) -> int:
    """Run the gateway until it is told to stop. Raises SumibiError when it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return uvloop.run(serve(options))

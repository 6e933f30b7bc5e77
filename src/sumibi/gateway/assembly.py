"""What every shell around the router has, whatever the door that requests come in by: the router, a clock and
instructions carried out (`shell`), readers of prompts, a watch over each engine, logs.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

import msgspec
import zmq.asyncio

from sumibi.engines.discovery import EngineInfo
from sumibi.gateway.deadlines import Deadlines
from sumibi.gateway.exposition import Snapshot
from sumibi.gateway.jsonl import JsonlLog
from sumibi.gateway.metrics import Metrics
from sumibi.gateway.options import EngineOption, GatewayOptions
from sumibi.gateway.paths import state_directory
from sumibi.gateway.prompting import ModelReaders
from sumibi.gateway.record import Recorder
from sumibi.gateway.shell import Shell
from sumibi.gateway.supervision import EngineWatch
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import EndpointDown, Role, Signals
from sumibi.routing.policies import PAIRING, check_pairing
from sumibi.routing.router import Router

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


class Assembly:
    """See the module. To be made in a running loop; `begin`, then `end`."""

    def __init__(
        self, options: GatewayOptions, *, wait_for_endpoint_s: float | None = None, hands_over: bool = True
    ) -> None:
        """Checks everything that can be checked without a socket. `wait_for_endpoint_s`: how long a request
        waits for an endpoint of its model; None: the router's default. `hands_over`: whether KV of pairs is
        this process's to have moved. Raises ConfigError, ModelError.
        """
        self._hands_over = hands_over
        self.options = options
        if any(engine.role not in (None, Role.BOTH) for engine in options.engines):
            check_pairing(options.policy)
        self.state = state_directory()
        self.metrics = Metrics()
        recorder = Recorder(options.record) if options.record is not None else None
        config = router_config(options, gateway_epoch=int(time.time()))
        if wait_for_endpoint_s is not None:
            config = msgspec.structs.replace(config, wait_for_endpoint_s=wait_for_endpoint_s)
        self.router = Router(config, observer=recorder.event if recorder is not None else None)
        if recorder is not None:
            recorder.started(config)
        self.usage_log = JsonlLog(options.usage_log or self.state / "usage.jsonl")
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
        self.deadlines = Deadlines(asyncio.get_running_loop())
        self._context = zmq.asyncio.Context()
        self.watches = [self._watch(engine) for engine in options.engines]
        self.shell.look_at = self._look_at
        self.shell.ask_replay = self._ask_replay
        self.shell.hint = self._hint
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        """True if at least one engine is up."""
        return any(watch.up for watch in self.watches)

    def begin(self) -> None:
        """Look for engines, write logs."""
        loop = asyncio.get_running_loop()
        for watch in self.watches:
            self._watching[watch.url] = loop.create_task(watch.run())
        for jsonl in self._logs:
            self._tasks.append(loop.create_task(jsonl.run()))

    async def end(self) -> None:
        """Let go of everything. Not to be cancelled: sockets would stay open behind their context."""
        tasks = [*self._watching.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.shell.close()
        self.deadlines.close()
        self._context.destroy(linger=0)
        for jsonl in self._logs:
            jsonl.flush()

    async def watch_only(self, engines: Iterable[EngineOption]) -> None:
        """Watch these engines from now on: new ones are looked for, those that are not named any more are
        forgotten. What is known of the others stays.
        """
        wanted = {engine.url: engine for engine in engines}
        for watch in [watch for watch in self.watches if watch.option != wanted.get(watch.url)]:
            self.watches.remove(watch)
            task = self._watching.pop(watch.url)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for endpoint in watch.endpoints:
                self.shell.targets.pop(endpoint, None)
                self.metrics.endpoints.pop(endpoint, None)
                cause = "it is not among the endpoints any more"
                t = self.shell.now()
                self.shell.tell(EndpointDown(t=t, endpoint=endpoint, cause=cause, removed=True))
            log.info("engine %s is not among the endpoints any more", watch.url)
        for url in wanted.keys() - self._watching.keys():
            watch = self._watch(wanted[url])
            self.watches.append(watch)
            self._watching[url] = asyncio.get_running_loop().create_task(watch.run())

    def came_up(self, info: EngineInfo) -> None:
        """An engine is known to the router."""
        self.readers.bind(info)
        for model in info.models:
            self.metrics.serve(model)

    def scraped(self, signals: Signals) -> None:
        """An engine said what it has to do."""

    def show(self, *, client_connections: int, request_bytes: int) -> Snapshot:
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
            client_connections=client_connections,
            request_bytes=request_bytes,
            usage_dropped=self.usage_log.dropped,
            pauses=self.deadlines.pauses,
            reader_fallbacks={model: seen.approximate for model, seen in stats.items()},
            reader_mismatches={model: seen.mismatches for model, seen in stats.items()},
            reader_sources={name: reader.source.value for name, reader in readers.items()},
        )

    # -- inside

    def _watch(self, engine: EngineOption) -> EngineWatch:
        options = self.options
        return EngineWatch(
            engine,
            self.shell,
            self.deadlines,
            options.timeouts,
            self._context,
            interval_s=options.scrape_interval_s,
            max_sequences=options.max_sequences,
            pairs=options.policy in PAIRING,
            hands_over=self._hands_over,
            found=self.readers.find,
            came_up=self.came_up,
            scraped=self.scraped,
        )

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

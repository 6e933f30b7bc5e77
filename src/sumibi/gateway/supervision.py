"""One task per engine: find it, watch its health and load, follow its KV events, tell the router.

An engine is *up* from the first full discovery until a health check is refused or fails three times; then
it is looked for again. A broken event stream, or a request whose connection was refused or broke, makes its
endpoints suspect at once and is followed by a health check at once, not at the next interval.

Ranks of one engine are one process: they come up and go down together.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from sumibi.core.errors import EngineUnavailable, SumibiError
from sumibi.engines.discovery import (
    EngineInfo,
    EventSource,
    HintOutcome,
    RankInfo,
    address_of,
    discover,
    healthy,
    hint,
    scrape,
)
from sumibi.engines.kvevents import (
    BatchReceived,
    MalformedMessage,
    StreamLost,
    StreamRecord,
    StreamUp,
    follow,
    replay,
)
from sumibi.engines.signals import parse_signals
from sumibi.gateway.deadlines import Deadlines
from sumibi.gateway.options import EngineOption, Timeouts
from sumibi.gateway.shell import Shell, Target
from sumibi.gateway.transfers import role_of, transfer_of, view_of
from sumibi.gateway.upstream import Upstream
from sumibi.routing.events import (
    EndpointDown,
    EndpointSuspect,
    EndpointUp,
    EngineBatch,
    ReplayEnded,
    Role,
    Signals,
    Tier,
)

_FIRST_RETRY_S: Final = 0.2
_LAST_RETRY_S: Final = 2.0
_FAILURES_TO_DOWN: Final = 3
_HEALTH_TIMEOUT_S: Final = 2.0
_STREAM_WAIT_S: Final = 1.0
"""How long an engine that publishes events waits for its stream before it takes requests without."""
_REBIND_S: Final = 5.0
"""Until an address for KV events that could not be used is tried again."""
_HINTS: Final = 4
"""On their way to one engine at once; more are dropped."""
_HINT_TIMEOUT_S: Final = 2.0
_MODELS_EVERY: Final = 15
"""Health checks between two looks at what the engine serves (adapters come and go)."""

log = logging.getLogger(__name__)


class EngineWatch:
    """Supervises one engine. `run` is its task; `look` and `ask_replay` are called from outside."""

    def __init__(
        self,
        option: EngineOption,
        shell: Shell,
        deadlines: Deadlines,
        timeouts: Timeouts,
        context: zmq.asyncio.Context,
        *,
        interval_s: float,
        max_sequences: int | None = None,
        pairs: bool = True,
        hands_over: bool = True,
        found: Callable[[EngineInfo], Awaitable[None]],
        came_up: Callable[[EngineInfo], None],
        scraped: Callable[[Signals], None],
    ) -> None:
        """`max_sequences`: what an engine runs at once that does not say. `pairs`: whether the policy can do
        with engines that say by themselves that they have a role. `hands_over`: whether KV of pairs is this
        process's to have moved (else sidecars do). `found` is awaited before an
        engine takes requests, `came_up` called once the router knows it, `scraped` with its load whenever it
        tells that.
        """
        self.url = option.url
        self.up = False
        self.info: EngineInfo | None = None
        self.option = option
        self._shell = shell
        self._context = context
        self._interval_s = interval_s
        self._max_sequences = max_sequences
        self._pairs = pairs
        self._hands_over = hands_over
        self._told_role = self._told_connector = False
        self._found = found
        self._came_up = came_up
        self._scraped = scraped
        host, port = address_of(option.url)
        self._host_header = option.url.removeprefix("http://").encode()
        self._upstream = Upstream(host, port, timeouts, deadlines)
        self._prod = asyncio.Event()
        self._sources: dict[str, EventSource] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._streaming: set[str] = set()
        self._stream_change = asyncio.Event()
        self._replays: dict[str, asyncio.Task[None]] = {}
        self._hints = 0
        self._tasks: set[asyncio.Task[None]] = set()
        """Everything that uses ZMQ sockets; whoever owns their context has to see it end first."""
        self._closed = False

    @property
    def upstream(self) -> Upstream:
        """The engine's connections."""
        return self._upstream

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Canonical ids of its ranks, as far as known."""
        return tuple(rank.endpoint for rank in self.info.ranks) if self.info is not None else ()

    def look(self) -> None:
        """Check its health now, not at the next interval."""
        self._prod.set()

    def ask_replay(self, endpoint: str, from_seq: int) -> None:
        """Have every batch from `from_seq` on replayed; replaces a replay that is still going on."""
        running = self._replays.pop(endpoint, None)
        if running is not None:
            running.cancel()
        if not self._closed:
            self._replays[endpoint] = self._start(self._replay(endpoint, from_seq))

    def hint(self, endpoint: str, request: str) -> None:
        """Tell the engine that this request, which it answered, should go on soon; by the way."""
        if self._closed or not self.up or self._hints >= _HINTS:
            self._hinted(endpoint, HintOutcome.DROPPED)
        else:
            self._hints += 1
            self._start(self._send_hint(endpoint, request))

    async def _send_hint(self, endpoint: str, request: str) -> None:
        try:
            self._hinted(endpoint, await hint(self.url, request, timeout_s=_HINT_TIMEOUT_S))
        finally:
            self._hints -= 1

    def _hinted(self, endpoint: str, outcome: HintOutcome) -> None:
        counts = self._shell.metrics.endpoint(endpoint).hints
        counts[outcome.value] = counts.get(outcome.value, 0) + 1
        if outcome is HintOutcome.FAILED and counts[outcome.value] == 1:
            log.warning("%s: a hint to bring KV up got no answer; more of these are counted only", endpoint)

    async def run(self) -> None:
        """Supervise until cancelled. What goes wrong by a fault of ours ends this life of the engine only."""
        try:
            while True:
                try:
                    info = await self._find()
                    await self._come_up(info)
                    cause = await self._watch()
                except Exception:
                    log.exception("supervising %s failed", self.url)
                    cause = "the gateway failed to supervise it"
                    await asyncio.sleep(_LAST_RETRY_S)
                if self.info is not None:
                    self._go_down(self.info, cause)
        finally:
            self._closed = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._upstream.close()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pause(self, seconds: float) -> bool:
        """Wait; True if something happened meanwhile that calls for a look at once."""
        try:
            async with asyncio.timeout(seconds):
                await self._prod.wait()
        except TimeoutError:
            pass
        prodded = self._prod.is_set()
        self._prod.clear()
        return prodded

    # -- finding

    async def _find(self) -> EngineInfo:
        """Ask until the engine is up; the first failure of an outage is logged."""
        retry_s, told = _FIRST_RETRY_S, False
        while True:
            try:
                return await discover(self.url)
            except SumibiError as cause:
                if not told:
                    told = True
                    log.warning("engine %s is not ready: %s; still trying", self.url, cause)
            await self._pause(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def _come_up(self, info: EngineInfo) -> None:
        """Follow its events, then offer it to the router."""
        for rank in info.ranks:
            self._follow_events(rank)
        await self._wait_for_streams()
        await self._offer(info)
        self.up = True
        self._prod.clear()  # whatever happened before is seen to
        streams = f"KV events from {len(self._streaming)} of {len(info.ranks)} ranks"
        log.info("engine %s is up: %s, %s", self.url, ", ".join(info.models), streams)

    async def _offer(self, info: EngineInfo) -> None:
        """Let the router know what the engine is now, and which of its ranks are gone."""
        await self._found(info)
        before, self.info = self.endpoints, info
        missing = self._hands_over and transfer_of(self.option, info.transfer) is None
        if missing and self._role(info) is not Role.BOTH:
            self._miss_connector()
        for rank in info.ranks:
            several = rank.rank if len(info.ranks) > 1 else None
            self._shell.targets[rank.endpoint] = Target(
                self._upstream, self._host_header, several, transfer_of(self.option, info.transfer)
            )
            self._shell.metrics.endpoint(rank.endpoint).transfer = view_of(self.option, info.transfer)
            self._tell_up(info, rank)
        for endpoint in before:
            if endpoint not in self.endpoints:
                self._remove(endpoint)
        self._came_up(info)

    def _remove(self, endpoint: str) -> None:
        """A rank is gone for good: the engine came back with fewer."""
        self._unfollow(endpoint)
        self._shell.targets.pop(endpoint, None)
        self._shell.metrics.endpoints.pop(endpoint, None)
        cause = "the engine has no such rank any more"
        self._shell.tell(EndpointDown(t=self._shell.now(), endpoint=endpoint, cause=cause, removed=True))

    def _tell_up(self, info: EngineInfo, rank: RankInfo) -> None:
        source, streaming = self._sources.get(rank.endpoint), rank.endpoint in self._streaming
        self._shell.metrics.endpoint(rank.endpoint).up = True
        self._shell.tell(
            EndpointUp(
                t=self._shell.now(),
                endpoint=rank.endpoint,
                models=list(info.models),
                aliases=list(info.aliases),
                engine_block_tokens=rank.signals.block_tokens,
                kv_tokens=rank.signals.kv_tokens,
                max_sequences=rank.signals.max_sequences or self._max_sequences,
                tiers=[msgspec.convert(tier, Tier, from_attributes=True) for tier in rank.tiers],
                kv_bytes_per_token=rank.kv_bytes_per_token,
                prefetches=rank.prefetches,
                has_events=streaming,
                has_replay=streaming and source is not None and source.replay is not None,
                process_start_s=rank.signals.process_start_s,
                role=self._role(info),
                revision=self.option.revision,
                link=self.option.link,
            )
        )

    def _role(self, info: EngineInfo) -> Role:
        """What it is for. Pools that nobody asked for are not made under a policy that cannot use them."""
        role = role_of(self.option, info.transfer)
        if role is not Role.BOTH and self.option.role is None and not self._pairs:
            if not self._told_role:
                self._told_role = True
                log.warning("engine %s is for %s, which the policy has no use for", self.url, role)
            return Role.BOTH
        return role

    def _miss_connector(self) -> None:
        if not self._told_connector:
            self._told_connector = True
            log.error(
                "engine %s has a role and does not say how it hands KV over: add connector=... to its"
                " --engine; until then its pairs become whole runs",
                self.url,
            )

    def _go_down(self, info: EngineInfo, cause: str) -> None:
        self.up = False
        log.warning("engine %s is down: %s", self.url, cause)
        for rank in info.ranks:
            self._shell.metrics.endpoint(rank.endpoint).up = False
            self._shell.tell(EndpointDown(t=self._shell.now(), endpoint=rank.endpoint, cause=cause))

    # -- watching

    async def _watch(self) -> str:
        """Check health and scrape signals until the engine is down; the cause of that."""
        failures = checks = 0
        while True:
            prodded = await self._pause(self._interval_s)
            checks += 1
            scraped_t = self._shell.now()
            try:
                if not await healthy(self.url, timeout_s=_HEALTH_TIMEOUT_S):
                    return "its health check says it is not well"
                if prodded or checks % _MODELS_EVERY == 0:
                    await self._renew(await discover(self.url), prodded=prodded)
                failures = 0
            except SumibiError as cause:
                failures += 1
                if failures >= _FAILURES_TO_DOWN or isinstance(cause.__cause__, ConnectionRefusedError):
                    return str(cause)
                continue
            assert self.info is not None
            await self._scrape(self.info, scraped_t)

    async def _renew(self, info: EngineInfo, *, prodded: bool) -> None:
        """The engine answers: update what changed, and give suspect endpoints their chance to be trusted."""
        for rank in info.ranks:
            self._follow_events(rank)
        if prodded or self.info is None or _identity(self.info) != _identity(info):
            await self._offer(info)

    async def _scrape(self, info: EngineInfo, scraped_t: float) -> None:
        """Read load signals. An engine without metrics is served all the same."""
        try:
            page = await scrape(self.url, timeout_s=_HEALTH_TIMEOUT_S)
        except EngineUnavailable:
            for rank in info.ranks:
                self._shell.metrics.endpoint(rank.endpoint).scrape_errors += 1
            return
        for rank in info.ranks:
            seen = parse_signals(page, rank=rank.rank, ranks=len(info.ranks))
            counters = self._shell.metrics.endpoint(rank.endpoint)
            counters.running, counters.waiting = seen.running or 0, seen.waiting or 0
            counters.kv_usage = seen.kv_usage or 0.0
            signals = Signals(
                t=self._shell.now(),
                endpoint=rank.endpoint,
                scraped_t=scraped_t,
                running=seen.running,
                waiting=seen.waiting,
                kv_usage=seen.kv_usage,
                process_start_s=seen.process_start_s,
            )
            self._shell.tell(signals)
            self._scraped(signals)

    # -- KV events

    def _source(self, rank: RankInfo) -> EventSource | None:
        """Where a rank's events come from: the user's word before the engine's."""
        option = self.option
        if option.kv_events is None or rank.rank != 0:
            return rank.events
        # Of an address that the user gives the other end is meant: `*` in it binds here.
        binds = "*" in option.kv_events
        return EventSource(address=option.kv_events, bind=binds, replay=option.kv_replay)

    def _follow_events(self, rank: RankInfo) -> None:
        """Have a stream running that fits what the engine says now; ZMQ reconnects an old one by itself."""
        endpoint, source = rank.endpoint, self._source(rank)
        if self._sources.get(endpoint) == source:
            return
        self._unfollow(endpoint)
        if source is not None:
            self._sources[endpoint] = source
            self._streams[endpoint] = self._start(self._follow(endpoint, source))

    def _unfollow(self, endpoint: str) -> None:
        running = self._streams.pop(endpoint, None)
        if running is not None:
            running.cancel()
            del self._sources[endpoint]
            self._streaming.discard(endpoint)
            self._shell.metrics.endpoint(endpoint).streaming = False

    async def _wait_for_streams(self) -> None:
        try:
            async with asyncio.timeout(_STREAM_WAIT_S):
                while len(self._streaming) < len(self._streams):
                    self._stream_change.clear()
                    await self._stream_change.wait()
        except TimeoutError:
            log.warning("engine %s: its KV event stream does not connect; still trying", self.url)

    async def _follow(self, endpoint: str, source: EventSource) -> None:
        """Follow the stream for good. An address that cannot be used (now) is tried again; so is the stream
        after a fault of ours, which must not end in an endpoint that is thought to be followed and is not.
        """
        told = False
        while True:
            try:
                await follow(source, functools.partial(self._stream_record, endpoint), self._context)
            except* zmq.ZMQError as cause:
                if not told:
                    told = True
                    log.error("%s: no KV events from %s: %s", endpoint, source.address, cause.exceptions[0])
            except* Exception:
                log.exception("following the KV events of %s failed", endpoint)
                self._stream_record(endpoint, StreamLost())
            await asyncio.sleep(_REBIND_S)

    def _stream_record(self, endpoint: str, record: StreamRecord) -> None:
        counters = self._shell.metrics.endpoint(endpoint)
        match record:
            case BatchReceived():
                counters.event_batches += 1
                self._shell.tell(
                    EngineBatch(
                        t=self._shell.now(),
                        endpoint=endpoint,
                        batch=record.batch,
                        digest=record.digest,
                        replayed=record.replayed,
                    )
                )
            case StreamUp():
                self._streaming.add(endpoint)
                counters.streaming = True
                self._stream_change.set()
                self._prod.set()
            case StreamLost():
                self._streaming.discard(endpoint)
                counters.streaming = False
                counters.streams_lost += 1
                if self.up:
                    cause = "its KV event stream broke"
                    self._shell.tell(EndpointSuspect(t=self._shell.now(), endpoint=endpoint, cause=cause))
                self.look()
            case MalformedMessage():
                counters.malformed_messages += 1
                if counters.malformed_messages == 1:
                    log.warning("%s: a KV event message is malformed: %s", endpoint, record.detail)

    async def _replay(self, endpoint: str, from_seq: int) -> None:
        counters = self._shell.metrics.endpoint(endpoint)
        counters.replays += 1
        source, complete = self._sources.get(endpoint), False
        if source is not None and source.replay is not None:
            try:
                complete = await replay(
                    source.replay,
                    from_seq,
                    lambda record: self._stream_record(endpoint, record),
                    self._context,
                )
            except zmq.ZMQError as cause:
                log.error("%s: no replay from %s: %s", endpoint, source.replay, cause)
            except Exception:
                log.exception("replaying the KV events of %s failed", endpoint)
        counters.replays_failed += not complete
        del self._replays[endpoint]
        self._shell.tell(ReplayEnded(t=self._shell.now(), endpoint=endpoint, ok=complete))


def _identity(info: EngineInfo) -> tuple[object, ...]:
    """What the router is told of an engine, the start of its process aside (every scrape tells that)."""
    ranks = tuple(
        (
            *(r.endpoint, r.signals.block_tokens, r.signals.kv_tokens, r.signals.max_sequences),
            *(r.events, r.tiers, r.kv_bytes_per_token, r.prefetches),
        )
        for r in info.ranks
    )
    return info.models, info.aliases, info.transfer, ranks

"""`sumibi sidecar`: pairs run beside a decode engine, for gateways that only route.

Such a gateway sends a request to a decode engine's address and names the prefill engine in a header
(`x-prefiller-host-port`, as llm-d's does). This stands at that address: it runs the pair by the same executor
as the gateway (`completion`, `pairs`), with the header in the place of the router, and passes everything else
through. A prefill half that fails leads to a whole run on the decode engine.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import uvloop

from sumibi.core.errors import BadRequest, ConfigError
from sumibi.core.ids import new_id
from sumibi.engines.connectors import CONNECTORS, PAIRED, Values
from sumibi.engines.discovery import address_of
from sumibi.gateway import legs
from sumibi.gateway.allowed import Allowed
from sumibi.gateway.completion import Completion
from sumibi.gateway.deadlines import Deadlines
from sumibi.gateway.errors import error_body, shape_of
from sumibi.gateway.headers import PREFILLED_HEADER, PREFILLER_HEADER
from sumibi.gateway.http1 import Connection, Exchange, Limits, Request
from sumibi.gateway.inflight import InFlight
from sumibi.gateway.metrics import Metrics
from sumibi.gateway.options import EngineOption, Timeouts, engine_options
from sumibi.gateway.pairs import Owner, Pair
from sumibi.gateway.passing import Passing
from sumibi.gateway.readings import Usage
from sumibi.gateway.server import HttpServer
from sumibi.gateway.shell import Target
from sumibi.gateway.sides import Sides
from sumibi.gateway.stopping import on_signals
from sumibi.gateway.terms import Terms
from sumibi.gateway.transfers import Transfer, transfer_of
from sumibi.gateway.upstream import Call, Sink, Upstream
from sumibi.prompts.dialects import DIALECTS, parse_request
from sumibi.prompts.keys import Prompt, PromptGrade
from sumibi.routing.events import Admitted, Dispatch, Event, Finished, FinishReason, Prefilled

_ABORT_S: Final = 2.0
_DECODE: Final = "decode"
_DOUBTS = (
    FinishReason.REFUSED,
    FinishReason.ENGINE_GONE,
    FinishReason.ENGINE_ERROR,
    FinishReason.TIMEOUT,
)
"""Ends of a half after which the prefill engine is asked again where its side channel is."""
_PAIRED_PATHS = frozenset(path for path, dialect in DIALECTS.items() if dialect in PAIRED)
_NO_TERMS = Terms(session="", program="", priority=0, ttl_s=None)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarOptions:
    """What `sumibi sidecar` is told."""

    decode: EngineOption
    """The engine beside it; its connector is that of all pairs."""
    allow: frozenset[str]
    """`host:port` of prefill engines that requests may name; a name stands for its addresses, too."""
    host: str = "127.0.0.1"
    port: int = 8000
    kv_port: int | None = None
    """Of prefill engines' side channels; None: they are asked, and who says nothing has the usual one."""
    timeouts: Timeouts = field(default_factory=Timeouts)


def sidecar_options(
    decode: str, connector: str, allow: Sequence[str], *, host: str, port: int, kv_port: int | None
) -> SidecarOptions:
    """Checked options. Raises ConfigError naming flag and word."""
    if connector not in CONNECTORS:
        raise ConfigError(f"--connector is {connector!r}: want {', '.join(CONNECTORS)}")
    try:
        (engine,) = engine_options([f"{decode},role=decode,connector={connector}"])
    except ConfigError as cause:
        raise ConfigError(f"--decode is {decode!r}: want one http://HOST:PORT") from cause
    if kv_port is not None and not 1 <= kv_port <= 65535:
        raise ConfigError(f"--kv-port is {kv_port}: want 1 to 65535 (left out, prefill engines are asked)")
    for word in allow:
        if not _is_address(word):
            raise ConfigError(f"--allow-prefiller {word!r}: want HOST:PORT")
    return SidecarOptions(decode=engine, allow=frozenset(allow), host=host, port=port, kv_port=kv_port)


class SidecarShell:
    """What a completion needs around it, with a header for a router: the decode engine, by itself or after
    the prefill engine that the header names; after a failed half by itself.
    """

    def __init__(self, options: SidecarOptions, deadlines: Deadlines) -> None:
        self.metrics = Metrics()
        self.completions: dict[str, Completion] = {}
        self.prefillers: dict[str, str] = {}
        """Request in flight -> the prefill engine that it names."""
        self.now: Callable[[], float] = time.monotonic
        self._options = options
        self._deadlines = deadlines
        self._transfer = transfer_of(options.decode)
        self.upstream = Upstream(*address_of(options.decode.url), options.timeouts, deadlines)
        host_header = options.decode.url.removeprefix("http://").encode()
        self._targets = {_DECODE: Target(self.upstream, host_header, None, self._transfer)}
        self._sides = Sides(self.now)

    def ready(self, prefill: str) -> asyncio.Task[None] | None:
        """What to wait for before a pair with `prefill` can begin; None: nothing."""
        assert self._transfer is not None
        if self._options.kv_port is not None or self._transfer.connector.port is None:
            return None
        return self._sides.ask(prefill)

    def close(self) -> None:
        """Close idle connections, ask nobody any more."""
        self._sides.close()
        for target in self._targets.values():
            target.upstream.close()

    def tell(self, event: Event) -> None:
        """Go on as the header says."""
        if isinstance(event, Prefilled | Finished) and (event.request in self.prefillers):
            failed = event.failed if isinstance(event, Prefilled) else event.reason
            if failed in _DOUBTS:
                self._sides.doubt(self.prefillers[event.request])
        if isinstance(event, Prefilled) and event.request in self.completions:
            self.completions[event.request].note(PREFILLED_HEADER, legs.written(event))
        match event:
            case Admitted():
                self._dispatch(event.request, 1, self.prefillers.get(event.request))
            case Prefilled() if event.failed is not None and event.failed.retriable:
                self._dispatch(event.request, event.attempt + 1, None)
            case Finished() if event.reason is FinishReason.ENGINE_ERROR and not event.answered:
                completion = self.completions.get(event.request)
                if completion is not None and completion.prefill:  # it could not fetch
                    self._dispatch(event.request, event.attempt + 1, None)

    def send(self, endpoint: str, path: bytes, head: bytes, body: bytes, sink: Sink) -> Call | None:
        """POST to the decode engine or to a prefill engine (made known here with its first request)."""
        target = self._targets.get(endpoint)
        if target is None:
            host, _, port = endpoint.rpartition(":")
            upstream = Upstream(host.strip("[]"), int(port), self._options.timeouts, self._deadlines)
            target = self._targets[endpoint] = Target(upstream, endpoint.encode(), None)
        return target.upstream.call(b"".join((b"POST ", path, target.line_end, head, b"\r\n")), body, sink)

    def pair(self, owner: Owner, prefill: str, decode: str, api: str, body: bytes) -> Pair | None:
        """A pair of the named prefill engine with the one beside."""
        assert self._transfer is not None
        connector, host = self._transfer.connector, prefill.rpartition(":")[0].strip("[]")
        port, told = self._options.kv_port or connector.port or 0, self._sides.told(prefill)
        if told is not None and self._options.kv_port is None:
            host, port = told.remote_host or host, told.remote_port
        values: Values = Transfer(connector, host, port).values()
        return Pair(owner, connector, prefill, api, body, values)

    def leg_over(self, connector: str, outcome: str) -> None:
        """Count a prefill half."""
        legs = self.metrics.legs
        legs[connector, outcome] = legs.get((connector, outcome), 0) + 1

    def later(self, wait: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `wait` when a decode half is overdue with its first byte."""
        return self._deadlines.loop.call_later(self._options.timeouts.decode_wait_s, wait)

    def attempt_failed(self, endpoint: str, reason: FinishReason, detail: str) -> None:
        """Count it; the first of its kind is logged."""
        failures = self.metrics.endpoint(endpoint).failures
        failures[reason.value] = failures.get(reason.value, 0) + 1
        if failures[reason.value] == 1:
            log.warning("%s: %s: %s; more of these are counted only", endpoint, reason, detail)

    def over(self, request: InFlight, reason: FinishReason, usage: Usage | None) -> None:
        """Forget it."""
        del self.completions[request.id]
        self.prefillers.pop(request.id, None)

    def explanation(self, decision: str) -> bytes:
        """Nothing is decided here."""
        return b"{}"

    def _dispatch(self, request: str, attempt: int, prefill: str | None) -> None:
        completion = self.completions.get(request)
        if completion is not None:
            completion.dispatch(
                Dispatch(request=request, attempt=attempt, endpoint=_DECODE, decision="", prefill=prefill)
            )


class Sidecar:
    """A whole sidecar in the running loop. `start`, then `stop`."""

    def __init__(self, options: SidecarOptions) -> None:
        self.options = options
        self._deadlines = Deadlines(asyncio.get_running_loop())
        self.shell = SidecarShell(options, self._deadlines)
        self.server = HttpServer(self.respond, Limits(), self._deadlines)
        self._allowed = Allowed(options.allow)
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind. Raises EnvironmentProblem naming a port in use."""
        await self._allowed.refresh()
        await self.server.start(self.options.host, self.options.port, flag="--port")
        self._looking = asyncio.create_task(self._allowed.run())

    async def stop(self, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """Take no more requests, let those in flight finish for `grace_s`, end them."""
        self.server.stop_accepting()
        if not await self.server.drain(grace_s, hurry):
            for completion in list(self.shell.completions.values()):
                completion.shut_down()
            self.server.close_idle()
            await self.server.drain(_ABORT_S)
            self.server.abort()
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.sleep(0)
        self.shell.close()
        self._deadlines.close()

    def respond(self, request: Request, connection: Connection) -> Exchange | None:
        """Run a pair if the request names a prefill engine, or pass it through."""
        named = request.named.get(PREFILLER_HEADER)
        if request.path == "/sidecar/legs":
            counts = {f"{name}/{outcome}": n for (name, outcome), n in self.shell.metrics.legs.items()}
            connection.respond(200, msgspec.json.encode(counts))
            return None
        if named is None or request.method != "POST" or request.path not in _PAIRED_PATHS:
            if request.method == "HEAD":
                connection.respond(405, error_body(405, "HEAD is not passed through"))
                return None
            passing = Passing(connection, request, shape_of(request.path))
            passing.begin(self.shell.upstream, self.options.decode.url, request)
            return passing
        prefillers = [word.strip() for word in named.decode("latin-1").split(",")]
        refused = next((word for word in prefillers if word not in self._allowed), None)
        if refused is not None:
            message = (
                f"{PREFILLER_HEADER.decode()}: {refused[:100]!r} is not among the prefill engines allowed"
            )
            connection.respond(403, error_body(403, message, code="prefiller_not_allowed"))
            return None
        try:
            asked = parse_request(request.path, request.body)
        except BadRequest as error:
            connection.respond(error.status, shape_of(request.path).body_of(error))
            return None
        shell = self.shell
        given = request.named.get(b"x-request-id", b"").decode("latin-1")
        usable = given and given.isascii() and len(given) <= 128 and given not in shell.completions
        name = given if usable else new_id("req")
        completion = Completion(
            shell,
            connection,
            request,
            asked,
            request_id=name,
            tenant="",
            terms=_NO_TERMS,
            counters=shell.metrics.model(asked.model),
            keep_credentials=True,
            explain=False,
        )
        shell.completions[name] = completion
        shell.prefillers[name] = prefillers[0]
        prompt = Prompt(keys=[], prompt_tokens=0, grade=PromptGrade.APPROXIMATE)
        waiting = shell.ready(prefillers[0])
        if waiting is None:
            completion.arrive(prompt)
        else:
            waiting.add_done_callback(lambda _: completion.arrive(prompt))
        return completion


def _is_address(word: str) -> bool:
    host, colon, port = word.rpartition(":")
    return bool(host and colon and "/" not in host) and port.isdigit() and 1 <= int(port) <= 65535


async def serve(options: SidecarOptions) -> int:
    """Run until SIGTERM or SIGINT, then drain; a second signal cuts the draining short."""
    sidecar = Sidecar(options)
    await sidecar.start()
    log.info("sidecar of %s on http://%s:%d", options.decode.url, options.host, sidecar.server.port)
    stop, hurry = on_signals()
    await stop.wait()
    await sidecar.stop(options.timeouts.drain_s, hurry)
    return 0


def main(options: SidecarOptions) -> int:
    """Run the sidecar until it is told to stop. Raises SumibiError when it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return uvloop.run(serve(options))

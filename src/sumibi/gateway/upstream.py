"""Connections to engines: a pool for each, reused, and one `Call` for each try of a request.

Answers pass through unparsed but for HTTP framing (by llhttp): a call's sink gets the head once, then
unframed pieces of body as they come, then the end or a failure. A connection that was idle may turn out to
be closed by the engine just as a request is written to it; if no byte of an answer came, the call is made
again on a fresh connection, once, and nobody hears of it.
"""

import asyncio
import math
from typing import Final, Protocol, cast

import httptools

from sumibi.gateway.deadlines import Deadlines
from sumibi.gateway.http1 import Header, set_nodelay
from sumibi.gateway.options import Timeouts
from sumibi.routing.events import FinishReason

_MAX_HEAD_BYTES: Final = 64 * 1024
"""An engine's status line and headers; more is taken for garbage."""
_MAX_IDLE: Final = 256
"""Unused connections kept per engine."""
_FRAMING = (b"content-length", b"transfer-encoding")
_DELIVERY_S: Final = 0.05
"""For an engine to read a request whose answer nobody wants: closing at once might throw it away unread."""


class Sink(Protocol):
    """Who receives an answer. Exactly one of `answer_end` and `answer_failed` closes it."""

    def answer_head(self, status: int, headers: list[Header]) -> None:
        """Status and headers (hop-by-hop ones included)."""

    def answer_body(self, pieces: list[bytes], *, last: bool) -> None:
        """The next pieces of the body, unframed, at least one, none empty; `last`: the end follows."""

    def answer_end(self) -> None:
        """The answer is complete."""

    def answer_failed(self, reason: FinishReason, detail: str) -> None:
        """No (complete) answer will come."""


class Call:
    """One try of one request at one engine."""

    def __init__(self, upstream: "Upstream", head: bytes, body: bytes, sink: Sink) -> None:
        self.upstream = upstream
        self.head = head
        self.body = body
        self.sink = sink
        self.connection: EngineConnection | None = None
        self.connecting: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Nobody wants the answer: close the connection, so that the engine stops working on it."""
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.abandon()

    def deliver(self) -> None:
        """Nobody wants the answer, but the engine has to see the request: close soon after it has left."""
        self.sink = _Nobody()
        loop = self.upstream.loop
        if self.connecting is not None:
            self.connecting.add_done_callback(lambda _: loop.call_later(_DELIVERY_S, self.cancel))
        else:
            loop.call_later(_DELIVERY_S, self.cancel)

    def pause(self) -> None:
        """Read no more of the answer for now."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self.connection is not None:
            self.connection.resume()


class _Nobody:
    """A sink for an answer that nobody reads."""

    def answer_head(self, status: int, headers: list[Header]) -> None:
        """Not of interest, as the rest is not."""

    def answer_body(self, pieces: list[bytes], *, last: bool) -> None:
        """Thrown away."""

    def answer_end(self) -> None:
        """Over."""

    def answer_failed(self, reason: FinishReason, detail: str) -> None:
        """Over."""


class Upstream:
    """One engine as a place to send requests: its address and its connections."""

    def __init__(self, host: str, port: int, timeouts: Timeouts, deadlines: Deadlines) -> None:
        self.timeouts = timeouts
        self.deadlines = deadlines
        self.loop = deadlines.loop
        self.idle: list[EngineConnection] = []
        self.open = 0
        """Connections, busy ones included."""
        self.opened_total = 0
        self.stale_total = 0
        """Reused connections that had been closed by the engine: calls made again."""
        self._host = host
        self._port = port

    def call(self, head: bytes, body: bytes, sink: Sink) -> Call:
        """Send a request (`head` ends with its blank line); the answer goes to `sink`."""
        call = Call(self, head, body, sink)
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                connection.send(call)
                return call
        self.connect(call)
        return call

    def connect(self, call: Call) -> None:
        """Make the call on a new connection."""
        call.connecting = self.loop.create_task(self._connect(call))

    def close(self) -> None:
        """Close the idle connections; busy ones end with their calls."""
        for connection in self.idle[:]:
            connection.close()
        self.idle.clear()

    async def _connect(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                connection = EngineConnection(self)
                await self.loop.create_connection(
                    lambda: cast("asyncio.Protocol", connection), self._host, self._port
                )
        except TimeoutError:
            call.connecting = None
            call.sink.answer_failed(FinishReason.REFUSED, "connecting took too long")
        except OSError as cause:
            call.connecting = None
            call.sink.answer_failed(FinishReason.REFUSED, str(cause) or type(cause).__name__)
        else:
            call.connecting = None
            connection.send(call)


class EngineConnection:  # as http1.Connection an asyncio.Protocol in all but its base
    """One connection to an engine, serving one call at a time."""

    def __init__(self, upstream: Upstream) -> None:
        self.deadline = math.inf
        self._upstream = upstream
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._reused = False
        self._closed = False
        self._paused = False
        self._reset()

    def _reset(self) -> None:
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._status = 0
        self._head_bytes = 0
        self._received = False  # any byte of an answer to this call
        self._head_told = False
        self._complete = False
        self._excess = False  # the engine sent more than one answer
        self._framed = False  # the head says where the body ends
        self._keep_alive = False

    @property
    def usable(self) -> bool:
        """True if a call can be sent on it."""
        return not self._closed and not self._transport.is_closing()

    def send(self, call: Call) -> None:
        """Write the request of `call`."""
        self._call = call
        call.connection = self
        self._reset()
        self.deadline = self._upstream.loop.time() + self._upstream.timeouts.first_byte_s
        self._transport.writelines((call.head, call.body))

    def abandon(self) -> None:
        """Forget the call and close at once."""
        self._call = None
        self._transport.abort()

    def close(self) -> None:
        """Close an idle connection."""
        self._transport.close()

    def pause(self) -> None:
        """Stop reading; the wait is the client's fault, so no deadline runs."""
        if not self._paused and self.usable:
            self._paused = True
            self.deadline = math.inf
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and self.usable:
            self._paused = False
            self.deadline = self._upstream.loop.time() + self._upstream.timeouts.between_bytes_s
            self._transport.resume_reading()

    def expired(self, now: float) -> None:
        """The engine took too long, or the connection was idle for long enough."""
        if self._call is None:
            self.close()
        else:
            what = "sent nothing more" if self._received else "did not answer"
            self._fail(FinishReason.TIMEOUT, f"the engine {what} in time")

    # -- asyncio.Protocol

    def pause_writing(self) -> None:
        """The engine reads a large request slowly: all of it is in the transport's buffer already."""

    def resume_writing(self) -> None:
        """It caught up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)
        set_nodelay(self._transport)
        self._upstream.open += 1
        self._upstream.opened_total += 1
        self._upstream.deadlines.waiting.add(self)

    def data_received(self, data: bytes) -> None:
        """Feed the parser and pass on what it found."""
        call = self._call
        if call is None:
            self._transport.abort()  # bytes that nobody asked for
            return
        self._received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as cause:
            why = cause.__context__ if isinstance(cause, httptools.HttpParserCallbackError) else cause
            self._fail(FinishReason.ENGINE_GONE, f"the engine's answer is not valid HTTP/1.1: {why}")
            return
        if not self._head_told:
            if self._status == 0:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self._fail(FinishReason.ENGINE_GONE, "the engine's headers do not end")
                return
            self._head_told = True
            call.sink.answer_head(self._status, self._headers)
            if self._call is not call:
                return
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            call.sink.answer_body(pieces, last=self._complete)
            if self._call is not call:
                return
        if self._complete:
            self._finish(call)
        elif not self._paused:
            self.deadline = self._upstream.loop.time() + self._upstream.timeouts.between_bytes_s

    def eof_received(self) -> bool:
        """The engine will send no more: the end of an answer without a length, else a failure."""
        self._lost("the engine closed the connection")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        if not self._closed:
            self._closed = True
            self._upstream.open -= 1
            self._upstream.deadlines.waiting.discard(self)
            if self in self._upstream.idle:
                self._upstream.idle.remove(self)
        self._lost(f"the connection to the engine broke: {exc or 'closed'}")
        self._parser = None  # it holds us in a cycle, which a collector might find in ten minutes

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        """First byte of a status line."""
        if self._complete:
            self._excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer (dropped)."""
        if self._status == 0:
            self._headers.append((name.lower(), name, value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        status = self._parser.get_status_code()
        if self._excess:
            return
        framing = [(lower, value) for lower, _, value in self._headers if lower in _FRAMING]
        if status < 200:
            if status < 100 or framing:  # llhttp would read a body, and the answer's own would come after it
                raise ValueError(f"status {status} with a body")
            self._headers = []  # interim answers (100, 103) are the engine's talk with us
            return
        codings = [value.lower() for lower, value in framing if lower == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            # llhttp takes others beside it; we would pass coded bytes on, unnamed.
            raise ValueError("a transfer coding other than chunked")
        self._status = status
        self._keep_alive = self._parser.should_keep_alive()
        self._framed = bool(framing)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body, unframed."""
        if not self._excess:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._status >= 200:
            self._complete = True

    # -- inside

    def _finish(self, call: Call) -> None:
        """The answer is complete: free the connection first, so that what follows can use it."""
        self._call = None
        call.connection = None
        upstream = self._upstream
        reusable = self._keep_alive and self._framed and not self._excess and self.usable
        if reusable and len(upstream.idle) < _MAX_IDLE and self._transport.get_write_buffer_size() == 0:
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._reused = True
            self.deadline = upstream.loop.time() + upstream.timeouts.upstream_idle_s
            upstream.idle.append(self)
        else:
            self._transport.close()
        call.sink.answer_end()

    def _lost(self, detail: str) -> None:
        call = self._call
        if call is None:
            return
        if self._status and not self._framed:
            self._finish(call)  # an answer that ends with its connection
        elif self._reused and not self._received:
            self._call = None
            call.connection = None
            self._upstream.stale_total += 1
            self._upstream.connect(call)
        else:
            self._fail(FinishReason.ENGINE_GONE, detail)

    def _fail(self, reason: FinishReason, detail: str) -> None:
        call = self._call
        assert call is not None
        self._call = None
        call.connection = None
        self._transport.abort()
        call.sink.answer_failed(reason, detail)

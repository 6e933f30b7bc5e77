"""HTTP/1.1 as a server speaks it: bytes of one client connection in, whole requests out.

Knows framing, limits and time, and nothing of what a request means. One `Connection` is one client; it
hands each complete request to the server's handler and lets it answer through the same object. Requests
that come in before the one in flight is answered (pipelining) wait in a short queue, in order.

llhttp (through httptools) tokenises and refuses what smuggling is made of: both framings at once, repeated
or malformed lengths, folded headers, bare CR or LF, control characters. What it lets through and we do not
(other transfer codings, HTTP/0.9, a chunked HTTP/1.0 body, a missing or repeated Host) is refused here, and
a forwarded request is written anew with one length, so no byte of a client's framing reaches an engine.

A client that half-closes while its answer is due counts as gone, as nginx does it: the two cannot be told
apart, and an abandoned generation costs more than a half-closing client is worth.
"""

import asyncio
import math
import socket
from collections import deque
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol, cast

import httptools

_MAX_PIPELINED: Final = 16
"""Complete requests waiting behind the one in flight; beyond it the connection is not read."""
_BODY_RATE_BYTES_S: Final = 4096
"""A body earns a second for each so many bytes, beyond the grace that the limits give it."""
_LOOSE_PIECES: Final = 64
"""Pieces of a body kept as they came; what comes after is merged."""
_LAST_CALL_S: Final = 1.0
"""While the server goes down: for a request that is under way on a connection that was to stay open."""
_LINGER_S: Final = 2.0
"""How long what a refused client still sends is thrown away, so that it can read why."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_STATUS_LINES = {code: b"HTTP/1.1 %d %b\r\n" % (code, phrase) for code, phrase in _REASONS.items()}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Header names that end at one connection and are never forwarded (RFC 9110, 7.6.1)."""

_ONCE = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization", b"x-api-key")
)
"""Headers that must not be repeated: two readers might pick different ones."""

Header = tuple[bytes, bytes, bytes]
"""(lower-case name, name as sent, value)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may send, and how slowly."""

    head_bytes: int = 32 * 1024
    """Request line and headers."""
    headers: int = 128
    body_bytes: int = 16 * 1024 * 1024
    buffered_bytes: int = 1 << 30
    """Bodies of all requests in flight together; beyond it new ones get 503."""
    connections: int = 20_000
    """Open client connections; beyond it new ones are closed at once."""
    head_s: float = 15.0
    body_s: float = 30.0
    keep_alive_s: float = 75.0
    write_s: float = 60.0


class Request:
    """One complete request."""

    __slots__ = ("body_bytes", "headers", "keep_alive", "method", "named", "pieces", "target", "version")

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        """As sent: origin form in all but odd cases."""
        self.version = "1.1"
        self.headers: list[Header] = []
        self.named: dict[bytes, bytes] = {}
        """Lower-case name -> value; of repeated headers the last."""
        self.pieces: list[bytes | bytearray] = []
        self.body_bytes = 0
        self.keep_alive = True

    def add(self, piece: bytes) -> None:
        """Append a piece of body. Many tiny ones are merged: each would cost forty times its size."""
        pieces = self.pieces
        if len(pieces) < _LOOSE_PIECES:
            pieces.append(piece)
        elif isinstance(pieces[-1], bytearray):
            pieces[-1] += piece
        else:
            pieces.append(bytearray(piece))

    @property
    def body(self) -> bytes:
        """The whole body, unframed and otherwise untouched."""
        pieces = self.pieces
        if len(pieces) != 1:
            pieces[:] = [b"".join(pieces)]
        return pieces[0]  # type: ignore[return-value]  # a lone piece is bytes

    @property
    def path(self) -> str:
        """The target's path, without query; of an absolute-form target the path in it."""
        target = self.target
        if not target.startswith(b"/"):
            try:
                target = httptools.parse_url(target).path or b"/"
            except httptools.HttpParserInvalidURLError:
                return ""
        return target.partition(b"?")[0].decode("latin-1")

    @property
    def query(self) -> bytes:
        """What stands after the first `?` of the target, undecoded."""
        return self.target.partition(b"?")[2]


class Exchange(Protocol):
    """Who answers a request that is not answered at once; told what the client does meanwhile."""

    def client_gone(self) -> None:
        """The connection is lost or half-closed: nobody waits for the answer any more."""

    def client_full(self) -> None:
        """The client does not read fast enough: send no more for now."""

    def client_drained(self) -> None:
        """The client caught up: go on."""


class Handler(Protocol):
    """What a `Connection` needs of its server; one implementation, `server.HttpServer`."""

    limits: Limits
    buffered_bytes: int
    draining: bool

    def opened(self, connection: "Connection") -> bool:
        """Count the connection; False refuses it."""

    def closed(self, connection: "Connection") -> None:
        """It is gone."""

    def handle(self, request: Request, connection: "Connection") -> Exchange | None:
        """Answer now (and return None), or return the exchange that will."""

    def error_body(self, status: int, message: str, path: str) -> bytes:
        """JSON of an error that this layer answers by itself; `path`: of the request, empty if not known."""

    def now(self) -> float:
        """Seconds, monotonic."""


def response_head(status: int, headers: list[tuple[bytes, bytes]], *, close: bool) -> bytes:
    """Status line and headers of a response, the blank line included."""
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    lines += [b"%b: %b\r\n" % header for header in headers]
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(lines)


class Connection:  # an asyncio.Protocol in all but its base, which a compiled class cannot have
    """One client connection: reads requests, queues pipelined ones, writes what the exchange gives it.

    To answer, call `respond`, or `writelines` as often as needed and then `finished`; `abort` cuts it off.
    """

    def __init__(self, server: Handler) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport
        self.deadline = math.inf
        """When the server's sweep calls `expired`, seconds on its clock."""
        self._reading: Request | None = None
        self._head_done = False
        self._head_bytes = 0
        self._offered: Request | None = None  # its head offers to switch protocols, and llhttp stopped there
        self._since = 0.0  # when the head or body being read began
        self._idle_since = 0.0  # when it was opened, or the last answer sent: bare line ends are no request
        self._bare_bytes = 0  # received for the request being read without adding header or body
        self._queue: deque[Request] = deque()
        self._in_flight: Request | None = None
        self._exchange: Exchange | None = None
        self._handling = False
        self._full = False  # the transport's write buffer is over its high-water mark
        self._broken: tuple[int, str] | None = None  # answer this when all before it is answered, then close
        self._broken_path = ""  # of a broken request that was read to its end
        self._closing = False
        self._reads_paused = False
        self._said_last = False  # the head of the answer in flight says that the connection closes

    # -- what the exchange calls

    def is_last(self) -> bool:
        """True if the connection closes after the answer in flight: whoever asks says so in its head."""
        request = self._in_flight
        last = request is None or not request.keep_alive or self._server.draining
        self._said_last = last or (self._broken is not None and not self._queue)
        return self._said_last

    def writelines(self, pieces: list[bytes]) -> None:
        """Send pieces of an answer; never blocks, `Exchange.client_full` says when to pause."""
        self.transport.writelines(pieces)

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """Send a whole answer to the request in flight."""
        fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]
        head = response_head(status, fields, close=self.is_last())
        request = self._in_flight
        self.transport.write(head if request is not None and request.method == "HEAD" else head + body)
        self.finished()

    def finished(self, *, close: bool = False) -> None:
        """The answer in flight was written to its end: the next request may go, or the connection closes."""
        last = close or self._said_last
        request, self._in_flight, self._exchange = self._in_flight, None, None
        if request is not None:
            self._server.buffered_bytes -= request.body_bytes
        self._idle_since = self._server.now()
        if last:
            self._close()
        elif not self._handling:
            self._advance()

    def abort(self) -> None:
        """Cut the connection off: what was sent so far is no complete answer."""
        self._closing = True
        self.transport.abort()

    # -- what the server calls

    def expired(self, now: float) -> None:
        """The deadline has passed: refuse, or close."""
        if self._full or self._closing:
            self.transport.abort()
        elif self._reading is not None:
            self._broken = (408, "the request did not arrive in time")
            self._advance()
        elif self._in_flight is None:
            self._close()
        else:
            self._set_deadline(now)

    def drain(self) -> None:
        """The server is going down: close soon if nothing is in flight or being read."""
        self._idle_since = self._server.now()
        self._set_deadline(self._idle_since)

    def close_idle(self) -> None:
        """Close now if nothing is in flight or being read."""
        if self._in_flight is None and self._reading is None and not self._queue:
            self._close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its bases
        set_nodelay(self.transport)
        if not self._server.opened(self):
            self.abort()
            return
        self._idle_since = self._server.now()
        self._set_deadline(self._idle_since)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then start what became complete."""
        if self._closing or self._broken is not None:
            return
        now = self._server.now()
        before, head_before = self._reading, self._head_done
        body_before = before.body_bytes if before is not None else 0
        if before is None:
            self._since = now
        self._feed(data)
        request = self._reading
        if request is not None and request is before and request.body_bytes == body_before:
            self._bare_bytes += len(data)
            if self._bare_bytes > self._server.limits.head_bytes and self._broken is None:
                self._broken = (431, "the request's headers are too large")
        if request is not before or self._head_done != head_before:
            self._bare_bytes = 0
            self._since = now
        self._advance()

    def eof_received(self) -> bool:
        """The client will send no more: see the module's note on half-closed connections."""
        self._gone()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whichever side."""
        self._closing = True
        self._gone()
        for request in (self._in_flight, self._reading, *self._queue):
            if request is not None:
                self._server.buffered_bytes -= request.body_bytes
        self._in_flight = self._reading = None
        self._queue.clear()
        self._server.closed(self)
        self._parser = None  # it holds us in a cycle, which a collector might find in ten minutes

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._full = True
        self.deadline = self._server.now() + self._server.limits.write_s
        if self._exchange is not None:
            self._exchange.client_full()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._full = False
        if self._exchange is not None:
            self._exchange.client_drained()
        self._advance()

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        """First byte of a request line."""
        if self._offered is not None:
            return  # the head made up by `_read_on`
        self._reading = Request()
        self._head_done = False
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """The request target (may come in pieces)."""
        request = self._reading
        assert request is not None
        if self._head_done:
            return
        request.target += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer of a chunked body (which nobody reads)."""
        request = self._reading
        assert request is not None
        if self._head_done:
            return
        lower = name.lower()
        if lower in _ONCE and lower in request.named:
            self._broken = (400, f"the header {lower.decode()} is repeated")
        request.headers.append((lower, name, value))
        request.named[lower] = value
        self._head_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        """The head is whole: refuse what no body can repair."""
        request = self._reading
        assert request is not None
        if self._offered is not None:
            self._offered = None
            return
        self._head_done = True
        request.method = self._parser.get_method().decode("latin-1")
        request.version = self._parser.get_http_version()
        request.keep_alive = request.version == "1.1" and self._parser.should_keep_alive()
        if self._broken is None:
            self._broken = self._fault(request)
        if self._parser.should_upgrade():
            self._offered = request
        if self._broken is None and b"expect" in request.named and not self._in_flight and not self._queue:
            self.transport.write(_CONTINUE)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body, unframed."""
        request = self._reading
        assert request is not None
        if self._broken is not None:
            return
        size = len(piece)
        request.body_bytes += size
        self._server.buffered_bytes += size
        limits = self._server.limits
        if request.body_bytes > limits.body_bytes:
            self._broken = (413, f"the request body is larger than {limits.body_bytes} bytes")
        elif self._server.buffered_bytes > limits.buffered_bytes:
            self._broken = (503, "too many bytes of requests in flight")
        else:
            request.add(piece)

    def on_message_complete(self) -> None:
        """A whole request was read."""
        if self._offered is not None:
            return  # only its head: see `_read_on`
        request, self._reading = self._reading, None
        assert request is not None
        if self._broken is None:
            self._queue.append(request)
        else:
            self._server.buffered_bytes -= request.body_bytes
            self._broken_path = request.path

    # -- inside

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_on(data[upgrade.args[0] :])
        except httptools.HttpParserError as cause:
            if self._broken is None:
                self._broken = (400, f"the request is not valid HTTP/1.1: {cause}")

    def _read_on(self, rest: bytes) -> None:
        """Go on after a head that offers to switch protocols: the offer is ignored (RFC 9110, 7.8).

        llhttp stops there and leaves the body, if there is one, unread. A fresh parser gets a made-up head
        with the same framing, so that it reads the body as a body and not as the next request.
        """
        request = self._offered
        if request is None or self._broken is not None:
            return
        framing = [name for name in (b"content-length", b"transfer-encoding") if name in request.named]
        head = b"POST / HTTP/1.1\r\n" + b"".join(
            b"%b: %b\r\n" % (name, request.named[name]) for name in framing
        )
        self._parser = httptools.HttpRequestParser(self)
        self._feed(head + b"\r\n" + rest)

    def _fault(self, request: Request) -> tuple[int, str] | None:
        """What is wrong with a head, as (status, message)."""
        named, limits = request.named, self._server.limits
        if self._head_bytes > limits.head_bytes or len(request.headers) > limits.headers:
            return 431, "the request's headers are too large or too many"
        if request.version not in ("1.1", "1.0"):
            return 505, "only HTTP/1.1 and HTTP/1.0 are spoken here"
        if request.method == "CONNECT":
            return 501, "no tunnels through here"
        if request.version == "1.1" and b"host" not in named:
            return 400, "the Host header is missing"
        coding = named.get(b"transfer-encoding")
        if coding is not None and (request.version == "1.0" or coding.lower() != b"chunked"):
            return 501, "the only transfer coding known is chunked, over HTTP/1.1"
        expect = named.get(b"expect")
        if expect is not None and (expect.lower() != b"100-continue" or request.version == "1.0"):
            return 417, "the only expectation known is 100-continue"
        length = int(named.get(b"content-length", b"0"))
        if length > limits.body_bytes:
            return 413, f"the request body is larger than {limits.body_bytes} bytes"
        if length + self._server.buffered_bytes > limits.buffered_bytes:
            return 503, "too many bytes of requests in flight"
        return None

    def _advance(self) -> None:
        """Start the next request, answer a broken one, and set reading and the deadline to match."""
        while self._in_flight is None and self._queue and not (self._closing or self._full):
            request = self._in_flight = self._queue.popleft()
            self._handling = True
            exchange = self._server.handle(request, self)
            self._handling = False
            if self._answers(request):
                self._exchange = exchange
        if self._closing:
            return
        if self._broken is not None and self._in_flight is None and not self._queue:
            self._refuse(*self._broken)
            return
        crowded = len(self._queue) > _MAX_PIPELINED
        if crowded != self._reads_paused:
            self._reads_paused = crowded
            if crowded:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()
        self._set_deadline(self._server.now())

    def _answers(self, request: Request) -> bool:
        """Whether it is still in flight: it may have changed while it was handled (docs/decisions/0029)."""
        return self._in_flight is request

    def _set_deadline(self, now: float) -> None:
        limits = self._server.limits
        if self._full or self._closing:
            return  # set when that began
        if self._in_flight is not None:
            self.deadline = math.inf
        elif self._reading is None:
            quiet_s = _LAST_CALL_S if self._server.draining else limits.keep_alive_s
            self.deadline = self._idle_since + quiet_s
        elif self._head_done:
            self.deadline = self._since + limits.body_s + self._reading.body_bytes / _BODY_RATE_BYTES_S
        else:
            self.deadline = self._since + limits.head_s

    def _refuse(self, status: int, message: str) -> None:
        """Answer an error and close, leaving the client time to read it although it may still be sending."""
        request, self._reading = self._reading, None
        path = self._broken_path
        if request is not None:
            self._server.buffered_bytes -= request.body_bytes
            path = request.path if self._head_done else ""
        body = self._server.error_body(status, message, path)
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self.transport.write(response_head(status, fields, close=True) + body)
        self._closing = True
        self.deadline = self._server.now() + _LINGER_S
        if self._reads_paused:
            self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _close(self) -> None:
        self._closing = True
        self.deadline = self._server.now() + self._server.limits.write_s
        self.transport.close()

    def _gone(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()


def set_nodelay(transport: asyncio.Transport) -> None:
    """Switch Nagle's algorithm off: a token must not wait for an acknowledgement (40 ms, delayed ACK)."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

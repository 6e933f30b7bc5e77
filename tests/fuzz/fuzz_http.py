"""HTTP both ways, each against h11: requests of clients as `http1` reads them, answers of engines as
`upstream` does. h11 is strict, written from the standard and by others; llhttp, below both, is neither.

Smuggling is two readers of one byte stream who disagree where a message ends. So of everything that we
accept h11 must see the same messages: method, target, body. Where h11 refuses what we take, the reason must
be one that cannot move the end of a message; `HARMLESS` and `HARMLESS_ANSWERS` list them all, with why.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

import h11
from fuzz_bytes import Choices

from sumibi.core.errors import BadRequest
from sumibi.gateway.headers import forwarded
from sumibi.gateway.http1 import Connection, Header, Limits, Request
from sumibi.gateway.options import Timeouts
from sumibi.gateway.terms import terms_of
from sumibi.gateway.upstream import EngineConnection, Upstream
from sumibi.routing.events import FinishReason

LIMITS = Limits(head_bytes=4096, headers=24, body_bytes=4096, buffered_bytes=8192)
"""Small, so that they are reached."""

Message = tuple[bytes, bytes, bytes]
"""Method, target, body; of answers status, nothing, body."""

HARMLESS = {
    r"^no request line received$": "an empty line before a request line may end in a bare LF for"
    " llhttp: it is thrown away, and a request line begins behind it for both",
    r"^illegal request line: bytearray\(b'(\\r)+[A-Z]": "so may a bare CR",
    r"^illegal request line: bytearray\(b'[A-Z]+ +\S+ +(HTTP|RTSP|ICE)/1\.[01]'\)$": "several spaces around"
    " the target count as one (RFC 9112, 3, allows it), and are no part of it; llhttp reads two protocols"
    " that are written like HTTP",
}
"""What h11 says of a request that we take and it does not (a pattern) -> why no message's end moves."""

HARMLESS_ANSWERS = {
    r"^illegal status line: bytearray\(b'HTTP/1\.[01] \d{3} ": "control characters in a reason phrase,"
    " which goes no further; the line ends at the same CRLF",
    r"^no response line received$": "llhttp throws empty lines before a status line away",
}
"""The same of engines' answers."""


class Wire:
    """A transport that remembers what is written to it, and whether it was closed."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.data += b"".join(pieces)

    def close(self) -> None:
        self.closed = True

    abort = close

    def write_eof(self) -> None:
        """A refused client: what it still sends is thrown away."""
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


# --- requests

METHODS = (
    b"POST",
    b"GET",
    b"HEAD",
    b"PUT",
    b"OPTIONS",
    b"CONNECT",
    b"DELETE",
    b"post",
    b"PRI",
    b"SOURCE",
    b"",
)
TARGETS = (
    b"/v1/chat/completions",
    b"/v1/completions?x=1",
    b"/",
    b"*",
    b"http://t/v1/models",
    b"t:80",
    b"//t/x",
    b"/a b",
    b"/\xc3\xa9",
    b"/%0d%0aX:%20y",
    b"/\x7f",
    b"/#f",
    b"",
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 ", b"")
ENDS = (b"\r\n", b"\n", b"\r", b"\r\r\n", b" \r\n", b"\x00\r\n", b"\r\n\r\n")
SOUND = (
    b"Content-Length: 3",
    b"Content-Length: 0",
    b"Transfer-Encoding: chunked",
    b"X-A: 1",
    b"Content-Type: application/json",
    b"Connection: keep-alive",
)
FIELDS = (
    b"Content-Length: 3",
    b"Content-Length: 0",
    b"Content-Length: 5",
    b"Content-Length: 03",
    b"Content-Length: 3, 3",
    b"Content-Length: +3",
    b"Content-Length:3",
    b"Content-Length: 3 ",
    b"Content-Length: 3\t",
    b"Content-Length: \x0b3",
    b"Content-Length: 0x3",
    b"Content-Length: 3_0",
    b"Content-Length: 18446744073709551619",
    b"Content-Length: 5000",
    b"Content-Length:",
    b"Content-Length : 3",
    b" Content-Length: 3",
    b"Content_Length: 3",
    b"Transfer-Encoding: chunked",
    b"transfer-encoding:\tchunked",
    b"Transfer-Encoding: Chunked ",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: \x0bchunked",
    b'Transfer-Encoding: "chunked"',
    b"Transfer-Encoding:",
    b"Transfer-Encoding\t: chunked",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: close, keep-alive",
    b"Connection: Transfer-Encoding, X-A",
    b"Connection: upgrade",
    b"Upgrade: h2c",
    b"Upgrade: websocket",
    b"Expect: 100-continue",
    b"Expect: 200-ok",
    b"Host: u",
    b"X-A: 1",
    b"X-A:",
    b"X-A",
    b": x",
    b"X-B: a\x00b",
    b"X-B: \xff\x80",
    b"X-B: \x01",
    b"X-B: a\rContent-Length: 5",
    b"X-C: a\n b",
    b" folded",
    b"\tfolded",
    b"X-Llm-D-Inference-TTL: 1m30s",
    b"X-Request-Id: a b",
    b"Authorization: Bearer x",
    b"Trailer: X-A",
    b"Proxy-Connection: close",
    b"Content-Encoding: gzip",
    b"X-L: " + b"l" * 1500,
)
CHUNKS = (
    b"3\r\nabc\r\n",
    b"3;x=y\r\nabc\r\n",
    b"3 \r\nabc\r\n",
    b'3;"\n"\r\nabc\r\n',
    b"03\r\nabc\r\n",
    b"0x3\r\nabc\r\n",
    b"A\r\n0123456789\r\n",
    b"a\r\n0123456789\r\n",
    b"3\nabc\n",
    b"3\r\nabcd\r\n",
    b"3\r\nab\r\n",
    b"-1\r\n",
    b"\r\n",
    b"10000000000000003\r\nabc\r\n",
    b"3;" + b"e" * 300 + b"\r\nabc\r\n",
    b"3\r\nabc",
)
LASTS = (
    b"0\r\n\r\n",
    b"0\r\nX-A: 1\r\n\r\n",
    b"0\r\nContent-Length: 3\r\n\r\n",
    b"00\r\n\r\n",
    b"0;x\r\n\r\n",
    b"0\r\n",
    b"0\r\n\n",
    b"0\n\n",
    b"0\r\nX-A\r\n\r\n",
    b"0\r\n folded\r\n\r\n",
    b"",
)
BODIES = (b"", b"abc", b"abcde", b"0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: t\r\n\r\n", b"\r\n", b"abc\r\n")


def chunked(choose: Choices) -> bytes:
    """A body of chunks, some of them wrong."""
    if choose.once_in(3):
        return b"".join(choose.pick(CHUNKS) for _ in range(choose.below(4))) + choose.pick(LASTS)
    return b"3\r\nabc\r\n" * choose.below(3) + b"0\r\n\r\n"


def message_of(choose: Choices, first: list[bytes]) -> bytes:
    """One message that begins with these lines: mostly sound, and then broken in one way or two."""
    lines = first + [choose.pick(SOUND) for _ in range(choose.below(3))]
    if choose.once_in(2):
        lines.insert(1 + choose.below(len(lines)), choose.pick(FIELDS))
    ends = [b"\r\n"] * (len(lines) + 1)
    if choose.once_in(6):
        ends[choose.below(len(ends))] = choose.pick(ENDS)
    head = b"".join(map(bytes.__add__, [*lines, b""], ends))
    lower = head.lower()
    if choose.once_in(6):
        return head + choose.pick(BODIES)
    if b"chunked" in lower:
        return head + chunked(choose)
    if b"content-length: 3\r" in lower:
        return head + b"abc"
    return head + (choose.pick(BODIES) if choose.once_in(3) else b"")


def request_of(choose: Choices) -> bytes:
    """One request as a client might send it."""
    parts = [b"POST", b"/v1/chat/completions", b"HTTP/1.1"]
    if choose.once_in(4):
        at = choose.below(3)
        parts[at] = choose.pick((METHODS, TARGETS, VERSIONS)[at])
    return message_of(choose, [b" ".join(parts), *([] if choose.once_in(12) else [b"Host: t"])])


def requests(data: bytes) -> None:
    """What we read out of a client's bytes, h11 reads too, and what would be sent on is one request."""
    choose = Choices(data)
    stream = b"".join(request_of(choose) for _ in range(1 + choose.below(4)))
    stream = choose.damaged(stream)
    server = _Server(choose)
    wire = Wire()
    connection = Connection(server)
    connection.connection_made(cast("Any", wire))
    for piece in choose.cut(stream):
        if wire.closed:
            break
        connection.data_received(piece)
        server.answer_some()
    while server.answer_some():
        pass
    ours = server.seen
    theirs, why = read_requests(stream)
    same(ours, theirs, why, HARMLESS, stream)
    if len(theirs) > len(ours):
        assert wire.closed or connection._broken is not None, f"waits for ever after {stream!r}"
    connection.connection_lost(None)
    assert server.buffered_bytes == 0, f"{server.buffered_bytes} bytes are still counted after {stream!r}"
    answered = answers_written(bytes(wire.data))
    assert answered >= len(ours), f"{len(ours)} requests got {answered} answers"


def same(
    ours: list[Message], theirs: list[Message], why: str, harmless: dict[str, str], stream: bytes
) -> None:
    """Fail where the two readings differ, but for what `harmless` allows."""
    both = min(len(ours), len(theirs))
    assert ours[:both] == theirs[:both], f"{stream!r}: we read {ours}, h11 {theirs}"
    if len(ours) > both:
        assert any(re.search(pattern, why) for pattern in harmless), (
            f"{stream!r}: we read {ours[both:]} where h11 says: {why}"
        )


def read_requests(data: bytes) -> tuple[list[Message], str]:
    """Whole requests by h11, and what it said in the end."""
    found: list[Message] = []
    while True:
        while data.startswith(b"\r\n"):  # empty lines before a request may be skipped (RFC 9112, 2.2)
            data = data[2:]
        if not data:
            return found, "the end"
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        parser.receive_data(data)
        method = target = body = b""
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as refusal:
                return found, str(refusal)
            if isinstance(event, h11.Request):
                method, target = event.method, event.target
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            elif event in (h11.NEED_DATA, h11.PAUSED):
                return found, "more is needed"
        found.append((method, target, body))
        if parser.their_state not in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL):
            return found, "it asked for the connection to be closed"
        data = parser.trailing_data[0]


def answers_written(data: bytes) -> int:
    """Answers but 100 in what we wrote; each must be valid by itself."""
    count = 0
    while data := data.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"):
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        parser.send(h11.Request(method="GET", target="/", headers=[("host", "t")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(data)
        parser.receive_data(b"")
        event = parser.next_event()
        while not isinstance(event, h11.EndOfMessage):
            event = parser.next_event()
        count += 1
        data = parser.trailing_data[0]
    return count


class _Server:
    """A server without sockets: answers at once, or a while later."""

    limits = LIMITS
    draining = False

    def __init__(self, choose: Choices) -> None:
        self.buffered_bytes = 0
        self.seen: list[Message] = []
        self._choose = choose
        self._late: list[Connection] = []

    def opened(self, connection: Connection) -> bool:
        return True

    def closed(self, connection: Connection) -> None:
        """Nothing to keep."""

    def handle(self, request: Request, connection: Connection) -> Any:
        assert len(request.body) == request.body_bytes
        self.seen.append((request.method.encode(), request.target, request.body))
        forwards(request)
        try:
            terms_of(request.named, "t", {"x": 1})
        except BadRequest:
            pass
        if self._choose.once_in(3):
            self._late.append(connection)
            return self
        connection.respond(204, b"")
        return None

    def answer_some(self) -> bool:
        """Answer what was put off; False if nothing was."""
        late, self._late = self._late, []
        for connection in late:
            connection.respond(204, b"")
        return bool(late)

    def client_gone(self) -> None:
        self._late.clear()

    def client_full(self) -> None:
        """Nothing is streamed here."""

    client_drained = client_full

    def error_body(self, status: int, message: str, path: str) -> bytes:
        return b"{}"

    def now(self) -> float:
        return 0.0


def forwards(request: Request) -> None:
    """What an engine would get is one request with the same body, whatever the client's header lines were."""
    target = request.target if request.target.startswith(b"/") else request.path.encode("latin-1")
    if not target:
        return
    lines = forwarded(request, "req-1", keep_credentials=True)
    head = b"POST %b HTTP/1.1\r\nhost: e\r\n%bcontent-length: %d\r\n\r\n" % (
        target,
        lines,
        request.body_bytes,
    )
    found, why = read_requests(head + request.body)
    if not found and any(re.search(pattern, why) for pattern in HARMLESS):
        return
    assert found == [(b"POST", target, request.body)], f"{head!r}: {found}, {why}"


# --- answers

STATUS_LINES = (
    b"HTTP/1.1 200 OK",
    b"HTTP/1.1 200 ",
    b"HTTP/1.1 200",
    b"HTTP/1.0 200 OK",
    b"HTTP/1.1 204 No Content",
    b"HTTP/1.1 304 Not Modified",
    b"HTTP/1.1 500 X",
    b"HTTP/1.1 429 X",
    b"HTTP/1.1 100 Continue",
    b"HTTP/1.1 103 Early Hints",
    b"HTTP/1.1 101 Switching Protocols",
    b"HTTP/1.1 199 X",
    b"HTTP/1.1 099 X",
    b"HTTP/1.1 600 X",
    b"HTTP/1.1 2000 X",
    b"HTTP/1.1 20 X",
    b"HTTP/2 200 OK",
    b"HTTP/1.2 200 OK",
    b"ICY 200 OK",
    b"HTTP/1.1 200 \xff\x80",
    b"POST / HTTP/1.1",
    b"",
)


def answer_of(choose: Choices) -> bytes:
    """One answer as an engine might send it."""
    return message_of(choose, [choose.pick(STATUS_LINES) if choose.once_in(4) else b"HTTP/1.1 200 OK"])


def answers(data: bytes) -> None:
    """Of an engine's bytes we pass on a whole answer, or a failure, once; h11 agrees about whole ones."""
    choose = Choices(data)
    stream = b"".join(answer_of(choose) for _ in range(1 + choose.below(3)))
    stream = choose.damaged(stream)
    ends = choose.once_in(2)
    upstream = Upstream("e", 1, Timeouts(), cast("Any", _Deadlines()))
    wire, sink = Wire(), _Sink()
    connection = EngineConnection(upstream)
    connection.connection_made(cast("Any", wire))
    call = upstream_call(upstream, connection, sink)
    for piece in choose.cut(stream):
        if wire.closed or sink.closed:
            break
        connection.data_received(piece)
    if ends and not wire.closed:
        connection.eof_received()
    theirs, why = read_answer(stream, ends=ends)
    ours = [(b"%d" % sink.status, b"", sink.body)] if sink.ended else []
    same(ours, theirs, why, HARMLESS_ANSWERS, stream)
    if theirs or ends:
        assert sink.closed, f"waits for ever after {stream!r}"
    if not sink.closed:
        call.cancel()
    connection.connection_lost(None)
    assert sink.closed <= 1
    assert upstream.open == 0
    assert not upstream.idle


def upstream_call(upstream: Upstream, connection: EngineConnection, sink: "_Sink") -> Any:
    """A call on an open connection."""
    upstream.idle.append(connection)
    return upstream.call(b"POST / HTTP/1.1\r\n\r\n", b"", sink)


def read_answer(data: bytes, *, ends: bool) -> tuple[list[Message], str]:
    """The first whole answer by h11, and what it said in the end."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    parser.send(h11.Request(method="POST", target="/", headers=[("host", "t")]))
    parser.send(h11.EndOfMessage())
    if data:
        parser.receive_data(data)
    if ends:
        parser.receive_data(b"")
    status = body = b""
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError as refusal:
            return [], str(refusal)
        if isinstance(event, h11.Response):
            status = b"%d" % event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return [(status, b"", body)], ""
        elif event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            return [], "more is needed"


class _Loop:
    def time(self) -> float:
        return 0.0

    def create_task(self, work: Any) -> None:
        work.close()
        raise AssertionError("a new connection for a first call")


class _Deadlines:
    def __init__(self) -> None:
        self.loop = _Loop()
        self.waiting: set[Any] = set()


class _Sink:
    """Takes one answer, and holds the connection to its promises."""

    def __init__(self) -> None:
        self.status, self.body = 0, b""
        self.ended = False
        self.closed = 0

    def answer_head(self, status: int, headers: list[Header]) -> None:
        assert not self.status
        assert 200 <= status <= 999
        self.status = status

    def answer_body(self, pieces: list[bytes], *, last: bool) -> None:
        assert self.status
        assert not self.closed
        assert pieces
        assert all(pieces)
        self.body += b"".join(pieces)

    def answer_end(self) -> None:
        self.ended = True
        self.closed += 1

    def answer_failed(self, reason: FinishReason, detail: str) -> None:
        self.closed += 1

"""HTTP/1.1 as the gateway reads it: whole requests, early refusals, no two readings of one byte stream."""

import asyncio
import contextlib
import json
import socket

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.gateway.deadlines import Deadlines
from sumibi.gateway.http1 import Connection, Limits
from sumibi.gateway.server import HttpServer


@contextlib.asynccontextmanager
async def echo_server(**limits):
    """Answers each request with what was understood of it. Yields (server, port)."""

    def respond(request, connection):
        seen = {
            "method": request.method,
            "target": request.target.decode("latin-1"),
            "body": request.body.decode("latin-1"),
            "headers": [
                [name.decode("latin-1"), value.decode("latin-1")] for _, name, value in request.headers
            ],
        }
        connection.respond(200, json.dumps(seen).encode())

    deadlines = Deadlines(asyncio.get_running_loop())
    server = HttpServer(respond, Limits(**limits), deadlines)
    await server.start("127.0.0.1", 0, flag="--port")
    try:
        yield server
    finally:
        server.stop_accepting()
        server.abort()
        await server.drain(1.0)
        deadlines.close()


async def talk(server, *writes):
    """Send pieces and read until the server closes: (status, body) of each answer.

    End with `LAST` where the server has no reason of its own to close.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    received = b""
    with contextlib.suppress(ConnectionError):
        for piece in writes:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            received += data
    writer.close()
    return answers_in(received)


def answers_in(data):
    """Parse consecutive responses with h11, an independent reader."""
    out = []
    while data:
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="GET", target="/", headers=[("host", "t")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(data)
        status, body = None, b""
        while True:
            event = parser.next_event()
            if isinstance(event, h11.InformationalResponse):
                out.append((event.status_code, b""))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
        out.append((status, body))
        data = parser.trailing_data[0] if isinstance(event, h11.EndOfMessage) else b""
    return out


def post(*headers, body=b"", version="1.1", host=True):
    lines = [f"POST /x HTTP/{version}", *(["Host: t"] if host else []), *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


LAST = post("Connection: close")
CHUNKED = "Transfer-Encoding: chunked"

REFUSED = {
    "both framings": (post("Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"), 400),
    "both framings, other order": (post(CHUNKED, "Content-Length: 5", body=b"0\r\n\r\n"), 400),
    "two lengths": (post("Content-Length: 2", "Content-Length: 3", body=b"abc"), 400),
    "two equal lengths": (post("Content-Length: 2", "Content-Length: 2", body=b"ab"), 400),
    "list of lengths": (post("Content-Length: 2, 2", body=b"ab"), 400),
    "signed length": (post("Content-Length: +2", body=b"ab"), 400),
    "negative length": (post("Content-Length: -2", body=b"ab"), 400),
    "hexadecimal length": (post("Content-Length: 0x2", body=b"ab"), 400),
    "huge length": (post("Content-Length: 99999999999999999999", body=b"ab"), 400),
    "other coding": (post("Transfer-Encoding: gzip", body=b"ab"), 501),
    "coding before chunked": (post("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), 501),
    "coding after chunked": (post("Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n"), 400),
    "coding twice": (post(CHUNKED, CHUNKED, body=b"0\r\n\r\n"), 400),
    "almost chunked": (post("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), 501),
    "chunked over 1.0": (post(CHUNKED, version="1.0", body=b"0\r\n\r\n"), 501),
    "space before colon": (post("Content-Length : 2", body=b"ab"), 400),
    "folded header": (post("X: a\r\n b"), 400),
    "bare CR in a value": (post("X: a\rb"), 400),
    "NUL in a value": (post("X: a\0b"), 400),
    "bare LF": (b"POST /x HTTP/1.1\nHost: t\n\n", 400),
    "no host": (post(host=False), 400),
    "two hosts": (post("Host: u"), 400),
    "two authorizations": (post("Authorization: Bearer a", "Authorization: Bearer b"), 400),
    "HTTP/0.9": (b"GET /x\r\n\r\n", 505),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/1.2": (b"GET /x HTTP/1.2\r\nHost: t\r\n\r\n", 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "unknown method": (b"FROB /x HTTP/1.1\r\nHost: t\r\n\r\n", 400),
    "space in target": (b"GET /a b HTTP/1.1\r\nHost: t\r\n\r\n", 400),
    "negative chunk": (post(CHUNKED, body=b"-1\r\na\r\n0\r\n\r\n"), 400),
    "chunk size overflow": (post(CHUNKED, body=b"fffffffffffffffff\r\na\r\n0\r\n\r\n"), 400),
    "chunk ends in LF": (post(CHUNKED, body=b"1\na\n0\n\n"), 400),
    "chunk too long": (post(CHUNKED, body=b"1\r\nab\r\n0\r\n\r\n"), 400),
    "a tunnel": (b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\nGET /x HTTP/1.1\r\nHost: t\r\n\r\n", 501),
    "unknown expectation": (post("Expect: the-unexpected", "Content-Length: 2"), 417),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_two_readers_might_read_differently_is_refused(data, status):
    async with echo_server() as server:
        answers = await talk(server, data)
        assert [code for code, _ in answers] == [status]
        assert json.loads(answers[0][1])["error"]["message"]
        assert server.buffered_bytes == 0


ACCEPTED = {
    "length": (post("Content-Length: 2", body=b"ab"), b"ab"),
    "no body": (post(), b""),
    "chunked": (post(CHUNKED, body=b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"), b"abc"),
    "chunk extension": (post(CHUNKED, body=b"1;x=y\r\na\r\n0\r\n\r\n"), b"a"),
    "trailers": (post(CHUNKED, body=b"1\r\na\r\n0\r\nX: y\r\n\r\n"), b"a"),
    "upper case": (post("TRANSFER-ENCODING: CHUNKED", body=b"1\r\na\r\n0\r\n\r\n"), b"a"),
    "leading empty lines": (b"\r\n\r\n" + post("Content-Length: 1", body=b"a"), b"a"),
    "an offer to switch": (
        post("Connection: upgrade", "Upgrade: h2c", "Content-Length: 2", body=b"ab"),
        b"ab",
    ),
    "offer to switch, chunked": (
        post("Connection: Upgrade", "Upgrade: a", CHUNKED, body=b"1\r\na\r\n0\r\n\r\n"),
        b"a",
    ),
    "offer to switch, no body": (post("Connection: Upgrade", "Upgrade: websocket"), b""),
    "HTTP/1.0": (post("Content-Length: 2", version="1.0", host=False, body=b"ab"), b"ab"),
}


@pytest.mark.parametrize(("data", "body"), ACCEPTED.values(), ids=ACCEPTED.keys())
@pytest.mark.parametrize("pieces", [1, 2, 0], ids=["whole", "halves", "bytes"])
async def test_a_valid_request_is_read_the_same_however_it_is_cut(data, body, pieces):
    cuts = (
        [data[i : i + 1] for i in range(len(data))]
        if pieces == 0
        else [data[: len(data) // pieces], data[len(data) // pieces :]]
    )
    async with echo_server() as server:
        answers = await talk(server, *cuts, LAST)
        assert {status for status, _ in answers} == {200}
        assert json.loads(answers[0][1])["body"].encode("latin-1") == body
        assert server.buffered_bytes == 0


async def test_pipelined_requests_are_answered_in_order():
    requests = b"".join(post("Content-Length: 2", body=b"%02d" % i) for i in range(40))
    async with echo_server() as server:
        answers = await talk(server, requests + LAST)
        assert [json.loads(body)["body"] for _, body in answers[:-1]] == [f"{i:02d}" for i in range(40)]


async def test_requests_before_a_broken_one_are_still_answered():
    async with echo_server() as server:
        answers = await talk(server, post() + post() + b"nonsense\r\n\r\n")
        assert [status for status, _ in answers] == [200, 200]


async def test_a_body_after_an_offer_to_switch_is_no_request():
    """llhttp leaves the body unread then, and a second reader would take it for the next request."""
    hidden = b"GET /hidden HTTP/1.1\r\nHost: t\r\n\r\n"
    offer = post("Connection: upgrade", "Upgrade: h2c", f"Content-Length: {len(hidden)}", body=hidden)
    async with echo_server() as server:
        answers = await talk(server, offer + post("Content-Length: 1", body=b"z") + LAST)
        assert [json.loads(body)["body"] for _, body in answers] == [hidden.decode(), "z", ""]


async def test_a_request_that_says_close_is_the_last():
    async with echo_server() as server:
        answers = await talk(server, LAST)
        assert [status for status, _ in answers] == [200]


async def test_a_client_that_waits_for_100_continue_gets_it_before_its_body():
    async with echo_server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post("Expect: 100-continue", "Content-Length: 2"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ab")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post("Content-Length: 1001"), 413),
        (post("Expect: 100-continue", "Content-Length: 1001"), 413),
        (post(CHUNKED, body=b"3e9\r\n" + b"a" * 1001 + b"\r\n0\r\n\r\n"), 413),
        (post("X: " + "a" * 3000), 431),
        (post(*[f"X{i}: a" for i in range(30)]), 431),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: t\r\n\r\n", 431),
    ],
)
async def test_what_is_too_large_is_refused_by_name(data, status):
    async with echo_server(body_bytes=1000, head_bytes=2000, headers=20) as server:
        answers = await talk(server, data)
        assert [code for code, _ in answers] == [status]
        assert server.buffered_bytes == 0


async def test_a_head_without_end_is_cut_off_at_its_limit():
    async with echo_server(head_bytes=2000) as server:
        answers = await talk(server, b"GET / HTTP/1.1\r\nX: ", *[b"a" * 500] * 20)
        assert [code for code, _ in answers] == [431]


async def test_a_chunk_extension_without_end_is_cut_off_at_its_limit():
    async with echo_server(head_bytes=2000) as server:
        answers = await talk(server, post(CHUNKED, body=b"1;x="), *[b"a" * 500] * 20)
        assert [code for code, _ in answers] == [431]


async def test_a_refused_client_that_is_still_sending_can_read_why():
    """Closing with unread bytes would reset the connection and take the answer with it."""
    async with echo_server(body_bytes=1000) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post("Content-Length: 5000000"))
        for _ in range(50):
            writer.write(b"a" * 20_000)
            await asyncio.sleep(0.001)
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_bodies_of_all_connections_together_are_bounded():
    async with echo_server(buffered_bytes=1000, body_bytes=900) as server:
        first = await asyncio.open_connection("127.0.0.1", server.port)
        first[1].write(post("Content-Length: 800", body=b"a" * 700))
        while server.buffered_bytes < 700:
            await asyncio.sleep(0.001)
        answers = await talk(server, post("Content-Length: 400", body=b"a" * 400))
        assert [status for status, _ in answers] == [503]
        first[1].close()
        while server.buffered_bytes:
            await asyncio.sleep(0.001)
        answers = await talk(server, post("Content-Length: 400", body=b"a" * 400) + LAST)
        assert [status for status, _ in answers] == [200, 200]


async def test_connections_beyond_the_limit_are_closed_at_once():
    async with echo_server(connections=2) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        while server.connections < 2:
            await asyncio.sleep(0.001)
        answers = await talk(server, post())
        assert (answers, server.refused_connections) == ([], 1)
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    ("writes", "status"),
    [
        ([b"GET / HT"], 408),
        ([post("Content-Length: 10", body=b"abc")], 408),
        ([b""], None),
        ([post()], 200),
    ],
    ids=["head", "body", "silence", "between requests"],
)
async def test_slow_and_silent_clients_are_let_go(writes, status):
    async with echo_server(head_s=0.05, body_s=0.05, keep_alive_s=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for data in writes:
            writer.write(data)
        received = await reader.read()  # until the server closes
        assert [code for code, _ in answers_in(received)] == ([status] if status else [])
        writer.close()


async def test_a_trickled_body_is_cut_off_although_bytes_keep_coming():
    async with echo_server(body_s=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post("Content-Length: 100000"))
        answer = asyncio.ensure_future(reader.readline())
        while not answer.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)
        assert (await answer).startswith(b"HTTP/1.1 408")
        writer.close()


@pytest.mark.parametrize("drip", [b"\r\n", b"\n"])
async def test_line_ends_that_begin_no_request_keep_no_connection_open(drip):
    async with echo_server(keep_alive_s=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        closed = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(5):
            while not closed.done():
                writer.write(drip)
                await asyncio.sleep(0.01)
        assert closed.result() == b""
        writer.close()


async def test_head_requests_get_no_body():
    async with echo_server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"HEAD /x HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) > 0
        assert body == b""
        writer.close()


async def test_a_bug_in_a_handler_is_an_internal_error_and_the_server_goes_on(caplog):
    async with echo_server() as server:
        calls, respond = [], server._respond

        def fails_once(request, connection):
            calls.append(request)
            if len(calls) == 1:
                raise RuntimeError("a bug")
            return respond(request, connection)

        server._respond = fails_once
        answers = await talk(server, post() + LAST)
        assert [status for status, _ in answers] == [500, 200]
        assert server.faults == 1
        assert "a bug" in caplog.text
        assert b"a bug" not in answers[0][1]


async def test_nagle_s_algorithm_is_off():
    async with echo_server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post())
        await reader.readline()
        (connection,) = server._connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


# -- against h11

_FRAMING = (
    *(
        "Content-Length: 3",
        "Content-Length: 5",
        "Content-Length: 03",
        "Content-Length: 3, 3",
        "Content-Length:",
    ),
    *(CHUNKED, "transfer-encoding:chunked", "Transfer-Encoding: identity"),
    *("Connection: close", "Connection: keep-alive", "X: y", "X:  y ", "X-Empty:", "Expect: 100-continue"),
)
_BODIES = (
    *(b"", b"abc", b"abcde", b"3\r\nab", b"0\r\n\r\n"),
    *(b"3\r\nabc\r\n0\r\n\r\n", b"3;e\r\nabc\r\n0\r\nT: 1\r\n\r\n"),
)
_REQUESTS = st.tuples(st.lists(st.sampled_from(_FRAMING), max_size=3), st.sampled_from(_BODIES))


def read_by_h11(data):
    """Bodies of the whole requests in `data`, up to the first thing that h11 refuses."""
    bodies = []
    while True:
        while data.startswith(b"\r\n"):  # empty lines before a request may be skipped (RFC 9112, 2.2)
            data = data[2:]
        if not data:
            return bodies
        parser, body = h11.Connection(h11.SERVER), b""
        parser.receive_data(data)
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError:
                return bodies
            if isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            elif event in (h11.NEED_DATA, h11.PAUSED):
                return bodies
        bodies.append(body)
        if parser.their_state is not h11.DONE:  # it asked for the connection to be closed
            return bodies
        data = parser.trailing_data[0]


class _Wire:
    """A transport that remembers what is written to it."""

    def __init__(self):
        self.data, self.closed = b"", False

    def write(self, data):
        self.data += data

    def close(self):
        self.closed = True

    abort = write_eof = close

    def get_extra_info(self, _name):
        return None

    def can_write_eof(self):
        return True

    def pause_reading(self):
        pass

    resume_reading = pause_reading


class _Still:
    """A server without sockets: answers at once, time stands still."""

    limits, buffered_bytes, draining = Limits(), 0, False

    def __init__(self):
        self.bodies = []

    def opened(self, connection):
        return True

    def closed(self, connection):
        pass

    def handle(self, request, connection):
        self.bodies.append(request.body)
        connection.respond(200, b"")

    def error_body(self, status, message, path):
        return b""

    def now(self):
        return 0.0


@settings(max_examples=400, deadline=None)
@given(st.lists(_REQUESTS, min_size=1, max_size=3), st.integers(1, 40))
def test_no_request_is_understood_that_h11_understands_otherwise(requests, step):
    """We may refuse more than h11. What we accept, it accepts with the same body and boundaries."""
    data = b"".join(post(*headers, body=body) for headers, body in requests)
    server, wire = _Still(), _Wire()
    connection = Connection(server)
    connection.connection_made(wire)
    for at in range(0, len(data), step):
        if not wire.closed:
            connection.data_received(data[at : at + step])
    theirs = read_by_h11(data)
    assert server.bodies == theirs[: len(server.bodies)]
    connection.connection_lost(None)
    assert server.buffered_bytes == 0

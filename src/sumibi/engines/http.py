"""Small questions to an engine over HTTP: one connection each, whole answers, bounded in time and size.

For discovery, health and metrics, a few a second; requests of users go through the gateway's data plane.
"""

import asyncio
from dataclasses import dataclass

import httptools

from sumibi.core.errors import EngineUnavailable

_MAX_ANSWER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's answer."""

    status: int
    body: bytes


class _Reader:
    """httptools callbacks that gather one response."""

    def __init__(self) -> None:
        self.status = 0
        self.body: list[bytes] = []
        self.complete = False
        self.framed = False
        """The head says where the body ends."""
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.framed = self.framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.body.append(piece)

    def on_message_complete(self) -> None:
        self.complete = self.status >= 200


async def ask(host: str, port: int, path: str, *, body: bytes | None = None, timeout_s: float = 2.0) -> Reply:
    """GET `path`, or POST a JSON `body` to it. Raises EngineUnavailable when no answer comes in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(host, port, path, body)
    except TimeoutError as cause:
        raise EngineUnavailable(f"http://{host}:{port}{path} did not answer in {timeout_s:g} s") from cause
    except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade) as cause:
        raise EngineUnavailable(f"http://{host}:{port}{path}: {cause or type(cause).__name__}") from cause


async def _exchange(host: str, port: int, path: str, body: bytes | None) -> Reply:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        method = "GET" if body is None else "POST"
        name = f"[{host}]" if ":" in host else host
        head = f"{method} {path} HTTP/1.1\r\nhost: {name}:{port}\r\nconnection: close\r\n"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + (body or b""))
        answer = _Reader()
        received = 0
        while not answer.complete:
            data = await reader.read(65536)
            if not data:
                break
            received += len(data)
            if received > _MAX_ANSWER_BYTES:
                raise EngineUnavailable(f"http://{host}:{port}{path}: the answer is too long")
            answer.parser.feed_data(data)
        if answer.status == 0 or (answer.framed and not answer.complete):
            raise EngineUnavailable(f"http://{host}:{port}{path}: closed without a whole answer")
        return Reply(answer.status, b"".join(answer.body))
    finally:
        writer.close()

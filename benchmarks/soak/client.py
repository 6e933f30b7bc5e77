"""A client that sees everything: whole answers, broken ones, errors in a stream, refused connections.

Reads answers with h11, which is strict and not ours.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import h11
from benchmarks.soak.engine import MODEL

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Seen:
    """What became of one request, as its client saw it."""

    status: int = 0
    """0: no head came."""
    whole: bool = False
    """The framing ended as it should."""
    closes: bool = False
    """The answer said that the connection will be closed."""
    refused: bool = False
    """No connection was made, or it was closed without a byte."""
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def events(self) -> list[str]:
        """Data of each event of a stream."""
        parts = self.body.decode(errors="replace").split("\n\n")
        return [part.removeprefix("data: ") for part in parts if part]

    @property
    def error(self) -> str:
        """The code of the error that the answer is, or its stream ends with; empty: none."""
        words = self.events if self.status == 200 else [self.body.decode(errors="replace")]
        for word in words[-2:]:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                if error := json.loads(word).get("error"):
                    return str(error.get("code", "the engine's"))
        return ""

    @property
    def outcome(self) -> str:
        """`ok`, or what went wrong in a word."""
        if self.refused:
            return "refused"
        if not self.whole:
            return "cut"
        if self.status != 200:
            return f"{self.status}"
        return f"error event: {self.error}" if self.error else "ok"


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def request_bytes(body: dict[str, Any]) -> bytes:
    """A whole request."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Client:
    """One connection, made anew when it was closed."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: dict[str, Any], within_s: float = 30.0) -> Seen:
        """Send a request and read its answer to the end. Raises TimeoutError.

        A kept connection may be closed by the server just as a request is sent on it: then, as HTTP clients
        do, it is sent again on a new one.
        """
        async with asyncio.timeout(within_s):
            kept = self._open is not None
            seen = await self._ask(body)
            return await self._ask(body) if seen.refused and kept else seen

    def close(self) -> None:
        """Close the connection."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    async def _ask(self, body: dict[str, Any]) -> Seen:
        seen = Seen()
        try:
            if self._open is not None and self._open[0].at_eof():
                self.close()  # by the server, while it was not used
            if self._open is None:
                self._open = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self._open
            writer.write(request_bytes(body))
            await _read(reader, seen)
        except ConnectionError:
            seen.refused = not seen.status
        if seen.closes or seen.refused or not seen.whole:
            self.close()
        return seen


async def _read(reader: asyncio.StreamReader, seen: Seen) -> None:
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    parser.send(h11.Request(method="POST", target=CHAT, headers=[("host", "t")]))
    parser.send(h11.EndOfMessage())
    pieces = []
    try:
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Response):
                seen.status = event.status_code
                seen.headers = {name.decode(): value.decode() for name, value in event.headers}
                seen.closes = seen.headers.get("connection") == "close"
            elif isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                seen.whole = True
                break
            elif isinstance(event, h11.ConnectionClosed):
                break
    except (h11.RemoteProtocolError, ConnectionError):
        pass
    finally:
        seen.body = b"".join(pieces)
    seen.refused = not seen.status


async def ask(port: int, body: dict[str, Any], within_s: float = 30.0) -> Seen:
    """One request on a connection of its own."""
    client = Client(port)
    try:
        return await client.ask(body, within_s)
    finally:
        client.close()

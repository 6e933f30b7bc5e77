"""An engine's answer on its way to the client: its head, its body in framing of our own, its end.

The head is held until the first piece of the body. From then on nothing can be taken back: a stream that
breaks ends with an error event and a proper end, any other answer by cutting the connection, so that it
cannot pass for whole.
"""

from typing import Final

from sumibi.gateway.answers import EventStream, JsonAnswer
from sumibi.gateway.errors import shape_in
from sumibi.gateway.headers import answer_ids
from sumibi.gateway.http1 import HOP_BY_HOP, Connection, Header, response_head
from sumibi.gateway.readings import Usage, reading_of
from sumibi.gateway.rewriting import Cached
from sumibi.prompts.dialects import Dialect
from sumibi.routing.events import FinishReason

DECISION_HEADER: Final = b"x-sumibi-decision"
DROPPED_HEADERS = (b"x-sumibi-dropped-reason", b"x-llm-d-request-dropped-reason")
"""Why a request was refused, under our name and under the one llm-d's clients know."""

_NOT_RETURNED = HOP_BY_HOP | {b"content-length", b"x-request-id", b"request-id"}
_LAST_CHUNK: Final = b"0\r\n\r\n"
_JSON: Final = b"application/json"

_FAILURES = {
    FinishReason.REFUSED: (502, "no engine takes requests now: they are down, or starting"),
    FinishReason.ENGINE_GONE: (502, "the engine broke off before its answer was complete"),
    FinishReason.ENGINE_ERROR: (502, "the engine could not answer"),
    FinishReason.REJECTED: (502, "the engine refused the request"),
    FinishReason.TIMEOUT: (504, "the engine did not answer in time"),
    FinishReason.SHUTDOWN: (503, "the gateway is shutting down"),
}
"""(status, message): what clients are told; addresses of engines are none of their business."""


class Reply:
    """To one request, whichever engine it comes from in the end."""

    def __init__(self, connection: Connection, request_id: str, dialect: Dialect, *, one_zero: bool) -> None:
        self.status = 0
        """Of the engine's answer; 0: it has not come."""
        self.events: EventStream | None = None
        self.json: JsonAnswer | None = None
        """What is read of the body; neither, if it is an error."""
        self.answered = False
        """A byte of it went to the client."""
        self.ended = False
        """Its end, too."""
        self._connection = connection
        self._ids = answer_ids(request_id, dialect)
        self._dialect = dialect
        self._one_zero = one_zero
        self._headers: list[Header] = []
        self._notes: list[tuple[bytes, bytes]] = []
        self._chunked = False

    def note(self, name: bytes, value: bytes) -> None:
        """A header of ours for whatever answer there will be."""
        self._notes.append((name, value))

    # -- from the engine

    def anew(self) -> None:
        """Another attempt begins; nothing of the one before went to the client."""
        self.status = 0
        self.events = self.json = None

    def head(self, status: int, headers: list[Header]) -> None:
        """The head came."""
        self.status, self._headers = status, headers

    def read(self, cached: Cached | None) -> None:
        """It is a good one, so its body is read. `cached`: see `tell_cached`."""
        if _value(self._headers, b"content-type").startswith(b"text/event-stream"):
            self.events = EventStream(reading_of(self._dialect))
        else:
            self.json = JsonAnswer(reading_of(self._dialect))
        self.tell_cached(cached)

    def tell_cached(self, cached: Cached | None) -> None:
        """What the answer's usage is to say, if the engine that writes it cannot know."""
        for reading in (self.events, self.json):
            if reading is not None:
                reading.cached = cached

    def hold(self, pieces: list[bytes], *, last: bool) -> list[bytes] | None:
        """Keep an answer without streaming until it is whole; None: it is not yet. Too long a one goes on."""
        assert self.json is not None
        over = self.json.overflows(pieces)
        if over is not None or not last:
            return over
        body = self.json.whole()
        assert body is not None
        self._headers = [header for header in self._headers if header[0] != b"content-length"]
        self._headers.append((b"content-length", b"content-length", b"%d" % len(body)))
        return [body]

    def usage(self) -> Usage:
        """Token counts by the engine, or else an estimate of the answer's."""
        if self.json is not None:
            return self.json.usage() or Usage(None, None, None, exact=False)
        assert self.events is not None
        return self.events.usage() or self.events.estimate()

    def finish(self) -> str:
        """Why the engine says that its answer ended; empty: it does not."""
        reading = self.events or self.json
        return reading.finish() if reading is not None else ""

    # -- to the client

    def write(self, pieces: list[bytes], *, last: bool = False, explained: bytes | None = None) -> None:
        """Send pieces of the body: before the first of them the head (with an explanation of the decision),
        after the last of them the end.
        """
        out = [] if self.answered else [self._head(explained)]
        if pieces and self._chunked:
            out += [b"%x\r\n" % sum(map(len, pieces)), *pieces, b"\r\n"]
        else:
            out += pieces
        if last:
            self.ended = True
            if self._chunked:
                out.append(_LAST_CHUNK)
        if out:
            self._connection.writelines(out)

    def _head(self, explained: bytes | None) -> bytes:
        """The head, with framing of our own."""
        self.answered = True
        fields = [(name, value) for lower, name, value in self._headers if lower not in _NOT_RETURNED]
        fields += self._ids
        fields += self._notes
        if explained is not None:
            fields.append((DECISION_HEADER, explained))
        length = _value(self._headers, b"content-length") if self.events is None else b""
        if length:
            fields.append((b"content-length", length))
        elif not self._one_zero:
            self._chunked = True
            fields.append((b"transfer-encoding", b"chunked"))
        return response_head(self.status, fields, close=self._connection.is_last())

    def cut(self, reason: FinishReason) -> None:
        """End an answer that has begun and will not be whole."""
        if self.events is None or self._one_zero:
            self._connection.abort()
            return
        event = shape_in(self._dialect).event(_FAILURES[reason][1], _code(reason), self.events.events)
        self.write([event], last=True)
        self._connection.finished(close=True)

    # -- answers of our own

    def failure(self, reason: FinishReason) -> None:
        """No engine's answer, but why there is none."""
        status, message = _FAILURES[reason]
        code = _code(reason)
        headers = dropped(code) if reason is FinishReason.SHUTDOWN else None
        self.whole(status, shape_in(self._dialect).body(status, message, code, None), headers)

    def refusal(self, status: int, reason: str, message: str) -> None:
        """The router's word instead: no engine will take the request."""
        self.whole(status, shape_in(self._dialect).body(status, message, reason, None), dropped(reason))

    def pass_on(self, status: int, headers: list[Header], body: bytes) -> None:
        """A prefill engine's word instead."""
        fields = [
            (name, value)
            for lower, name, value in headers
            if lower not in _NOT_RETURNED and lower != b"content-type"
        ]
        self.whole(status, body, fields, content_type=_value(headers, b"content-type") or _JSON)

    def whole(
        self,
        status: int,
        body: bytes,
        headers: list[tuple[bytes, bytes]] | None = None,
        *,
        content_type: bytes = _JSON,
    ) -> None:
        """A whole answer at once."""
        fields = [*(headers or ()), *self._ids, *self._notes]
        self._connection.respond(status, body, content_type=content_type, headers=fields)


def dropped(reason: str) -> list[tuple[bytes, bytes]]:
    """The headers that say why a request was refused."""
    return [(name, reason.encode()) for name in DROPPED_HEADERS]


def _value(headers: list[Header], name: bytes) -> bytes:
    return next((value for lower, _, value in headers if lower == name), b"")


def _code(reason: FinishReason) -> str:
    """The word of an error answer that a program can go by."""
    return "rejected-shutting-down" if reason is FinishReason.SHUTDOWN else reason.value

"""One HTTP request as Envoy tells of it, message by message: external processing in full-duplex mode, no I/O.

`receive` takes a message; what it means is told to its `Owner`, who answers with `send_to` or `refuse`,
at once or later. What is to be sent to Envoy stands in `out`, in order, encoded.

Envoy hands the request over and keeps no copy: nothing is sent before it is whole, then headers and the whole
body go back. The answer is echoed piece by piece as it comes. How Envoy ends the stream says nothing of how
the request ended; `end` does.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from sumibi.gateway.epp.wire import ProcessingResponse

CHUNK_BYTES: Final = 62_000
"""Envoy takes no larger piece of a body."""
FULL_DUPLEX: Final = 4
"""Of `ProtocolConfiguration`'s body modes; the next too."""
NO_BODY: Final = 0
DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
LB: Final = "envoy.lb"
SUBSET_HINT: Final = "envoy.lb.subset_hint"
_OVERWRITE: Final = 2

Headers = Sequence[tuple[str, bytes]]


class End(Enum):
    """How a request ended, as far as this stream saw."""

    COMPLETED = "completed"
    """The whole answer passed."""
    REJECTED = "rejected"
    """It was answered here, with an error."""
    ABORTED = "aborted"
    """Neither: its client left, or Envoy gave up."""


class Asked(NamedTuple):
    """A whole request."""

    method: str
    path: str
    """Without the query."""
    named: dict[bytes, bytes]
    """Headers by lower-case name, the pseudo headers included; of a repeated one the last."""
    body: bytes
    subset: list[str] | None
    """Addresses that it may go to, as its subset hint has them (`ip`, `ip:port`); None: there is no hint."""


class Owner(Protocol):
    """Who has the request answered."""

    def asked(self, request: Asked) -> None:
        """It is whole: call one of the stream's answers, now or later."""

    def too_large(self) -> None:
        """Its body is longer than is allowed: refuse it."""

    def answering(self, status: int, headers: dict[bytes, bytes], served: str) -> None:
        """The head of an answer; `served`: the address that it is from, empty if Envoy does not say."""

    def piece(self, data: bytes) -> None:
        """A piece of its body, not empty."""

    def complete(self) -> None:
        """It is whole."""


class Stream:
    """See the module."""

    __slots__ = (
        "_bodied",
        "_body",
        "_bytes",
        "_echoes",
        "_hint",
        "_max_body_bytes",
        "_named",

        "_trailers",
        "_whole",
        "end",
        "out",
        "response_body_mode",
        "sent",
    )  # fmt: skip

    def __init__(self, max_body_bytes: int) -> None:
        self.out: deque[bytes] = deque()
        self.end: End | None = None
        """None while it is not known; nothing is sent after it is."""
        self.response_body_mode: int | None = None
        """As Envoy says with its first message; None: it does not say."""
        self._max_body_bytes = max_body_bytes
        self._named: dict[bytes, bytes] = {}
        self._hint: list[str] | None = None
        self._body: list[bytes] = []
        self._bytes = 0
        self.sent = False
        """The request went on."""
        self._bodied = False  # it has a body, be it empty
        self._trailers = False  # it has trailers, which are not answered yet
        self._whole = False  # nothing more of the request is expected
        self._echoes = True  # pieces of the answer are sent back by us

    @property
    def buffered_bytes(self) -> int:
        """Of the request's body."""
        return self._bytes

    # -- from Envoy

    def receive(self, message: Any, owner: Owner) -> None:
        """Take one `ProcessingRequest`, and tell `owner` what it means."""
        if self.end is not None:
            return
        match message.WhichOneof("request"):
            case "request_headers":
                self._request_headers(message, owner)
            case "request_body":
                self._request_body(message.request_body, owner)
            case "request_trailers":
                self._request_trailers(owner)
            case "response_headers":
                self._response_headers(message, owner)
            case "response_body":
                self._response_body(message.response_body, owner)
            case "response_trailers":
                self._send(_RESPONSE_TRAILERS)
                self._complete(owner)

    def _request_headers(self, message: Any, owner: Owner) -> None:
        if message.HasField("protocol_config"):
            self.response_body_mode = message.protocol_config.response_body_mode
            self._echoes = self.response_body_mode == FULL_DUPLEX
        self._named = _named(message.request_headers.headers)
        self._hint = _subset(message)
        self._bodied = not message.request_headers.end_of_stream
        if not self._bodied:
            self._ask(owner)
        elif message.HasField("protocol_config") and message.protocol_config.request_body_mode != FULL_DUPLEX:
            # Its body will not come in a way that it could be sent on in.
            why = b"the picker needs request_body_mode: FULL_DUPLEX_STREAMED in Envoy's configuration"
            self.refuse(500, [], why)

    def _request_body(self, piece: Any, owner: Owner) -> None:
        if self._whole:
            return  # Envoy may hand over the last piece of a large body twice
        if piece.body:
            self._body.append(piece.body)
            self._bytes += len(piece.body)
        if self._bytes > self._max_body_bytes:
            self._whole = True
            self._body.clear()
            owner.too_large()
        elif piece.end_of_stream:
            self._ask(owner)

    def _request_trailers(self, owner: Owner) -> None:
        """They come after the whole body, whose last piece says nothing of an end then."""
        self._trailers = True
        if not self._whole:
            self._ask(owner)
        elif self.sent:
            self._send_trailers()

    def _ask(self, owner: Owner) -> None:
        self._whole = True
        named = self._named
        path, _, _ = named.get(b":path", b"").partition(b"?")
        owner.asked(
            Asked(
                method=named.get(b":method", b"").decode("latin-1"),
                path=path.decode("latin-1"),
                named=named,
                body=b"".join(self._body) if len(self._body) != 1 else self._body[0],
                subset=self._hint,
            )
        )

    def _response_headers(self, message: Any, owner: Owner) -> None:
        headers = _named(message.response_headers.headers)
        owner.answering(_status(headers), headers, _served(message))
        self._send(_RESPONSE_HEADERS)
        if message.response_headers.end_of_stream:
            self._complete(owner)

    def _response_body(self, piece: Any, owner: Owner) -> None:
        data, last = piece.body, piece.end_of_stream
        if data:
            owner.piece(data)
        if self._echoes:
            self._send_body("response_body", data, last=last)
        else:
            self._send(_RESPONSE_BODY)
        if last:
            self._complete(owner)

    def _complete(self, owner: Owner) -> None:
        if self.end is None:
            owner.complete()
            self.end = End.COMPLETED

    # -- from the owner

    def send_to(self, destination: str, set_headers: Headers, remove: Iterable[str], body: bytes) -> None:
        """Let the request go on to `destination` (`ip:port`, several: in order of preference) with `body`."""
        answer = ProcessingResponse()
        where = destination.encode()
        answer.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value = destination
        response = answer.request_headers.response
        response.clear_route_cache = True
        mutation = response.header_mutation
        _set(mutation, [(DESTINATION, where), *set_headers])
        mutation.remove_headers.extend(remove)
        self._send(answer.SerializeToString())
        self.sent = True
        if self._bodied:
            self._send_body("request_body", body, last=not self._trailers)
        self._body.clear()
        if self._trailers:
            self._send_trailers()

    def refuse(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer it with an error, whatever passed of it so far but its end."""
        if self.end is not None:
            return
        self.end = End.REJECTED
        answer = ProcessingResponse()
        immediate = answer.immediate_response
        immediate.status.code = status
        immediate.body = body
        _set(immediate.headers, headers)
        self._body.clear()
        self.out.append(answer.SerializeToString())

    def closed(self) -> End:
        """There will be no more messages: how it ended."""
        self.end = self.end or End.ABORTED
        self._body.clear()
        return self.end

    # -- inside

    def _send(self, answer: bytes) -> None:
        if self.end is None:
            self.out.append(answer)

    def _send_trailers(self) -> None:
        self._trailers = False
        self._send(_REQUEST_TRAILERS)

    def _send_body(self, part: str, body: bytes, *, last: bool) -> None:
        """In pieces that Envoy takes; an empty one if there is nothing."""
        view = memoryview(body)
        for start in range(0, len(body) or 1, CHUNK_BYTES):
            answer = ProcessingResponse()
            piece = getattr(answer, part).response.body_mutation.streamed_response
            end = start + CHUNK_BYTES
            piece.body = bytes(view[start:end]) if len(body) > CHUNK_BYTES else body
            piece.end_of_stream = last and end >= len(body)
            self._send(answer.SerializeToString())


def _go_on(part: str) -> bytes:
    """Let a part pass as it is."""
    answer = ProcessingResponse()
    getattr(answer, part).SetInParent()
    return bytes(answer.SerializeToString())


_REQUEST_TRAILERS = _go_on("request_trailers")
_RESPONSE_HEADERS = _go_on("response_headers")
_RESPONSE_BODY = _go_on("response_body")
_RESPONSE_TRAILERS = _go_on("response_trailers")


def _set(mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add()
        option.header.key, option.header.raw_value = name, value
        option.append_action = _OVERWRITE


def _named(headers: Any) -> dict[bytes, bytes]:
    """Envoy fills `raw_value`, others may fill `value`."""
    return {h.key.encode(): h.raw_value or h.value.encode() for h in headers.headers}


def _status(named: dict[bytes, bytes]) -> int:
    text = named.get(b":status", b"")
    return int(text) if text.isdigit() else 0


def _subset(message: Any) -> list[str] | None:
    """The subset hint: a list of addresses, or some with commas between."""
    metadata = message.metadata_context.filter_metadata
    if SUBSET_HINT not in metadata:
        return None
    fields = metadata[SUBSET_HINT].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        words = [one.string_value for one in value.list_value.values]
    else:
        words = value.string_value.split(",")
    return [word for word in (word.strip() for word in words) if word]


def _served(message: Any) -> str:
    metadata = message.metadata_context.filter_metadata
    if LB not in metadata:
        return ""
    fields = metadata[LB].fields
    return str(fields[SERVED].string_value) if SERVED in fields else ""

"""One request passed through to one engine as it is, its answer too: no retry, nothing read of either."""

from sumibi.gateway.errors import OPENAI, ErrorShape
from sumibi.gateway.http1 import HOP_BY_HOP, Connection, Header, Request, response_head
from sumibi.gateway.upstream import Call, Upstream
from sumibi.routing.events import FinishReason

_NOT_PASSED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


class Passing:
    """An `http1.Exchange` towards the client, an `upstream.Sink` towards the engine."""

    def __init__(self, connection: Connection, request: Request, shape: ErrorShape = OPENAI) -> None:
        self.call: Call | None = None
        """To the engine, while it lasts."""
        self._connection = connection
        self._shape = shape
        self._status = 0
        self._headers: list[Header] = []
        self._begun = False
        self._chunked = False
        self._one_zero = request.version == "1.0"

    def begin(self, upstream: Upstream, url: str, request: Request) -> None:
        """Send the request as it came."""
        body = request.body
        target = request.target if request.target.startswith(b"/") else request.path.encode("latin-1")
        head = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), target)]
        head.append(b"host: %b\r\n" % url.removeprefix("http://").encode())
        head += [b"%b: %b\r\n" % (n, v) for lower, n, v in request.headers if lower not in _NOT_PASSED]
        if body or request.method in ("POST", "PUT", "PATCH"):
            head.append(b"content-length: %d\r\n" % len(body))
        self.call = upstream.call(b"".join([*head, b"\r\n"]), body, self)

    # -- upstream.Sink

    def answer_head(self, status: int, headers: list[Header]) -> None:
        """Kept until the first piece of the body, or the end."""
        self._status, self._headers = status, headers

    def answer_body(self, pieces: list[bytes], *, last: bool) -> None:
        """Passed on."""
        out = [] if self._begun else [self._head()]
        if self._chunked:
            out += [b"%x\r\n" % sum(map(len, pieces)), *pieces, b"\r\n"]
        else:
            out += pieces
        self._connection.writelines(out)

    def answer_end(self) -> None:
        """The answer is whole."""
        self.call = None
        out = [] if self._begun else [self._head()]
        if self._chunked:
            out.append(b"0\r\n\r\n")
        if out:
            self._connection.writelines(out)
        self._connection.finished()

    def answer_failed(self, reason: FinishReason, detail: str) -> None:
        """Said, if that is still possible; else the connection is cut."""
        self.call = None
        if self._begun:
            self._connection.abort()
            return
        status = 504 if reason is FinishReason.TIMEOUT else 502
        self._connection.respond(
            status, self._shape.body(status, "the engine did not answer", reason.value, None)
        )

    # -- http1.Exchange

    def client_gone(self) -> None:
        """Stop the engine's work."""
        call, self.call = self.call, None
        if call is not None:
            call.cancel()

    def client_full(self) -> None:
        """Read no more from the engine until the client catches up."""
        if self.call is not None:
            self.call.pause()

    def client_drained(self) -> None:
        """Read on."""
        if self.call is not None:
            self.call.resume()

    def _head(self) -> bytes:
        self._begun = True
        fields = [(name, value) for lower, name, value in self._headers if lower not in HOP_BY_HOP]
        framed = any(lower == b"content-length" for lower, _, _ in self._headers)
        if not framed and not self._one_zero and self._status not in (204, 304):
            self._chunked = True
            fields.append((b"transfer-encoding", b"chunked"))
        return response_head(self._status, fields, close=self._connection.is_last())

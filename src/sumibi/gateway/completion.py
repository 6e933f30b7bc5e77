"""One request for generated text, from its parsed prompt to its last byte: the shell's side of its life.

It tells the router what happens (arrival, dispatch, first token, end) and does what the router says
(dispatch, refuse). Bytes flow past it: the engine's answer is its sink, the client's connection its drain.

The head of an answer is held until the first piece of its body, so that an engine that dies in between
costs a retry and not the request. From then on nothing can be taken back: a stream that breaks ends with an
error event and a proper end, any other answer by cutting the connection, so that it cannot pass for whole.
"""

from typing import Protocol

from sumibi.gateway.answers import EventStream, JsonAnswer, Usage
from sumibi.gateway.errors import error_body, error_event
from sumibi.gateway.http1 import HOP_BY_HOP, Connection, Header, Request, response_head
from sumibi.gateway.metrics import Metrics, ModelCounters, seconds
from sumibi.gateway.terms import Terms
from sumibi.gateway.upstream import Call
from sumibi.prompts.dialects import PromptKind, PromptRequest
from sumibi.prompts.keys import Prompt
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatch,
    Dispatched,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    PromptGrade,
)

EXPLAIN_HEADER = b"x-sumibi-explain"
DECISION_HEADER = b"x-sumibi-decision"
DROPPED_HEADERS = (b"x-sumibi-dropped-reason", b"x-llm-d-request-dropped-reason")
"""Why a request was refused, under our name and under the one llm-d's clients know."""

_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",  # usage must be readable on its way through
    b"x-request-id",
    b"x-data-parallel-rank",  # placement decides
    EXPLAIN_HEADER,
}
_NOT_RETURNED = HOP_BY_HOP | {b"content-length", b"x-request-id"}
_LAST_CHUNK = b"0\r\n\r\n"

_FAILURES = {
    FinishReason.REFUSED: (502, "no engine could be reached"),
    FinishReason.ENGINE_GONE: (502, "the engine broke off before its answer was complete"),
    FinishReason.TIMEOUT: (504, "the engine did not answer in time"),
    FinishReason.SHUTDOWN: (503, "the gateway is shutting down"),
}
"""(status, message): what clients are told; addresses of engines are none of their business."""
_QUEUE_OUTCOMES = {
    FinishReason.CLIENT_GONE: "rejected-context-cancelled",
    FinishReason.SHUTDOWN: "rejected-shutting-down",
}


class Shell(Protocol):
    """What a completion needs around it; one implementation, `shell.Shell`."""

    metrics: Metrics

    def now(self) -> float:
        """Seconds on the clock of all events."""

    def tell(self, event: Event) -> None:
        """Hand an event to the router and carry out what it answers."""

    def send(
        self, endpoint: str, path: bytes, head: bytes, body: bytes, completion: "Completion"
    ) -> Call | None:
        """POST to an endpoint; None (and a failure soon) if there is no such endpoint any more."""

    def attempt_failed(self, endpoint: str, reason: FinishReason, detail: str) -> None:
        """Count a failure of an endpoint, and look after it if its process may be gone."""

    def over(self, completion: "Completion", reason: FinishReason, usage: Usage | None) -> None:
        """The request is over: count it, write its usage record, forget it."""

    def explanation(self, decision: str) -> bytes:
        """A decision for its header: JSON of at most 2 KB."""


class Completion:
    """See the module. An `http1.Exchange` towards the client, an `upstream.Sink` towards the engine."""

    def __init__(
        self,
        shell: Shell,
        connection: Connection,
        request: Request,
        asked: PromptRequest,
        *,
        request_id: str,
        tenant: str,
        terms: Terms,
        counters: ModelCounters,
        keep_authorization: bool,
        explain: bool,
    ) -> None:
        self.id = request_id
        self.asked = asked
        self.tenant = tenant
        self.counters = counters
        """Of its model, from its arrival to its end."""
        self.endpoint = ""
        self.decision = ""
        self.attempt = 0
        self.prompt_tokens = 0
        """By our own count; the engine's replaces it when it comes."""
        self.arrived_t = shell.now()
        self.first_token_t: float | None = None
        self.refusal = ""
        """Drop reason, if the router refused the request."""
        self._shell = shell
        self._connection = connection
        self._target = request.target if request.target.startswith(b"/") else request.path.encode("latin-1")
        self._terms = terms
        self._body = request.body
        self._one_zero = request.version == "1.0"
        self._forward = _forwarded(request, self._body, request_id, keep_authorization=keep_authorization)
        self._explain = explain
        self._call: Call | None = None
        self._status = 0
        self._headers: list[Header] = []
        self._events: EventStream | None = None
        self._json: JsonAnswer | None = None
        self._queued_t: float | None = None  # since when it waits for its first endpoint
        self._arrived = False  # the router knows of the request
        self._answered = False  # a byte of an answer went to the client
        self._ended = False  # its end, too
        self._chunked = False
        self._over = False

    def arrive(self, prompt: Prompt) -> None:
        """The prompt is known: let the router choose (unless the client left meanwhile)."""
        if self._over:
            return
        asked, shell, terms = self.asked, self._shell, self._terms
        self.prompt_tokens = prompt.prompt_tokens
        self._arrived = True
        shell.tell(
            Arrived(
                t=shell.now(),
                request=self.id,
                model=asked.model,
                keys=prompt.keys,
                prompt_tokens=prompt.prompt_tokens,
                max_tokens=asked.max_tokens,
                tenant=self.tenant,
                session=terms.session,
                program=terms.program,
                priority=terms.priority,
                ttl_s=terms.ttl_s,
                prompt_grade=PromptGrade(prompt.grade),
                stream=asked.stream,
            )
        )
        if not self._over:
            self._queued_t = shell.now()
            shell.tell(Admitted(t=self._queued_t, request=self.id))

    def fail(self, status: int, body: bytes) -> None:
        """The request cannot be placed, by its fault or by ours: answer with an error."""
        if not self._over:
            self._stop_call()
            self._tell_finished(FinishReason.REJECTED, None)
            self._close(FinishReason.REJECTED, None)
            self._respond(status, body)

    # -- what the router says

    def dispatch(self, instruction: Dispatch) -> None:
        """Send the request to the endpoint chosen."""
        shell = self._shell
        if instruction.attempt == 1:
            self._left_queue("dispatched")
        self.attempt = instruction.attempt
        self.endpoint = instruction.endpoint
        self.decision = instruction.decision
        self._status = 0
        self._events = self._json = None
        self._call = shell.send(instruction.endpoint, self._target, self._forward, self._body, self)
        shell.tell(
            Dispatched(t=shell.now(), request=self.id, attempt=self.attempt, endpoint=instruction.endpoint)
        )

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Answer with an error: no endpoint will take the request."""
        self.refusal = reason
        self._left_queue(reason)
        self._close(FinishReason.REFUSED, None)
        self._respond(status, error_body(status, message, code=reason), _dropped(reason))

    # -- upstream.Sink

    def answer_head(self, status: int, headers: list[Header]) -> None:
        """The engine's status decides what becomes of the attempt."""
        self._status, self._headers = status, headers
        if 200 <= status < 300:
            kind = next((value for lower, _, value in headers if lower == b"content-type"), b"")
            if kind.startswith(b"text/event-stream"):
                self._events = EventStream()
            else:
                self._json = JsonAnswer()
            return
        reason = FinishReason.REJECTED
        if status >= 500 or status == 429:
            reason = FinishReason.ENGINE_ERROR
            self._shell.attempt_failed(self.endpoint, reason, f"it answered {status}")
        failed, self._call = self._call, None
        if self._tried_again(reason):
            if failed is not None:
                failed.cancel()
            return
        self._call = failed
        self._close(reason, None)

    def answer_body(self, pieces: list[bytes], *, last: bool) -> None:
        """Pass a piece of the answer on."""
        events = self._events
        if events is not None:
            block = events.feed(pieces)
            if last:
                block += events.rest()
            if not block:
                return
            pieces = [block]
        elif self._json is not None:
            self._json.feed(pieces)
        self._write(pieces, last=last)

    def answer_end(self) -> None:
        """The engine's answer is whole."""
        self._call = None
        if not self._ended:
            self._write([], last=True)
        if not self._over:
            usage, reason = self._usage(), FinishReason.STOP
            if self._events is not None and self._events.failed():
                reason = FinishReason.ENGINE_ERROR
                self._shell.attempt_failed(self.endpoint, reason, "it ended a stream with an error")
            self._tell_finished(reason, usage)
            self._close(reason, usage)
        self._connection.finished()

    def answer_failed(self, reason: FinishReason, detail: str) -> None:
        """The attempt brought no whole answer: try elsewhere, or say so in the way that is still open."""
        self._call = None
        self._shell.attempt_failed(self.endpoint, reason, detail)
        if self._over:  # while an engine's error answer was being passed on
            if self._answered:
                self._connection.abort()
            else:
                self._respond_failure(reason)
        elif self._answered:
            self._tell_finished(reason, None)
            self._cut(reason)
            self._close(reason, None)
        elif not self._tried_again(reason):
            self._close(reason, None)
            self._respond_failure(reason)

    # -- http1.Exchange

    def client_gone(self) -> None:
        """Stop the engine's work at once."""
        self._stop_call()
        if not self._over:
            self._tell_finished(FinishReason.CLIENT_GONE, None)
            self._close(FinishReason.CLIENT_GONE, None)

    def client_full(self) -> None:
        """Read no more from the engine until the client catches up."""
        if self._call is not None:
            self._call.pause()

    def client_drained(self) -> None:
        """Read on."""
        if self._call is not None:
            self._call.resume()

    # -- shutdown

    def shut_down(self) -> None:
        """The gateway's drain time is over: end the request with an error."""
        self._stop_call()
        if self._over:
            self._connection.abort()
            return
        reason = FinishReason.SHUTDOWN
        self._tell_finished(reason, None)
        if self._answered:
            self._cut(reason)
        else:
            self._respond_failure(reason)
        self._close(reason, None)

    # -- inside

    def _write(self, pieces: list[bytes], *, last: bool = False) -> None:
        """Send pieces of the answer, before the first of them its head, after the last of them its end."""
        first = not self._answered
        out = [self._head()] if first else []
        if pieces and self._chunked:
            out += [b"%x\r\n" % sum(map(len, pieces)), *pieces, b"\r\n"]
        else:
            out += pieces
        if last:
            self._ended = True
            if self._chunked:
                out.append(_LAST_CHUNK)
        if out:
            self._connection.writelines(out)
        if first and not self._over:
            shell = self._shell
            self.first_token_t = shell.now()
            shell.tell(FirstToken(t=self.first_token_t, request=self.id, attempt=self.attempt))

    def _head(self) -> bytes:
        """The head of the answer, with framing of our own."""
        self._answered = True
        fields = [(name, value) for lower, name, value in self._headers if lower not in _NOT_RETURNED]
        fields.append((b"x-request-id", self.id.encode()))
        if self._explain and self.decision:
            fields.append((DECISION_HEADER, self._shell.explanation(self.decision)))
        length = None
        if self._events is None:
            length = next((value for lower, _, value in self._headers if lower == b"content-length"), None)
        if length is not None:
            fields.append((b"content-length", length))
        elif not self._one_zero:
            self._chunked = True
            fields.append((b"transfer-encoding", b"chunked"))
        return response_head(self._status, fields, close=self._connection.last)

    def _cut(self, reason: FinishReason) -> None:
        """End an answer that has begun and will not be whole."""
        if self._events is None or self._one_zero:
            self._connection.abort()
            return
        self._write([error_event(_FAILURES[reason][1], code=_code(reason))], last=True)
        self._connection.finished(close=True)

    def _respond_failure(self, reason: FinishReason) -> None:
        status, message = _FAILURES[reason]
        code = _code(reason)
        headers = _dropped(code) if reason is FinishReason.SHUTDOWN else None
        self._respond(status, error_body(status, message, code=code), headers)

    def _respond(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self._connection.respond(
            status, body, headers=[*(headers or ()), (b"x-request-id", self.id.encode())]
        )

    def _tried_again(self, reason: FinishReason) -> bool:
        """Report the end of an unanswered attempt; True if the router took care of what follows."""
        before = self.attempt
        self._tell_finished(reason, None)
        return self.attempt != before or self._over

    def _tell_finished(self, reason: FinishReason, usage: Usage | None) -> None:
        if not self._arrived:
            return
        shell = self._shell
        shell.tell(
            Finished(
                t=shell.now(),
                request=self.id,
                attempt=self.attempt,
                reason=reason,
                answered=self._answered,
                prompt_tokens=usage.prompt_tokens if usage is not None and usage.exact else None,
                cached_tokens=usage.cached_tokens if usage is not None else None,
                output_tokens=usage.output_tokens if usage is not None else None,
            )
        )

    def _left_queue(self, outcome: str) -> None:
        """It waited for its first endpoint no longer: because it has one, or for the reason given."""
        if self._queued_t is not None:
            queue_s = self._shell.metrics.queue_s
            queue_s.setdefault(outcome, seconds()).observe(self._shell.now() - self._queued_t)
            self._queued_t = None

    def _close(self, reason: FinishReason, usage: Usage | None) -> None:
        self._over = True
        self._left_queue(_QUEUE_OUTCOMES.get(reason, "failed"))
        self._shell.over(self, reason, usage)

    def _stop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _usage(self) -> Usage:
        """Token counts of the whole answer: the engine's, else counted here."""
        if self._json is not None:
            return self._json.usage() or Usage(None, None, None, exact=False)
        assert self._events is not None
        usage = self._events.usage()
        if usage is not None:
            return usage
        # One event a token, the opening role event of a chat and the closing [DONE] aside.
        overhead = 2 if self.asked.kind is PromptKind.CHAT else 1
        return Usage(None, None, max(0, self._events.events - overhead), exact=False)


def _dropped(reason: str) -> list[tuple[bytes, bytes]]:
    return [(name, reason.encode()) for name in DROPPED_HEADERS]


def _code(reason: FinishReason) -> str:
    """The word of an error answer that a program can go by."""
    return "rejected-shutting-down" if reason is FinishReason.SHUTDOWN else reason.value


def _forwarded(request: Request, body: bytes, request_id: str, *, keep_authorization: bool) -> bytes:
    """The header lines that an engine gets, but for `Host`."""
    named = request.named.get(b"connection", b"").lower()
    dropped = _NOT_FORWARDED
    if named not in (b"", b"keep-alive", b"close"):
        dropped = dropped | {token.strip() for token in named.split(b",")}
    if not keep_authorization:
        dropped = dropped | {b"authorization"}
    lines = [b"%b: %b\r\n" % (name, value) for lower, name, value in request.headers if lower not in dropped]
    lines.append(b"content-length: %d\r\nx-request-id: %b\r\n" % (len(body), request_id.encode()))
    return b"".join(lines)

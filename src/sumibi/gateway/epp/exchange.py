"""One request for text that Envoy carries: what the router says of it becomes the picker's word to Envoy, and
what is seen of its answer becomes the router's events.

Envoy retries by itself, along the addresses that it was given, and says whose answer it is. If that is not
the first one, the first one could not be reached. Where no answers are shown, ends are `estimates`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from sumibi.gateway import legs
from sumibi.gateway.answers import EventStream, JsonAnswer
from sumibi.gateway.epp.stream import Asked, Headers, Stream
from sumibi.gateway.errors import shape_in
from sumibi.gateway.headers import (
    ATTEMPT_HEADER,
    CREDENTIALS,
    EXPLAIN_HEADER,
    PREFILLED_HEADER,
    PREFILLER_HEADER,
)
from sumibi.gateway.inflight import InFlight
from sumibi.gateway.metrics import ModelCounters
from sumibi.gateway.readings import Usage, reading_of
from sumibi.gateway.terms import Terms
from sumibi.prompts.dialects import PromptRequest
from sumibi.routing.events import Dispatch, Dispatched, FinishReason, FirstToken, Moved

if TYPE_CHECKING:
    from sumibi.gateway.epp.visit import Picker

DROPPED: Final = "x-llm-d-request-dropped-reason"
_RANK: Final = "x-data-parallel-rank"
_PREFILLER: Final = PREFILLER_HEADER.decode()
_ENCODING: Final = "accept-encoding"
"""Usage must be readable on its way through."""
_OURS = (_PREFILLER, ATTEMPT_HEADER.decode(), EXPLAIN_HEADER.decode(), _RANK)
"""Not for clients to say."""


class Exchange(InFlight):
    """See the module."""

    def __init__(
        self,
        picker: "Picker",
        stream: Stream,
        request: Asked,
        asked: PromptRequest,
        *,
        request_id: str,
        tenant: str,
        terms: Terms,
        counters: ModelCounters,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(
            picker.shell, asked, request_id=request_id, tenant=tenant, terms=terms, counters=counters
        )
        self._picker = picker
        self._shell = picker.shell
        self._stream = stream
        self._request = request
        self._wake = wake
        self._events: EventStream | None = None
        self._json: JsonAnswer | None = None
        self._status = 0
        self._seen = picker.sees(stream)

    # -- what the router says

    def dispatch(self, instruction: Dispatch) -> None:
        """Name the endpoint to Envoy; once it has left, only take note."""
        self._chosen(instruction)
        if self._stream.sent:
            return
        endpoint, request = instruction.endpoint, self._request
        headers: Headers = [("content-length", b"%d" % len(request.body)), ("x-request-id", self.id.encode())]
        headers = headers if request.body else headers[1:]
        target = self._shell.targets.get(endpoint)
        if target is not None and target.rank is not None:
            headers = [*headers, (_RANK, b"%d" % target.rank)]
        if instruction.prefill is not None:
            headers = [*headers, (_PREFILLER, address_of(instruction.prefill).encode())]
        given = {name for name, _ in headers}
        remove = [
            name
            for name in self._picker.not_forwarded
            if name not in given and name.encode() in request.named
        ]
        destination = self._destination(instruction, alone=_RANK in given)
        self._stream.send_to(destination, headers, remove, request.body)
        if not self._seen:
            self._picker.estimates.add(self)
        elif instruction.prefill is None:
            # Of a pair it is not told: when its prefill ends is heard too late to learn from.
            t = self._shell.now()
            self._shell.tell(Dispatched(t=t, request=self.id, attempt=self.attempt, endpoint=endpoint))
        self._wake()

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Answer with an error."""
        self.refusal = reason
        self._close(FinishReason.REFUSED, None)
        body = shape_in(self.asked.dialect).body(status, message, reason, None)
        self._refuse(status, body, reason)

    # -- what becomes of it before

    def fail(self, status: int, body: bytes) -> None:
        """It cannot be placed, by its fault or by ours."""
        if not self._over:
            self._end(FinishReason.REJECTED, None)
            self._refuse(status, body, "")

    # -- the answer

    def answering(self, status: int, headers: dict[bytes, bytes], served: str) -> None:
        """The head of an answer came."""
        self._status = status
        if self._over:
            return
        if served and served != address_of(self.endpoint):
            self._moved(served)
        told = headers.get(PREFILLED_HEADER)
        if told is not None and self.prefill:
            self._leg_over(told)
        if self._over:
            return
        if 200 <= status < 300:
            reading = reading_of(self.asked.dialect)
            if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._events = EventStream(reading)
            else:
                self._json = JsonAnswer(reading)
            return
        reason = FinishReason.REJECTED
        if status >= 500 or status == 429:
            reason = FinishReason.ENGINE_ERROR
            if not served and self._picker.states_served and status == 503:
                reason = FinishReason.REFUSED  # none could be reached
            self._shell.attempt_failed(self.endpoint, reason, f"it answered {status}")
        self._end(reason, None)

    def piece(self, data: bytes) -> None:
        """A piece of its body came."""
        if self._over:
            return
        if self.first_token_t is None:
            self.first_token_t = self._shell.now()
            self._shell.tell(FirstToken(t=self.first_token_t, request=self.id, attempt=self.attempt))
        if self._events is not None:
            self._events.feed([data])
        elif self._json is not None:
            self._json.feed([data])

    def complete(self) -> None:
        """The whole answer passed."""
        if self._over:
            return
        usage, reason = self._usage(), FinishReason.STOP
        if self._events is not None:
            self._events.feed([self._events.rest()])
            if self._events.failed():
                reason = FinishReason.ENGINE_ERROR
                self._shell.attempt_failed(self.endpoint, reason, "it ended a stream with an error")
            else:
                self.finish = self._events.finish()
        elif self._json is not None:
            self.finish = self._json.finish()
        self._end(reason, usage)

    def aborted(self) -> None:
        """Its stream ended before its answer: the client left, or Envoy gave up."""
        if self._over or (self._stream.sent and not self._seen):
            return
        self._end(FinishReason.CLIENT_GONE, None)

    def shut_down(self) -> None:
        """The drain time is over."""
        self.evict(503, "rejected-shutting-down", "the endpoint picker is shutting down")

    def evict(self, status: int, reason: str, message: str) -> None:
        """End it with an error, whatever has passed of it; of those whose answers are not seen only what is
        kept here.
        """
        if self._over:
            return
        self.refusal = reason
        self._end(FinishReason.SHUTDOWN, None)
        self._refuse(status, shape_in(self.asked.dialect).body(status, message, reason, None), reason)

    # -- estimates

    def estimated_first_token(self) -> None:
        """Its prefill should be over."""
        if not self._over:
            self._shell.tell(FirstToken(t=self._shell.now(), request=self.id, attempt=self.attempt))

    def estimated_end(self) -> None:
        """It should be over."""
        if not self._over:
            self._end(FinishReason.STOP, None)

    # -- inside

    def _destination(self, instruction: Dispatch, *, alone: bool) -> str:
        """The address of the pick, and where else it may go, the next best first."""
        first = address_of(instruction.endpoint)
        most = 0 if alone else self._picker.fallbacks
        decision = self._shell.decision(instruction.decision) if most else None
        if decision is None or len(decision.candidates) == 1:
            return first
        order = sorted(zip(decision.scores, decision.candidates, strict=True), key=lambda pair: pair[0])
        addresses = dict.fromkeys((first, *(address_of(candidate.endpoint) for _, candidate in order)))
        return ",".join(list(addresses)[: most + 1])

    def _moved(self, served: str) -> None:
        """Somebody else than the pick answers."""
        self._shell.attempt_failed(self.endpoint, FinishReason.REFUSED, f"{served} answers in its place")
        before = self.attempt
        endpoint = next((name for name in self._shell.targets if address_of(name) == served), served)
        t = self._shell.now()
        self._shell.tell(Moved(t=t, request=self.id, attempt=before, endpoint=endpoint))
        if self.attempt == before:  # the router does not know who that is
            self._close(FinishReason.REFUSED, None)
        elif not self._seen:
            self._picker.estimates.moved(self)
        else:
            t = self._shell.now()
            self._shell.tell(Dispatched(t=t, request=self.id, attempt=self.attempt, endpoint=endpoint))

    def _leg_over(self, told: bytes) -> None:
        """A sidecar says what became of the prefill half. If it failed, what follows has happened already:
        a whole run where the answer comes from.
        """
        t, before, endpoint = self._shell.now(), self.attempt, self.endpoint
        event = legs.read(told, t=t, request=self.id, attempt=before)
        if event is None:
            return
        outcome = "ok" if event.failed is None else event.failed.value
        self._shell.leg_over("sidecar", outcome)
        if event.failed is not None:
            self._shell.attempt_failed(self.prefill, event.failed, "a sidecar says so of a prefill half")
        self._shell.tell(event)
        if self.attempt != before and self.endpoint != endpoint:
            self._moved(address_of(endpoint))

    def _usage(self) -> Usage:
        """Token counts by the engine, or else an estimate of the answer's."""
        if self._events is not None:
            return self._events.usage() or self._events.estimate()
        usage = self._json.usage() if self._json is not None else None
        return usage or Usage(None, None, None, exact=False)

    def _end(self, reason: FinishReason, usage: Usage | None) -> None:
        self._tell_finished(reason, usage, answered=self._stream.sent)
        self._close(reason, usage)

    def _close(self, reason: FinishReason, usage: Usage | None) -> None:
        if not self._seen:
            self._picker.estimates.over(self.id)
        super()._close(reason, usage)

    def _refuse(self, status: int, body: bytes, reason: str) -> None:
        self._stream.refuse(status, error_headers(reason), body)
        self._wake()


def address_of(endpoint: str) -> str:
    """`ip:port` of `http://ip:port#rank`."""
    return endpoint.removeprefix("http://").partition("#")[0]


def error_headers(reason: str) -> Headers:
    """Of an error answer; `reason`: why the request was dropped, empty: it was not."""
    headers = [("content-type", b"application/json")]
    return [*headers, (DROPPED, reason.encode())] if reason else headers


def not_forwarded(*, keep_credentials: bool, reads_answers: bool) -> tuple[str, ...]:
    """Header names of requests that engines do not get."""
    credentials = () if keep_credentials else tuple(name.decode() for name in sorted(CREDENTIALS))
    return (*_OURS, *credentials, *((_ENCODING,) if reads_answers else ()))


def renamed(body: bytes, model: str) -> bytes:
    """The same JSON object with another `model`. Raises msgspec.MsgspecError if it is none."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)

"""One request for generated text, from its parsed prompt to its last byte: the shell's side of its life.

It tells the router what happens (arrival, dispatch, first token, end) and does what the router says
(dispatch, refuse). Bytes flow past it: it is the sink of the engine's answer, `reply` its way to the client.

Nothing of an answer is sent before the first piece of its body is there, so that an engine that dies before
costs a retry and not the request.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from sumibi.engines.connectors import PrefillAnswer
from sumibi.gateway import pairs
from sumibi.gateway.headers import ATTEMPT_HEADER, forwarded
from sumibi.gateway.http1 import Connection, Header, Request
from sumibi.gateway.inflight import InFlight, Teller
from sumibi.gateway.metrics import ModelCounters
from sumibi.gateway.pairs import Failure, Pair
from sumibi.gateway.readings import Usage
from sumibi.gateway.reply import Reply
from sumibi.gateway.rewriting import Cached
from sumibi.gateway.terms import Terms
from sumibi.gateway.upstream import Call, Sink
from sumibi.prompts.dialects import PromptRequest
from sumibi.routing.events import (
    Dispatch,
    Dispatched,
    FinishReason,
    FirstToken,
    Prefilled,
)


class Shell(Teller, Protocol):
    """What a completion needs around it; one implementation, `shell.Shell`."""

    def send(self, endpoint: str, path: bytes, head: bytes, body: bytes, sink: Sink) -> Call | None:
        """POST to an endpoint; None (and a failure soon) if there is no such endpoint any more."""

    def pair(self, owner: pairs.Owner, prefill: str, decode: str, api: str, body: bytes) -> Pair | None:
        """A pair of two endpoints; None if they have no connector in common."""

    def leg_over(self, connector: str, outcome: str) -> None:
        """Count a prefill half."""

    def later(self, wait: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `wait` when a decode half is overdue with its first byte."""

    def attempt_failed(self, endpoint: str, reason: FinishReason, detail: str) -> None:
        """Count a failure of an endpoint, and look after it if its process may be gone."""

    def explanation(self, decision: str) -> bytes:
        """A decision for its header: JSON of at most 2 KB."""


class Completion(InFlight):
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
        keep_credentials: bool,
        explain: bool,
    ) -> None:
        super().__init__(shell, asked, request_id=request_id, tenant=tenant, terms=terms, counters=counters)
        self._shell = shell
        self._connection = connection
        self._reply = Reply(connection, request_id, asked.dialect, one_zero=request.version == "1.0")
        self._target = request.target if request.target.startswith(b"/") else request.path.encode("latin-1")
        self._body = request.body
        self._forward = forwarded(request, request_id, keep_credentials=keep_credentials)
        self._explain = explain
        self._call: Call | None = None
        self._pair: Pair | None = None
        self._kept: Pair | None = None  # its parameters have not reached any decode engine
        self._cached: Cached | None = None  # of a pair, by its prefill half
        self._overdue: asyncio.TimerHandle | None = None

    def fail(self, status: int, body: bytes) -> None:
        """The request cannot be placed, by its fault or by ours: answer with an error."""
        if not self._over:
            self._stop_call()
            self._ended(FinishReason.REJECTED, None)
            self._close(FinishReason.REJECTED, None)
            self._reply.whole(status, body)

    def note(self, name: bytes, value: bytes) -> None:
        """A header for its answer."""
        self._reply.note(name, value)

    # -- what the router says

    def dispatch(self, instruction: Dispatch) -> None:
        """Send the request to the endpoint chosen."""
        self._chosen(instruction)
        self._reply.anew()
        self._cached = None
        self._drop_pair()
        if instruction.prefill is None:
            self._send(self._body)
        else:
            self._begin_pair(instruction.prefill, instruction.endpoint)

    # -- pairs.Owner

    def send_prefill(self, endpoint: str, body: bytes, sink: Sink) -> Call | None:
        """The prefill half leaves."""
        shell = self._shell
        call = shell.send(endpoint, self._target, self._head_for(body), body, sink)
        shell.tell(Dispatched(t=shell.now(), request=self.id, attempt=self.attempt, endpoint=endpoint))
        return call

    def prefill_over(self, pair: Pair, answer: PrefillAnswer) -> None:
        """The KV is ready (to be fetched, or fetched already)."""
        shell = self._shell
        shell.leg_over(pair.connector.name, pairs.OK)
        self._prefilled(pair, answer)

    def prefill_failed(self, pair: Pair, failure: Failure) -> None:
        """The prompt was not computed there: end the other half, let the router say what follows."""
        shell, reason = self._shell, failure.reason
        shell.leg_over(pair.connector.name, failure.outcome)
        shell.attempt_failed(pair.prefill, reason, failure.detail)
        if self._over or self._pair is not pair:
            return
        if self._reply.answered:  # the decode engine has all it needs
            return
        self._leg_failed(failure)

    # -- a pair's steps

    def _begin_pair(self, prefill: str, decode: str) -> None:
        """Send the prefill half, and the decode half too if they leave together."""
        shell = self._shell
        kept, self._kept = self._kept, None
        asked = self.asked
        pair = shell.pair(self, prefill, decode, asked.dialect.value, self._body)
        if pair is None:
            shell.leg_over("none", pairs.NO_CONNECTOR)
            detail = "the two endpoints have no connector in common"
            self._leg_failed(Failure(FinishReason.ENGINE_ERROR, pairs.NO_CONNECTOR, detail))
            return
        self._pair = pair
        if pair.unfit(answers=asked.n, prompts=asked.prompts):
            shell.leg_over(pair.connector.name, pairs.UNFIT)
            detail = "the request is several, or wants what a fetched prompt cannot give"
            self._leg_failed(Failure(FinishReason.ENGINE_ERROR, pairs.UNFIT, detail))
            return
        if kept is not None and kept.prefill == prefill and kept.answer is not None:
            shell.leg_over(pair.connector.name, pairs.KEPT)
            pair.answer = kept.answer
            t = shell.now()
            shell.tell(Dispatched(t=t, request=self.id, attempt=self.attempt, endpoint=prefill))
            self._prefilled(pair, kept.answer)
            return
        pair.begin()
        if pair.concurrent and self._pair is pair:
            self._send(pair.decode_body())

    def _prefilled(self, pair: Pair, answer: PrefillAnswer) -> None:
        """The leg is over; of a serial pair the decode half leaves now."""
        if self._over or self._pair is not pair:
            return
        cached_tokens = answer.cached_tokens
        if cached_tokens is None and pair.connector.takes is not None:
            cached_tokens = 0  # else the client would be told that all of it was, by the decode engine
        self._cached = None if cached_tokens is None else Cached(cached_tokens, answer.cached_by_tier)
        self._reply.tell_cached(self._cached)
        shell = self._shell
        if not self._reply.answered:
            shell.tell(
                Prefilled(
                    t=shell.now(),
                    request=self.id,
                    attempt=self.attempt,
                    prompt_tokens=answer.prompt_tokens,
                    cached_tokens=cached_tokens,
                )
            )
        if self._over or self._pair is not pair:
            return
        if not pair.concurrent:
            self._send(pair.decode_body())
        if self.asked.stream and not self._reply.answered:
            self._overdue = shell.later(self._decode_overdue)

    def _decode_overdue(self) -> None:
        """The decode engine has waited for KV, or for its turn, for longer than anybody should."""
        self._overdue = None
        call = self._call
        if call is not None and not self._over and not self._reply.answered:
            self._call = None
            call.cancel()
            self.answer_failed(FinishReason.TIMEOUT, "no first token of a fetched prompt in time")

    def _leg_failed(self, failure: Failure) -> None:
        shell, before = self._shell, self.attempt
        self._stop_call()
        self._drop_pair()
        shell.tell(Prefilled(t=shell.now(), request=self.id, attempt=before, failed=failure.reason))
        if self.attempt != before or self._over:
            return
        self._close(failure.reason, None)
        if failure.status:
            self._reply.pass_on(failure.status, failure.headers, failure.body)
        else:
            self._reply.failure(failure.reason)

    def _drop_pair(self) -> None:
        """Nothing more is wanted of its prefill half, whatever that is at."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.cancel()
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _send(self, body: bytes) -> None:
        """The request, or the decode half of a pair, leaves for `endpoint`."""
        shell, endpoint = self._shell, self.endpoint
        self._call = shell.send(endpoint, self._target, self._head_for(body), body, self)
        shell.tell(Dispatched(t=shell.now(), request=self.id, attempt=self.attempt, endpoint=endpoint))

    def _head_for(self, body: bytes) -> bytes:
        again = b"%b: %d\r\n" % (ATTEMPT_HEADER, self.attempt) if self.attempt > 1 else b""
        return self._forward + again + b"content-length: %d\r\n" % len(body)

    # -- what else the router says

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Answer with an error: no endpoint will take the request."""
        self.refusal = reason
        self._left_queue(reason)
        self._close(FinishReason.REFUSED, None)
        self._reply.refusal(status, reason, message)

    # -- upstream.Sink

    def answer_head(self, status: int, headers: list[Header]) -> None:
        """The engine's status decides what becomes of the attempt."""
        self._reply.head(status, headers)
        if 200 <= status < 300:
            self._reply.read(self._cached)
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
        reply, waits = self._reply, self._pair is not None and not self._reply.answered
        events = reply.events
        if events is not None:
            block = events.feed(pieces)
            if last:
                block += events.rest()
            if not block:
                return
            if waits and events.failed():
                self._decode_refused()
                return
            pieces = [block]
        elif reply.json is not None:
            if waits:
                # Without streaming a pair's answer is held until its usage can be set right.
                held = reply.hold(pieces, last=last)
                if held is None:
                    return
                pieces = held
            else:
                reply.json.feed(pieces)
        self._write(pieces, last=last)

    def _decode_refused(self) -> None:
        """The decode engine's first word is that it cannot go on: nothing was sent to the client yet."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self.answer_failed(FinishReason.ENGINE_ERROR, "it began a stream with an error")

    def answer_end(self) -> None:
        """The engine's answer is whole."""
        self._call = None
        if not self._reply.ended:
            self._write([], last=True)
        if not self._over:
            usage, reason = self._usage(), FinishReason.STOP
            if self._reply.events is not None and self._reply.events.failed():
                reason = FinishReason.ENGINE_ERROR
                self._shell.attempt_failed(self.endpoint, reason, "it ended a stream with an error")
            else:
                self.finish = self._reply.finish()
            self._ended(reason, usage)
            self._close(reason, usage)
        self._connection.finished()

    def answer_failed(self, reason: FinishReason, detail: str) -> None:
        """The attempt brought no whole answer: try elsewhere, or say so in the way that is still open."""
        self._call = None
        pair = self._pair
        if reason is FinishReason.REFUSED and pair is not None and pair.answer and not pair.concurrent:
            self._kept = pair
        self._shell.attempt_failed(self.endpoint, reason, detail)
        if self._over:  # while an engine's error answer was being passed on
            if self._reply.answered:
                self._connection.abort()
            else:
                self._reply.failure(reason)
        elif self._reply.answered:
            self._ended(reason, None)
            self._reply.cut(reason)
            self._close(reason, None)
        elif not self._tried_again(reason):
            self._close(reason, None)
            self._reply.failure(reason)

    # -- http1.Exchange

    def client_gone(self) -> None:
        """Stop the engine's work at once."""
        self._leave()
        if not self._over:
            self._ended(FinishReason.CLIENT_GONE, None)
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
        self._leave()
        if self._over:
            self._connection.abort()
            return
        reason = FinishReason.SHUTDOWN
        self._ended(reason, None)
        if self._reply.answered:
            self._reply.cut(reason)
        else:
            self._reply.failure(reason)
        self._close(reason, None)

    # -- inside

    def _write(self, pieces: list[bytes], *, last: bool = False) -> None:
        """Send pieces of the answer; the router hears of the first."""
        reply = self._reply
        if reply.answered:
            reply.write(pieces, last=last)
            return
        explained = self._shell.explanation(self.decision) if self._explain and self.decision else None
        reply.write(pieces, last=last, explained=explained)
        if not self._over:
            self.first_token_t = self._shell.now()
            self._shell.tell(FirstToken(t=self.first_token_t, request=self.id, attempt=self.attempt))

    def _tried_again(self, reason: FinishReason) -> bool:
        """Report the end of an unanswered attempt; True if the router took care of what follows."""
        before = self.attempt
        self._count_lost(reason)
        self._drop_pair()
        self._ended(reason, None)
        return self.attempt != before or self._over

    def _count_lost(self, reason: FinishReason) -> None:
        """A pair's decode half failed, for `reason`: its prefill half was for nothing, unless its answer can
        go to another decode engine. One that did all it could for a bad request is not counted again.
        """
        pair = self._pair
        if pair is None:
            return
        if reason is FinishReason.REJECTED:
            if pair.answer is None:
                self._shell.leg_over(pair.connector.name, reason.value)
        elif reason is not FinishReason.REFUSED or pair is not self._kept:
            self._shell.leg_over(pair.connector.name, pairs.DECODE_FAILED)

    def _ended(self, reason: FinishReason, usage: Usage | None) -> None:
        """Tell the router that the attempt is over."""
        self._tell_finished(reason, usage, answered=self._reply.answered)

    def _close(self, reason: FinishReason, usage: Usage | None) -> None:
        self._over = True
        self._drop_pair()
        self._kept = None
        super()._close(reason, usage)

    def _stop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _leave(self) -> None:
        """Nobody waits any more. A prefill engine keeps what it computed until a decode engine has heard of
        it: so one that has not answered yet gets to read its half before it is told to stop.
        """
        call, pair = self._call, self._pair
        if call is not None and pair is not None and pair.answer is not None and not self._reply.status:
            self._call = None
            call.deliver()
        self._stop_call()
        self._drop_pair()

    def _usage(self) -> Usage:
        """Token counts of the whole answer: the engine's, else counted here."""
        usage = self._reply.usage()
        cached = self._cached
        if cached is not None:  # the answer may have passed before this was known
            by_tier = usage.cached_by_tier if cached.by_tier is None else cached.by_tier
            usage = msgspec.structs.replace(usage, cached_tokens=cached.tokens, cached_by_tier=by_tier)
        return usage

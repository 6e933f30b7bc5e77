"""The shell around the router: events in from every side, instructions carried out, one clock for both.

The router decides and never acts; this acts and never decides. It holds what the router's names stand for:
requests in flight, endpoints' connections, the timer for the next tick.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import Callable

import msgspec

from sumibi.gateway.inflight import InFlight
from sumibi.gateway.metrics import Metrics
from sumibi.gateway.options import Timeouts
from sumibi.gateway.pairs import Owner, Pair
from sumibi.gateway.readings import Usage
from sumibi.gateway.record import Recorder
from sumibi.gateway.transfers import Transfer
from sumibi.gateway.upstream import Call, Sink, Upstream
from sumibi.routing.decisions import Decision, explain
from sumibi.routing.events import (
    AskReplay,
    Dispatch,
    Event,
    Finished,
    FinishReason,
    Grade,
    GradeChanged,
    Instruction,
    Prefetch,
    Refuse,
    Tick,
    WakeAt,
)
from sumibi.routing.router import Router

_GRADES_TOLD = 6
"""Changes of an endpoint's grade that are logged within `_GRADES_S`."""
_GRADES_S = 60.0

log = logging.getLogger(__name__)


class UsageRecord(msgspec.Struct):
    """One line of the usage log: who used how much of what, and how it ended. Never any text."""

    t: float
    """Wall-clock seconds at the end."""
    request: str
    tenant: str
    model: str
    endpoint: str
    reason: str
    """In the engine's word why its answer ended (`stop`, `length`, ...; `stop` if it gave none), or why there
    was no whole answer."""
    prompt_tokens: int
    cached_tokens: int | None
    cached_by_tier: dict[str, int] | None
    """Where these were (device, host, disk, store, ...), if the engine told, of a pair the prefill engine;
    null: it did not, which is so of prompts that were on the device only. Of a pair whose prefill engine did
    not, the decode engine's word: `p2p` is what came over."""
    output_tokens: int | None
    exact: bool
    """True if the engine gave the counts; False if they are the gateway's."""
    attempts: int
    ttft_s: float | None
    duration_s: float
    prefill: str = ""
    """The endpoint that computed the prompt, if `endpoint` only generated."""


class Target:
    """An endpoint as a place to send requests."""

    __slots__ = ("line_end", "rank", "transfer", "upstream")

    def __init__(
        self,
        upstream: Upstream,
        host_header: bytes,
        rank: int | None,
        transfer: Transfer | None = None,
    ) -> None:
        self.upstream = upstream
        self.rank = rank
        """Of an engine with several, which share its address; None: it has one."""
        self.transfer = transfer
        """How KV gets there and from there; None: not at all."""
        self.line_end = b" HTTP/1.1\r\nhost: " + host_header + b"\r\n"
        if rank is not None:
            self.line_end += b"x-data-parallel-rank: %d\r\n" % rank


class Shell:
    """See the module."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        *,
        record_usage: Callable[[UsageRecord], None],
        recorder: Recorder | None,
        wall_clock: Callable[[], float],
    ) -> None:
        self.metrics = metrics
        self.completions: dict[str, InFlight] = {}
        """Requests in flight, by id."""
        self.targets: dict[str, Target] = {}
        """Endpoint -> where to send."""
        self.decode_wait_s = Timeouts().decode_wait_s
        self.ask_replay: Callable[[str, int], None] = lambda endpoint, from_seq: None
        self.look_at: Callable[[str], None] = lambda endpoint: None
        self.hint: Callable[[str, str], None] = lambda endpoint, request: None
        """All three are set by whoever supervises engines."""
        self._router = router
        self._loop = asyncio.get_running_loop()
        self.now = time.monotonic  # the loop has a clock of its own, in whole milliseconds on uvloop
        self._record_usage = record_usage
        self._recorder = recorder
        self._wall_clock = wall_clock
        self._grades_told: dict[str, tuple[float, int]] = {}  # endpoint -> since when, how often
        self._timer: asyncio.TimerHandle | None = None
        self._wakes: list[float] = []  # heap of the times at which the router wants a tick

    def add(self, completion: InFlight) -> None:
        """A request is in flight from now on."""
        self.completions[completion.id] = completion
        counters = completion.counters
        counters.requests += 1
        counters.in_flight += 1

    def tell(self, event: Event) -> None:
        """Hand an event to the router and carry out what it answers."""
        instructions = self._router.handle(event)
        if self._recorder is not None:
            self._record(self._recorder, event, instructions)
        for instruction in instructions:
            self._carry_out(instruction)

    def attempt_failed(self, endpoint: str, reason: FinishReason, detail: str) -> None:
        """Count a failure of an endpoint (the first of its kind is logged), and have it looked after."""
        failures = self.metrics.endpoint(endpoint).failures
        failures[reason.value] = failures.get(reason.value, 0) + 1
        if failures[reason.value] == 1:
            log.warning(
                "%s: a request failed (%s): %s; more of these are counted only", endpoint, reason, detail
            )
        if reason in (FinishReason.REFUSED, FinishReason.ENGINE_GONE):
            self.look_at(endpoint)

    def explanation(self, decision: str) -> bytes:
        """A decision for its header: JSON of at most 2 KB."""
        record = self._router.decision(decision)
        return explain(record) if record is not None else b"{}"

    def decision(self, decision: str) -> Decision | None:
        """A recent decision by its id."""
        return self._router.decision(decision)

    def expected_s(self, request: str) -> tuple[float, float]:
        """What the router expects of a request under way: seconds from its dispatch to its first token, and
        from there to its end; zero if it knows of no such request.
        """
        return self._router.expected_s(request)

    def send(self, endpoint: str, path: bytes, head: bytes, body: bytes, sink: Sink) -> Call | None:
        """POST to an endpoint; None (and a failure soon) if there is no such endpoint any more.

        `head` is the request's header lines without `Host`, and ends before the blank line.
        """
        target = self.targets.get(endpoint)
        if target is None:
            self._loop.call_soon(sink.answer_failed, FinishReason.REFUSED, "the endpoint is gone")
            return None
        whole = b"".join((b"POST ", path, target.line_end, head, b"\r\n"))
        return target.upstream.call(whole, body, sink)

    def pair(self, owner: Owner, prefill: str, decode: str, api: str, body: bytes) -> Pair | None:
        """A pair of two endpoints; None if they have no connector in common."""
        first, second = self.targets.get(prefill), self.targets.get(decode)
        link = first.transfer if first is not None else None
        if link is None or second is None or second.transfer is None:
            return None
        if link.connector is not second.transfer.connector:
            return None
        return Pair(owner, link.connector, prefill, api, body, link.values())

    def idlest(self, model: str) -> str | None:
        """The endpoint of a model with the least to do, None if none is up. For what the router need not
        know of: it looks at every endpoint.
        """
        fleet = self._router.fleet_view()
        serving = [one for one in fleet if one.up and one.reachable and model in one.models]
        idlest = min(serving, key=lambda one: (one.inflight, one.waiting or 0), default=None)
        return idlest.endpoint if idlest is not None else None

    def leg_over(self, connector: str, outcome: str) -> None:
        """Count a prefill half."""
        legs = self.metrics.legs
        legs[connector, outcome] = legs.get((connector, outcome), 0) + 1

    def later(self, wait: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `wait` when a decode half is overdue with its first byte."""
        return self._loop.call_later(self.decode_wait_s, wait)

    def over(self, request: InFlight, reason: FinishReason, usage: Usage | None) -> None:
        """The request is over: count it, write its usage record, forget it."""
        del self.completions[request.id]
        now = self.now()
        counters = request.counters
        counters.in_flight -= 1
        counters.duration_s.observe(now - request.arrived_t)
        outcome = request.refusal or reason.value
        prompt_tokens = request.prompt_tokens
        if reason is FinishReason.STOP:
            counters.prompt_tokens.observe(prompt_tokens)
        else:
            counters.error(outcome)
        ttft_s = None
        if request.first_token_t is not None:
            ttft_s = request.first_token_t - request.arrived_t
            counters.ttft_s.observe(ttft_s)
        cached = output = None
        if usage is not None:
            cached, output = usage.cached_tokens, usage.output_tokens
            if usage.prompt_tokens is not None:
                prompt_tokens = usage.prompt_tokens
            if cached is not None:
                counters.cached_tokens.observe(cached)
                if request.attempt == 1:  # later ones are told less, see `ATTEMPT_HEADER`
                    self._compare(request, cached)
            if output is not None:
                counters.output_tokens.observe(output)
            counters.estimated_usage += not usage.exact
            if output and output > 1 and request.asked.stream and request.first_token_t is not None:
                counters.per_token_s.observe((now - request.first_token_t) / (output - 1))
        self._record_usage(
            UsageRecord(
                t=self._wall_clock(),
                request=request.id,
                tenant=request.tenant,
                model=request.asked.model,
                endpoint=request.endpoint,
                reason=request.finish or outcome,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached,
                cached_by_tier=None if usage is None else usage.cached_by_tier,
                output_tokens=output,
                exact=usage is not None and usage.exact,
                attempts=request.attempt,
                ttft_s=ttft_s,
                duration_s=now - request.arrived_t,
                prefill=request.prefill,
            )
        )

    def _compare(self, request: InFlight, cached_tokens: int) -> None:
        """Predicted cached tokens beside the engine's."""
        decision = self._router.decision(request.decision)
        if decision is not None:
            predicted = decision.picked.reused_tokens
            if decision.picked.grade is not Grade.EXACT:
                # More than we know of is to be expected: from before our start, or by other clients.
                cached_tokens = min(cached_tokens, predicted)
            alarm = request.counters.agreement.observe(predicted, cached_tokens)
            if alarm:
                log.error("%s: %s", request.asked.model, alarm)

    def close(self) -> None:
        """Send no more ticks."""
        if self._timer is not None:
            self._timer.cancel()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Dispatch():
                completion = self.completions.get(instruction.request)
                if completion is not None:
                    completion.dispatch(instruction)
            case Refuse():
                completion = self.completions.get(instruction.request)
                if completion is not None:
                    completion.refuse(instruction.status, instruction.reason, instruction.message)
            case WakeAt():
                self._wake_at(instruction.at)
            case AskReplay():
                self.ask_replay(instruction.endpoint, instruction.from_seq)
            case Prefetch():
                self.hint(instruction.endpoint, instruction.request)
            case GradeChanged():
                self.metrics.endpoint(instruction.endpoint).grade = instruction.grade.value
                self._tell_grade(instruction)

    def _tell_grade(self, changed: GradeChanged) -> None:
        """Log it, but not every time for an engine that breaks connections all the time."""
        endpoint, now = changed.endpoint, self.now()
        since_t, told = self._grades_told.get(endpoint, (now, 0))
        if now - since_t >= _GRADES_S:
            since_t, told = now, 0
        self._grades_told[endpoint] = since_t, told + 1
        if told < _GRADES_TOLD:
            log.info("%s: cache knowledge is %s (%s)", endpoint, changed.grade, changed.cause)
        elif told == _GRADES_TOLD:
            log.warning(
                "%s: cache knowledge changes all the time (now: %s, %s); for %g s no more is told of it",
                *(endpoint, changed.grade, changed.cause, _GRADES_S - (now - since_t)),
            )

    def _record(self, recorder: Recorder, event: Event, instructions: list[Instruction]) -> None:
        """Decisions made and outcomes learnt; events come to the recorder from the router itself."""
        for instruction in instructions:
            if isinstance(instruction, Dispatch):
                decision = self._router.decision(instruction.decision)
                if decision is not None:
                    recorder.decision(decision)
        if isinstance(event, Finished):
            for outcome in self._router.outcomes(1):
                if (outcome.request, outcome.attempt) == (event.request, event.attempt):
                    recorder.outcome(outcome)

    def _wake_at(self, at: float) -> None:
        if at not in self._wakes:
            heapq.heappush(self._wakes, at)
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._wakes:
            self._timer = self._loop.call_later(max(0.0, self._wakes[0] - self.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now, due = self.now(), False
        while self._wakes and self._wakes[0] <= now:
            heapq.heappop(self._wakes)
            due = True
        self._set_timer()
        if due:  # the loop's timer may be early by its resolution
            self.tell(Tick(t=now))

r"""The brain: one state machine, typed events in, typed instructions out.

`Router.handle(event)` is the only mutator. It knows requests, endpoints and what both have told; it must not
know sockets, clocks, tasks or files. Time comes with the events, chance from a hash of the request's id.
So the HTTP gateway, an Envoy endpoint picker and the simulator drive the same object, and a recorded log of
events fed to a fresh one yields the same decisions, bit for bit.

Choosing and reserving are one step: the next request, even within the same instant, sees the load of this
one. A request is in one of three states, and leaves the router from any of them:

    ARRIVED --Admitted--> RUNNING (an endpoint is chosen and reserved) --Finished--> over
                     \--> WAITING (no endpoint of its model is up) --EndpointUp--> RUNNING, or refused

Events about what is over (a late first token, a second finish, an endpoint that was removed) are counted
and otherwise ignored: a shell cannot avoid them. Time that goes backwards is a bug of the shell and raises.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum

import msgspec

from sumibi.core.errors import SumibiError
from sumibi.routing.config import RouterConfig
from sumibi.routing.cost import price
from sumibi.routing.decisions import Candidate, Decision, Outcome
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatch,
    Dispatched,
    EndpointDown,
    EndpointSuspect,
    EndpointUp,
    EngineBatch,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Grade,
    GradeChanged,
    Instruction,
    Refuse,
    ReplayEnded,
    Residency,
    Signals,
    Tick,
    WakeAt,
)
from sumibi.routing.fleet import BUSY_PERIOD_PREFILLS, TYPICAL_RATE, Endpoint, Fleet
from sumibi.routing.index import BlockIndex
from sumibi.routing.ledger import Ledger, Load, Owner, Reservation
from sumibi.routing.policies import policy_named
from sumibi.routing.views import Counters, EndpointView


class _State(Enum):
    ARRIVED = "arrived"
    WAITING = "waiting"
    RUNNING = "running"


class _Request:
    """One request from its arrival to its end; the last attempt's facts are overwritten by the next."""

    __slots__ = (
        "attempt",
        "candidate",
        "deadline_t",
        "decision",
        "dispatched_t",
        "endpoint",
        "event",
        "first_token_t",
        "life",
        "owner",
        "settled_by_t",
        "state",
    )

    def __init__(self, event: Arrived, owner: Owner) -> None:
        self.event = event
        self.owner = owner
        self.state = _State.ARRIVED
        self.attempt = 0
        self.deadline_t = 0.0
        self.decision = ""
        self.endpoint: Endpoint | None = None
        self.life: Load | None = None
        self.candidate: Candidate | None = None
        self.dispatched_t: float | None = None
        self.first_token_t: float | None = None
        self.settled_by_t: float | None = None


class Router:
    """Places requests on endpoints. `observer` gets every event in its recordable form (no text, no ids)."""

    def __init__(
        self, config: RouterConfig | None = None, *, observer: Callable[[Event], None] | None = None
    ) -> None:
        self.config = config or RouterConfig()
        self._policy = policy_named(self.config.policy)
        self._observer = observer
        self._index = BlockIndex(self.config.max_index_blocks)
        self._fleet = Fleet(self.config, self._index)
        self._ledger = Ledger()
        self._requests: dict[str, _Request] = {}
        self._waiting: OrderedDict[str, _Request] = OrderedDict()
        self._computing: dict[Owner, _Request] = {}
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._outcomes: deque[Outcome] = deque(maxlen=self.config.decisions_kept)
        self._count = Counters()
        self._out: list[Instruction] = []
        self._t = float("-inf")
        self._handlers: dict[type[Event], Callable[..., None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Dispatched: self._dispatched,
            FirstToken: self._first_token,
            Finished: self._finished,
            EndpointUp: self._endpoint_up,
            EndpointSuspect: self._endpoint_suspect,
            EndpointDown: self._endpoint_down,
            EngineBatch: self._engine_batch,
            Residency: self._residency,
            ReplayEnded: self._replay_ended,
            Signals: self._signals,
            Tick: self._tick,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; what the shell must do now, in order. Raises SumibiError if time went backwards."""
        if event.t < self._t:
            raise SumibiError(f"time went backwards: {event.t} after {self._t} ({type(event).__name__})")
        self._t = event.t
        if self._observer is not None:
            self._observer(event)
        self._out = []
        self._handlers[type(event)](event)
        return self._out

    # --- requests ---

    def _arrived(self, event: Arrived) -> None:
        if event.request in self._requests:
            self._count.stale_events += 1
        elif len(self._requests) >= self.config.max_requests:
            self._refuse(event.request, 429, "rejected-saturated", "too many requests are in flight")
        else:
            owner = Owner(self.config.gateway, self.config.gateway_epoch, event.request)
            self._requests[event.request] = _Request(event, owner)

    def _admitted(self, event: Admitted) -> None:
        request = self._requests.get(event.request)
        if request is None or request.state is not _State.ARRIVED:
            self._count.stale_events += 1
            return
        if self._place(request):
            return
        if len(self._waiting) >= self.config.max_waiting:
            self._refuse(event.request, 429, "rejected-saturated", "too many requests wait for an endpoint")
            return
        request.state = _State.WAITING
        request.deadline_t = self._t + self.config.wait_for_endpoint_s
        self._waiting[event.request] = request
        self._out.append(WakeAt(at=request.deadline_t))

    def _dispatched(self, event: Dispatched) -> None:
        request = self._running(event.request, event.attempt)
        if request is None or request.dispatched_t is not None:
            self._count.stale_events += 1
            return
        request.dispatched_t = self._t
        endpoint = request.endpoint
        assert endpoint is not None
        if request.life is endpoint.load and endpoint.busy.since_t is None:
            endpoint.busy.reset(self._t)

    def _first_token(self, event: FirstToken) -> None:
        request = self._running(event.request, event.attempt)
        if request is None or request.first_token_t is not None:
            self._count.stale_events += 1
            return
        endpoint = request.endpoint
        assert endpoint is not None
        request.first_token_t = self._t
        endpoint.unreachable_t = None
        self._end_prefill(request, endpoint)

    def _finished(self, event: Finished) -> None:
        request = self._requests.get(event.request)
        if request is None or (request.state is _State.RUNNING and request.attempt != event.attempt):
            self._count.stale_events += 1
            return
        reason = event.reason
        self._count.finished[reason] = self._count.finished.get(reason, 0) + 1
        if request.state is not _State.RUNNING:
            self._waiting.pop(event.request, None)
            del self._requests[event.request]
            return
        endpoint = request.endpoint
        assert endpoint is not None
        self._close_attempt(request, endpoint, event)
        if reason in (FinishReason.REFUSED, FinishReason.ENGINE_GONE) and self._is_current(endpoint):
            endpoint.unreachable_t = self._t
            self._suspect(endpoint, f"connection {reason.replace('_', ' ')}")
        retry = reason.retriable and not event.answered and request.attempt < self.config.max_attempts
        if retry and self._place(request, excluded=endpoint.name):
            self._count.retries += 1
        else:
            del self._requests[event.request]

    def _running(self, name: str, attempt: int) -> _Request | None:
        request = self._requests.get(name)
        if request is None or request.state is not _State.RUNNING or request.attempt != attempt:
            return None
        return request

    def _refuse(self, request: str, status: int, reason: str, message: str) -> None:
        self._requests.pop(request, None)
        self._waiting.pop(request, None)
        self._count.refused[reason] = self._count.refused.get(reason, 0) + 1
        self._out.append(Refuse(request=request, status=status, reason=reason, message=message))

    # --- placing ---

    def _place(self, request: _Request, excluded: str | None = None) -> bool:
        """Choose and reserve. False if no endpoint may take it."""
        event = request.event
        endpoints = self._fleet.candidates(event.model, excluded)
        if not endpoints:
            return False
        model = self._fleet.models[event.model]
        candidates = self._price(event, endpoints, model.output_tokens)
        number = model.decisions
        model.decisions += 1
        self._count.decisions += 1
        pick = self._policy(event.request, number, candidates)
        endpoint, candidate = endpoints[pick], candidates[pick]
        self._reserve(request, endpoint, candidate)
        decision = Decision(
            id=f"{self.config.gateway}-{self.config.gateway_epoch}-{self._count.decisions}",
            t=self._t,
            request=event.request,
            attempt=request.attempt,
            model=event.model,
            tenant=event.tenant,
            policy=self.config.policy,
            number=number,
            prompt_tokens=event.prompt_tokens,
            candidates=candidates,
            pick=pick,
        )
        self._decisions[decision.id] = decision
        if len(self._decisions) > self.config.decisions_kept:
            self._decisions.popitem(last=False)
        request.decision = decision.id
        self._out.append(
            Dispatch(
                request=event.request, attempt=request.attempt, endpoint=endpoint.name, decision=decision.id
            )
        )
        return True

    def _price(self, event: Arrived, endpoints: list[Endpoint], output_tokens: float) -> list[Candidate]:
        keys, t = event.keys, self._t
        block_tokens = self._fleet.block_tokens(event.model)
        # The engine computes at least the last token itself, so a hit never covers the whole prompt.
        length = min(len(keys), max(0, event.prompt_tokens - 1) // block_tokens)
        if event.max_tokens is not None:
            output_tokens = min(output_tokens, event.max_tokens)
        holders = 0
        for endpoint in endpoints:
            if endpoint.suspect is None:
                holders |= endpoint.holders
        levels = sorted(self._index.match(keys, length, holders), reverse=True)
        pending = self._pending(keys, length, endpoints, levels)
        candidates = []
        for endpoint in endpoints:
            matched = _blocks(levels, endpoint.holders) if endpoint.suspect is None else 0
            blocks, pending_s = pending.get(endpoint, (matched, 0.0))
            candidates.append(
                price(
                    endpoint,
                    t,
                    prompt_tokens=event.prompt_tokens,
                    matched_tokens=matched * block_tokens,
                    pending_tokens=(blocks - matched) * block_tokens,
                    pending_s=pending_s,
                    output_tokens=output_tokens,
                    block_tokens=block_tokens,
                )
            )
        return candidates

    def _pending(
        self, keys: Sequence[int], length: int, endpoints: list[Endpoint], levels: list[tuple[int, int]]
    ) -> dict[Endpoint, tuple[int, float]]:
        """What requests of ours are computing: endpoint -> (blocks from the root, seconds until then)."""
        found: dict[Endpoint, tuple[int, float]] = {}
        for owner, other in self._computing.items():
            endpoint = other.endpoint
            assert endpoint is not None
            if other.life is not endpoint.load or endpoint.suspect is not None or endpoint not in endpoints:
                continue
            theirs = other.event.keys
            have = found[endpoint][0] if endpoint in found else _blocks(levels, endpoint.holders)
            if have >= length or have >= len(theirs) or keys[have] != theirs[have]:
                continue
            blocks = _common(keys, theirs, have, min(length, len(theirs)))
            left_s = endpoint.prefill_left_s(self._t, owner) if owner in endpoint.load.prefills else 0.0
            found[endpoint] = (blocks, left_s)
        return found

    def _reserve(self, request: _Request, endpoint: Endpoint, candidate: Candidate) -> None:
        event = request.event
        reused = candidate.matched_tokens + candidate.pending_tokens
        new = event.prompt_tokens - reused
        start = endpoint.learner.start
        work_s = start.prefill_s(new, reused) - start.a_s
        reservation = Reservation(
            request.owner,
            uncached_tokens=new,
            kv_tokens=event.prompt_tokens,
            work_ns=round(work_s * 1e9),
            streamed=event.stream,
        )
        self._ledger.reserve(reservation, endpoint.load, endpoint.load, self._t)
        request.state = _State.RUNNING
        request.attempt += 1
        request.endpoint, request.life, request.candidate = endpoint, endpoint.load, candidate
        request.dispatched_t = request.first_token_t = request.settled_by_t = None
        self._computing[request.owner] = request
        endpoint.dispatched += 1

    # --- what attempts teach ---

    def _end_prefill(self, request: _Request, endpoint: Endpoint) -> None:
        load, owner = request.life, request.owner
        assert load is not None
        reservation = load.prefills.get(owner)
        assert reservation is not None
        learner = endpoint.learner
        work_s = reservation.work_ns * 1e-9
        served_s = learner.start.a_s * learner.fixed_factor + work_s * learner.work_factor
        self._ledger.end_prefill(owner, self._t, served_s)
        if load is not endpoint.load:
            return
        endpoint.typical_prefill_s += TYPICAL_RATE * (served_s - endpoint.typical_prefill_s)
        busy = endpoint.busy
        busy.prefills += 1
        busy.work_ns += reservation.work_ns
        busy.sound = busy.sound and request.event.stream and request.dispatched_t is not None
        if not load.prefills or busy.prefills >= BUSY_PERIOD_PREFILLS:
            if busy.sound and busy.since_t is not None:
                learner.observe_prefill(self._t - busy.since_t, busy.prefills, busy.work_ns * 1e-9)
            busy.reset(self._t if load.prefills else None)

    def _close_attempt(self, request: _Request, endpoint: Endpoint, event: Finished) -> None:
        load, candidate = request.life, request.candidate
        assert load is not None
        assert candidate is not None
        decodes = load.decodes
        computed = request.first_token_t is not None
        if request.owner in load.prefills and load is endpoint.load:
            endpoint.busy.sound = False
            computed = event.reason is FinishReason.STOP
        self._ledger.release(request.owner, self._t)
        self._computing.pop(request.owner, None)
        if load is endpoint.load:
            if not load.prefills:
                endpoint.busy.reset(None)
            if computed:
                self._recall(request, endpoint, event)
            self._learn_decode(request, endpoint, event, decodes)
        if event.cached_tokens is not None and computed:
            self._count.predicted_cached_tokens += candidate.matched_tokens
            self._count.actual_cached_tokens += event.cached_tokens
            self._count.reported_prompt_tokens += event.prompt_tokens or request.event.prompt_tokens
        ttft_s = None
        if request.event.stream and request.first_token_t is not None and request.dispatched_t is not None:
            ttft_s = request.first_token_t - request.dispatched_t
        self._outcomes.append(
            Outcome(
                decision=request.decision,
                t=self._t,
                request=request.event.request,
                attempt=request.attempt,
                model=request.event.model,
                endpoint=endpoint.name,
                reason=event.reason,
                prompt_tokens=request.event.prompt_tokens,
                predicted_cached_tokens=candidate.matched_tokens,
                cached_tokens=event.cached_tokens,
                predicted_ttft_s=candidate.ttft_s,
                ttft_s=ttft_s,
                output_tokens=event.output_tokens,
            )
        )

    def _recall(self, request: _Request, endpoint: Endpoint, event: Finished) -> None:
        """An endpoint without KV events has computed this prompt: remember its blocks."""
        if endpoint.has_events:
            return
        keys, candidate = request.event.keys, request.candidate
        assert candidate is not None
        if event.cached_tokens is not None and event.cached_tokens < candidate.matched_tokens:
            tokens = self._fleet.block_tokens(request.event.model)
            endpoint.recall.correct(keys[: candidate.matched_tokens // tokens], event.cached_tokens // tokens)
        endpoint.recall.remember(keys)

    def _learn_decode(self, request: _Request, endpoint: Endpoint, event: Finished, decodes: int) -> None:
        output = event.output_tokens
        if output is None or event.reason is not FinishReason.STOP:
            return
        model = self._fleet.models[request.event.model]
        model.output_tokens += TYPICAL_RATE * (output - model.output_tokens)
        if output > 1 and request.event.stream and request.first_token_t is not None:
            step_s = (self._t - request.first_token_t) / (output - 1)
            context = request.event.prompt_tokens + output / 2
            endpoint.learner.observe_decode(step_s, max(1, decodes), context)

    # --- endpoints ---

    def _endpoint_up(self, event: EndpointUp) -> None:
        known = self._fleet.endpoints.get(event.endpoint)
        if known is not None and _restarted(known.process_start_s, event.process_start_s):
            self._new_life(known, "the engine process was started anew")
        endpoint = self._fleet.upsert(event)
        endpoint.up = True
        endpoint.unreachable_t = None
        if event.process_start_s is not None:
            endpoint.process_start_s = event.process_start_s
        self._grade(endpoint, "endpoint is up")
        for name in list(self._waiting):
            request = self._waiting[name]
            if request.event.model in endpoint.models and self._place(request):
                del self._waiting[name]

    def _endpoint_down(self, event: EndpointDown) -> None:
        endpoint = self._fleet.endpoints.get(event.endpoint)
        if endpoint is None:
            self._count.stale_events += 1
            return
        endpoint.up = False
        if event.removed:
            self._fleet.remove(endpoint)
        else:
            self._suspect(endpoint, event.cause)

    def _endpoint_suspect(self, event: EndpointSuspect) -> None:
        endpoint = self._fleet.endpoints.get(event.endpoint)
        if endpoint is None:
            self._count.stale_events += 1
        else:
            self._suspect(endpoint, event.cause)

    def _suspect(self, endpoint: Endpoint, cause: str) -> None:
        if endpoint.suspect is None:
            self._count.suspicions += 1
            endpoint.suspect = cause
        self._grade(endpoint, cause)

    def _new_life(self, endpoint: Endpoint, cause: str) -> None:
        self._count.lives += 1
        endpoint.new_life()
        endpoint.suspect = None
        self._grade(endpoint, cause)

    def _signals(self, event: Signals) -> None:
        endpoint = self._fleet.endpoints.get(event.endpoint)
        if endpoint is None:
            self._count.stale_events += 1
            return
        if endpoint.unreachable_t is not None and event.scraped_t >= endpoint.unreachable_t:
            endpoint.unreachable_t = None
        if event.process_start_s is not None:
            if _restarted(endpoint.process_start_s, event.process_start_s):
                self._new_life(endpoint, "the engine process was started anew")
            elif endpoint.suspect is not None and endpoint.process_start_s is not None:
                endpoint.suspect = None
                self._grade(endpoint, "same engine process")
            endpoint.process_start_s = event.process_start_s
        endpoint.observe_load(event)

    def _grade(self, endpoint: Endpoint, cause: str) -> None:
        endpoint.grade = Grade.NONE if endpoint.suspect is not None else Grade.APPROXIMATE
        if endpoint.grade is not endpoint.emitted_grade:
            endpoint.emitted_grade = endpoint.grade
            self._out.append(GradeChanged(endpoint=endpoint.name, grade=endpoint.grade, cause=cause))

    def _engine_batch(self, event: EngineBatch) -> None:
        pass

    def _residency(self, event: Residency) -> None:
        pass

    def _replay_ended(self, event: ReplayEnded) -> None:
        pass

    def _tick(self, event: Tick) -> None:
        while self._waiting:
            name, request = next(iter(self._waiting.items()))
            if request.deadline_t > self._t:
                break
            self._refuse(name, 503, "rejected-no-endpoints", f"no endpoint serves {request.event.model} now")

    def _is_current(self, endpoint: Endpoint) -> bool:
        return self._fleet.endpoints.get(endpoint.name) is endpoint

    # --- views ---

    def models(self) -> list[str]:
        """Names that requests may ask for: served by an endpoint that is known, up or not."""
        return [name for name, model in self._fleet.models.items() if model.endpoints]

    def block_tokens(self, model: str) -> int:
        """Tokens of a routing block of `model`."""
        return self._fleet.block_tokens(model)

    def decision(self, decision: str) -> Decision | None:
        """A recent decision by its id."""
        return self._decisions.get(decision)

    def decisions(self, last: int = 100) -> list[Decision]:
        """The newest decisions, oldest first."""
        return list(self._decisions.values())[-last:]

    def outcomes(self, last: int = 100) -> list[Outcome]:
        """The newest outcomes, oldest first."""
        return list(self._outcomes)[-last:]

    def counters(self) -> Counters:
        """What was counted so far (a copy)."""
        self._count.requests_now = len(self._requests)
        self._count.waiting_now = len(self._waiting)
        self._count.index_blocks_now = len(self._index)
        self._count.index_bytes_now = self._index.estimated_bytes
        self._count.index_refused_blocks = self._index.refused_blocks
        return msgspec.structs.replace(
            self._count, refused=dict(self._count.refused), finished=dict(self._count.finished)
        )

    def fleet_view(self) -> list[EndpointView]:
        """Every endpoint as the router knows it now."""
        return [self._view(endpoint) for endpoint in self._fleet.endpoints.values()]

    def _view(self, e: Endpoint) -> EndpointView:
        t = self._t
        block_tokens = self._fleet.block_tokens(e.models[0]) if e.models else 0
        running, waiting = e.foreign(t)
        resident = e.resident_blocks() * block_tokens
        latency = e.learner.model
        scraped = e.signals
        return EndpointView(
            endpoint=e.name,
            models=e.models,
            up=e.up,
            grade=e.grade,
            suspect=e.suspect,
            reachable=e.unreachable_t is None,
            epoch=e.epoch,
            has_events=e.has_events,
            last_sequence=None,
            blocks=e.resident_blocks(),
            block_tokens=block_tokens,
            kv_tokens=e.kv_tokens,
            free_tokens=max(0, e.kv_tokens - resident - e.load.prefill_tokens) if e.kv_tokens else None,
            max_sequences=e.max_sequences,
            inflight=e.load.inflight,
            prefilling=len(e.load.prefills),
            decoding=e.load.decodes,
            prefill_tokens=e.load.prefill_tokens,
            wait_s=e.prefill_left_s(t),
            foreign_running=running,
            foreign_waiting=waiting,
            running=scraped.running if scraped else None,
            waiting=scraped.waiting if scraped else None,
            kv_usage=scraped.kv_usage if scraped else None,
            scraped_t=scraped.scraped_t if scraped else None,
            dispatched=e.dispatched,
            latency=latency,
            fixed_factor=e.learner.fixed_factor,
            work_factor=e.learner.work_factor,
            decode_factor=e.learner.decode_factor,
        )

    def check_integrity(self) -> None:
        """Compare ledger, counters and index with a recount; raises SumibiError. For tests and idle time."""
        loads = {id(r.life): r.life for r in self._requests.values() if r.life is not None}
        loads.update({id(e.load): e.load for e in self._fleet.endpoints.values()})
        self._ledger.check_integrity(list(loads.values()))
        self._index.check_integrity()
        running = sum(r.state is _State.RUNNING for r in self._requests.values())
        if running != len(self._ledger):
            raise SumibiError(f"router: {running} requests run, {len(self._ledger)} hold reservations")


def _restarted(known_s: float | None, said_s: float | None) -> bool:
    """Whether a process start time says that another process answers now (clocks round to 10 ms)."""
    return known_s is not None and said_s is not None and abs(known_s - said_s) > 0.05


def _blocks(levels: list[tuple[int, int]], holders: int) -> int:
    """The longest run of any of `holders`; `levels` from the longest down."""
    for blocks, here in levels:
        if here & holders:
            return blocks
    return 0


def _common(ours: Sequence[int], theirs: Sequence[int], low: int, high: int) -> int:
    """How many leading keys are equal, known to be more than `low` and at most `high`: keys are chained."""
    low += 1
    while low < high:
        middle = (low + high + 1) >> 1
        if ours[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low

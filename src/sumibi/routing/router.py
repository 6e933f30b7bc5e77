r"""The brain: one state machine, typed events in, typed instructions out.

`Router.handle(event)` is the only mutator. It knows requests, endpoints and what both have told; it must not
know sockets, clocks, tasks or files. Time comes with the events, chance from a hash of the request's id.
So the HTTP gateway, an Envoy endpoint picker and the simulator drive the same object, and a recorded log of
events fed to a fresh one yields the same decisions, bit for bit.

Choosing and reserving are one step: the next request, even within the same instant, sees the load of this
one. A request is in one of four states, and leaves the router from any of them:

    ARRIVED --Admitted--> RUNNING (an endpoint is chosen and reserved) --Finished--> over
                    |\--> WAITING (no endpoint of its model is up) --EndpointUp--> RUNNING, or refused
                     \--> HELD (its pick cannot begin soon, see `flow`) --> RUNNING, or refused

Events about what is over (a late first token, a second finish, an endpoint that was removed) are counted
and otherwise ignored: a shell cannot avoid them. Time that goes backwards is a bug of the shell and raises.

What this file does is connect, which part hears of which event in which order, and see every request through
its states. The rooms beside it: what a policy picks (`choosing`), what an attempt does from its beginning to
its end (`attempts`), who waits for an endpoint that could begin (`gate`), what is heard of endpoints and what
becomes of them (`lives`), what is shown (`views`).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from sumibi.core.errors import SumibiError
from sumibi.core.kvevents import EventBatch
from sumibi.routing import disagg
from sumibi.routing.attempts import Attempts
from sumibi.routing.choosing import NOBODY, Choice, Choosing
from sumibi.routing.computing import Computing
from sumibi.routing.config import RouterConfig
from sumibi.routing.counters import Counters
from sumibi.routing.decisions import Decision, Outcome
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatched,
    EndpointDown,
    EndpointSuspect,
    EndpointUp,
    EngineBatch,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Instruction,
    Moved,
    Prefilled,
    Refuse,
    ReplayEnded,
    Residency,
    Role,
    Signals,
    Tick,
    WakeAt,
)
from sumibi.routing.fleet import Fleet
from sumibi.routing.gate import Gate
from sumibi.routing.held import Held
from sumibi.routing.hints import Hints
from sumibi.routing.index import BlockIndex
from sumibi.routing.ledger import Ledger, Owner
from sumibi.routing.lives import Lives
from sumibi.routing.placing import NOTHING_AHEAD
from sumibi.routing.policies import check_pairing
from sumibi.routing.requests import Attempt, Request, State
from sumibi.routing.views import EndpointView, counted, view

_DROPPED = {
    FinishReason.CLIENT_GONE: "rejected-context-cancelled",
    FinishReason.SHUTDOWN: "rejected-shutting-down",
}
"""Why a request was not served that ended while it waited."""


class Router:
    """Places requests on endpoints. `observer` gets every event in its recordable form (no text, no ids)."""

    def __init__(
        self, config: RouterConfig | None = None, *, observer: Callable[[Event], None] | None = None
    ) -> None:
        self.config = config = config or RouterConfig()
        self._observer = observer
        self._count = Counters()
        self._index = BlockIndex(config.max_index_blocks)
        self._fleet = Fleet(config, self._index)
        self._ledger = Ledger()
        self._computing = Computing(self._index)
        self._gate = Gate(config, self._fleet)
        self._choosing = Choosing(config, self._fleet, self._index, self._computing)
        self._hints = Hints(self._fleet, self._index, self._count, self._emit)
        self._attempts = Attempts(
            config,
            self._fleet,
            self._ledger,
            self._computing,
            self._gate,
            self._choosing,
            self._hints,
            self._count,
        )
        self._lives = Lives(
            config, self._fleet, self._index, self._computing, self._count, self._emit, observer
        )
        self._requests: dict[str, Request] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._out: list[Instruction] = []
        self._t = float("-inf")
        self._handlers: dict[type[Event], Callable[..., None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Dispatched: self._dispatched,
            Moved: self._moved,
            Prefilled: self._prefilled,
            FirstToken: self._first_token,
            Finished: self._finished,
            EndpointUp: self._endpoint_up,
            EndpointSuspect: self._lives.suspected,
            EndpointDown: self._endpoint_down,
            EngineBatch: self._lives.batch,
            Residency: self._lives.residency,
            ReplayEnded: self._lives.replay_ended,
            Signals: self._signals,
            Tick: self._tick,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; what the shell must do now, in order. Raises SumibiError if time went backwards."""
        if event.t < self._t:
            raise SumibiError(f"time went backwards: {event.t} after {self._t} ({type(event).__name__})")
        self._catch_up()
        self._t = event.t
        if self._observer is not None:
            self._observer(_recordable(event))
        self._out = []
        self._handlers[type(event)](event)
        if not self._attempts.behind:
            self._fleet.settle(self._t)
        return self._out

    def _catch_up(self) -> None:
        self._attempts.catch_up(self._t)

    def _emit(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    # --- requests ---

    def _arrived(self, event: Arrived) -> None:
        if event.request in self._requests:
            self._count.stale_events += 1
        elif len(self._requests) >= self.config.max_requests:
            self._refuse(event.request, 429, "rejected-saturated", "too many requests are in flight")
        else:
            owner = Owner(self.config.gateway, self.config.gateway_epoch, event.request)
            self._requests[event.request] = Request(event, owner)

    def _admitted(self, event: Admitted) -> None:
        request = self._requests.get(event.request)
        if request is None or request.state is not State.ARRIVED:
            self._count.stale_events += 1
            return
        request.queued_t = self._t
        if self._place(request, may_hold=request.event.followed):
            return
        if len(self._waiting) >= self.config.max_waiting:
            self._refuse(event.request, 429, "rejected-saturated", "too many requests wait for an endpoint")
        else:
            request.state = State.WAITING
            wait_s = min(self.config.wait_for_endpoint_s, self._gate.ttl_s(request))
            request.deadline_t = self._t + wait_s
            self._waiting[event.request] = request
            self._emit(WakeAt(at=request.deadline_t))

    def _dispatched(self, event: Dispatched) -> None:
        _, attempt = self._running(event)
        if attempt is None or not self._attempts.dispatched(attempt, event.endpoint, self._t):
            self._count.stale_events += 1

    def _moved(self, event: Moved) -> None:
        """The attempt's endpoint could not be reached; another one answers already."""
        request, attempt = self._running(event)
        if request is None or attempt is None or attempt.endpoint.name == event.endpoint:
            self._count.stale_events += 1
            return
        why = FinishReason.REFUSED
        self._count.finished[why] = self._count.finished.get(why, 0) + 1
        over = Finished(t=self._t, request=event.request, attempt=attempt.number, reason=why, answered=False)
        self._close(request, attempt, over)
        there = self._fleet.endpoints.get(event.endpoint)
        if there is not None and request.event.model in there.models:
            choice = self._choose(request, [there], NOTHING_AHEAD)
            self._commit(request, choice.endpoints, choice, disagg.FALLBACK)
            self._count.retries += 1
        else:
            del self._requests[event.request]
        self._freed(attempt.endpoint)

    def _prefilled(self, event: Prefilled) -> None:
        request, attempt = self._running(event)
        leg = attempt.leg if attempt is not None else None
        if request is None or attempt is None or leg is None or leg.first_token_t is not None:
            self._count.stale_events += 1
        elif event.failed is None:
            self._attempts.leg_over(request, leg, event.cached_tokens, self._t)
            self._freed(leg.endpoint)
        else:
            self._leg_failed(request, attempt, leg, event.failed)

    def _leg_failed(self, request: Request, attempt: Attempt, leg: Attempt, why: FinishReason) -> None:
        """Nothing was sent to the client yet: a whole run where it was to be decoded, if that may take it,
        or else whatever is left.
        """
        name = request.event.request
        self._count.finished[why] = self._count.finished.get(why, 0) + 1
        over = Finished(t=self._t, request=name, attempt=attempt.number, reason=why, answered=False)
        self._close(request, attempt, over, blamed=leg)
        again = why.retriable and attempt.number < self.config.max_attempts
        if again and attempt.endpoint in self._candidates(request):
            choice = self._choose(request, [attempt.endpoint], NOTHING_AHEAD)
            self._commit(request, choice.endpoints, choice, disagg.FALLBACK)
        elif not again or not self._place(request, excluded=leg.endpoint.name):
            again = False
            del self._requests[name]
        self._count.retries += again
        for endpoint in (leg.endpoint, attempt.endpoint):
            self._freed(endpoint)

    def _first_token(self, event: FirstToken) -> None:
        request, attempt = self._running(event)
        if request is None or attempt is None or attempt.first_token_t is not None:
            self._count.stale_events += 1
            return
        self._attempts.first_token(request, attempt, self._t)
        if attempt.leg is not None:
            self._freed(attempt.leg.endpoint)
        self._attempts.decodes(request, attempt, self._t)
        self._freed(attempt.endpoint)

    def _finished(self, event: Finished) -> None:
        request = self._requests.get(event.request)
        attempt = request.running(event.attempt) if request is not None else None
        if request is None or (request.state is State.RUNNING and attempt is None):
            self._count.stale_events += 1
            return
        reason = event.reason
        self._count.finished[reason] = self._count.finished.get(reason, 0) + 1
        retry = False
        if attempt is not None:
            self._close(request, attempt, event)
            retry = reason.retriable and not event.answered and attempt.number < self.config.max_attempts
            retry = retry and (
                self._place(request, excluded=attempt.endpoint.name)
                or self._by_itself(request, attempt, reason)
            )
        if retry:
            self._count.retries += 1
        else:
            self._gave_up(request, reason)
            del self._requests[event.request]
        if attempt is not None:
            self._freed(attempt.endpoint)
            if attempt.leg is not None:
                self._freed(attempt.leg.endpoint)

    def _by_itself(self, request: Request, attempt: Attempt, why: FinishReason) -> bool:
        """Nobody else may take what an endpoint could not decode from the KV it was promised: a whole run
        there needs none. False if that is not what happened.
        """
        fetching = attempt.leg is not None and why is FinishReason.ENGINE_ERROR
        if not fetching or attempt.endpoint not in self._candidates(request):
            return False
        choice = self._choose(request, [attempt.endpoint], NOTHING_AHEAD)
        self._commit(request, choice.endpoints, choice, disagg.FALLBACK)
        return True

    def _gave_up(self, request: Request, reason: FinishReason) -> None:
        """It is over; count it as refused if it never left its queue."""
        if self._waiting.pop(request.event.request, None) is None and not self._gate.leave(request, self._t):
            return
        dropped = _DROPPED.get(reason)
        if dropped is not None:
            self._count.refused[dropped] = self._count.refused.get(dropped, 0) + 1

    def _close(
        self, request: Request, attempt: Attempt, event: Finished, blamed: Attempt | None = None
    ) -> None:
        """End an attempt, and doubt the endpoint if that is called for: the one of `blamed` (the leg of a
        pair), or else its own.
        """
        self._attempts.end(request, attempt, event)
        failed = blamed or attempt
        if event.reason in (FinishReason.REFUSED, FinishReason.ENGINE_GONE) and failed.current:
            failed.endpoint.unreachable_t = self._t
            cause = f"connection {event.reason.value.replace('_', ' ')}"
            self._lives.suspect(failed.endpoint, cause, self._t)

    def _running(
        self, event: Dispatched | Moved | Prefilled | FirstToken
    ) -> tuple[Request | None, Attempt | None]:
        request = self._requests.get(event.request)
        return request, request.running(event.attempt) if request is not None else None

    def _refuse(self, request: str, status: int, reason: str, message: str) -> None:
        known = self._requests.pop(request, None)
        self._waiting.pop(request, None)
        if known is not None:
            self._gate.leave(known, self._t)
        self._count.refused[reason] = self._count.refused.get(reason, 0) + 1
        self._emit(Refuse(request=request, status=status, reason=reason, message=message))

    def _place(self, request: Request, excluded: str | None = None, *, may_hold: bool = False) -> bool:
        """Choose and reserve, in one step; or hold it back, if it may be, because its pick cannot begin
        soon. False if no endpoint may take it.
        """
        endpoints = self._candidates(request, excluded)
        if not endpoints:
            return False
        ahead_s = NOTHING_AHEAD
        if may_hold:
            # Those who wait already go first, if there is room for them by now.
            self._freed(endpoints[0])
            ahead_s = self._gate.ahead_s(request, endpoints)
        prefillers = self._prefillers(request, excluded)
        choice = self._choose(request, endpoints, ahead_s, prefillers)
        if not may_hold or not self._gate.holds(choice.picked):
            self._commit(request, endpoints, choice)
            return True
        self._gate.recognise(request)
        if self._gate.hold(request, endpoints, choice.found, choice.pick, self._t):
            request.state = State.HELD
            self._count.held += 1
            self._serve(self._gate.pool(endpoints[0]))
        else:
            self._refuse(request.event.request, 429, "rejected-saturated", "too many requests wait")
        return True

    def _candidates(self, request: Request, excluded: str | None = None) -> list[Endpoint]:
        """Who may take it now."""
        return self._fleet.candidates(request.event.model, excluded, request.event.only)

    def _prefillers(self, request: Request, excluded: str | None = None) -> list[Endpoint]:
        """Who may compute its prompt for another one now."""
        return self._fleet.prefillers(request.event.model, excluded, request.event.only)

    def _choose(
        self,
        request: Request,
        endpoints: list[Endpoint],
        ahead_s: Mapping[str, float],
        prefillers: list[Endpoint] = NOBODY,
        decoders: list[Endpoint] | None = None,
    ) -> Choice:
        self._catch_up()
        return self._choosing.choose(request, endpoints, self._t, ahead_s, prefillers, decoders)

    def _commit(
        self, request: Request, endpoints: list[Endpoint], choice: Choice, reason: str | None = None
    ) -> None:
        """Reserve, and have it sent. `reason`: why it is a whole run, if that is known already."""
        left_out = 0 if choice.sides is not None else len(endpoints) - len(choice.found)
        self._emit(self._attempts.begin(request, choice, left_out, reason, self._t))

    # --- held requests ---

    def _freed(self, endpoint: Endpoint, *, anew: bool = False) -> None:
        """Something is over at `endpoint`, or was heard of it: it may take somebody who is held."""
        for pool in self._gate.pools_of(endpoint):
            self._serve(pool, anew=anew)

    def _serve(self, pool: str, *, anew: bool = False) -> None:
        self._catch_up()
        due_t = self._gate.serve(pool, self._t, self._place_held, anew=anew)
        if due_t is not None:
            self._emit(WakeAt(at=due_t))

    def _place_held(
        self, held: Held, ahead_s: Mapping[str, float], home_open: bool
    ) -> tuple[str, float, float] | None:
        """Place a held request if its pick can begin soon. (pick, seconds until that can begin with another
        one, seconds of its prefill); None if no endpoint may take it.
        """
        request = held.request
        endpoints = self._candidates(request)
        if not endpoints:
            return None
        prefillers = self._prefillers(request)
        choice = self._choose(request, endpoints, ahead_s, prefillers)
        ready = self._gate.open(endpoints, self._t) if home_open and self._gate.holds(choice.picked) else []
        ready_legs = self._gate.open(prefillers, self._t) if prefillers else []
        if ready or (home_open and ready_legs and self._gate.holds(choice.picked)):
            # Its home can begin, but now somebody who cannot looks better. That is waited for as long as
            # it is better by, counted from the first time on.
            if held.declined_t is None:
                held.declined_t = self._t
            ready = ready or endpoints
            second = self._choose(request, ready, ahead_s, ready_legs, endpoints)
            if second.scores[second.pick] - choice.scores[choice.pick] <= self._t - held.declined_t:
                endpoints, choice = ready, second
        endpoint, picked = choice.begins, choice.picked
        if self._gate.holds(picked):
            self._gate.stays(held, choice.found, choice.pick)
            return endpoint.name, picked.wait_s - ahead_s.get(endpoint.name, 0.0), picked.compute_s
        self._gate.leave(request, self._t)
        self._commit(request, endpoints, choice)
        self._catch_up()
        return endpoint.name, endpoint.begins_in_s(self._t), picked.compute_s

    # --- endpoints ---

    def _endpoint_up(self, event: EndpointUp) -> None:
        if event.role is not Role.BOTH:
            check_pairing(self.config.policy)
        endpoint = self._lives.up(event)
        for name, request in list(self._waiting.items()):
            serves = request.event.model in endpoint.models
            if serves and self._place(request, may_hold=request.event.followed):
                self._waiting.pop(name, None)
        self._freed(endpoint, anew=True)

    def _endpoint_down(self, event: EndpointDown) -> None:
        endpoint = self._lives.down(event)
        if endpoint is None:
            return
        if event.removed:
            self._choosing.gone(endpoint.name)
            self._hints.gone(endpoint.name)
        self._freed(endpoint)

    def _signals(self, event: Signals) -> None:
        endpoint = self._lives.signals(event)
        if endpoint is not None:
            self._freed(endpoint)

    # --- time ---

    def _tick(self, event: Tick) -> None:
        for request in [r for r in self._waiting.values() if r.deadline_t <= self._t]:
            self._refuse_without_endpoint(request)
        for held in self._gate.expired(self._t):
            self._expired(held)
        for pool in self._gate.pools():
            self._serve(pool)
        self._lives.tick(self._t)
        self._hints.tick(self._t)

    def _expired(self, held: Held) -> None:
        """A held request's time is over. If there are endpoints that could begin with something, it waited
        for its own good, for the one that has its prefix: it goes there now and waits on.
        """
        request = held.request
        endpoints = self._candidates(request)
        if not endpoints:
            self._refuse_without_endpoint(request)
        elif not self._gate.open([*endpoints, *self._prefillers(request)], self._t):
            waited = f"no endpoint could begin with it within {self._t - held.queued_t:.3g} s"
            self._refuse(request.event.request, 429, "rejected-ttl-expired", waited)
        else:
            self._gate.leave(request, self._t)
            prefillers = self._prefillers(request)
            choice = self._choose(request, endpoints, NOTHING_AHEAD, prefillers)
            self._commit(request, endpoints, choice)

    def _refuse_without_endpoint(self, request: Request) -> None:
        why = f"no endpoint serves {request.event.model} now"
        self._refuse(request.event.request, 503, "rejected-no-endpoints", why)

    # --- views ---

    def models(self) -> list[str]:
        """Names that requests may ask for: served by an endpoint that is known, up or not."""
        return [name for name, model in self._fleet.models.items() if model.endpoints]

    def block_tokens(self, model: str) -> int:
        """Tokens of a routing block of `model`."""
        return self._fleet.block_tokens(model)

    def key_name(self, model: str) -> str:
        """The name under which prompts for `model` are to be hashed: one for all names of a model."""
        return self._fleet.key_name(model)

    def expected_s(self, request: str) -> tuple[float, float]:
        """Of a request under way, as it was placed: seconds from its dispatch to its first token, and from
        there to its end. Zero: it is not under way.
        """
        known = self._requests.get(request)
        attempt = known.attempt if known is not None else None
        if known is None or attempt is None:
            return 0.0, 0.0
        event, endpoint = known.event, attempt.endpoint
        output = self._fleet.models[event.model].output_tokens
        output = min(output, event.max_tokens) if event.max_tokens is not None else output
        step_s = endpoint.learner.model.decode_step_s(
            attempt.life.decodes + 1, event.prompt_tokens + output / 2
        )
        return attempt.candidate.ttft_s + attempt.overhead_s, output * step_s

    def decision(self, decision: str) -> Decision | None:
        """A recent decision by its id."""
        self._catch_up()
        return self._attempts.decisions.get(decision)

    def decisions(self, last: int = 100) -> list[Decision]:
        """The newest decisions, oldest first."""
        self._catch_up()
        return list(self._attempts.decisions.values())[-last:]

    def outcomes(self, last: int = 100) -> list[Outcome]:
        """The newest outcomes, oldest first."""
        return list(self._attempts.outcomes)[-last:]

    def fleet_view(self) -> list[EndpointView]:
        """Every endpoint as the router knows it now."""
        self._catch_up()
        return [view(e, self._t, self._fleet.tokens_of(e)) for e in self._fleet.endpoints.values()]

    def counters(self) -> Counters:
        """What was counted so far (a copy)."""
        self._catch_up()
        requests, waiting = len(self._requests), len(self._waiting)
        return counted(self._count, requests, waiting, self._gate, self._index, self._fleet, self._t)

    def check_integrity(self) -> None:
        """Compare ledger, counters and index with a recount; raises SumibiError. For tests and idle time."""
        self._catch_up()
        attempts = [r.attempt for r in self._requests.values() if r.attempt is not None]
        loads = {id(a.life): a.life for a in attempts}
        loads.update({id(a.leg.life): a.leg.life for a in attempts if a.leg is not None})
        loads.update({id(e.load): e.load for e in self._fleet.endpoints.values()})
        self._ledger.check_integrity(list(loads.values()))
        self._index.check_integrity()
        self._gate.check_integrity()
        held = sum(r.state is State.HELD for r in self._requests.values())
        if held != self._gate.held:
            raise SumibiError(f"router: {held} requests are held, the gate has {self._gate.held}")
        running = sum(r.state is State.RUNNING for r in self._requests.values())
        if running != len(self._ledger):
            raise SumibiError(f"router: {running} requests run, {len(self._ledger)} hold reservations")


def _recordable(event: Event) -> Event:
    """The event without text and token ids. A batch keeps what orders it; `Residency` says what it meant."""
    if isinstance(event, Arrived) and not isinstance(event.keys, list):
        return msgspec.structs.replace(event, keys=list(event.keys))
    if not isinstance(event, EngineBatch) or not event.batch.events:
        return event
    b = event.batch
    return msgspec.structs.replace(
        event, batch=EventBatch(seq=b.seq, ts=b.ts, events=[], rank=b.rank, skipped=b.skipped)
    )

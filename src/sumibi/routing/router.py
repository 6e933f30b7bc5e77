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

What this file does is connect: which part hears of which event, in which order.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from sumibi.core.errors import SumibiError
from sumibi.core.kvevents import EventBatch
from sumibi.routing import disagg, lessons
from sumibi.routing.computing import Computing
from sumibi.routing.config import RouterConfig
from sumibi.routing.counters import Counters
from sumibi.routing.decisions import Candidate, Decision, Outcome
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import (
    Admitted,
    Arrived,
    AskReplay,
    Change,
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
    GradeChanged,
    Instruction,
    Prefilled,
    Refuse,
    ReplayEnded,
    Residency,
    Role,
    Signals,
    Tick,
    WakeAt,
)
from sumibi.routing.feed import Feed
from sumibi.routing.fleet import Fleet, Roster
from sumibi.routing.flow import Held
from sumibi.routing.gate import Gate
from sumibi.routing.index import BlockIndex
from sumibi.routing.ledger import Ledger, Owner, Reservation
from sumibi.routing.levels import Levels, beyond
from sumibi.routing.placing import NOTHING_AHEAD, Looked, candidates, matchable_blocks, order_some
from sumibi.routing.policies import Ask, Policy, check_pairing, least, make_policy
from sumibi.routing.requests import Attempt, Request, State
from sumibi.routing.sequence import Forget, Step
from sumibi.routing.views import EndpointView, view

SAME_START_S = 0.05
"""Process start times closer than this are the same one, read twice."""
RESTARTED = "the engine process was started anew"
_DROPPED = {
    FinishReason.CLIENT_GONE: "rejected-context-cancelled",
    FinishReason.SHUTDOWN: "rejected-shutting-down",
}
"""Why a request was not served that ended while it waited."""


NOBODY: list[Endpoint] = []


class Sides(NamedTuple):
    """What both sides of pairs have of a prompt."""

    prefill: Roster
    legs: Looked
    """Their candidates, priced if the policy prices."""
    decode: Roster
    there: Looked


class Choice(NamedTuple):
    """What a policy picked."""

    ask: Ask
    endpoints: list[Endpoint]
    found: list[Candidate]
    """Theirs."""
    roster: Roster
    """Of all endpoints that were asked about."""
    levels: Levels
    """How far the prompt is known at those."""
    scores: list[float]
    pick: int
    sides: Sides | None = None
    """Where pairs are possible."""

    @property
    def leg(self) -> tuple[Endpoint, Candidate] | None:
        """Where the prompt is computed, of a pair."""
        name = self.picked.prefill
        if not name or self.sides is None:
            return None
        legs = self.sides.legs
        return next((e, c) for e, c in zip(legs.endpoints, legs.candidates, strict=True) if e.name == name)

    @property
    def begins(self) -> Endpoint:
        """Where the request goes first."""
        leg = self.leg
        return leg[0] if leg is not None else self.endpoints[self.pick]

    @property
    def picked(self) -> Candidate:
        """The chosen candidate."""
        return self.found[self.pick]


class Router:
    """Places requests on endpoints. `observer` gets every event in its recordable form (no text, no ids)."""

    def __init__(
        self, config: RouterConfig | None = None, *, observer: Callable[[Event], None] | None = None
    ) -> None:
        self.config = config or RouterConfig()
        self._policies: dict[str, Policy] = {}
        """By model, made with its first request."""
        make_policy(self.config.policy, self.config)  # a name that there is none of is told at once
        self._observer = observer
        self._index = BlockIndex(self.config.max_index_blocks)
        self._fleet = Fleet(self.config, self._index)
        self._ledger = Ledger()
        self._computing = Computing(self._index)
        self._requests: dict[str, Request] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._gate = Gate(self.config, self._fleet)
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._outcomes: deque[Outcome] = deque(maxlen=self.config.decisions_kept)
        self._count = Counters()
        self._after: list[Callable[[], None]] = []
        """What is left to do of events that were taken, and does not change what was answered to them."""
        self._out: list[Instruction] = []
        self._t = float("-inf")
        self._handlers: dict[type[Event], Callable[..., None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Dispatched: self._dispatched,
            Prefilled: self._prefilled,
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
        self._catch_up()
        self._t = event.t
        if self._observer is not None:
            self._observer(_recordable(event))
        self._out = []
        self._handlers[type(event)](event)
        if not self._after:
            self._fleet.settle(self._t)
        return self._out

    def _catch_up(self) -> None:
        if self._after:
            for work in self._after:
                work()
            self._after.clear()
            self._fleet.settle(self._t)

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
        if self._place(request, may_hold=True):
            return
        if len(self._waiting) >= self.config.max_waiting:
            self._refuse(event.request, 429, "rejected-saturated", "too many requests wait for an endpoint")
        else:
            request.state = State.WAITING
            wait_s = min(self.config.wait_for_endpoint_s, self._gate.ttl_s(request))
            request.deadline_t = self._t + wait_s
            self._waiting[event.request] = request
            self._out.append(WakeAt(at=request.deadline_t))

    def _dispatched(self, event: Dispatched) -> None:
        _, attempt = self._running(event)
        if attempt is not None and attempt.leg is not None:
            self._dispatched_apart(attempt, attempt.leg, event.endpoint)
        elif attempt is None or attempt.dispatched_t is not None:
            self._count.stale_events += 1
        else:
            lessons.dispatched(attempt, self._t)

    def _dispatched_apart(self, attempt: Attempt, leg: Attempt, endpoint: str) -> None:
        """One of the two halves of a pair left."""
        if endpoint == leg.endpoint.name and leg.dispatched_t is None:
            attempt.dispatched_t = self._t
            lessons.dispatched(leg, self._t)
        elif endpoint == attempt.endpoint.name and attempt.sent_t is None:
            attempt.sent_t = self._t
        else:
            self._count.stale_events += 1

    def _prefilled(self, event: Prefilled) -> None:
        request, attempt = self._running(event)
        leg = attempt.leg if attempt is not None else None
        if request is None or attempt is None or leg is None or leg.first_token_t is not None:
            self._count.stale_events += 1
        elif event.failed is None:
            self._leg_over(request, leg, event.cached_tokens)
            self._freed(leg.endpoint)
        else:
            self._leg_failed(request, attempt, leg, event.failed)

    def _leg_over(self, request: Request, leg: Attempt, cached_tokens: int | None) -> None:
        """Its prompt is computed: the prefill endpoint is free for the next, and has its blocks."""
        leg.endpoint.unreachable_t = None
        lessons.first_token(request, leg, self._ledger, self._t)
        lessons.stored(request, leg, self._fleet)
        self._computing.computed(request, leg, self._t)
        self._computing.end(request, leg, self._t, computed=True)
        if leg.current and not request.announced(leg.endpoint):
            lessons.remember(request, leg, cached_tokens, self._fleet)

    def _leg_failed(self, request: Request, attempt: Attempt, leg: Attempt, why: FinishReason) -> None:
        """Nothing was sent to the client yet: a whole run where it was to be decoded, if that may take it,
        or else whatever is left.
        """
        name, model = request.event.request, request.event.model
        self._count.finished[why] = self._count.finished.get(why, 0) + 1
        over = Finished(t=self._t, request=name, attempt=attempt.number, reason=why, answered=False)
        self._close(request, attempt, over, blamed=leg)
        again = why.retriable and attempt.number < self.config.max_attempts
        if again and attempt.endpoint in self._fleet.candidates(model):
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
        attempt.endpoint.unreachable_t = None
        leg = attempt.leg
        if leg is None:
            lessons.first_token(request, attempt, self._ledger, self._t)
            lessons.stored(request, attempt, self._fleet)
        else:
            if leg.first_token_t is None:
                self._leg_over(request, leg, None)
            lessons.transferred(request, attempt, self._t)
            self._freed(leg.endpoint)
        self._policies[request.event.model].first_token(event.request)
        self._computing.computed(request, attempt, self._t)
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
            retry = retry and self._place(request, excluded=attempt.endpoint.name)
        if retry:
            self._count.retries += 1
        else:
            self._gave_up(request, reason)
            del self._requests[event.request]
        if attempt is not None:
            self._freed(attempt.endpoint)
            if attempt.leg is not None:
                self._freed(attempt.leg.endpoint)

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
        """End an attempt: release, learn, record, and doubt the endpoint if that is called for: the one of
        `blamed` (the leg of a pair), or else its own.
        """
        endpoint, leg = attempt.endpoint, attempt.leg
        decodes = attempt.life.decodes
        lessons.idle(request.event.keys, self._fleet.models[request.event.model], attempt, self._t)
        computed = lessons.finished(request, attempt, self._ledger, event)
        self._computing.end(request, attempt, self._t, computed=computed)
        if leg is not None:
            lessons.let_go(leg, self._t)
            if leg.first_token_t is None:
                self._computing.end(request, leg, self._t, computed=computed)
        self._policies[request.event.model].ended(event.request, event)
        if computed and event.cached_tokens is not None:
            self._count.predicted_cached_tokens += attempt.candidate.reused_tokens
            self._count.actual_cached_tokens += event.cached_tokens
            self._count.reported_prompt_tokens += event.prompt_tokens or request.event.prompt_tokens
        if computed and attempt.first_token_t is None:
            lessons.stored(request, attempt, self._fleet)
        if computed and attempt.current and not request.announced(endpoint):
            lessons.remember(request, attempt, event.cached_tokens, self._fleet)
        if event.reason is FinishReason.STOP:
            lessons.answer(request, attempt, self._fleet.models[request.event.model], event, decodes)
        if computed:
            self._gate.ended(request, event)
        self._outcomes.append(lessons.outcome(request, attempt, event))
        failed = blamed or attempt
        if event.reason in (FinishReason.REFUSED, FinishReason.ENGINE_GONE) and failed.current:
            failed.endpoint.unreachable_t = self._t
            self._suspect(failed.endpoint, f"connection {event.reason.value.replace('_', ' ')}")

    def _running(self, event: Dispatched | Prefilled | FirstToken) -> tuple[Request | None, Attempt | None]:
        request = self._requests.get(event.request)
        return request, request.running(event.attempt) if request is not None else None

    def _refuse(self, request: str, status: int, reason: str, message: str) -> None:
        known = self._requests.pop(request, None)
        self._waiting.pop(request, None)
        if known is not None:
            self._gate.leave(known, self._t)
        self._count.refused[reason] = self._count.refused.get(reason, 0) + 1
        self._out.append(Refuse(request=request, status=status, reason=reason, message=message))

    def _place(self, request: Request, excluded: str | None = None, *, may_hold: bool = False) -> bool:
        """Choose and reserve, in one step; or hold it back, if it may be, because its pick cannot begin
        soon. False if no endpoint may take it.
        """
        endpoints = self._fleet.candidates(request.event.model, excluded)
        if not endpoints:
            return False
        ahead_s = NOTHING_AHEAD
        if may_hold:
            # Those who wait already go first, if there is room for them by now.
            self._freed(endpoints[0])
            ahead_s = self._gate.ahead_s(request, endpoints)
        prefillers = self._fleet.prefillers(request.event.model, excluded)
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

    def _choose(
        self,
        request: Request,
        endpoints: list[Endpoint],
        ahead_s: Mapping[str, float],
        prefillers: list[Endpoint] = NOBODY,
        decoders: list[Endpoint] | None = None,
    ) -> Choice:
        """What the policy picks now, `ahead_s` seconds of held work going first: a whole run at one of
        `endpoints`, or a prefill at one of `prefillers` and the rest at one of `decoders`.
        """
        event = request.event
        self._catch_up()
        self._computing.expire(self._t)
        model = self._fleet.models[event.model]
        block_tokens = self._fleet.block_tokens(event.model)
        look = partial(
            candidates,
            event,
            t=self._t,
            block_tokens=block_tokens,
            output_tokens=model.output_tokens,
            returns=model.returns,
            index=self._index,
            computing=self._computing,
        )
        policy = self._policy(event.model)
        roster = self._fleet.roster(event.model, endpoints)
        some, found, levels = look(roster=roster, priced=policy.priced, ahead_s=ahead_s)
        number = request.attempt.number + 1 if request.attempt is not None else 1
        ask = Ask(
            request=event.request,
            attempt=number,
            number=model.decisions,
            t=self._t,
            keys=event.keys,
            length=matchable_blocks(event, block_tokens),
            prompt_tokens=event.prompt_tokens,
            block_tokens=block_tokens,
            session=event.session,
            priority=event.priority,
            stream=event.stream,
        )
        if prefillers:
            whole = Choice(ask, some, found, roster, levels, [], 0)
            paired = self._pair(event, policy, look, whole, prefillers, decoders or endpoints, ahead_s)
            if paired is not None:
                return paired
        scores = policy.choose(ask, found, some)
        pick = least(event.request, scores)
        if not policy.priced:
            # What is predicted of the pick is recorded beside what came, under any policy.
            found[pick] = look(roster=self._fleet.roster(event.model, [some[pick]])).candidates[0]
        return Choice(ask, some, found, roster, levels, scores, pick)

    def _pair(
        self,
        event: Arrived,
        policy: Policy,
        look: Callable[..., Looked],
        whole: Choice,
        prefillers: list[Endpoint],
        decoders: list[Endpoint],
        ahead_s: Mapping[str, float],
    ) -> Choice | None:
        """What the policy picks of pairs and of whole runs; None: nobody can be paired."""
        model, ask = event.model, whole.ask
        decode, prefill = self._fleet.roster(model, decoders), self._fleet.prefill_roster(model, prefillers)
        there = look(roster=decode, priced=False)
        legs = look(roster=prefill, output_tokens=1.0, ahead_s=ahead_s, priced=policy.priced)
        sides = Sides(prefill, legs, decode, there)
        output_tokens = self._fleet.models[model].output_tokens
        if event.max_tokens is not None:
            output_tokens = min(output_tokens, event.max_tokens)
        if policy.priced:
            some, found = disagg.pairs(legs, there, self._t, ask, output_tokens)
            if not some:
                return None
            some, found = [*whole.endpoints, *some], [*whole.found, *found]
            scores = policy.choose(ask, found, some)
            pick = least(ask.request, scores)
            return Choice(ask, some, found, whole.roster, whole.levels, scores, pick, sides)
        some, found, scores = disagg.blind(policy, ask, legs, there)
        if not some:
            return None
        pick = least(ask.request, scores)
        choice = Choice(ask, some, found, whole.roster, whole.levels, scores, pick, sides)
        # As of whole runs, what is predicted of the pick is recorded.
        leg = look(roster=self._fleet.prefill_roster(model, [choice.begins]), output_tokens=1.0)
        local = look(roster=self._fleet.roster(model, [some[choice.pick]]), priced=False)
        _, priced = disagg.pairs(leg, local, self._t, ask, output_tokens)
        found[choice.pick : choice.pick + len(priced)] = priced
        return choice

    def _commit(
        self, request: Request, endpoints: list[Endpoint], choice: Choice, reason: str | None = None
    ) -> None:
        """Reserve, and have it sent. `reason`: why it is a whole run, if that is known already."""
        event = request.event
        number, pick = choice.ask.attempt, choice.pick
        model, policy = self._fleet.models[event.model], self._policy(event.model)
        if event.model in self._fleet.apart:
            reason = self._count_kind(choice, reason, priced=policy.priced)
        self._count.decisions += 1
        decision = f"{self.config.gateway}-{self.config.gateway_epoch}-{self._count.decisions}"
        attempt = Attempt(number, choice.endpoints[pick], choice.found[pick], decision)
        begins = choice.leg
        if begins is not None:
            attempt.leg = Attempt(number, *begins, decision)
        self._reserve(request, attempt)
        policy.placed(choice.ask, attempt.endpoint)
        left_out = 0 if choice.sides is not None else len(endpoints) - len(choice.found)
        self._after.append(
            partial(self._placed, request, attempt, choice, model.decisions, left_out, reason or "", self._t)
        )
        model.decisions += 1
        self._out.append(
            Dispatch(
                request=event.request,
                attempt=number,
                endpoint=attempt.endpoint.name,
                decision=decision,
                prefill=begins[0].name if begins is not None else None,
            )
        )

    def _count_kind(self, choice: Choice, reason: str | None, *, priced: bool) -> str:
        """Count whether it is a pair, and why (`reason`, if that is known already)."""
        kind = disagg.PAIR if choice.picked.prefill else disagg.WHOLE
        if reason is None and kind is disagg.PAIR and not priced:
            reason = disagg.ALWAYS
        reason = reason or disagg.reason(choice.found, choice.pick)
        counts = self._count.disagg.setdefault(kind, {})
        counts[reason] = counts.get(reason, 0) + 1
        return reason

    def _placed(
        self,
        request: Request,
        attempt: Attempt,
        choice: Choice,
        number: int,
        left_out: int,
        reason: str,
        t: float,
    ) -> None:
        """Take note of a placement, the model's `number`th: record it, let its blocks be pending, and, if the
        policy goes by seconds, remember who used what.
        """
        event, name = request.event, request.event.model
        roster, levels, sides = choice.roster, choice.levels, choice.sides
        self._decisions[attempt.decision] = Decision(
            id=attempt.decision,
            t=t,
            request=event.request,
            attempt=attempt.number,
            model=name,
            tenant=event.tenant,
            policy=self.config.policy,
            number=number,
            prompt_tokens=event.prompt_tokens,
            candidates=choice.found,
            scores=choice.scores,
            pick=choice.pick,
            left_out=left_out,
            legs=sides.legs.candidates if sides is not None else [],
            reason=reason,
        )
        if len(self._decisions) > self.config.decisions_kept:
            self._decisions.popitem(last=False)
        self._computing.begin(request, attempt)
        if attempt.leg is not None:
            self._computing.begin(request, attempt.leg)
        self._gate.recognise(request)
        self._gate.placed(request, attempt.endpoint, attempt.candidate, t)
        if not self._policy(name).priced:
            return
        if sides is not None and attempt.leg is not None:
            block_tokens = self._fleet.block_tokens(name)
            legs, others = (
                [(side.endpoints[place], n) for place, n in beyond(looked.levels, side.places, 0).items()]
                for side, looked in ((sides.prefill, sides.legs), (sides.decode, sides.there))
            )
            lessons.placed_apart(event.keys, self._fleet.models[name], legs, others, block_tokens, attempt, t)
        else:
            model, block_tokens = self._fleet.models[name], self._fleet.block_tokens(name)
            reused = attempt.candidate.reused_tokens // block_tokens
            more = beyond(levels, roster.places, reused)
            left = [(roster.endpoints[place], blocks) for place, blocks in more.items()]
            lessons.placed(event.keys, model, left, block_tokens, attempt, t)
            if sides is not None:
                # It goes on where it decodes: copies at prefill endpoints are not wanted any more.
                for place in beyond(sides.legs.levels, sides.prefill.places, 0):
                    other = sides.prefill.endpoints[place]
                    if other.role is Role.PREFILL:
                        other.moved_away(event.keys)
            order_some(roster.endpoints, t, block_tokens, model.returns)

    # --- held requests ---

    def _freed(self, endpoint: Endpoint, *, anew: bool = False) -> None:
        """Something is over at `endpoint`, or was heard of it: it may take somebody who is held."""
        for pool in self._gate.pools_of(endpoint):
            self._serve(pool, anew=anew)

    def _serve(self, pool: str, *, anew: bool = False) -> None:
        self._catch_up()
        due_t = self._gate.serve(pool, self._t, self._place_held, anew=anew)
        if due_t is not None:
            self._out.append(WakeAt(at=due_t))

    def _place_held(
        self, held: Held, ahead_s: Mapping[str, float], home_open: bool
    ) -> tuple[str, float, float] | None:
        """Place a held request if its pick can begin soon. (pick, seconds until that can begin with another
        one, seconds of its prefill); None if no endpoint may take it.
        """
        request = held.request
        endpoints = self._fleet.candidates(request.event.model)
        if not endpoints:
            return None
        prefillers = self._fleet.prefillers(request.event.model)
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

    def _policy(self, model: str) -> Policy:
        policy = self._policies.get(model)
        if policy is None:
            policy = self._policies[model] = make_policy(self.config.policy, self.config)
        return policy

    def _reserve(self, request: Request, attempt: Attempt) -> None:
        event, where = request.event, attempt.computes
        endpoint, candidate = where.endpoint, where.candidate
        reused = candidate.reused_tokens
        new = event.prompt_tokens - reused
        start = endpoint.learner.start
        reservation = Reservation(
            request.owner,
            uncached_tokens=new,
            kv_tokens=event.prompt_tokens,
            work_ns=round((start.prefill_s(new, reused) - start.a_s) * 1e9),
            streamed=event.stream or where is not attempt,
            priority=event.priority,
        )
        self._ledger.reserve(reservation, endpoint.load, attempt.endpoint.load, self._t)
        if candidate.fetched_tokens and endpoint.lower is not None:
            endpoint.lower.begin(candidate, self._t)
        endpoint.dispatched += 1
        request.state, request.attempt = State.RUNNING, attempt
        if where is not attempt:
            attempt.endpoint.dispatched += 1

    # --- endpoints ---

    def _endpoint_up(self, event: EndpointUp) -> None:
        if event.role is not Role.BOTH:
            check_pairing(self.config.policy)
        known = self._fleet.endpoints.get(event.endpoint)
        was_refused = known is not None and known.unreachable_t is not None
        endpoint = self._fleet.upsert(event)
        endpoint.up = True
        endpoint.unreachable_t = None
        self._hear_start(endpoint, event.process_start_s)
        self._follow_events(endpoint, event)
        if endpoint.suspect is not None and endpoint.feed is None:
            # Nobody can say whether it is the same process.
            if was_refused:
                endpoint.recall.clear()
            endpoint.suspect = None
        self._grade(endpoint)
        for name, request in list(self._waiting.items()):
            if request.event.model in endpoint.models and self._place(request, may_hold=True):
                self._waiting.pop(name, None)
        self._freed(endpoint, anew=True)

    def _follow_events(self, endpoint: Endpoint, event: EndpointUp) -> None:
        """Begin to follow its KV events, or take them up again."""
        resumed = event.has_events and not endpoint.has_events
        endpoint.has_events = event.has_events and bool(event.models)
        feed = endpoint.feed
        if feed is not None:
            feed.sequence.replay = event.has_replay
            self._changed(endpoint, feed.source.serve(list(event.models)))
        if not endpoint.has_events:
            return
        model, block_tokens = self.key_name(event.models[0]), self._fleet.block_tokens(event.models[0])
        if feed is None or (feed.source.model, feed.source.block_tokens) != (model, block_tokens):
            feed = Feed(self._index, self.config, self._count, model, list(event.models), block_tokens)
            feed.sequence.replay = event.has_replay
            endpoint.attach(feed)
            if endpoint.lower is not None:
                endpoint.see_tiers(block_tokens)
            self._take(endpoint, feed.sequence.start(self._t))
        elif resumed or endpoint.suspect is not None:
            self._take(endpoint, feed.sequence.doubt(self._t, back=True))
        if resumed:
            endpoint.recall.clear()

    def _hear_start(self, endpoint: Endpoint, said_s: float | None) -> None:
        """What a process start time says: another process serves there, or the same one as before."""
        known_s = endpoint.process_start_s
        if _differ(known_s, said_s):
            if endpoint.feed is not None:
                sequence = endpoint.feed.sequence
                self._take(endpoint, sequence.start(self._t, cause=RESTARTED, restarted=True))
            else:
                self._new_life(endpoint, RESTARTED)
        elif known_s is not None and said_s is not None and not self._asks(endpoint):
            endpoint.suspect = None
            self._grade(endpoint)
        if said_s is not None:
            endpoint.process_start_s = said_s

    def _asks(self, endpoint: Endpoint) -> bool:
        """Whether missed events can be asked for: the answer says more than a start time does."""
        feed = endpoint.feed
        return feed is not None and endpoint.has_events and feed.sequence.replay

    def _endpoint_down(self, event: EndpointDown) -> None:
        endpoint = self._endpoint(event.endpoint)
        if endpoint is None:
            return
        endpoint.up = False
        if event.removed:
            self._fleet.remove(endpoint)
            for policy in self._policies.values():
                policy.gone(endpoint.name)
        else:
            self._suspect(endpoint, event.cause, ask=False)
        self._freed(endpoint)

    def _endpoint_suspect(self, event: EndpointSuspect) -> None:
        endpoint = self._endpoint(event.endpoint)
        if endpoint is not None:
            self._suspect(endpoint, event.cause)

    def _suspect(self, endpoint: Endpoint, cause: str, *, ask: bool = True) -> None:
        """Its blocks count for nothing until it is known who answers there; they are kept meanwhile."""
        self._count.suspicions += endpoint.suspect is None
        if endpoint.feed is None and endpoint.process_start_s is None:
            # It has no way to vouch for itself: forget at once.
            endpoint.recall.clear()
            return
        endpoint.suspect = cause
        if ask and endpoint.feed is not None and endpoint.has_events:
            self._take(endpoint, endpoint.feed.sequence.doubt(self._t))
        self._grade(endpoint)

    def _new_life(self, endpoint: Endpoint, cause: str) -> None:
        self._count.lives += 1
        endpoint.new_life()
        endpoint.suspect = None
        self._grade(endpoint, cause)

    def _signals(self, event: Signals) -> None:
        endpoint = self._endpoint(event.endpoint)
        if endpoint is None:
            return
        if endpoint.unreachable_t is not None and event.scraped_t >= endpoint.unreachable_t:
            endpoint.unreachable_t = None
        self._hear_start(endpoint, event.process_start_s)
        endpoint.observe_load(event)
        self._freed(endpoint)

    def _endpoint(self, name: str) -> Endpoint | None:
        endpoint = self._fleet.endpoints.get(name)
        self._count.stale_events += endpoint is None
        return endpoint

    def _grade(self, endpoint: Endpoint, happened: str = "") -> None:
        """Judge it anew; tell if that changes its grade, with what `happened` and what is so now."""
        endpoint.grade, why = endpoint.judge()
        if endpoint.grade is not endpoint.emitted_grade:
            endpoint.emitted_grade = endpoint.grade
            cause = why if happened in ("", why) else f"{happened}; {why}"
            self._out.append(GradeChanged(endpoint=endpoint.name, grade=endpoint.grade, cause=cause))

    # --- KV events ---

    def _engine_batch(self, event: EngineBatch) -> None:
        endpoint = self._endpoint(event.endpoint)
        if endpoint is None:
            return
        if endpoint.feed is None:
            self._count.stale_events += 1
            return
        sequence = endpoint.feed.sequence
        self._take(endpoint, sequence.replayed(event) if event.replayed else sequence.live(event))

    def _replay_ended(self, event: ReplayEnded) -> None:
        endpoint = self._endpoint(event.endpoint)
        if endpoint is not None and endpoint.feed is not None:
            self._take(endpoint, endpoint.feed.sequence.replay_ended(self._t, event.ok))

    def _residency(self, event: Residency) -> None:
        endpoint = self._endpoint(event.endpoint)
        if endpoint is None or endpoint.feed is None:
            return
        known = len(endpoint.feed.tiers)
        endpoint.feed.change(event.changes)
        if len(endpoint.feed.tiers) != known:
            endpoint.see_tiers(self._tokens(endpoint))
        self._computing.announced(endpoint, self._t)
        self._grade(endpoint)

    def _take(self, endpoint: Endpoint, step: Step) -> None:
        """Carry out what the order of its batches calls for."""
        feed = endpoint.feed
        assert feed is not None
        if step.forget is Forget.LIFE:
            self._new_life(endpoint, step.cause)
            endpoint.process_start_s = None
        elif step.forget is Forget.BLOCKS:
            feed.forget()
        changes = []
        for event in step.apply:
            changes += feed.read(event.batch)
        if step.replay_over:
            feed.source.drop_orphans()
        if step.ask_from is not None:
            self._out.append(AskReplay(endpoint=endpoint.name, from_seq=step.ask_from))
        if step.wake_at is not None:
            self._out.append(WakeAt(at=step.wake_at))
        if step.trusted:
            endpoint.suspect = None
        self._changed(endpoint, changes)
        self._grade(endpoint, step.cause)

    def _changed(self, endpoint: Endpoint, changes: list[Change]) -> None:
        """Take over what KV events, or their end, changed; in recorded logs this stands for it."""
        if changes:
            residency = Residency(t=self._t, endpoint=endpoint.name, changes=changes)
            if self._observer is not None:
                self._observer(residency)
            self._residency(residency)

    # --- time ---

    def _tick(self, event: Tick) -> None:
        for request in [r for r in self._waiting.values() if r.deadline_t <= self._t]:
            self._refuse_without_endpoint(request)
        for held in self._gate.expired(self._t):
            self._expired(held)
        for pool in self._gate.pools():
            self._serve(pool)
        for endpoint in self._fleet.endpoints.values():
            if endpoint.feed is not None:
                step = endpoint.feed.sequence.tick(self._t)
                if step != Step():
                    self._take(endpoint, step)

    def _expired(self, held: Held) -> None:
        """A held request's time is over. If there are endpoints that could begin with something, it waited
        for its own good, for the one that has its prefix: it goes there now and waits on.
        """
        request = held.request
        endpoints = self._fleet.candidates(request.event.model)
        if not endpoints:
            self._refuse_without_endpoint(request)
        elif not self._gate.open([*endpoints, *self._fleet.prefillers(request.event.model)], self._t):
            waited = f"no endpoint could begin with it within {self._t - held.queued_t:.3g} s"
            self._refuse(request.event.request, 429, "rejected-ttl-expired", waited)
        else:
            self._gate.leave(request, self._t)
            prefillers = self._fleet.prefillers(request.event.model)
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

    def decision(self, decision: str) -> Decision | None:
        """A recent decision by its id."""
        self._catch_up()
        return self._decisions.get(decision)

    def decisions(self, last: int = 100) -> list[Decision]:
        """The newest decisions, oldest first."""
        self._catch_up()
        return list(self._decisions.values())[-last:]

    def outcomes(self, last: int = 100) -> list[Outcome]:
        """The newest outcomes, oldest first."""
        return list(self._outcomes)[-last:]

    def fleet_view(self) -> list[EndpointView]:
        """Every endpoint as the router knows it now."""
        self._catch_up()
        return [view(e, self._t, self._tokens(e)) for e in self._fleet.endpoints.values()]

    def _tokens(self, endpoint: Endpoint) -> int:
        return self._fleet.block_tokens(endpoint.models[0] if endpoint.models else "")

    def counters(self) -> Counters:
        """What was counted so far (a copy)."""
        self._catch_up()
        count = self._count
        feeds = [e.feed for e in self._fleet.endpoints.values() if e.feed is not None]
        return msgspec.structs.replace(
            count,
            refused=dict(count.refused),
            finished=dict(count.finished),
            disagg={kind: dict(reasons) for kind, reasons in count.disagg.items()},
            requests_now=len(self._requests),
            waiting_now=len(self._waiting),
            held_now=self._gate.held_now(),
            saturation_now=self._gate.saturation(self._t),
            jain_now=self._gate.jain(self._t),
            index_blocks_now=len(self._index),
            index_bytes_now=self._index.estimated_bytes,
            index_refused_blocks=self._index.refused_blocks,
            orphan_blocks_now=sum(feed.source.orphan_blocks for feed in feeds),
        )

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


def _differ(known_s: float | None, said_s: float | None) -> bool:
    """Whether two process start times are of two processes. Not if one is unknown."""
    return known_s is not None and said_s is not None and abs(said_s - known_s) > SAME_START_S


def _recordable(event: Event) -> Event:
    """The event without text and token ids. A batch keeps what orders it; `Residency` says what it meant."""
    if not isinstance(event, EngineBatch) or not event.batch.events:
        return event
    b = event.batch
    return msgspec.structs.replace(
        event, batch=EventBatch(seq=b.seq, ts=b.ts, events=[], rank=b.rank, skipped=b.skipped)
    )

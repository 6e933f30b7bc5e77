"""The attempts of requests, from the choice that begins one to its end: who is to hear of each step.

Reserving is done at once, so that the next choice sees it. What else follows from a placement (its record,
pending blocks, charges, who used what last) is left for later: it changes nothing of what is answered, and is
caught up on before the next event is taken or anything is asked.

What a step teaches is in `lessons`; when a request gets another attempt is for the `router` to say.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

from sumibi.routing import disagg, lessons
from sumibi.routing.choosing import Choice, Choosing
from sumibi.routing.computing import Computing
from sumibi.routing.config import RouterConfig
from sumibi.routing.counters import Counters
from sumibi.routing.decisions import Decision, Outcome
from sumibi.routing.events import Dispatch, Finished, FinishReason, Role
from sumibi.routing.fleet import Fleet
from sumibi.routing.gate import Gate
from sumibi.routing.hints import Hints
from sumibi.routing.ledger import Ledger, Reservation
from sumibi.routing.levels import beyond
from sumibi.routing.placing import order_some
from sumibi.routing.requests import Attempt, Request, State


class Attempts:
    """What attempts do to ledger, pending blocks, queues and what is learnt; and their records."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        ledger: Ledger,
        computing: Computing,
        gate: Gate,
        choosing: Choosing,
        hints: Hints,
        count: Counters,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._ledger = ledger
        self._computing = computing
        self._gate = gate
        self._choosing = choosing
        self._hints = hints
        self._count = count
        self._after: list[Callable[[], None]] = []
        """What is left to do of placements."""
        self.decisions: OrderedDict[str, Decision] = OrderedDict()
        """The newest, by id, the oldest of them first."""
        self.outcomes: deque[Outcome] = deque(maxlen=config.decisions_kept)

    # --- begin ---

    def begin(
        self, request: Request, choice: Choice, left_out: int, reason: str | None, t: float
    ) -> Dispatch:
        """Reserve what was chosen at `t`. `left_out`: endpoints that were not priced; `reason`: why it is a
        whole run, if that is known already.
        """
        event = request.event
        number, pick = choice.ask.attempt, choice.pick
        model, policy = self._fleet.models[event.model], self._choosing.policy(event.model)
        if event.model in self._fleet.apart:
            reason = self._count_kind(choice, reason, priced=policy.priced)
        self._count.decisions += 1
        decision = f"{self._config.gateway}-{self._config.gateway_epoch}-{self._count.decisions}"
        attempt = Attempt(number, choice.endpoints[pick], choice.found[pick], decision)
        begins = choice.leg
        if begins is not None:
            attempt.leg = Attempt(number, *begins, decision)
        self._reserve(request, attempt, t)
        policy.placed(choice.ask, attempt.endpoint)
        self._after.append(
            partial(self._placed, request, attempt, choice, model.decisions, left_out, reason or "", t)
        )
        model.decisions += 1
        return Dispatch(
            request=event.request,
            attempt=number,
            endpoint=attempt.endpoint.name,
            decision=decision,
            prefill=begins[0].name if begins is not None else None,
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

    def _reserve(self, request: Request, attempt: Attempt, t: float) -> None:
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
        self._ledger.reserve(reservation, endpoint.load, attempt.endpoint.load, t)
        if candidate.fetched_tokens and endpoint.lower is not None:
            endpoint.lower.begin(candidate, t)
        endpoint.dispatched += 1
        attempt.endpoint.arrivals.one(t)
        request.state, request.attempt = State.RUNNING, attempt
        if where is not attempt:
            attempt.endpoint.dispatched += 1

    # --- what was put off ---

    @property
    def behind(self) -> bool:
        """Whether something is left to do."""
        return bool(self._after)

    def catch_up(self, t: float) -> None:
        """Do it. `t`: of the event that is being taken, or was taken last."""
        if self._after:
            for work in self._after:
                work()
            self._after.clear()
            self._fleet.settle(t)

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
        event, sides = request.event, choice.sides
        self.decisions[attempt.decision] = Decision(
            id=attempt.decision,
            t=t,
            request=event.request,
            attempt=attempt.number,
            model=event.model,
            tenant=event.tenant,
            policy=self._config.policy,
            number=number,
            prompt_tokens=event.prompt_tokens,
            candidates=choice.found,
            scores=choice.scores,
            pick=choice.pick,
            left_out=left_out,
            legs=sides.legs.candidates if sides is not None else [],
            reason=reason,
        )
        if len(self.decisions) > self._config.decisions_kept:
            self.decisions.popitem(last=False)
        self._computing.begin(request, attempt)
        if attempt.leg is not None:
            self._computing.begin(request, attempt.leg)
        self._gate.recognise(request)
        self._gate.placed(request, attempt.endpoint, attempt.candidate, t)
        self._hints.goes_on(event.keys, t)
        if self._choosing.policy(event.model).priced:
            self._used(request, attempt, choice, t)

    def _used(self, request: Request, attempt: Attempt, choice: Choice, t: float) -> None:
        """Remember whose blocks it goes on with, and whose it leaves."""
        event, sides = request.event, choice.sides
        model, block_tokens = self._fleet.models[event.model], self._fleet.block_tokens(event.model)
        if sides is not None and attempt.leg is not None:
            legs, others = (
                [(side.endpoints[place], n) for place, n in beyond(looked.levels, side.places, 0).items()]
                for side, looked in ((sides.prefill, sides.legs), (sides.decode, sides.there))
            )
            lessons.placed_apart(event.keys, model, legs, others, block_tokens, attempt, t)
            return
        roster = choice.roster
        reused = attempt.candidate.reused_tokens // block_tokens
        more = beyond(choice.levels, roster.places, reused)
        left = [(roster.endpoints[place], blocks) for place, blocks in more.items()]
        lessons.placed(event.keys, model, left, block_tokens, attempt, t)
        if sides is not None:
            # It goes on where it decodes: copies at prefill endpoints are not wanted any more.
            for place in beyond(sides.legs.levels, sides.prefill.places, 0):
                other = sides.prefill.endpoints[place]
                if other.role is Role.PREFILL:
                    other.moved_away(event.keys)
        order_some(roster.endpoints, t, block_tokens, model.returns)

    # --- under way ---

    def dispatched(self, attempt: Attempt, endpoint: str, t: float) -> bool:
        """It left for `endpoint`: all of it, or one of the two halves of a pair. False if that is known."""
        leg = attempt.leg
        if leg is None:
            if attempt.dispatched_t is not None:
                return False
            lessons.dispatched(attempt, t)
        elif endpoint == leg.endpoint.name and leg.dispatched_t is None:
            attempt.dispatched_t = t
            lessons.dispatched(leg, t)
        elif endpoint == attempt.endpoint.name and attempt.sent_t is None:
            attempt.sent_t = t
        else:
            return False
        return True

    def leg_over(self, request: Request, leg: Attempt, cached_tokens: int | None, t: float) -> None:
        """Its prompt is computed: the prefill endpoint is free for the next, and has its blocks."""
        leg.endpoint.unreachable_t = None
        self._prompt_stored(request, leg, t)
        self._computing.computed(request, leg, t)
        self._computing.end(request, leg, t, computed=True)
        if leg.current and not request.announced(leg.endpoint):
            lessons.remember(request, leg, cached_tokens, self._fleet)

    def first_token(self, request: Request, attempt: Attempt, t: float) -> None:
        """It came."""
        attempt.endpoint.unreachable_t = None
        leg = attempt.leg
        if leg is None:
            self._prompt_stored(request, attempt, t)
            return
        if leg.first_token_t is None:
            self.leg_over(request, leg, None, t)
        lessons.transferred(request, attempt, t)

    def decodes(self, request: Request, attempt: Attempt, t: float) -> None:
        """All of its prompt is behind it."""
        self._choosing.policy(request.event.model).first_token(request.event.request)
        self._computing.computed(request, attempt, t)

    def _prompt_stored(self, request: Request, attempt: Attempt, t: float) -> None:
        lessons.first_token(request, attempt, self._ledger, t)
        lessons.stored(request, attempt, self._fleet)

    # --- end ---

    def end(self, request: Request, attempt: Attempt, event: Finished) -> None:
        """Release, learn, record."""
        t, model = event.t, self._fleet.models[request.event.model]
        endpoint, leg = attempt.endpoint, attempt.leg
        decodes = attempt.life.decodes
        lessons.idle(request.event.keys, model, attempt, t)
        computed = lessons.finished(request, attempt, self._ledger, event)
        self._computing.end(request, attempt, t, computed=computed)
        if leg is not None:
            lessons.let_go(leg, t)
            if leg.first_token_t is None:
                self._computing.end(request, leg, t, computed=computed)
        self._choosing.policy(request.event.model).ended(event.request, event)
        if computed and event.cached_tokens is not None:
            self._count.predicted_cached_tokens += attempt.candidate.reused_tokens
            self._count.actual_cached_tokens += event.cached_tokens
            self._count.reported_prompt_tokens += event.prompt_tokens or request.event.prompt_tokens
        if computed and attempt.first_token_t is None:
            lessons.stored(request, attempt, self._fleet)
        if computed and attempt.current and not request.announced(endpoint):
            lessons.remember(request, attempt, event.cached_tokens, self._fleet)
        if event.reason is FinishReason.STOP:
            lessons.answer(request, attempt, model, event, decodes)
            if self._choosing.policy(request.event.model).priced:
                self._hints.over(request, attempt, t)
        if computed:
            self._gate.ended(request, event)
        self.outcomes.append(lessons.outcome(request, attempt, event))

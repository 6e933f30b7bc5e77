"""What attempts teach: latency models, usual lengths, and what endpoints without KV events remember."""

from collections.abc import Sequence
from typing import Final

from sumibi.routing.busy import BUSY_PERIOD_PREFILLS
from sumibi.routing.decisions import Outcome
from sumibi.routing.endpoint import TYPICAL_RATE, Endpoint
from sumibi.routing.events import Finished, FinishReason
from sumibi.routing.fleet import Fleet, Model
from sumibi.routing.ledger import Ledger
from sumibi.routing.requests import Attempt, Request

FETCHED: Final = 0.2
FETCHED_ALONE: Final = 1.0
"""A stretch of prefills teaches how long these take if fetches were at most this part of it. A single prefill
does, if its fetch took at most as long as the rest."""


def placed(
    keys: Sequence[int],
    model: Model,
    matched: Sequence[tuple[Endpoint, int]],
    block_tokens: int,
    attempt: Attempt,
    t: float,
) -> None:
    """A request was placed: who used what last, who works. `matched` blocks of its prompt are at each
    endpoint that it might have gone to and that has more of it.
    """
    endpoint, reused = attempt.endpoint, attempt.candidate.reused_tokens // block_tokens
    left = [
        e
        for e, b in matched
        if b > reused and e is not endpoint and e.lasting(b, keys, block_tokens) > reused
    ]
    model.returns.used(keys, t)
    attempt.prompt = endpoint.recency.begin(keys, t)
    if endpoint.lower is not None:
        endpoint.lower.used(keys, t)
    _worked(attempt, keys, block_tokens, t)
    for other in left:
        other.moved_away(keys)


def placed_apart(
    keys: Sequence[int],
    model: Model,
    at_prefill: Sequence[tuple[Endpoint, int]],
    at_decode: Sequence[tuple[Endpoint, int]],
    block_tokens: int,
    attempt: Attempt,
    t: float,
) -> None:
    """The same of a pair: its conversation has a copy on either side."""
    leg = attempt.computes
    both = leg.endpoint, attempt.endpoint
    sides = (
        (at_prefill, attempt.candidate.reused_tokens // block_tokens),
        (at_decode, attempt.candidate.local_tokens // block_tokens),
    )
    left = dict.fromkeys(
        e
        for matched, reused in sides
        for e, b in matched
        if b > reused and e not in both and e.lasting(b, keys, block_tokens) > reused
    )
    model.returns.used(keys, t)
    for each in (leg, attempt):
        each.prompt = each.endpoint.recency.begin(keys, t)
        if each.endpoint.lower is not None:
            each.endpoint.lower.used(keys, t)
    _worked(leg, keys, block_tokens, t)
    for other in left:
        other.moved_away(keys)


def _worked(attempt: Attempt, keys: Sequence[int], block_tokens: int, t: float) -> None:
    """A prefill was placed."""
    learner, candidate = attempt.endpoint.learner, attempt.candidate
    work_s = candidate.compute_s - learner.start.a_s * learner.fixed_factor
    blocks = len(keys)
    new = 1.0 - candidate.reused_tokens / (blocks * block_tokens) if blocks else 1.0
    attempt.endpoint.worked(max(0.0, work_s) / learner.work_factor, max(0.0, new), t)


def idle(keys: Sequence[int], model: Model, attempt: Attempt, t: float) -> None:
    """An attempt is over: what it used begins to age."""
    if attempt.prompt is not None:
        model.returns.ended(keys, t)
        let_go(attempt, t)


def let_go(attempt: Attempt, t: float) -> None:
    """Its KV is not in use any more where it was placed; of a leg: it has been fetched. Once or more."""
    if attempt.prompt is not None and attempt.current:
        attempt.endpoint.recency.end(attempt.prompt, t)
    attempt.prompt = None


def dispatched(attempt: Attempt, t: float) -> None:
    """The request left for its endpoint: a busy period begins unless one is under way."""
    attempt.dispatched_t = t
    busy = attempt.endpoint.busy
    if attempt.current and busy.since_t is None:
        busy.reset(t)


def first_token(request: Request, attempt: Attempt, ledger: Ledger, t: float) -> None:
    """The prefill is over: release its part; at the end of a busy period learn how long prefills take."""
    attempt.first_token_t = t
    endpoint, load = attempt.endpoint, attempt.life
    learner = endpoint.learner
    learner.sync()
    reservation = load.prefills[request.owner]
    work_ns = reservation.work_ns
    served_s = learner.start.a_s * learner.fixed_factor + work_ns * 1e-9 * learner.work_factor
    ledger.end_prefill(request.owner, t, served_s)
    attempt.decodes = load.decodes
    if not attempt.current:
        return
    endpoint.typical_prefill_s += TYPICAL_RATE * (served_s - endpoint.typical_prefill_s)
    busy = endpoint.busy
    busy.prefills += 1
    busy.work_ns += work_ns
    busy.sound = busy.sound and reservation.streamed and attempt.dispatched_t is not None
    busy.fetch_s += attempt.candidate.fetch_s
    if not load.prefills or busy.prefills >= BUSY_PERIOD_PREFILLS:
        if busy.sound and busy.since_t is not None:
            lasted_s = t - busy.since_t
            most = FETCHED
            if busy.prefills == 1:
                # Nobody else was computed while it waited for what it fetched.
                lasted_s -= busy.fetch_s
                most = FETCHED_ALONE
            if busy.fetch_s <= most * lasted_s:
                learner.observe_prefill(lasted_s, busy.prefills, busy.work_ns * 1e-9)
        busy.reset(t if load.prefills else None)


def transferred(request: Request, attempt: Attempt, t: float) -> None:
    """The first token of a pair: its KV has come. Learn how long that takes, if it waited for that alone."""
    leg = attempt.computes
    attempt.first_token_t = t
    attempt.decodes = attempt.life.decodes
    let_go(leg, t)
    candidate = attempt.candidate
    begun_t = attempt.sent_t if attempt.sent_t is not None else leg.first_token_t
    if begun_t is None or leg.first_token_t is None or candidate.room_s or not request.event.stream:
        return
    if attempt.current and candidate.transfer_s:
        transfers = attempt.endpoint.transfers
        lacking = request.event.prompt_tokens - candidate.local_tokens
        moved_s = transfers.predict_s(lacking, leg.endpoint.transfers.link)
        transfers.observe(t - max(begun_t, leg.first_token_t), candidate.transfer_s, moved_s)


def stored(request: Request, attempt: Attempt, fleet: Fleet) -> None:
    """Its prompt is computed: the stores that its endpoint writes to have it now."""
    lower = attempt.endpoint.lower
    if lower is not None and attempt.current:
        for store in lower.stores:
            store.computed(request.event.keys, fleet.key_name(request.event.model))


def finished(request: Request, attempt: Attempt, ledger: Ledger, event: Finished) -> bool:
    """The attempt is over: release what is left of it. True if its prompt was computed, or came to be where
    its answer was generated.
    """
    where = attempt.computes
    endpoint, load = where.endpoint, where.life
    in_prefill = request.owner in load.prefills
    ledger.release(request.owner, event.t)
    if in_prefill and where.current:
        # Nobody knows how much of its work was done, so this period teaches nothing.
        if load.prefills:
            endpoint.busy.sound = False
        else:
            endpoint.busy.reset(None)
    if where is not attempt:
        in_prefill = attempt.first_token_t is None
    return not in_prefill or event.reason is FinishReason.STOP


def remember(request: Request, attempt: Attempt, cached_tokens: int | None, fleet: Fleet) -> None:
    """The endpoint has computed this prompt, or fetched it, and no events tell of it."""
    name, keys, recall = request.event.model, request.event.keys, attempt.endpoint.recall
    if name not in attempt.endpoint.models:
        return  # it left meanwhile, and may come back with other weights
    if cached_tokens is not None and attempt.leg is None:
        block_tokens = fleet.block_tokens(name)
        believed, cached = (
            (attempt.candidate.matched_tokens + attempt.candidate.fetched_tokens) // block_tokens,
            cached_tokens // block_tokens,
        )
        if cached < believed:
            recall.correct(keys[:believed], cached)
        else:
            recall.found(keys, cached)
    recall.remember(keys, fleet.key_name(name))


def answer(request: Request, attempt: Attempt, model: Model, event: Finished, decodes: int) -> None:
    """A whole answer: learn its length and, if it was streamed, the time of a step: `decodes` are there at
    its end, itself included.
    """
    output = event.output_tokens
    if output is None:
        return
    model.answers += 1
    rate = max(TYPICAL_RATE, 1 / (1 + model.answers))  # what was expected at first is one answer among others
    model.output_tokens += rate * (output - model.output_tokens)
    if output > 1 and request.event.stream and attempt.first_token_t is not None and attempt.current:
        step_s = (event.t - attempt.first_token_t) / (output - 1)
        context = request.event.prompt_tokens + output / 2
        attempt.endpoint.learner.observe_decode(step_s, max(1.0, (attempt.decodes + decodes) / 2), context)


def outcome(request: Request, attempt: Attempt, event: Finished) -> Outcome:
    """Predicted beside actual, for the record."""
    ttft_s = None
    if request.event.stream and attempt.first_token_t is not None and attempt.dispatched_t is not None:
        ttft_s = attempt.first_token_t - attempt.dispatched_t
    return Outcome(
        decision=attempt.decision,
        t=event.t,
        request=event.request,
        attempt=attempt.number,
        model=request.event.model,
        endpoint=attempt.endpoint.name,
        reason=event.reason,
        prompt_tokens=request.event.prompt_tokens,
        predicted_cached_tokens=attempt.candidate.reused_tokens,
        cached_tokens=event.cached_tokens,
        predicted_ttft_s=attempt.candidate.ttft_s + attempt.overhead_s,
        ttft_s=ttft_s,
        output_tokens=event.output_tokens,
        prefill=attempt.leg.endpoint.name if attempt.leg is not None else "",
    )

"""What attempts teach: latency models, usual lengths, and what endpoints without KV events remember."""

from collections.abc import Sequence

from sumibi.routing.decisions import Outcome
from sumibi.routing.events import Finished, FinishReason
from sumibi.routing.fleet import BUSY_PERIOD_PREFILLS, TYPICAL_RATE, Endpoint, Fleet, Model
from sumibi.routing.ledger import Ledger
from sumibi.routing.requests import Attempt, Request


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
    endpoint.worked(attempt.candidate.compute_s, t)
    for other in left:
        other.moved_away(keys)


def idle(keys: Sequence[int], model: Model, attempt: Attempt, t: float) -> None:
    """An attempt is over: what it used begins to age."""
    if attempt.prompt is not None:
        model.returns.ended(keys, t)
        if attempt.current:
            attempt.endpoint.recency.end(attempt.prompt, t)


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
    work_ns = load.prefills[request.owner].work_ns
    served_s = learner.start.a_s * learner.fixed_factor + work_ns * 1e-9 * learner.work_factor
    ledger.end_prefill(request.owner, t, served_s)
    attempt.decodes = load.decodes
    if not attempt.current:
        return
    endpoint.typical_prefill_s += TYPICAL_RATE * (served_s - endpoint.typical_prefill_s)
    busy = endpoint.busy
    busy.prefills += 1
    busy.work_ns += work_ns
    busy.sound = busy.sound and request.event.stream and attempt.dispatched_t is not None
    if not load.prefills or busy.prefills >= BUSY_PERIOD_PREFILLS:
        if busy.sound and busy.since_t is not None:
            learner.observe_prefill(t - busy.since_t, busy.prefills, busy.work_ns * 1e-9)
        busy.reset(t if load.prefills else None)


def finished(request: Request, attempt: Attempt, ledger: Ledger, event: Finished) -> bool:
    """The attempt is over: release what is left of it. True if its prompt was computed."""
    endpoint, load = attempt.endpoint, attempt.life
    in_prefill = request.owner in load.prefills
    ledger.release(request.owner, event.t)
    if in_prefill and attempt.current:
        # Nobody knows how much of its work was done, so this period teaches nothing.
        if load.prefills:
            endpoint.busy.sound = False
        else:
            endpoint.busy.reset(None)
    return not in_prefill or event.reason is FinishReason.STOP


def remember(request: Request, attempt: Attempt, event: Finished, fleet: Fleet) -> None:
    """The endpoint has computed this prompt and no events tell of it."""
    name, keys, recall = request.event.model, request.event.keys, attempt.endpoint.recall
    if name not in attempt.endpoint.models:
        return  # it left meanwhile, and may come back with other weights
    if event.cached_tokens is not None:
        block_tokens = fleet.block_tokens(name)
        believed, cached = (
            attempt.candidate.matched_tokens // block_tokens,
            event.cached_tokens // block_tokens,
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
    model.output_tokens += TYPICAL_RATE * (output - model.output_tokens)
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
    )

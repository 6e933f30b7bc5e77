"""What a request costs at an endpoint, in seconds, by its parts.

    total = max(wait, pending) + compute + delay + evict

Each part is time that somebody spends because the request goes there, so they add without weights:

wait     until the endpoint can begin: the prefills reserved before it (engines serve them in order of
         arrival, or the shortest first; all of them is right for the first kind and careful for the
         second), what foreign requests wait there, and a place in the batch where that is full.
pending  until blocks that another request is computing there are done. Its prefill is part of the wait
         already, hence the maximum. Pending blocks are never a hit.
compute  prefill of the tokens that are neither there nor pending.
delay    for those decoding there: each stands still while this prefill is computed, and each later step
         is longer by one sequence.
evict    to recompute what this request pushes out of the cache: each token put where the fill is x (0..1)
         costs x^2 prefills of a token, times how often a token once computed is wanted again (`reuse`,
         learnt from the traffic: near 0 for one-shot prompts, many for agents). The square stands for the
         chance that what fits today does not tomorrow, as those who are there grow; past the end of the
         cache something is lost for certain. Full caches all cost the same, so this balances
         conversations while there is room and protects them where there is none.

Times come from the endpoint's own latency model as learnt so far.
"""

from sumibi.routing.decisions import Candidate
from sumibi.routing.fleet import Endpoint


def price(
    endpoint: Endpoint,
    t: float,
    *,
    prompt_tokens: int,
    matched_tokens: int,
    pending_tokens: int,
    pending_s: float,
    output_tokens: float,
    reuse: float,
    block_tokens: int,
) -> Candidate:
    """The cost of one request at one endpoint, now. `output_tokens` is what it is expected to generate."""
    learner, load = endpoint.learner, endpoint.load
    learner.sync()
    start, work_factor, decode_factor = learner.start, learner.work_factor, learner.decode_factor
    foreign_running, foreign_waiting = endpoint.foreign(t) if endpoint.has_foreign else (0.0, 0.0)

    reused = matched_tokens + pending_tokens
    new = prompt_tokens - reused
    work_s = new * (start.b_s + start.q_s * (reused + new / 2))
    compute_s = start.a_s * learner.fixed_factor + work_s * work_factor

    inflight = load.inflight + foreign_running + foreign_waiting
    wait_s = foreign_waiting * endpoint.typical_prefill_s
    if load.prefills:
        wait_s += endpoint.prefill_left_s(t)
    decodes = load.decodes + foreign_running
    context = prompt_tokens + output_tokens / 2
    step_growth_s = decode_factor * (start.d1_s + start.d2_s * context)
    places = endpoint.max_sequences
    if places and inflight >= places:
        step_s = start.d0_s * decode_factor + places * step_growth_s
        wait_s += (inflight - places + 1) / places * output_tokens * step_s
    delay_s = decodes * (compute_s + output_tokens * step_growth_s)

    evict_s = 0.0
    capacity = endpoint.kv_tokens
    if capacity:
        needed = new + output_tokens
        used = min(endpoint.resident_blocks() * block_tokens + load.prefill_tokens, capacity)
        within = min(needed, capacity - used)
        weight = ((used + within) ** 3 - used**3) / (3 * capacity**2) + (needed - within)
        evict_s = reuse * weight * work_factor * (start.b_s + start.q_s * needed / 2)

    return Candidate(
        endpoint.name,
        endpoint.grade,
        matched_tokens,
        pending_tokens,
        wait_s,
        pending_s,
        compute_s,
        delay_s,
        evict_s,
        (wait_s if wait_s > pending_s else pending_s) + compute_s + delay_s + evict_s,
        inflight,
        load.prefill_tokens,
        endpoint.dispatched,
    )

"""What a request costs at an endpoint, in seconds, by its parts.

    total = max(wait, pending) + compute + delay + evict + balance

Each part is time that somebody spends because the request goes there, so they add without weights:

wait     until the endpoint can begin: the prefills reserved before it (engines serve them in order of
         arrival, or the shortest first; all of them is right for the first kind and careful for the
         second), what foreign requests wait there, what is held back for it (`flow`), and a place in the
         batch where that is full.
pending  until blocks that another request is computing there are done. Its prefill is part of the wait
         already, hence the maximum. Pending blocks are never a hit.
compute  prefill of the tokens that are neither there nor pending.
delay    for those decoding there: each stands still while this prefill is computed, and each later step
         is longer by one sequence. Those of a higher priority count for more, of a lower one for less.
evict    to recompute what this request pushes out of the cache: the blocks used longest ago, each stretch
         times the chance that it is wanted again after so long (`recency`, `returns`). Nothing while there
         is room, little where finished conversations lie, much where a cache is full of live ones. And
         since those grow: each second of prefill that is stored where live ones fill the part x of the
         cache costs CROWD*x^2 more.
balance  conversations stay, so an endpoint that computed more than its share lately will be asked for more:
         each second given to it meets a queue more often than elsewhere. See `imbalance`.

Times come from the endpoint's own latency model as learnt so far.
"""

from sumibi.routing.decisions import Candidate
from sumibi.routing.fleet import Endpoint
from sumibi.routing.returns import ReturnTimes

CROWD = 0.3
IDLE_SHARE = 0.01
"""Utilisation that an endpoint is taken to have beside what we know: differences far below do not count."""
MILD, FREE_EXCESS, STEEP = 0.05, 0.1, 2.0
"""A second of prefill on an endpoint whose share is x above the mean costs MILD*x more and, beyond
FREE_EXCESS, STEEP for each further unit of x. Chosen on agents' sessions (docs/decisions/0013)."""


def imbalance(busy_share: float, added_share: float, mean_share: float) -> float:
    """Seconds that one second of prefill costs beyond itself at an endpoint with this share of busy time.

    Shares are of time, 0..1; `added_share` is what this request adds to it.
    """
    level = mean_share + IDLE_SHARE
    excess = (busy_share - mean_share) / level
    return MILD * excess + STEEP * max(0.0, excess + added_share / 2 / level - FREE_EXCESS)


def price(
    endpoint: Endpoint,
    t: float,
    *,
    prompt_tokens: int,
    matched_tokens: int,
    pending_tokens: int,
    pending_s: float,
    output_tokens: float,
    block_tokens: int,
    mean_share: float,
    returns: ReturnTimes,
    ahead_s: float = 0.0,
    priority: int = 0,
) -> Candidate:
    """The cost of one request at one endpoint, now. `output_tokens` is what it is expected to generate,
    `mean_share` the mean over all candidates of the share of time in which they computed prefills.
    """
    learner, load = endpoint.learner, endpoint.load
    learner.sync()
    start, work_factor, decode_factor = learner.start, learner.work_factor, learner.decode_factor
    foreign_running, foreign_waiting = endpoint.foreign(t) if endpoint.has_foreign else (0.0, 0.0)

    reused = matched_tokens + pending_tokens
    new = prompt_tokens - reused
    work_s = new * (start.b_s + start.q_s * (reused + new / 2)) * work_factor
    compute_s = start.a_s * learner.fixed_factor + work_s

    inflight = load.inflight + foreign_running + foreign_waiting
    wait_s = ahead_s + foreign_waiting * endpoint.typical_prefill_s
    if load.prefills:
        wait_s += endpoint.prefill_left_s(t)
    decodes = foreign_running + (load.decode_weight(priority) if load.decodes else 0.0)
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
        recency = endpoint.order_victims(t, block_tokens, returns)
        needed = min(new + output_tokens, capacity)
        live_tokens = recency.live_blocks * block_tokens + load.prefill_tokens
        crowd = min(1.0, (live_tokens + needed / 2) / capacity)
        evict_s = work_s * CROWD * crowd * crowd
        over = needed - max(0, capacity - endpoint.resident_blocks() * block_tokens - load.prefill_tokens)
        if over > 0:
            evict_s += recency.loss_s(-int(-over // block_tokens)) * work_factor

    balance_s = work_s * imbalance(endpoint.busy_share(t), work_s / endpoint.SHARE_WINDOW_S, mean_share)

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
        balance_s,
        (wait_s if wait_s > pending_s else pending_s) + compute_s + delay_s + evict_s + balance_s,
        inflight,
        load.prefill_tokens,
        endpoint.dispatched,
    )

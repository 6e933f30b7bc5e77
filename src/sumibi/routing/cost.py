"""What a request costs at an endpoint, in seconds, by its parts.

    total = max(wait, pending, room) + fetch + compute + delay + evict + balance

Each part is time that somebody spends because the request goes there, so they add without weights:

wait     until the endpoint can begin: the prefills reserved before it (engines serve them in order of
         arrival, or the shortest first; all of them is right for the first kind and careful for the
         second), what foreign requests wait there, what is held back for it (`flow`), and a place in the
         batch where that is full.
pending  until blocks that another request is computing there are done. Its prefill is part of the wait
         already, hence the maximum. Pending blocks are never a hit.
room     until enough of those who run there are over, where their KV leaves too little for this one.
fetch    until what lies below the device has come to it (`lower`). The endpoint computes for others
         meanwhile, so nobody else waits for it.
compute  prefill of the tokens that are neither there, on the device or below, nor pending.
delay    for those decoding there: each stands still while this prefill is computed (DECODE), and each
         later step is longer by one sequence (LONGER). Those of a higher priority count for more, of a lower
         one for less. And for those expected back while it is computed, by the times after which prefixes
         returned so far (`returns`): they will have to wait for what is left of it. On an endpoint whose
         role is to decode standing still costs more (STALL), and those count as well who will come there
         meanwhile: one whose prompt is being computed elsewhere, and as many as came lately.
evict    to recompute what this request pushes out of the cache: the blocks used longest ago, each stretch
         times the chance that it is wanted again after so long (`recency`). Little where finished
         conversations lie, much where a cache is full of live ones. And for what will be pushed
         out as live ones grow (CROWD). What goes to a tier below costs the fetch, not the prefill, by
         the same chance; what falls out of that one is lost, unless a store has it.
balance  the prefill itself, wherever it is computed (WORK), more where more than its share was computed
         lately: conversations stay, so such an endpoint will be asked for more. And for those that will
         follow a prompt that is new: it settles where it is computed, they decode beside whom settled there
         before (FOLLOWERS).

The few constants are exchange rates between kinds of seconds. They were chosen on the agents' sessions, the
ladder W2 and W12 together (docs/decisions/0016) and are the same for every fleet.

Times come from the endpoint's own latency model as learnt so far.
"""

from typing import Final

from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Role
from sumibi.routing.fading import faded_s
from sumibi.routing.lower import NO_FETCH, Fetch, Kind
from sumibi.routing.spread import Spread

WORK: Final = 0.3
"""A second of prefill costs so much more than the seconds it is waited for: even an idle endpoint will be
wanted. So a prefix that is being computed is waited for a little rather than computed once more."""
DECODE: Final = 0.2
"""A second in which an answer that streams already stands still counts less than one before its first
token."""
STALL: Final = 2.5
"""Not where prompts are computed elsewhere so that answers need not stand still: there a second of standing
still counts so much."""
LONGER: Final = 0.1
"""A second that is spread over the steps of an answer counts still less: nobody sees a gap."""
RETURNS: Final = 0.5
"""Those expected back count half: they may be sent elsewhere, if that is better for them."""
EVICT: Final = 1.5
"""What is lost is computed again on an endpoint that has others to serve: they wait as well."""
CROWD: Final = 5.0
POWER: Final = 4
"""Storing a second of prefill where live conversations fill the part x of a cache costs CROWD*x^POWER: they
grow, and so does what is stored. At x = 0.74 that is what an eviction costs."""
FOLLOWERS: Final = 400.0
"""So many later requests will decode where a prompt is computed that nobody has, if it is wanted again at
all: it may be the first of a group, or of a long conversation."""
FREE_FORK: Final = 1.0
"""A new conversation that begins like others has followers as well: its own. That counts where so many times
the mean settled, since to compute the beginning once more is dear, and beside those who run now: on an idle
fleet nobody is in the way."""
MILD: Final = 0.05
FREE_EXCESS: Final = 0.05
STEEP: Final = 4.0
"""A second of prefill on an endpoint whose share is x above the mean costs MILD*x more and, beyond
FREE_EXCESS, STEEP for each further unit of x."""


def imbalance(worked_s: float, level_s: float) -> float:
    """Seconds that one second of prefill costs beyond itself at an endpoint that had so many lately.

    `level_s` is the mean of all candidates. Some usual prefills are added to both (`spread`).
    """
    excess = worked_s / level_s - 1.0
    return MILD * excess + STEEP * max(0.0, excess - FREE_EXCESS)


def company_s(sequences: float, followed: float) -> float:
    """Seconds that the followers of a new prompt cost beside so many sequences, for each second that one
    more adds to the steps of an answer. `followed`: as in `price`.
    """
    return LONGER * FOLLOWERS * followed * sequences


def pushed_out_s(work_s: float, crowd: float, lost_s: float) -> float:
    """Seconds that storing a prefill of `work_s` costs where live conversations fill the part `crowd`;
    `lost_s`: to compute what has to go now, by its chances of return.
    """
    return EVICT * lost_s + work_s * CROWD * float(crowd**POWER)


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
    spread: Spread,
    followed: float,
    forks: bool = False,
    ahead_s: float = 0.0,
    priority: int = 0,
    below: Fetch = NO_FETCH,
) -> Candidate:
    """The cost of one request at one endpoint, now. `output_tokens` is what it is expected to generate,
    `spread` how evenly all candidates were given work; `followed`: the chance that a prompt that nobody had
    before is wanted again; `forks`: see `returns`; `below` is what it fetches.
    """
    learner, load = endpoint.learner, endpoint.load
    learner.sync()
    work_factor, decode_factor = learner.work_factor, learner.decode_factor
    foreign_running, foreign_waiting = endpoint.foreign(t) if endpoint.has_foreign else (0.0, 0.0)

    reused = matched_tokens + below.tokens + pending_tokens
    new = prompt_tokens - reused
    work_s = new * (learner.b_s + learner.q_s * (reused + new / 2)) * work_factor
    compute_s = learner.a_s * learner.fixed_factor + work_s

    inflight = load.inflight + foreign_running + foreign_waiting
    wait_s = ahead_s + foreign_waiting * endpoint.typical_prefill_s
    if load.prefills:
        wait_s += endpoint.prefill_left_s(t)
    decodes = foreign_running + (load.decode_weight(priority) if load.decodes else 0.0)
    context = prompt_tokens + output_tokens / 2
    step_growth_s = decode_factor * (learner.d1_s + learner.d2_s * context)
    places = endpoint.max_sequences
    if places and inflight >= places:
        step_s = learner.d0_s * decode_factor + places * step_growth_s
        wait_s += (inflight - places + 1) / places * output_tokens * step_s
    # A prefill holds up those who decode; a longer step those as well who will by then.
    longer_s = (decodes + len(load.prefills)) * output_tokens * step_growth_s
    held_s = DECODE * decodes * compute_s
    if endpoint.role is Role.DECODE:
        # Of those whose prompts are computed elsewhere the next one comes meanwhile, others queue behind it;
        # those who are not here yet come at any time of it.
        come = min(load.coming, 1) + endpoint.arrivals.per_s(t) * compute_s / 2
        held_s = STALL * (decodes + come) * compute_s
    delay_s = held_s + LONGER * longer_s

    recency, capacity = endpoint.recency, endpoint.kv_tokens
    answers_tokens = inflight * output_tokens / 2
    room_s = 0.0
    if capacity and inflight:
        # Who runs keeps what it has. Where that leaves no room, so many have to finish first.
        in_use = recency.pinned_blocks * block_tokens + answers_tokens
        excess = in_use + new + below.tokens + output_tokens / 2 - capacity
        if in_use and excess > 0:
            step_s = learner.d0_s * decode_factor + inflight * step_growth_s
            room_s = min(1.0, excess / in_use) * output_tokens * step_s
    delay_s += RETURNS * (recency.delay_s(wait_s + compute_s) - recency.delay_s(wait_s))

    lower = endpoint.lower
    evict_s = 0.0
    if capacity:
        needed = min(new + below.tokens + output_tokens, capacity)
        on_device = endpoint.resident_blocks() * block_tokens
        room = float(capacity)
        kept, freed = on_device, 0
        if lower is not None:
            # What its own tiers below keep is not lost; what is fetched from them leaves them.
            room, kept, freed = endpoint.room_tokens(), endpoint.kept_tokens(block_tokens), below.own_tokens
        coming = load.prefill_tokens + answers_tokens
        live_tokens = recency.live_blocks * block_tokens + coming
        crowd = min(1.0, (live_tokens + needed / 2) / room)
        lost_s = 0.0
        over = needed - freed - max(0, room - kept - coming)
        if over > 0:
            lost_s = recency.loss_s(-int(-over // block_tokens)) * work_factor
        evict_s = pushed_out_s(work_s, crowd, lost_s)
        if lower is not None:
            leaves = needed - max(0, capacity - on_device - coming)
            evict_s = lower.evict_s(evict_s, recency, over, leaves, endpoint.below_blocks(), block_tokens)

    hardware_work, fade = learner.shared.work, faded_s(1.0, t - endpoint.worked_t)
    worked_s = endpoint.worked_s * fade * hardware_work + spread.few_s
    balance_s = work_s * (WORK + imbalance(worked_s, spread.level_s))
    more_settled_s = endpoint.settled_s * fade * hardware_work - spread.least_settled_s
    if more_settled_s > 0:
        more = more_settled_s / spread.settled_level_s
        steps_s = more * output_tokens * step_growth_s
        # Never more than to compute the whole prompt, beside as many as decode at an endpoint on average.
        whole_s = prompt_tokens * (learner.b_s + learner.q_s / 2 * prompt_tokens) * work_factor
        most_s = whole_s * (1.0 + DECODE * spread.inflight)
        followers_s = (
            new / max(prompt_tokens, 1) * min(company_s(spread.inflight + 1.0, followed) * steps_s, most_s)
        )
        if forks and more > FREE_FORK:
            followers_s = max(followers_s, min(company_s(spread.inflight, followed) * steps_s, most_s))
        balance_s += followers_s

    start_s = max(wait_s, pending_s, room_s)
    fetch_s = below.takes_s(t + start_s) if below.tokens else 0.0
    return Candidate(
        endpoint.name,
        endpoint.grade,
        matched_tokens,
        pending_tokens,
        wait_s,
        pending_s,
        room_s,
        compute_s,
        delay_s,
        evict_s,
        balance_s,
        start_s + fetch_s + compute_s + delay_s + evict_s + balance_s,
        inflight,
        load.prefill_tokens,
        endpoint.dispatched,
        below.of(Kind.HOST) if below.tokens else 0,
        below.of(Kind.DISK) if below.tokens else 0,
        below.of(Kind.STORE) if below.tokens else 0,
        fetch_s,
    )

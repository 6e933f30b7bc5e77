"""Prefill on one endpoint, decode on another: what such a pair costs, and why one is taken or not.

    total = max(ready, room) + transfer + delay + evict + balance
    ready = max(wait, pending) + fetch + compute

The first endpoint's share (wait, pending, fetch, compute, and its delay, evict and balance) is its price in
`cost` for a request that generates one token. The second one's:

room      until there is a place in its batch, and KV that those who run there leave it.
transfer  the KV of what it lacks of the prompt, over the slower of the two links; then the request's way
          there and the step that computes its first token.
delay     each step of those who decode there is longer by one sequence. No prefill makes them stand still.
evict     what the prompt's KV and the answer push out of its cache: both endpoints have a copy.

Each endpoint is priced once for its share; pairs are sums. (Of a large pool only those prefill endpoints are
combined that are near the best by themselves, as for whole runs: where room at the decode endpoint decides, a
slower one with less to lose is not looked for.) A pair is made within one revision. The price
keeps short remainders where their conversation decodes: there is little to compute, and a transfer would cost
more.

Policies that look at no seconds always take a pair where there is one, as llm-d's and SGLang's routers do:
their scores pick the decode endpoint among all of them, and then the prefill endpoint in the same way.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from sumibi.routing.cost import LONGER, pushed_out_s
from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.placing import Looked
from sumibi.routing.policies import Ask, Policy, least
from sumibi.routing.policies.cost import SLACK

PAIR: Final = "prefill-decode"
WHOLE: Final = "decode-only"
"""How decisions are counted (llm-d's names)."""
ONLY: Final = "only"
ALWAYS: Final = "always"
FALLBACK: Final = "fallback"
"""Reasons: there was nothing of the other kind; the policy takes pairs whatever they cost; a whole run after
the prefill leg failed."""


class Share(NamedTuple):
    """The part of a pair's cost that its decode endpoint has."""

    endpoint: Endpoint
    local_tokens: int
    fetch_s: float
    """Until those of them have come that lie below its device: beside the transfer."""
    room_s: float
    after_s: float
    """Beside the transfer, from the end of the prefill to the first token."""
    delay_s: float
    evict_s: float


def share(
    there: Candidate,
    endpoint: Endpoint,
    t: float,
    *,
    prompt_tokens: int,
    output_tokens: float,
    block_tokens: int,
    priority: int,
) -> Share:
    """Of `endpoint`, where `there` says what it has of the prompt. Terms as in `cost.price`."""
    learner, load = endpoint.learner, endpoint.load
    learner.sync()
    start, decode_factor = learner.start, learner.decode_factor
    foreign_running, foreign_waiting = endpoint.foreign(t) if endpoint.has_foreign else (0.0, 0.0)
    inflight = load.inflight + foreign_running + foreign_waiting
    local = there.reused_tokens
    new = prompt_tokens - local

    step_growth_s = decode_factor * (start.d1_s + start.d2_s * (prompt_tokens + output_tokens / 2))
    step_s = start.d0_s * decode_factor + inflight * step_growth_s
    decodes = foreign_running + load.decode_weight(priority)
    delay_s = LONGER * (decodes + load.coming + len(load.prefills)) * output_tokens * step_growth_s

    room_s = 0.0
    places = endpoint.max_sequences
    if places and inflight >= places:
        room_s = (inflight - places + 1) / places * output_tokens * step_s
    recency, capacity = endpoint.recency, endpoint.kv_tokens
    answers_tokens = inflight * output_tokens / 2
    evict_s = 0.0
    if capacity:
        in_use = recency.pinned_blocks * block_tokens + answers_tokens
        excess = in_use + new + output_tokens / 2 - capacity
        if inflight and in_use and excess > 0:
            room_s += min(1.0, excess / in_use) * output_tokens * step_s
        work_s = new * (start.b_s + start.q_s * (local + new / 2)) * learner.work_factor
        needed = min(new + output_tokens, capacity)
        # What comes over the link is not resident yet, but in use in `recency`.
        coming = load.prefill_tokens + load.coming_kv_tokens + answers_tokens
        live_tokens = recency.live_blocks * block_tokens + load.prefill_tokens + answers_tokens
        room = float(capacity)
        kept = endpoint.resident_blocks() * block_tokens
        if endpoint.lower is not None:
            room, kept = endpoint.room_tokens(), endpoint.kept_tokens(block_tokens)
        crowd = min(1.0, (live_tokens + needed / 2) / room)
        lost_s = 0.0
        over = needed - max(0, room - kept - coming)
        if over > 0:
            lost_s = recency.loss_s(-int(-over // block_tokens)) * learner.work_factor
        evict_s = pushed_out_s(work_s, crowd, lost_s)
    after_s = learner.overhead_s + step_s + step_growth_s
    return Share(endpoint, local, there.fetch_s, room_s, after_s, delay_s, evict_s)


class Cost(NamedTuple):
    """Of a pair, in seconds."""

    transfer_s: float
    ttft_s: float
    total_s: float


def cost(leg: Candidate, source: Endpoint, part: Share, prompt_tokens: int) -> Cost:
    """Of a prefill endpoint, as priced by itself, with a decode endpoint."""
    moved_s = part.endpoint.transfers.predict_s(prompt_tokens - part.local_tokens, source.transfers.link)
    transfer_s = max(moved_s, part.fetch_s) + part.after_s
    ready_s = max(leg.wait_s, leg.pending_s, leg.room_s) + leg.fetch_s + leg.compute_s
    ttft_s = max(ready_s, part.room_s) + transfer_s
    total_s = ttft_s + (leg.delay_s + part.delay_s) + (leg.evict_s + part.evict_s) + leg.balance_s
    return Cost(transfer_s, ttft_s, total_s)


def combine(leg: Candidate, part: Share, cost: Cost) -> Candidate:
    """The pair as a candidate."""
    return Candidate(
        endpoint=part.endpoint.name,
        grade=part.endpoint.grade,
        matched_tokens=leg.matched_tokens,
        pending_tokens=leg.pending_tokens,
        wait_s=leg.wait_s,
        pending_s=max(leg.pending_s, leg.room_s),
        room_s=part.room_s,
        compute_s=leg.compute_s,
        delay_s=leg.delay_s + part.delay_s,
        evict_s=leg.evict_s + part.evict_s,
        balance_s=leg.balance_s,
        total_s=cost.total_s,
        inflight=part.endpoint.load.inflight,
        prefill_tokens=leg.prefill_tokens,
        dispatched=part.endpoint.dispatched,
        prefill=leg.endpoint,
        local_tokens=part.local_tokens,
        transfer_s=cost.transfer_s,
        host_tokens=leg.host_tokens,
        disk_tokens=leg.disk_tokens,
        store_tokens=leg.store_tokens,
        fetch_s=leg.fetch_s,
    )


def pairs(
    legs: Looked, there: Looked, t: float, ask: Ask, output_tokens: float
) -> tuple[list[Endpoint], list[Candidate]]:
    """For each decode endpoint that `there` looked at, its best pair with any prefill endpoint: of those that
    tie the one that has most of the prompt, then the one that had fewest requests.
    """
    endpoints, found = [], []
    sources = [
        (e, leg)
        for e, leg in zip(legs.endpoints, legs.candidates, strict=True)
        if holds(e, ask.prompt_tokens)
    ]
    for endpoint, local in zip(there.endpoints, there.candidates, strict=True):
        near = [(e, leg) for e, leg in sources if may_pair(e, endpoint)]
        if not near or not holds(endpoint, ask.prompt_tokens):
            continue
        part = share(
            local,
            endpoint,
            t,
            prompt_tokens=ask.prompt_tokens,
            output_tokens=output_tokens,
            block_tokens=ask.block_tokens,
            priority=ask.priority,
        )
        costs = [cost(leg, e, part, ask.prompt_tokens) for e, leg in near]
        best = min(range(len(near)), key=lambda i: costs[i].total_s)
        limit_s = costs[best].total_s + SLACK * near[best][1].ttft_s
        tied = [(leg, each) for (_, leg), each in zip(near, costs, strict=True) if each.total_s <= limit_s]
        leg, taken = min(tied, key=lambda one: (-one[0].reused_tokens, one[0].dispatched))
        endpoints.append(endpoint)
        found.append(combine(leg, part, taken))
    return endpoints, found


def blind(
    policy: Policy, ask: Ask, legs: Looked, there: Looked
) -> tuple[list[Endpoint], list[Candidate], list[float]]:
    """Pairs of a policy that looks at no seconds, and its scores for them: (decode endpoints, pairs, scores).
    Empty if nobody can be paired.
    """
    places = [i for i, e in enumerate(there.endpoints) if any(may_pair(p, e) for p in legs.endpoints)]
    if not places:
        return [], [], []
    endpoints = [there.endpoints[i] for i in places]
    found = [there.candidates[i] for i in places]
    scores = policy.choose(ask, found, endpoints)
    chosen: dict[str, Candidate] = {}
    for endpoint in endpoints:
        near = [i for i, e in enumerate(legs.endpoints) if may_pair(e, endpoint)]
        # Of its own, so that chance does not draw the same number for both.
        own = msgspec.structs.replace(ask, request=f"{ask.request}/prefill")
        candidates = [legs.candidates[i] for i in near]
        drawn = policy.choose(own, candidates, [legs.endpoints[i] for i in near])
        chosen[endpoint.name] = candidates[least(own.request, drawn)]
    paired = [
        msgspec.structs.replace(
            one,
            matched_tokens=chosen[one.endpoint].matched_tokens,
            pending_tokens=chosen[one.endpoint].pending_tokens,
            host_tokens=chosen[one.endpoint].host_tokens,
            disk_tokens=chosen[one.endpoint].disk_tokens,
            store_tokens=chosen[one.endpoint].store_tokens,
            prefill=chosen[one.endpoint].endpoint,
            local_tokens=one.reused_tokens,
        )
        for one in found
    ]
    return endpoints, paired, scores


def may_pair(prefill: Endpoint, decode: Endpoint) -> bool:
    """Whether KV may go from one to the other. Both serve the model that is asked for."""
    return prefill is not decode and prefill.revision == decode.revision


def holds(endpoint: Endpoint, prompt_tokens: int) -> bool:
    """Whether a prompt fits into its memory at all."""
    return endpoint.kv_tokens is None or prompt_tokens < endpoint.kv_tokens


def reason(found: Sequence[Candidate], pick: int) -> str:
    """What decided whether it is a pair: the part of the cost by which the best of the other kind exceeds the
    pick the most. `room` counts as `wait`.
    """
    picked = found[pick]
    others = [c for c in found if bool(c.prefill) != bool(picked.prefill)]
    if not others:
        return ONLY
    rival = min(others, key=lambda c: c.total_s)
    ours, theirs = _parts(picked), _parts(rival)
    return max(ours, key=lambda part: theirs[part] - ours[part])


def _parts(c: Candidate) -> dict[str, float]:
    """Parts of the total that sum up to it."""
    return {
        "wait": c.ttft_s - c.fetch_s - c.compute_s - c.transfer_s,
        "compute": c.compute_s,
        "transfer": c.transfer_s,
        "delay": c.delay_s,
        "evict": c.evict_s,
        "balance": c.balance_s,
        "fetch": c.fetch_s,
    }

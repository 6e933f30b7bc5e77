"""The candidates for one request: what each endpoint has of its prompt, and what it would cost there.

In a small fleet every endpoint is priced. In a large one few can win, those that have the prompt or are idle;
so only those are priced whose lower bound (`floors`) is not above the best price found so far. The pick is
that among all.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from sumibi.routing.computing import Computing
from sumibi.routing.cost import FEW_PREFILLS, price
from sumibi.routing.decisions import Candidate
from sumibi.routing.events import Arrived
from sumibi.routing.fleet import SHARE_HALF_LIFE_S, Endpoint
from sumibi.routing.floors import Terms, floor, terms, work_s
from sumibi.routing.index import BlockIndex
from sumibi.routing.learning import Hardware
from sumibi.routing.policies.cost import SLACK
from sumibi.routing.recency import FRESH_S
from sumibi.routing.returns import ReturnTimes

MANY = 16
"""Up to so many endpoints all are priced."""
STALE_S = 2.0
"""In a larger fleet orders of victims are used for so long if need be."""
MOST_ORDERED = 4
"""So many are renewed after a decision, which nobody waits for."""
ROUNDING = 1e-9
"""By this part a bound may be above what it bounds."""

NOTHING_AHEAD: Mapping[str, float] = {}


class Looked(NamedTuple):
    """Endpoints that may be picked, in the fleet's order, and what was found."""

    endpoints: list[Endpoint]
    candidates: list[Candidate]
    """Theirs."""
    matched: Mapping[Endpoint, int]
    """Leading blocks of the prompt at each endpoint that has any, at those that were left out too."""


def candidates(
    event: Arrived,
    endpoints: list[Endpoint],
    t: float,
    *,
    block_tokens: int,
    output_tokens: float,
    returns: ReturnTimes,
    index: BlockIndex,
    computing: Computing,
    ahead_s: Mapping[str, float] = NOTHING_AHEAD,
    priced: bool = True,
) -> Looked:
    """A candidate for each endpoint, or for those of many that may be picked. Blocks of a suspect endpoint
    count for nothing.

    `ahead_s`: endpoint -> seconds of work that waits for it elsewhere and goes before this request.
    Not `priced`: what lies where, at all of them, without seconds.
    """
    if event.max_tokens is not None:
        output_tokens = min(output_tokens, event.max_tokens)
    keys, length = event.keys, matchable_blocks(event, block_tokens)
    matched = _matched(keys, length, endpoints, block_tokens, index, guess=priced)
    pending = computing.pending(keys, length, matched, t)
    if not priced:
        found = []
        for endpoint in endpoints:
            blocks = matched.get(endpoint, 0)
            reach, _ = pending.get(endpoint, (blocks, 0.0))
            found.append(_unpriced(endpoint, t, blocks * block_tokens, (reach - blocks) * block_tokens))
        return Looked(endpoints, found, matched)

    count = len(endpoints)
    oldest_t = t - (STALE_S if count > MANY else FRESH_S)
    for endpoint in [e for e in endpoints if e.recency.computed_t < oldest_t]:
        endpoint.order_victims(t, block_tokens, returns)
    few_s = FEW_PREFILLS * sum([e.typical_prefill_s for e in endpoints]) / count
    lately_s = sum([e.worked_s * 0.5 ** ((t - e.worked_t) / SHARE_HALF_LIFE_S) for e in endpoints])
    level_s = few_s + lately_s / count

    def look(endpoint: Endpoint) -> Candidate:
        blocks = matched.get(endpoint, 0)
        reach, pending_s = pending.get(endpoint, (blocks, 0.0)) if pending else (blocks, 0.0)
        return price(
            endpoint,
            t,
            prompt_tokens=event.prompt_tokens,
            matched_tokens=blocks * block_tokens,
            pending_tokens=(reach - blocks) * block_tokens,
            pending_s=pending_s,
            output_tokens=output_tokens,
            block_tokens=block_tokens,
            level_s=level_s,
            few_s=few_s,
            ahead_s=ahead_s.get(endpoint.name, 0.0) if ahead_s else 0.0,
            priority=event.priority,
        )

    if count <= MANY:
        return Looked(endpoints, [look(endpoint) for endpoint in endpoints], matched)
    reused = matched
    if pending:
        reused = matched | {e: max(blocks, matched.get(e, 0)) for e, (blocks, _) in pending.items()}
    least = _least(event, endpoints, t, reused, block_tokens, output_tokens)
    if ahead_s:
        least = [s + ahead_s.get(e.name, 0.0) for s, e in zip(least, endpoints, strict=True)]
    chosen = _shortlist(endpoints, least, look)
    order = sorted(chosen)
    return Looked([endpoints[i] for i in order], [chosen[i] for i in order], matched)


def order_some(endpoints: Sequence[Endpoint], t: float, block_tokens: int, returns: ReturnTimes) -> None:
    """Renew a few orders of victims that a decision in a large fleet will want soon."""
    if len(endpoints) > MANY:
        due = [e for e in endpoints if t - e.recency.computed_t > FRESH_S]
        for endpoint in nsmallest(MOST_ORDERED, due, key=lambda e: e.recency.computed_t):
            endpoint.order_victims(t, block_tokens, returns)


def matchable_blocks(event: Arrived, block_tokens: int) -> int:
    """How many leading blocks of the prompt a cache may spare.

    The engine computes at least the last token itself, so a hit never covers the whole prompt.
    """
    return min(len(event.keys), max(0, event.prompt_tokens - 1) // block_tokens)


def _matched(
    keys: Sequence[int],
    length: int,
    endpoints: Sequence[Endpoint],
    block_tokens: int,
    index: BlockIndex,
    *,
    guess: bool,
) -> dict[Endpoint, int]:
    """Blocks at each endpoint that is trusted.

    `guess`: without those that a full engine will have lost by then, which is our own idea: other policies
    go by what lies where.
    """
    trusted = [e for e in endpoints if e.suspect is None]
    holders = 0
    for endpoint in trusted:
        holders |= endpoint.holders
    matched = dict.fromkeys(trusted, 0)
    rest = trusted
    for blocks, here in reversed(index.match(keys, length, holders)):
        others = []
        for endpoint in rest:
            if not here & endpoint.holders:
                others.append(endpoint)
            elif guess and endpoint.load.prefill_tokens and endpoint.overfull(block_tokens):
                matched[endpoint] = min(blocks, endpoint.recency.reach(keys))
            else:
                matched[endpoint] = blocks
        rest = others
    return matched


def _least(
    event: Arrived,
    endpoints: Sequence[Endpoint],
    t: float,
    reused: Mapping[Endpoint, int],
    block_tokens: int,
    output_tokens: float,
) -> list[float]:
    """What the request costs at each endpoint, in seconds, at least."""
    kind = event.priority, block_tokens
    prompt_tokens = event.prompt_tokens
    known: dict[Hardware, Terms] = {}
    result = []
    for endpoint in endpoints:
        own = endpoint.load.floors.get(kind) or floor(endpoint, kind)
        hardware, fixed, work, steps, busy = own
        here = known.get(hardware)
        if here is None:
            here = known[hardware] = terms(hardware, prompt_tokens, output_tokens)
        fixed_s, factor, prefill_s, steps_s = here
        if blocks := reused.get(endpoint, 0):
            prefill_s = work_s(hardware, prompt_tokens, blocks * block_tokens) * factor
        least_s = fixed_s * fixed + prefill_s * work + steps_s * steps
        if busy is not None:
            rest, rest_s, head, head_s, since_t = busy
            least_s += fixed_s * rest + factor * rest_s
            left_s = fixed_s * head + factor * head_s - (t - since_t)
            if left_s > 0:
                least_s += left_s
        result.append(least_s)
    return result


def _shortlist(
    endpoints: Sequence[Endpoint], least: Sequence[float], look: Callable[[Endpoint], Candidate]
) -> dict[int, Candidate]:
    """Candidates (by position) among which the best of all is, with those that tie with it."""
    found: dict[int, Candidate] = {}
    # Nothing of a price is negative, so a tie with the best cannot reach further than this.
    i = least.index(min(least))
    found[i] = candidate = look(endpoints[i])
    best_s = candidate.total_s
    reach = (1.0 + SLACK) * (1.0 + ROUNDING)
    near = [(bound_s, i) for i, bound_s in enumerate(least) if bound_s <= best_s * reach]
    near.sort()
    for bound_s, i in near:
        if bound_s > best_s * reach:
            break
        if i not in found:
            found[i] = candidate = look(endpoints[i])
            best_s = min(best_s, candidate.total_s)
    return found


def _unpriced(endpoint: Endpoint, t: float, matched_tokens: int, pending_tokens: int) -> Candidate:
    load = endpoint.load
    foreign_running, foreign_waiting = endpoint.foreign(t) if endpoint.has_foreign else (0.0, 0.0)
    return Candidate(
        endpoint=endpoint.name,
        grade=endpoint.grade,
        matched_tokens=matched_tokens,
        pending_tokens=pending_tokens,
        wait_s=0.0,
        pending_s=0.0,
        room_s=0.0,
        compute_s=0.0,
        delay_s=0.0,
        evict_s=0.0,
        balance_s=0.0,
        total_s=0.0,
        inflight=load.inflight + foreign_running + foreign_waiting,
        prefill_tokens=load.prefill_tokens,
        dispatched=endpoint.dispatched,
    )

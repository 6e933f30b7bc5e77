"""The candidates for one request: what each endpoint has of its prompt, and what it would cost there.

In a small fleet every endpoint is priced. In a large one few can win, those that have the prompt or are idle;
so only those are priced whose lower bound (`floors`) is not above the best price found so far. The pick is
that among all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from sumibi.routing.computing import Computing
from sumibi.routing.cost import FEW_PREFILLS, price
from sumibi.routing.decisions import Candidate
from sumibi.routing.events import Arrived
from sumibi.routing.fleet import SHARE_HALF_LIFE_S, Endpoint, Roster
from sumibi.routing.floors import Rows, least, rows
from sumibi.routing.index import BlockIndex
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

FEW = 8
"""Up to so many holders are gone through one by one."""
NOTHING_AHEAD: Mapping[str, float] = {}
NOTHING_COMING = (0, 0.0)


class Looked(NamedTuple):
    """Endpoints that may be picked, in the fleet's order, and what was found."""

    endpoints: list[Endpoint]
    candidates: list[Candidate]
    """Theirs."""
    matched: list[int]
    """Leading blocks of the prompt at each endpoint of the roster, those that were left out too."""


def candidates(
    event: Arrived,
    roster: Roster,
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
    endpoints = roster.endpoints
    there = _matched(keys, length, roster, index)
    have = dict(zip(endpoints, there, strict=True))
    if not roster.trusts_all:
        have = {endpoint: blocks for endpoint, blocks in have.items() if endpoint.suspect is None}
    pending = computing.pending(keys, length, have, t)
    if not priced:
        # What a full engine will have lost is our own guess: other policies go by what lies where.
        found = []
        for endpoint, blocks in zip(endpoints, there, strict=True):
            reach, _ = pending.get(endpoint, (blocks, 0.0))
            found.append(_unpriced(endpoint, t, blocks * block_tokens, (reach - blocks) * block_tokens))
        return Looked(endpoints, found, there)

    count = len(endpoints)
    known: Rows | None = None
    typical_s: Sequence[float]
    worked: Iterable[tuple[float, float]]
    if count > MANY:
        kind = event.priority, block_tokens
        known = rows(roster, kind)
        if min(known.ordered_t) < t - STALE_S:
            _order(endpoints, t - STALE_S, t, block_tokens, returns)
            known.refresh()
        typical_s, worked = known.typical_s, zip(known.worked_s, known.worked_t, strict=True)
    else:
        _order(endpoints, t - FRESH_S, t, block_tokens, returns)
        typical_s = [e.typical_prefill_s for e in endpoints]
        worked = [(e.worked_s, e.worked_t) for e in endpoints]
    few_s = FEW_PREFILLS * sum(typical_s) / count
    lately_s = sum([work_s * 0.5 ** ((t - at_t) / SHARE_HALF_LIFE_S) for work_s, at_t in worked])
    level_s = few_s + lately_s / count

    def look(place: int) -> Candidate:
        endpoint, blocks = endpoints[place], there[place]
        coming_there = pending
        lasting = endpoint.lasting(blocks, keys, block_tokens)
        if lasting < blocks:
            blocks = lasting
            coming_there = computing.pending(keys, length, {endpoint: blocks}, t)
        reach, pending_s = coming_there.get(endpoint, (blocks, 0.0))
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

    if known is None:
        return Looked(endpoints, [look(place) for place in range(count)], there)
    reused = there
    if pending:
        coming = (pending.get(endpoint, NOTHING_COMING)[0] for endpoint in endpoints)
        reused = list(map(max, there, coming))
    bounds_s = least(
        known,
        roster,
        t,
        prompt_tokens=event.prompt_tokens,
        reused_tokens=[blocks * block_tokens for blocks in reused],
        output_tokens=output_tokens,
    )
    if ahead_s:
        bounds_s = [s + ahead_s.get(e.name, 0.0) for s, e in zip(bounds_s, endpoints, strict=True)]
    chosen = _shortlist(bounds_s, look)
    order = sorted(chosen)
    return Looked([endpoints[i] for i in order], [chosen[i] for i in order], there)


def _order(
    endpoints: Sequence[Endpoint], oldest_t: float, t: float, block_tokens: int, returns: ReturnTimes
) -> None:
    """Renew the orders of victims that are older."""
    for endpoint in [e for e in endpoints if e.recency.computed_t < oldest_t]:
        endpoint.order_victims(t, block_tokens, returns)


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


def _matched(keys: Sequence[int], length: int, roster: Roster, index: BlockIndex) -> list[int]:
    """Blocks at each endpoint, in their order."""
    matched = [0] * len(roster.endpoints)
    places = roster.places
    for blocks, here in index.match(keys, length, roster.trusted):
        if here.bit_count() > FEW:
            matched = [blocks if here & own else m for own, m in zip(roster.holders, matched, strict=True)]
            continue
        while here:
            holder = here.bit_length() - 1
            matched[places[holder]] = blocks
            here ^= 1 << holder
    return matched


def _shortlist(bounds_s: Sequence[float], look: Callable[[int], Candidate]) -> dict[int, Candidate]:
    """Candidates, by place, among which the best of all is, with those that tie with it."""
    # Nothing of a price is negative, so a tie with the best cannot reach further than this.
    reach = (1.0 + SLACK) * (1.0 + ROUNDING)
    place = bounds_s.index(min(bounds_s))
    candidate = look(place)
    found = {place: candidate}
    limit_s = candidate.total_s * reach
    near = [(bound_s, place) for place, bound_s in enumerate(bounds_s) if bound_s <= limit_s]
    near.sort()
    for bound_s, place in near[1:]:
        if bound_s > limit_s:
            break
        found[place] = candidate = look(place)
        limit_s = min(limit_s, candidate.total_s * reach)
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

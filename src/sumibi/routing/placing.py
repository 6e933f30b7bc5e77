"""The candidates for one request: what each endpoint has of its prompt, and what it would cost there.

In a small fleet every endpoint is priced. In a large one few can win, those that have the prompt or are idle;
so only those are priced whose lower bound (`floors`) is not above the best price found so far. The pick is
that among all.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Final, NamedTuple

from sumibi.routing.computing import Computing
from sumibi.routing.cost import company_s, price
from sumibi.routing.decisions import Candidate
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Arrived
from sumibi.routing.fleet import Roster
from sumibi.routing.floors import ROUNDING, Floors, rows
from sumibi.routing.index import BlockIndex
from sumibi.routing.levels import Levels, blocks_of, deepest
from sumibi.routing.lower import NO_FETCH, Fetch, Kind, Run, fetch, levels_of
from sumibi.routing.policies.cost import SLACK
from sumibi.routing.recency import FRESH_S
from sumibi.routing.returns import ReturnTimes
from sumibi.routing.spread import Spread, spread_over

MANY: Final = 16
"""Up to so many endpoints all are priced."""
STALE_S: Final = 2.0
"""In a larger fleet orders of victims are used for so long if need be."""
MOST_ORDERED: Final = 4
"""So many are renewed after a decision, which nobody waits for."""

FEW: Final = 8
"""Of so many endpoints it is known singly how much of a prompt they have before any is priced."""
NOTHING_AHEAD: Mapping[str, float] = {}


class Looked(NamedTuple):
    """Endpoints that may be picked, in the fleet's order, and what was found."""

    endpoints: list[Endpoint]
    candidates: list[Candidate]
    """Theirs."""
    levels: Levels
    """How far the prompt is known at any endpoint of the roster, on its device or below; at those that were
    left out, too."""


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
    endpoints, holders = roster.endpoints, roster.holders
    levels: Levels = index.match(keys, length, roster.trusted)
    runs: list[Run] | None = None
    if roster.has_lower:
        runs = _runs(keys, length, roster, index, levels)
        levels = levels_of(runs, holders)
    pending = computing.pending(keys, length, _Have(roster, levels, length).blocks, t)
    if not priced:
        # What a full engine will have lost is our own guess: other policies go by what lies where.
        found = []
        for place, (endpoint, own) in enumerate(zip(endpoints, holders, strict=True)):
            blocks = blocks_of(levels, own)
            reach, _ = pending.get(endpoint, (blocks, 0.0))
            below = fetch(runs[place], blocks, block_tokens) if runs is not None else NO_FETCH
            on_device = blocks * block_tokens - below.tokens
            found.append(_unpriced(endpoint, t, on_device, (reach - blocks) * block_tokens, below))
        return Looked(endpoints, found, levels)

    count = len(endpoints)
    known = rows(roster, event.priority, t) if count > MANY else None
    if known is None:
        _order(endpoints, t - FRESH_S, t, block_tokens, returns)
        spread = spread_over(roster, t)
    else:
        if not known.ordered_since(t - STALE_S):
            _order(endpoints, t - STALE_S, t, block_tokens, returns)
        spread = known.spread(t)
    followed = returns.chance(1, 0.0)
    forks = returns.forks(keys, levels[-1][0], block_tokens) if levels and count > 1 else False
    look = _Look(
        event,
        length,
        roster,
        levels,
        runs,
        pending,
        computing,
        t,
        block_tokens,
        output_tokens,
        spread,
        followed,
        forks,
        ahead_s,
    )
    if known is None:
        return Looked(endpoints, [look.candidate(place) for place in range(count)], levels)
    floors = Floors(
        known,
        t,
        prompt_tokens=event.prompt_tokens,
        output_tokens=output_tokens,
        spread=spread,
        company_s=company_s(spread.inflight + 1.0, followed),
    )
    more, most = deepest(levels, roster.places, FEW)
    for endpoint, (reach, _) in pending.items():
        more[roster.at[endpoint]] = reach
    bounds = _Bounds(floors, roster, levels, more, most * block_tokens, block_tokens, ahead_s)
    chosen = _shortlist(more or floors.idlest(), bounds, look)
    if len(chosen) == 1:
        ((place, candidate),) = chosen.items()
        return Looked([endpoints[place]], [candidate], levels)
    order = sorted(chosen)
    return Looked([endpoints[i] for i in order], [chosen[i] for i in order], levels)


# What the parts of one decision have in common is in objects, not in functions within functions: compiled,
# these are cycles of garbage, which keep a prompt's keys until the collector comes (docs/decisions/0029).


class _Have:
    """How much of a prompt is where."""

    __slots__ = ("_length", "_levels", "_roster")

    def __init__(self, roster: Roster, levels: Levels, length: int) -> None:
        self._roster = roster
        self._levels = levels
        self._length = length

    def blocks(self, endpoint: Endpoint) -> int:
        """Blocks there; all of them where they count for nothing, so none is waited for."""
        roster = self._roster
        place = roster.at.get(endpoint)
        if place is None or not roster.holders[place] & roster.trusted:
            return self._length
        return blocks_of(self._levels, roster.holders[place])


class _Lasting:
    """Of one endpoint what will still be there; of others no block is asked about."""

    __slots__ = ("_blocks", "_endpoint", "_length")

    def __init__(self, endpoint: Endpoint, blocks: int, length: int) -> None:
        self._endpoint = endpoint
        self._blocks = blocks
        self._length = length

    def blocks(self, endpoint: Endpoint) -> int:
        """As `_Have`."""
        return self._blocks if endpoint is self._endpoint else self._length


class _Look:
    """One prompt, looked at at any endpoint of a roster."""

    __slots__ = (
        "_ahead_s",
        "_block_tokens",
        "_computing",
        "_event",
        "_followed",
        "_forks",
        "_length",
        "_levels",
        "_output_tokens",
        "_pending",
        "_roster",
        "_runs",
        "_spread",
        "_t",
    )

    def __init__(
        self,
        event: Arrived,
        length: int,
        roster: Roster,
        levels: Levels,
        runs: list[Run] | None,
        pending: dict[Endpoint, tuple[int, float]],
        computing: Computing,
        t: float,
        block_tokens: int,
        output_tokens: float,
        spread: Spread,
        followed: float,
        forks: bool,
        ahead_s: Mapping[str, float],
    ) -> None:
        self._event = event
        self._length = length
        self._roster = roster
        self._levels = levels
        self._runs = runs
        self._pending = pending
        self._computing = computing
        self._t = t
        self._block_tokens = block_tokens
        self._output_tokens = output_tokens
        self._spread = spread
        self._followed = followed
        self._forks = forks
        self._ahead_s = ahead_s

    def candidate(self, place: int) -> Candidate:
        """What the endpoint there has of it, and what it would cost."""
        event, block_tokens, t, pending = self._event, self._block_tokens, self._t, self._pending
        endpoint = self._roster.endpoints[place]
        blocks = blocks_of(self._levels, self._roster.holders[place])
        lasting = endpoint.lasting(blocks, event.keys, block_tokens)
        if lasting < blocks:
            blocks = lasting
            there = _Lasting(endpoint, lasting, self._length)
            pending = self._computing.pending(event.keys, self._length, there.blocks, t)
        reach, pending_s = pending.get(endpoint, (blocks, 0.0))
        below = fetch(self._runs[place], blocks, block_tokens) if self._runs is not None else NO_FETCH
        return price(
            endpoint,
            t,
            prompt_tokens=event.prompt_tokens,
            matched_tokens=blocks * block_tokens - below.tokens,
            pending_tokens=(reach - blocks) * block_tokens,
            pending_s=pending_s,
            output_tokens=self._output_tokens,
            block_tokens=block_tokens,
            spread=self._spread,
            followed=self._followed,
            forks=self._forks,
            ahead_s=self._ahead_s.get(endpoint.name, 0.0) if self._ahead_s else 0.0,
            priority=event.priority,
            below=below,
        )


class _Bounds:
    """What one prompt costs at least, at any endpoint of a large roster."""

    __slots__ = ("_ahead_s", "_block_tokens", "_floors", "_levels", "_more", "_most_tokens", "_roster")

    def __init__(
        self,
        floors: Floors,
        roster: Roster,
        levels: Levels,
        more: dict[int, int],
        most_tokens: int,
        block_tokens: int,
        ahead_s: Mapping[str, float],
    ) -> None:
        """`more`: place -> blocks, of those where it is known; `most_tokens`: no other has more."""
        self._floors = floors
        self._roster = roster
        self._levels = levels
        self._more = more
        self._most_tokens = most_tokens
        self._block_tokens = block_tokens
        self._ahead_s = ahead_s

    def at_s(self, place: int) -> float:
        """There."""
        blocks = self._more.get(place)
        if blocks is None:
            blocks = blocks_of(self._levels, self._roster.holders[place])
        bound_s = self._floors.at(place, blocks * self._block_tokens)
        if self._ahead_s:
            return bound_s + self._ahead_s.get(self._roster.endpoints[place].name, 0.0)
        return bound_s

    def near(self, limit_s: float) -> list[tuple[float, int]]:
        """(coarser bound, place) of those that may be priced within a limit."""
        return self._floors.near(limit_s, self._most_tokens)


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


def _runs(keys: Sequence[int], length: int, roster: Roster, index: BlockIndex, levels: Levels) -> list[Run]:
    """How far each endpoint has the prompt, below its device too; `levels` are of the devices."""
    path = index.path(keys, length)
    return [
        endpoint.run(keys, path, blocks_of(levels, own))
        for endpoint, own in zip(roster.endpoints, roster.holders, strict=True)
    ]


def _shortlist(first: Iterable[int], bounds: _Bounds, look: _Look) -> dict[int, Candidate]:
    """Candidates, by place, among which the best of all is, with those that tie with it.

    The best of `first` by the bounds of their prices is priced first.
    """
    near = [(bounds.at_s(place), place) for place in first]
    bounded = {place for _, place in near}
    near.sort()
    _, place = near[0]
    candidate = look.candidate(place)
    found, best_s = {place: candidate}, candidate.total_s
    # A tie with any better one cannot reach further than this: nobody's time to first token is more than
    # its price.
    near += bounds.near(best_s * (1.0 + SLACK))
    if len(near) == 1:
        return found
    near.sort()
    limit_s = (best_s + SLACK * candidate.ttft_s) * (1.0 + ROUNDING)
    for bound_s, place in near:
        if bound_s > limit_s:
            break
        if place in found or (place not in bounded and bounds.at_s(place) > limit_s):
            continue
        found[place] = candidate = look.candidate(place)
        if candidate.total_s < best_s:
            best_s = candidate.total_s
            limit_s = (best_s + SLACK * candidate.ttft_s) * (1.0 + ROUNDING)
    return found


def _unpriced(
    endpoint: Endpoint, t: float, matched_tokens: int, pending_tokens: int, below: Fetch
) -> Candidate:
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
        host_tokens=below.of(Kind.HOST) if below.tokens else 0,
        disk_tokens=below.of(Kind.DISK) if below.tokens else 0,
        store_tokens=below.of(Kind.STORE) if below.tokens else 0,
    )

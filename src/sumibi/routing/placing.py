"""The candidates for one request: what each endpoint has of its prompt, and what it would cost there."""

from collections.abc import Mapping

from sumibi.routing.computing import Computing
from sumibi.routing.cost import FEW_PREFILLS, price
from sumibi.routing.decisions import Candidate
from sumibi.routing.events import Arrived
from sumibi.routing.fleet import Endpoint
from sumibi.routing.index import BlockIndex
from sumibi.routing.returns import ReturnTimes

NOTHING_AHEAD: Mapping[str, float] = {}


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
) -> list[Candidate]:
    """One candidate for each endpoint, in their order. Blocks of a suspect endpoint count for nothing.

    `ahead_s`: endpoint -> seconds of work that waits for it elsewhere and goes before this request.
    Not `priced`: what lies where, without seconds.
    """
    keys, length = event.keys, matchable_blocks(event, block_tokens)
    if event.max_tokens is not None:
        output_tokens = min(output_tokens, event.max_tokens)
    holders = 0
    for endpoint in endpoints:
        if endpoint.suspect is None:
            holders |= endpoint.holders
    levels = sorted(index.match(keys, length, holders), reverse=True)
    matched = {e: _longest(levels, e.holders) for e in endpoints if e.suspect is None}
    for endpoint, blocks in matched.items():
        if blocks and endpoint.overfull(block_tokens):
            matched[endpoint] = min(blocks, endpoint.recency.reach(keys))
    pending = computing.pending(keys, length, matched, t)
    few_s = level_s = 0.0
    if priced:
        few_s = FEW_PREFILLS * sum(endpoint.typical_prefill_s for endpoint in endpoints) / len(endpoints)
        level_s = few_s + sum(endpoint.work_lately_s(t) for endpoint in endpoints) / len(endpoints)
    result = []
    for endpoint in endpoints:
        blocks = matched.get(endpoint, 0)
        reach, pending_s = pending.get(endpoint, (blocks, 0.0))
        if not priced:
            result.append(_unpriced(endpoint, t, blocks * block_tokens, (reach - blocks) * block_tokens))
            continue
        result.append(
            price(
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
                returns=returns,
                ahead_s=ahead_s.get(endpoint.name, 0.0),
                priority=event.priority,
            )
        )
    return result


def matchable_blocks(event: Arrived, block_tokens: int) -> int:
    """How many leading blocks of the prompt a cache may spare.

    The engine computes at least the last token itself, so a hit never covers the whole prompt.
    """
    return min(len(event.keys), max(0, event.prompt_tokens - 1) // block_tokens)


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


def _longest(levels: list[tuple[int, int]], holders: int) -> int:
    """The longest run of any of `holders`; `levels` from the longest down."""
    for blocks, here in levels:
        if here & holders:
            return blocks
    return 0

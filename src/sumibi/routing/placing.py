"""The candidates for one request: what each endpoint has of its prompt, and what it would cost there."""

from sumibi.routing.computing import Computing
from sumibi.routing.cost import price
from sumibi.routing.decisions import Candidate
from sumibi.routing.events import Arrived
from sumibi.routing.fleet import Endpoint
from sumibi.routing.index import BlockIndex


def candidates(
    event: Arrived,
    endpoints: list[Endpoint],
    t: float,
    *,
    block_tokens: int,
    output_tokens: float,
    reuse: float,
    index: BlockIndex,
    computing: Computing,
) -> list[Candidate]:
    """One candidate for each endpoint, in their order. Blocks of a suspect endpoint count for nothing."""
    keys = event.keys
    # The engine computes at least the last token itself, so a hit never covers the whole prompt.
    length = min(len(keys), max(0, event.prompt_tokens - 1) // block_tokens)
    if event.max_tokens is not None:
        output_tokens = min(output_tokens, event.max_tokens)
    holders = 0
    for endpoint in endpoints:
        if endpoint.suspect is None:
            holders |= endpoint.holders
    levels = sorted(index.match(keys, length, holders), reverse=True)
    matched = {e: _longest(levels, e.holders) for e in endpoints if e.suspect is None}
    pending = computing.pending(keys, length, matched, t)
    result = []
    for endpoint in endpoints:
        blocks = matched.get(endpoint, 0)
        reach, pending_s = pending.get(endpoint, (blocks, 0.0))
        result.append(
            price(
                endpoint,
                t,
                prompt_tokens=event.prompt_tokens,
                matched_tokens=blocks * block_tokens,
                pending_tokens=(reach - blocks) * block_tokens,
                pending_s=pending_s,
                output_tokens=output_tokens,
                reuse=reuse,
                block_tokens=block_tokens,
            )
        )
    return result


def _longest(levels: list[tuple[int, int]], holders: int) -> int:
    """The longest run of any of `holders`; `levels` from the longest down."""
    for blocks, here in levels:
        if here & holders:
            return blocks
    return 0

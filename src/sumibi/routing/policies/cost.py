"""`cost`, the default: the least seconds added, by `routing.cost`."""

from collections.abc import Sequence
from math import inf, nextafter
from typing import Final

from sumibi.routing.decisions import Candidate

SLACK: Final = 0.02
"""Costs that differ by less than this part of the best candidate's time to first token are a tie: the
models do not know it better, and a tie is free to be used for balance."""


def scores(request: str, number: int, candidates: Sequence[Candidate]) -> list[float]:
    """Total seconds. Of those that tie with the best, the ones to take (least to compute, then fewest
    requests so far) get the best's, the others at least the end of the tie.
    """
    if len(candidates) == 1:
        return [candidates[0].total_s]
    totals = [c.total_s for c in candidates]
    best = candidates[totals.index(min(totals))]
    limit = best.total_s + SLACK * best.ttft_s
    tied = [i for i, total_s in enumerate(totals) if total_s <= limit]
    if len(tied) > 1:
        keys = [(-candidates[i].reused_tokens, candidates[i].dispatched) for i in tied]
        wanted, above = min(keys), max(limit, nextafter(best.total_s, inf))
        for i, key in zip(tied, keys, strict=True):
            totals[i] = best.total_s if key == wanted else above
    return totals

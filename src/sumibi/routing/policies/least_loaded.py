"""`least-loaded`: fewest requests in flight, counted by ourselves (foreign ones estimated from scrapes).

Known hole: it counts requests, whatever their size, and sees no caches.
"""

from collections.abc import Sequence

from sumibi.routing.decisions import Candidate
from sumibi.routing.policies.base import ranks


def scores(request: str, number: int, candidates: Sequence[Candidate]) -> list[float]:
    """Rank by requests in flight; among ties by prompt tokens to compute, then by requests so far."""
    return ranks([(c.inflight, c.prefill_tokens, c.dispatched) for c in candidates])

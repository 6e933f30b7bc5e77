"""`round-robin`, `random` and `least-loaded`: no locality, no seconds.

Known holes: the first two see neither caches nor load. Least-loaded counts requests, whatever their size.
"""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from sumibi.routing.decisions import Candidate
from sumibi.routing.policies.base import ranks

RANDOM_SEED = 0x5EED
"""Makes the order of `random` another one than that of ties, which go by the request's id too."""


def round_robin(request: str, number: int, candidates: Sequence[Candidate]) -> list[float]:
    """The candidates in turn: how many turns each one has to wait."""
    n = len(candidates)
    return [float((i - number) % n) for i in range(n)]


def random(request: str, number: int, candidates: Sequence[Candidate]) -> list[float]:
    """Uniform by a hash of the request's id: 0 for the one that is drawn, 1 for the others."""
    drawn = xxh3_64_intdigest(request.encode(), RANDOM_SEED) % len(candidates)
    return [float(i != drawn) for i in range(len(candidates))]


def least_loaded(request: str, number: int, candidates: Sequence[Candidate]) -> list[float]:
    """Fewest requests in flight; among ties fewest prompt tokens to compute, then fewest so far."""
    return ranks([(c.inflight, c.prefill_tokens, c.dispatched) for c in candidates])

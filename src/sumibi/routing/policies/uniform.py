"""`random`: every candidate alike. Known hole: it sees neither caches nor load."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from sumibi.routing.decisions import Candidate

SEED = 0x5EED
"""Makes the order another one than that of ties, which go by a hash of the request's id too."""


def scores(request: str, number: int, candidates: Sequence[Candidate]) -> list[float]:
    """0 for the one that a hash of the request's id draws, 1 for the others."""
    drawn = xxh3_64_intdigest(request.encode(), SEED) % len(candidates)
    return [float(i != drawn) for i in range(len(candidates))]

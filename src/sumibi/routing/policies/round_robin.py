"""`round-robin`: the candidates in turn. Known hole: it sees neither caches nor load."""

from collections.abc import Sequence

from sumibi.routing.decisions import Candidate


def scores(request: str, number: int, candidates: Sequence[Candidate]) -> list[float]:
    """How many turns each candidate has to wait."""
    n = len(candidates)
    return [float((i - number) % n) for i in range(n)]

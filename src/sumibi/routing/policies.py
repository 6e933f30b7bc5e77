"""Policies: pure functions from what a decision record holds to an index into its candidates.

A policy knows the candidates' features, the request's id and how many decisions came before; it keeps no
state and sees neither clock nor prompt. So a record alone recomputes its pick, and any policy can be asked
what it would have done.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

from sumibi.core.errors import ConfigError
from sumibi.routing.decisions import Candidate, Decision, Rerun

Policy = Callable[[str, int, list[Candidate]], int]
"""(request id, number of decisions before for this model, candidates: at least one) -> index."""

SLACK = 0.02
"""Costs that differ by less than this part of the best candidate's time to first token are a tie: the
models do not know it better, and a tie is free to be used for balance."""


def cost(request: str, number: int, candidates: list[Candidate]) -> int:
    """Least seconds added; among ties least to compute, then fewest requests so far, then by hash."""
    totals = [c.total_s for c in candidates]
    best = candidates[totals.index(min(totals))]
    limit = best.total_s + SLACK * best.ttft_s
    tied = [i for i, total_s in enumerate(totals) if total_s <= limit]
    return _least(request, candidates, tied, lambda c: (-c.reused_tokens, c.dispatched))


def round_robin(request: str, number: int, candidates: list[Candidate]) -> int:
    """The candidates in turn."""
    return number % len(candidates)


def least_loaded(request: str, number: int, candidates: list[Candidate]) -> int:
    """Fewest requests in flight; among ties fewest prompt tokens to compute, fewest so far, hash."""
    every = range(len(candidates))
    return _least(request, candidates, every, lambda c: (c.inflight, c.prefill_tokens, c.dispatched))


POLICIES: dict[str, Policy] = {"cost": cost, "round-robin": round_robin, "least-loaded": least_loaded}


def policy_named(name: str) -> Policy:
    """The policy called `name`. Raises ConfigError that lists those there are."""
    try:
        return POLICIES[name]
    except KeyError as cause:
        raise ConfigError(f"policy {name!r} is not one of {', '.join(POLICIES)}") from cause


def rerun(decisions: Iterable[Decision], policy: str | None = None) -> Iterator[Rerun]:
    """Decide each recorded decision again, by its own policy or by `policy`."""
    chosen = policy_named(policy) if policy is not None else None
    for d in decisions:
        pick = (chosen or policy_named(d.policy))(d.request, d.number, d.candidates)
        yield Rerun(
            decision=d.id,
            request=d.request,
            policy=policy or d.policy,
            recorded=d.picked.endpoint,
            rerun=d.candidates[pick].endpoint,
        )


def _least(
    request: str,
    candidates: list[Candidate],
    among: Sequence[int],
    key: Callable[[Candidate], tuple[float, ...]],
) -> int:
    """The least by `key`; of several by a hash of the request, which is chance that can be repeated."""
    if len(among) == 1:
        return among[0]
    keys = [key(candidates[i]) for i in among]
    least = min(keys)
    tied = [i for i, each in zip(among, keys, strict=True) if each == least]
    return tied[0] if len(tied) == 1 else tied[xxh3_64_intdigest(request.encode()) % len(tied)]

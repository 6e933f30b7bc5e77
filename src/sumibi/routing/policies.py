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
    best = min(candidates, key=lambda c: c.total_s)
    limit = best.total_s + SLACK * best.ttft_s
    keys = [(-c.matched_tokens - c.pending_tokens, c.dispatched) for c in candidates]
    return _least(request, keys, [c.total_s <= limit for c in candidates])


def round_robin(request: str, number: int, candidates: list[Candidate]) -> int:
    """The candidates in turn."""
    return number % len(candidates)


def least_loaded(request: str, number: int, candidates: list[Candidate]) -> int:
    """Fewest requests in flight; among ties fewest prompt tokens to compute, fewest so far, hash."""
    return _least(request, [(c.inflight, c.prefill_tokens, c.dispatched) for c in candidates])


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


def _least(request: str, keys: Sequence[tuple[float, ...]], allowed: list[bool] | None = None) -> int:
    indexes = [i for i in range(len(keys)) if allowed is None or allowed[i]]
    least = min(keys[i] for i in indexes)
    tied = [i for i in indexes if keys[i] == least]
    if len(tied) == 1:
        return tied[0]
    return tied[xxh3_64_intdigest(request.encode()) % len(tied)]

"""Policies by name: ours (`cost`) and the ones that it is compared with.

`base` says what a policy is. Those in `SCORERS` are functions of a decision record, so a record can be
asked what they would have done; the others know more than their record holds (an index of their own, the
last scrape, who is bound where): from a record their pick can be recomputed by its scores, and what they
would do elsewhere has to be played (`sumibi replay`).
"""

from collections.abc import Callable, Iterable, Iterator

from sumibi.core.errors import ConfigError
from sumibi.routing.config import RouterConfig
from sumibi.routing.decisions import Decision, Rerun
from sumibi.routing.policies import cost, least_loaded, round_robin, uniform
from sumibi.routing.policies.base import Ask, Policy, Pure, Scorer, least
from sumibi.routing.policies.dynamo_kv import DynamoKv
from sumibi.routing.policies.llmd_precise import Precise
from sumibi.routing.policies.llmd_sticky import StickyUntilSaturated
from sumibi.routing.policies.llmd_weighted import Weighted
from sumibi.routing.policies.session_sticky import SessionSticky
from sumibi.routing.policies.sglang_cache_aware import CacheAware

__all__ = [
    "PAIRING",
    "POLICIES",
    "PRICED",
    "SCORERS",
    "Ask",
    "Policy",
    "check_pairing",
    "least",
    "make_policy",
    "rerun",
]

SCORERS: dict[str, Scorer] = {
    "cost": cost.scores,
    "round-robin": round_robin.scores,
    "random": uniform.scores,
    "least-loaded": least_loaded.scores,
}
"""Policies that are functions of a decision record."""
PRICED = frozenset({"cost"})
"""Those that look at seconds: under another policy only the pick of a record is priced."""
PAIRING = frozenset({"cost", "round-robin", "random"})
"""Those that can place prefill and decode on two endpoints."""

_STATEFUL: dict[str, Callable[[RouterConfig], Policy]] = {
    "session-sticky": lambda config: SessionSticky(),
    "sglang-cache-aware": lambda config: CacheAware(),
    "llmd-weighted": lambda config: Weighted(config.approximate_match_tokens),
    "llmd-precise": lambda config: Precise(),
    "llmd-sticky-until-saturated": lambda config: StickyUntilSaturated(
        config.r_peak_tokens_per_s, config.sticky_limit_s, config.approximate_match_tokens
    ),
    "dynamo-kv": lambda config: DynamoKv(),
    "dynamo-kv-agentic": lambda config: DynamoKv(agentic=True),
}

POLICIES: tuple[str, ...] = (*SCORERS, *_STATEFUL)
"""All names."""


def make_policy(name: str, config: RouterConfig) -> Policy:
    """A fresh policy called `name`. Raises ConfigError that lists those there are."""
    if name in SCORERS:
        return Pure(SCORERS[name], priced=name in PRICED)
    if name in _STATEFUL:
        return _STATEFUL[name](config)
    raise _unknown(name)


def check_pairing(name: str) -> None:
    """Raises ConfigError if policy `name` cannot place prefill and decode on two endpoints."""
    if name not in PAIRING:
        raise ConfigError(
            f"policy {name} makes no pairs of prefill and decode endpoints, as this fleet needs;"
            f" {', '.join(each for each in POLICIES if each in PAIRING)} do"
        )


def rerun(decisions: Iterable[Decision], policy: str | None = None) -> Iterator[Rerun]:
    """Decide each recorded decision again, by its own policy or by `policy`.

    Raises ConfigError if there is no such policy, or if `policy` needs more than the records hold.
    """
    if policy is not None and policy not in POLICIES:
        raise _unknown(policy)
    for d in decisions:
        pick = least(d.request, _scores(d, policy))
        yield Rerun(
            decision=d.id,
            request=d.request,
            policy=policy or d.policy,
            recorded=d.picked.endpoint,
            rerun=d.candidates[pick].endpoint,
        )


def _scores(decision: Decision, policy: str | None) -> list[float]:
    name = policy or decision.policy
    scorer = SCORERS.get(name)
    if scorer is None:
        if name == decision.policy and len(decision.scores) == len(decision.candidates):
            return decision.scores
        if name not in POLICIES:
            raise _unknown(name)
        raise ConfigError(
            f"decision {decision.id}: what {name} would do depends on what it saw before, which no record"
            f" holds: replay the events instead. From a record alone: {', '.join(SCORERS)}"
        )
    if name in PRICED and decision.policy not in PRICED:
        raise ConfigError(
            f"decision {decision.id} was made under {decision.policy}, which prices nothing, so {name} has"
            " nothing to go by: replay the events instead"
        )
    return scorer(decision.request, decision.number, decision.candidates)


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"policy {name!r} is not one of {', '.join(POLICIES)}")

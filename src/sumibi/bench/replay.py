"""`sumibi replay`: the same traffic on the same simulated fleet under several policies, with the bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sumibi.bench.bounds import Bounds, BoundsOf
from sumibi.bench.traces import read_all
from sumibi.bench.workloads import generate, generator_of
from sumibi.core.errors import ConfigError
from sumibi.routing.policies import PAIRING, POLICIES, check_pairing
from sumibi.sim.fleet import FleetSpec
from sumibi.sim.results import Run
from sumibi.sim.simulate import simulate
from sumibi.sim.workload import Workload

DEFAULT_USERS = 32
"""Where sessions have no start of their own."""

Report = Callable[[str, str, float | None], None]
"""Told who does what, and which part of it is done."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One policy's run and what was possible."""

    run: Run
    bounds: Bounds

    def record(self) -> dict[str, Any]:
        """For `--json`. Rates are parts of prompt tokens; times are seconds, virtual unless it says wall."""
        summary = msgspec.structs.asdict(self.run.summary)
        hit_rate = self.run.summary.token_hit_rate
        return summary | {
            "bound_token_hit_rate": self.bounds.infinite,
            "pooled_lru_token_hit_rate": self.bounds.pooled_lru,
            "pooled_belady_token_hit_rate": self.bounds.pooled_belady,
            "share_of_bound": share(hit_rate, self.bounds.infinite),
            "share_of_pooled_lru": share(hit_rate, self.bounds.pooled_lru),
        }


def share(rate: float, of: float) -> float | None:
    """Part of what was possible that was reached; None if nothing was."""
    return rate / of if of else None


def policies_for(text: str, fleet: FleetSpec) -> tuple[list[str], list[str]]:
    """`policies`, and those that `all` leaves out on this fleet: they make no pairs, and groups have roles.

    One that is named stays, to be refused. Raises ConfigError.
    """
    names, asked = policies(text), _split(text)
    if not has_roles(fleet) or "all" not in asked:
        return names, []
    left_out = [name for name in names if name not in PAIRING and name not in asked]
    return [name for name in names if name not in left_out], left_out


def has_roles(fleet: FleetSpec) -> bool:
    """Whether requests may be pairs of prefill and decode."""
    return any(group.role != "both" for group in fleet.groups)


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def policies(text: str) -> list[str]:
    """Names from `a,b,c` or `all`, each once. Raises ConfigError."""
    names = _split(text)
    if "all" in names:
        return list(POLICIES)
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        what = f"there is no policy {unknown[0]!r}" if unknown else "no policy is named"
        raise ConfigError(f"--policy: {what}; there are {', '.join(POLICIES)}, and `all`")
    return list(dict.fromkeys(names))


def workload_of(sources: Sequence[str], *, format: str | None = None, seed: int = 0) -> Workload:
    """Trace files as one workload, or one generator. Raises ConfigError, TraceError."""
    made = [source for source in sources if generator_of(source) and not Path(source).exists()]
    if made:
        if len(sources) > 1:
            raise ConfigError(f"{made[0]} is a generator: it can only be replayed by itself")
        return generate(made[0], seed=seed)
    return read_all([Path(source) for source in sources], format)


def with_users(workload: Workload, users: int | None) -> int | None:
    """Who plays: the number of users, or None for an open loop (sessions start at their own times).

    Users that are asked for replace recorded times.
    """
    if users is not None and users < 1:
        raise ConfigError(f"--users must be at least 1, not {users}")
    if users is None and all(session.start_s is not None for session in workload.sessions):
        return None
    for session in workload.sessions:
        session.start_s = None
    return users or workload.users or DEFAULT_USERS


def replay(
    workload: Workload,
    fleet: FleetSpec,
    names: Sequence[str],
    *,
    users: int | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> list[Replayed]:
    """A run a policy, all with the same requests, engines and noise. Raises ConfigError.

    Baselines are calibrated for the fleet as their authors would.
    """
    if has_roles(fleet):
        for name in names:
            check_pairing(name)
    users = with_users(workload, users)
    tell = report or (lambda who, what, done: None)
    tell("bounds", "the tree of all prompts", None)
    bounds = BoundsOf(workload)
    tell("bounds", "the tree of all prompts", 1.0)
    replayed = []
    for name in names:
        what = f"{workload.requests:,} requests"

        def progress(over: int, total: int, who: str = name, what: str = what) -> None:
            tell(who, what, over / total)

        run = simulate(workload, fleet, policy=name, users=users, seed=seed, progress=progress)
        tell(name, what, 1.0)
        replayed.append(Replayed(run, bounds.run(run.calls, fleet)))
    return replayed

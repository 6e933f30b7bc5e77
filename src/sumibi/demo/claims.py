"""What the demonstration claims, judged on its measurements alone: pure functions over steps.

A claim holds or it does not; the targets stand here and nowhere else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, Literal, TypeVar

BLOCK_TOKENS = 32
POLICIES = ("cost", "round-robin")
"""Compared in phase 7."""
Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class StepResult:
    """One request as the client saw it, and where it was sent."""

    phase: int
    step: str
    policy: str
    endpoint: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    turn: int


@dataclass(frozen=True, slots=True)
class Claim:
    """`held`: whether `value` `op` `target` is so. A plain statement has value 1 or 0 and target 1."""

    name: str
    value: float
    op: Literal["<=", ">=", "=="]
    target: float
    held: bool


@dataclass(frozen=True, slots=True)
class Demonstration(Generic[Measured]):
    """What was measured, step by step, and whether it is what was claimed."""

    steps: list[Measured]
    claims: list[Claim]

    @property
    def held(self) -> bool:
        """True if every claim held."""
        return all(claim.held for claim in self.claims)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Phase 7 under one policy."""

    hit_rate: float
    """Cached share of all prompt tokens."""
    later_ttft_s: float
    """Median TTFT of turns after the first."""

    @classmethod
    def of(cls, steps: Iterable[StepResult], policy: str) -> "Pressure":
        """The summary of `policy`'s phase-7 steps."""
        mine = [step for step in steps if step.phase == 7 and step.policy == policy]
        cached, prompts = (sum(getattr(s, f"{kind}_tokens") for s in mine) for kind in ("cached", "prompt"))
        return cls(cached / prompts, median(step.ttft_s for step in mine if step.turn > 1))


def judge(steps: Sequence[StepResult]) -> list[Claim]:
    """Every claim, from all steps of a run."""
    one, two, three, four, five = (_only(steps, phase) for phase in range(1, 6))
    warm = max(two.ttft_s / one.ttft_s, three.ttft_s / one.ttft_s, five.ttft_s / four.ttft_s)
    a_kept = {one.endpoint} == {two.endpoint, three.endpoint}
    cost, turns = (Pressure.of(steps, policy) for policy in POLICIES)
    return [
        _at_most("warm TTFT / cold TTFT, worst of phases 2, 3 and 5", warm, 0.1),
        _true("phases 2 and 3 go to the replica that holds A", a_kept),
        _true("phase 4 avoids the busy replica", four.endpoint != one.endpoint),
        _true("phase 5 goes to the replica that holds B", five.endpoint == four.endpoint),
        _at_least("phase 6: found share of what earlier turns computed", _agent_share(steps), 0.9),
        _at_least("phase 7: token hit rate, cost / round-robin", ratio(cost.hit_rate, turns.hit_rate), 2.0),
        _at_least(
            "phase 7: median TTFT of turns >= 2, saved by cost against round-robin",
            1 - cost.later_ttft_s / turns.later_ttft_s,
            0.7,
        ),
    ]


def ratio(value: float, base: float) -> float:
    """How many times `base` is `value`; infinite over nothing."""
    return value / base if base else float("inf")


def _agent_share(steps: Sequence[StepResult]) -> float:
    """Cached tokens over what the main conversation's or the fork's last request left to find."""
    found = wanted = before = 0
    for step in (s for s in steps if s.phase == 6):
        found += min(step.cached_tokens, before)
        wanted += before
        if "fork" not in step.step:
            before = step.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return found / wanted


def _only(steps: Sequence[StepResult], phase: int) -> StepResult:
    (step,) = (s for s in steps if s.phase == phase)
    return step


def _at_most(name: str, value: float, target: float) -> Claim:
    return Claim(name, value, "<=", target, value <= target)


def _at_least(name: str, value: float, target: float) -> Claim:
    return Claim(name, value, ">=", target, value >= target)


def _true(name: str, value: bool) -> Claim:
    return Claim(name, float(value), "==", 1.0, value)

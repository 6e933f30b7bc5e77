"""Workloads of llm-d's shared-prefix generator: groups of prompts behind one system prompt, at given rates.

As in `workloads_ladder`: prompts are shuffled once and gone through in a circle, a stage is a burst of
rate x seconds requests with Poisson gaps, and the next begins after the last answer and a pause.
Published are the shapes and the range of rates; what the stages between are is ours.
"""

from array import array
from collections.abc import Sequence
from random import Random

from sumibi.bench.workloads.history import History, named
from sumibi.sim.workload import Session, Turn, Workload

Stages = Sequence[tuple[int, int]]
"""(requests a second, seconds); the first is the warm-up, one pass over all prompts."""

PRIORITIES = ((100, 0.2), (0, 0.6), (-10, 0.2))
"""W15: critical, normal, batch and their parts."""


def w1(*, seed: int = 0) -> Workload:
    """37 % of 4 x 461,376 tokens: 83 groups x 3 prompts, system 8,000, question 1,000, answer 1,000."""
    stages = [(5, 50), (3, 40), (5, 40), (8, 40), (10, 40), (12, 40), (15, 40), (18, 40), (20, 40)]
    return shared_prefix("W1", 83, 3, (8_000, 1_000, 1_000), stages, seed)


def w3(*, seed: int = 0) -> Workload:
    """4.64 M tokens of prompts, twice what the devices hold: 250 x 5, system 16,000, 256 in, 256 out."""
    stages = [(25, 50), (5, 40), (10, 40), (15, 40), (20, 40), (25, 40), (30, 40), (35, 40), (40, 40)]
    return shared_prefix("W3", 250, 5, (16_000, 256, 256), stages, seed)


def w15(*, seed: int = 0) -> Workload:
    """Three priorities mixed at random over the prompts of W2, with answers of 300 tokens, up to overload."""
    stages = [(15, 50), (10, 60), (20, 60), (40, 60), (60, 60)]
    workload = shared_prefix("W15", 150, 5, (6_000, 1_200, 300), stages, seed)
    random = Random(f"W15 {seed} priorities")
    priorities, weights = zip(*PRIORITIES, strict=True)
    drawn = random.choices(priorities, weights, k=len(workload.sessions))
    for session, priority in zip(workload.sessions, drawn, strict=True):
        session.priority = int(priority)
    return workload


def shared_prefix(
    name: str,
    groups: int,
    prompts: int,
    tokens: tuple[int, int, int],
    stages: Stages,
    seed: int,
    block_tokens: int = 64,
) -> Workload:
    """`groups` x `prompts` prompts of (system, question, answer) tokens, asked in stages."""
    random = Random(f"{name} {seed}")
    system_tokens, question_tokens, output_tokens = tokens
    keys = [
        _keys(name, group, prompt, system_tokens, question_tokens, block_tokens)
        for group in range(groups)
        for prompt in range(prompts)
    ]
    random.shuffle(keys)
    prompt_tokens = system_tokens + question_tokens
    turn = Turn(
        blocks=array("I", range(prompt_tokens // block_tokens)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=output_tokens,
    )
    workload = Workload(name, block_tokens)
    for stage, (rate, seconds) in enumerate(stages):
        # a given number of Poisson arrivals in a given time: even and independent
        for start_s in sorted(random.random() * seconds for _ in range(rate * seconds)):
            number = len(workload.sessions)
            workload.sessions.append(
                Session(f"{name.lower()}-{number}", keys[number % len(keys)], [turn], start_s, stage=stage)
            )
    return workload


def _keys(
    name: str, group: int, prompt: int, system_tokens: int, question_tokens: int, block_tokens: int
) -> list[int]:
    keys: list[int] = []
    history = History(keys, block_tokens)
    history.add(named(f"{name} system {group}"), system_tokens)
    history.add(named(f"{name} question {group} {prompt}"), question_tokens)
    return keys

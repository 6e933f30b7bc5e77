"""What runs in a contestant's own process: reads tasks, answers how long they took.

A `Task` comes in, a `Took` goes out. Time is this process's CPU time over all its threads, and
wall time beside it.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from benchmarks import contestant


@dataclass(frozen=True, slots=True)
class Task:
    """`batch` random prompts of `prompt` tokens; timed are `steps` decodes, or with 0 the prefill."""

    seed: int
    batch: int
    prompt: int
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of a task."""

    cpu_s: float
    wall_s: float


class Contestant(Protocol):
    """One engine under test."""

    def run(self, task: Task) -> Took:
        """Do the task (greedy), timing what it asks for."""
        ...


class Stopwatch:
    """`with Stopwatch() as watch: ...`, then `watch.took`."""

    def __enter__(self) -> "Stopwatch":
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.took = Took(time.process_time() - self._cpu_s, time.perf_counter() - self._wall_s)


def serve(make: Callable[[], tuple[Contestant, str]]) -> None:
    """Answer tasks until stdin ends. `make` returns the contestant and a line about its versions."""

    def made() -> tuple[Callable[[dict[str, int]], dict[str, float]], str]:
        engine, about = make()
        return lambda task: asdict(engine.run(Task(**task))), about

    contestant.serve(made)


def random_prompts(task: Task) -> list[list[int]]:
    """The same for every contestant: token ids without the special ones."""
    import random

    generator = random.Random(task.seed)
    return [[generator.randrange(100, 49_000) for _ in range(task.prompt)] for _ in range(task.batch)]

"""What runs in a contestant's own process: a task (its name and the round) comes in, its results go out.

Times are microseconds, wall and CPU. Standard library only.
"""

import time
from collections.abc import Callable

from benchmarks import contestant

Results = dict[str, float]
Tasks = dict[str, Callable[[int], Results]]
"""By name: does it once, for a round's number."""


def serve(make: Callable[[], tuple[Tasks, str]]) -> None:
    """Answer until stdin ends. `make` returns the tasks and a line about versions."""

    def made() -> tuple[Callable[[tuple[str, int]], Results], str]:
        tasks, about = make()
        return lambda task: tasks[task[0]](task[1]), about

    contestant.serve(made)


def each_us(work: Callable[[object], object], items: list[object]) -> Results:
    """Do it to every item: median, 99th percentile and mean of wall time, mean CPU time."""
    clock = time.perf_counter_ns
    walls = []
    cpu = time.process_time_ns()
    for item in items:
        begun = clock()
        work(item)
        walls.append(clock() - begun)
    cpu = time.process_time_ns() - cpu
    return spread_us(walls) | {"cpu_us": cpu / len(items) / 1e3}


def spread_us(walls_ns: list[int]) -> Results:
    """Median, 99th percentile and mean."""
    ordered = sorted(walls_ns)
    return {
        "p50_us": ordered[len(ordered) // 2] / 1e3,
        "p99_us": ordered[len(ordered) * 99 // 100] / 1e3,
        "mean_us": sum(ordered) / len(ordered) / 1e3,
    }

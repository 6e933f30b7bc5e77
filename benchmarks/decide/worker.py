"""What runs in a contestant's own process: one JSON line in (the name of a task), one out (its results).

Times are microseconds, wall and CPU; anything a library prints goes to stderr. Standard library only.
"""

import json
import os
import sys
import time
from collections.abc import Callable

Results = dict[str, float]
Tasks = dict[str, Callable[[int], Results]]
"""By name: does it once, for a round's number."""


def serve(make: Callable[[], tuple[Tasks, str]]) -> None:
    """Answer until stdin ends. `make` returns the tasks and a line about versions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tasks, about = make()
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        name, number = json.loads(line)
        print(json.dumps(tasks[name](number)), file=answers, flush=True)


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

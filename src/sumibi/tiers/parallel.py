"""Do a list of small jobs on the calling thread and some helpers at once."""

import threading
from collections.abc import Callable, Iterator, Sequence

from sumibi.tiers.workers import Workers


class _Shared:
    """The jobs not yet begun, and how many are running."""

    def __init__(self, jobs: Iterator[Callable[[], None]]) -> None:
        self.jobs = jobs
        self.running = 0
        self.done = 0
        self.changed = threading.Condition()

    def work(self) -> None:
        """Take jobs until there are none."""
        while True:
            with self.changed:
                job = next(self.jobs, None)
                if job is None:
                    return
                self.running += 1
            try:
                job()
            finally:
                with self.changed:
                    self.running -= 1
                    self.done += 1
                    self.changed.notify_all()


def run_together(workers: Workers, helpers: int, jobs: Sequence[Callable[[], None]]) -> None:
    """Run all jobs and return when all are done. The calling thread does its share, so it needs no helper to
    come free. A job must not raise.
    """
    shared = _Shared(iter(jobs))
    for _ in range(min(helpers, len(jobs) - 1)):
        if not workers.submit(shared.work):
            break
    shared.work()
    with shared.changed:
        shared.changed.wait_for(lambda: not shared.running)


def run_until(workers: Workers, helpers: int, jobs: Sequence[Callable[[], None]], timeout_s: float) -> bool:
    """Run all jobs on helpers only; True once all are done, False if that takes longer than `timeout_s`: what
    has begun by then goes on, what has not is not begun.
    """
    shared = _Shared(iter(jobs))
    for _ in range(min(helpers, len(jobs))):
        if not workers.submit(shared.work):
            break
    with shared.changed:
        finished = shared.changed.wait_for(lambda: shared.done == len(jobs), timeout_s)
        shared.jobs = iter(())
    return finished


def run_unless_stuck(
    workers: Workers,
    helpers: int,
    jobs: Sequence[Callable[[], None]],
    stuck_s: float,
    meanwhile: Callable[[], None],
) -> bool:
    """Run all jobs on helpers only; True once all are done, False if `stuck_s` go by in which none is done:
    what has begun by then goes on, what has not is not begun. `meanwhile` is called by the calling thread
    when some have been done.
    """
    shared = _Shared(iter(jobs))
    for _ in range(min(helpers, len(jobs))):
        if not workers.submit(shared.work):
            break
    seen = 0
    while True:
        with shared.changed:
            moved = shared.changed.wait_for(lambda: shared.done > seen, stuck_s)  # noqa: B023 (called here)
            seen = shared.done
            if not moved or seen == len(jobs):
                shared.jobs = iter(())
                return moved
        meanwhile()

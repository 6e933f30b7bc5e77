"""How much slower than on a processor of their own engines ran, from how long their threads waited for one.

Others share the machine with a benchmark. Linux counts for each thread the time that it ran and the time that
it could have run but another one did (`/proc/PID/task/TID/schedstat`), so that is known without a look at how
requests fared. What others take from caches and memory is not counted.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

WINDOW_S = 3.0
LEAST_RUN_S = 0.1
"""An engine that ran for less in a window says nothing about it."""


class Window(msgspec.Struct, frozen=True):
    """Some seconds of one engine."""

    endpoint: str
    start_s: float
    """CLOCK_MONOTONIC, as the gateway's log has it."""
    end_s: float
    ran_s: float
    waited_s: float

    @property
    def slowdown(self) -> float:
        """1: never waited."""
        return (self.ran_s + self.waited_s) / self.ran_s


class Watch:
    """Counts in a thread of its own while its block lasts."""

    def __init__(self, engines: Mapping[str, int]) -> None:
        """`engines`: process ids by endpoint."""
        self._engines = engines
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.windows: list[Window] = []

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * WINDOW_S)

    def _run(self) -> None:
        then_s, then = time.monotonic(), {name: counted(pid) for name, pid in self._engines.items()}
        while not self._over.wait(WINDOW_S):
            now_s, now = time.monotonic(), {name: counted(pid) for name, pid in self._engines.items()}
            for name, (ran_s, waited_s) in now.items():
                ran_s, waited_s = ran_s - then[name][0], waited_s - then[name][1]
                if ran_s >= LEAST_RUN_S:
                    self.windows.append(Window(name, then_s, now_s, ran_s, max(0.0, waited_s)))
            then_s, then = now_s, now


def counted(pid: int) -> tuple[float, float]:
    """(ran, waited) seconds of all threads of a process so far."""
    ran_ns = waited_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran, waited, _ = (task / "schedstat").read_text().split()
        except FileNotFoundError:  # it ended just now
            continue
        ran_ns += int(ran)
        waited_ns += int(waited)
    return ran_ns * 1e-9, waited_ns * 1e-9


def slowdown(windows: list[Window]) -> float:
    """Of some windows together; 1 of none."""
    ran_s = sum(window.ran_s for window in windows)
    return (ran_s + sum(window.waited_s for window in windows)) / ran_s if ran_s else 1.0

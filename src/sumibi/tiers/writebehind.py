"""A bounded queue of blocks to be written to a slower tier, and the thread that writes them in batches."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sumibi.core.priority import give_way
from sumibi.tiers.catalog import Entry

_log = logging.getLogger(__name__)
BATCH_BLOCKS = 16
GATHER_S = 0.25
"""A block waits at most so long for others to be written with it."""
_HANGS_S = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """A pinned block of host memory that waits to be written."""

    entry: Entry
    epoch: int
    """Which life of the namespace it belongs to: `clear` begins a new one."""


class WriteBehind:
    """One thread, which gives way to others of the process. `write` gets batches; `chores` runs once at the
    start and about every `every_s` seconds or after `nudge`, on the same thread. Neither may raise; if one
    does it is logged and the thread goes on.
    """

    def __init__(
        self,
        name: str,
        limit_blocks: int,
        write: Callable[[list[Job]], None],
        chores: Callable[[], None],
        every_s: float,
    ) -> None:
        self._limit = limit_blocks
        self._write = write
        self._chores = chores
        self._every_s = every_s
        self._queue: deque[Job] = deque()
        self._enough = max(1, min(BATCH_BLOCKS, limit_blocks // 2))
        self._oldest_s = 0.0
        """When the first of those that wait came."""
        self._hurried = 0
        """How many wait for the queue to be empty."""
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._busy = True
        self._closed = False
        self._nudged = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, job: Job) -> bool:
        """Queue a block; False when the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._queue) >= self._limit:
                return False
            if not self._queue:
                self._oldest_s = time.monotonic()
            self._queue.append(job)
            if len(self._queue) == 1 or len(self._queue) >= self._enough:
                self._changed.notify_all()
        return True

    def nudge(self) -> None:
        """Run the chores soon."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def drain(self) -> list[Job]:
        """Take back what waits."""
        with self._changed:
            jobs = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        return jobs

    def between(self, act: Callable[[], None]) -> None:
        """Run `act` on this thread while the writing thread writes nothing. Raises TimeoutError (an OSError)
        where that one hangs.
        """
        if not self._writing.acquire(timeout=_HANGS_S):
            raise TimeoutError(f"{self._thread.name} has been writing for {_HANGS_S:.0f} s")
        try:
            act()
        finally:
            self._writing.release()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is written (or given up); False if that took too long."""
        with self._changed:
            self._hurried += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: self._closed or (not self._queue and not self._busy), timeout_s
                )
            finally:
                self._hurried -= 1

    def close(self, timeout_s: float) -> list[Job]:
        """Stop after the batch in hand; what was not written. The thread is left behind if it hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return self.drain()

    def _run(self) -> None:
        give_way()
        next_s = time.monotonic()
        while True:
            with self._changed:
                while True:
                    now_s = time.monotonic()
                    due = self._nudged or now_s >= next_s
                    gathered_s = self._oldest_s + GATHER_S if self._queue else float("inf")
                    enough = self._hurried or len(self._queue) >= self._enough or now_s >= gathered_s
                    if self._closed or due or (self._queue and enough):
                        break
                    self._busy = False
                    self._changed.notify_all()
                    self._changed.wait(min(min(next_s, gathered_s) - now_s, threading.TIMEOUT_MAX))
                if self._closed:
                    self._busy = False
                    self._changed.notify_all()
                    return
                self._busy = True
                self._nudged = False
                batch = [] if due else [self._queue.popleft() for _ in range(self._take())]
                self._oldest_s = time.monotonic()
            try:
                with self._writing:
                    if due:
                        next_s = time.monotonic() + self._every_s
                        self._chores()
                    else:
                        self._write(batch)
            except Exception:
                _log.exception("%s failed", self._thread.name)

    def _take(self) -> int:
        return min(BATCH_BLOCKS, len(self._queue))

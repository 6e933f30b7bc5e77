"""A few daemon threads that take tasks from a bounded queue.

Not concurrent.futures: its threads are joined when the interpreter ends, and one that hangs in a read from a
file server that is gone would hold the process for ever.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

Task = Callable[[], None]


class Workers:
    """`threads` threads, started when first needed; at most `waiting` tasks wait."""

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name = name
        self._limit = threads
        self._waiting = waiting
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, task: Task) -> bool:
        """Queue a task; False when there are too many or after `close`. A task must not raise."""
        with self._changed:
            if self._closed or len(self._tasks) >= self._waiting:
                return False
            self._tasks.append(task)
            if self._idle < len(self._tasks) and len(self._threads) < self._limit:
                thread = threading.Thread(
                    target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return True

    def close(self, timeout_s: float) -> None:
        """No more tasks; those that wait are dropped, those that run may end within `timeout_s` each."""
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._tasks and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                task = self._tasks.popleft()
            try:
                task()
            except Exception:
                _log.exception("a task of %s failed", self._name)

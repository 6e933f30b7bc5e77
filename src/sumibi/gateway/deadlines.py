"""One sweep for many deadlines: cheaper than a timer for each wait of each connection.

A data plane moves thousands of deadlines a second and lets almost none of them pass. So whoever waits just
writes a number into its `deadline`, and a sweep twice a second calls those whose time is over. Deadlines
are therefore late by up to half a second, which no limit here minds.
"""

import asyncio
from typing import Protocol

SWEEP_S = 0.5


class Waiting(Protocol):
    """Something with a deadline (seconds on the loop's clock; infinity for none)."""

    deadline: float

    def expired(self, now: float) -> None:
        """The deadline is over: called by every sweep until it is moved or the waiter removed."""


class Deadlines:
    """The set of waiters and the timer that sweeps it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiting: set[Waiting] = set()
        self._timer = loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """Sweep no more."""
        self._timer.cancel()

    def _sweep(self) -> None:
        now = self.loop.time()
        for waiter in [waiter for waiter in self.waiting if waiter.deadline < now]:
            waiter.expired(now)
        self._timer = self.loop.call_later(SWEEP_S, self._sweep)

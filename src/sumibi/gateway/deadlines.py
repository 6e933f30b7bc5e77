"""One sweep for many deadlines: cheaper than a timer for each wait of each connection.

A data plane moves thousands of deadlines a second and lets almost none of them pass. So whoever waits just
writes a number into its `deadline`, and a sweep twice a second calls those whose time is over. Deadlines
are therefore late by up to half a second, which no limit here minds.

A sweep that is itself late by seconds says that this process did not run meanwhile (a paused container, a
machine that swaps): then nobody could be heard, and what peers sent waits to be read. That time is nobody's
delay, and is added to every deadline.
"""

import asyncio
import logging
from typing import Final, Protocol

SWEEP_S: Final = 0.5
PAUSE_S: Final = 1.0
"""A sweep so late comes after a pause; less is a busy loop."""

log = logging.getLogger(__name__)


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
        self.pauses = 0
        """Times that this process did not run for a while."""
        self._due = loop.time() + SWEEP_S
        self._timer = loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """Sweep no more."""
        self._timer.cancel()

    def _sweep(self) -> None:
        now = self.loop.time()
        late_s = now - self._due
        if late_s > PAUSE_S:
            self._paused(late_s)
        for waiter in [waiter for waiter in self.waiting if waiter.deadline < now]:
            waiter.expired(now)
        self._due = now + SWEEP_S
        self._timer = self.loop.call_later(SWEEP_S, self._sweep)

    def _paused(self, late_s: float) -> None:
        self.pauses += 1
        if self.pauses == 1:
            log.warning("this process did not run for %.1f s: nobody is blamed for it; told once", late_s)
        for waiter in self.waiting:
            waiter.deadline += late_s

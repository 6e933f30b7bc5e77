"""When Python's cyclic garbage collector runs: between requests, not in the middle of one.

Left alone it runs whenever enough objects were made, and walks them, prompts' keys included: milliseconds
that one request pays for all. So it is off. Instead what is young is looked through every second, which is
quick, and everything when nobody is served. Under unbroken load everything that came since the last such
look is looked through every ten minutes, and taken for permanent then: the next look need not walk it again.
What becomes a cycle of garbage after that waits for an idle moment.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import Final

YOUNG_S: Final = 1.0
FULL_S: Final = 600.0
"""Between looks at everything, under unbroken load."""
IDLE_S: Final = 30.0
"""Between looks at everything if nobody is served."""


class Collector:
    """`busy` says whether anybody is served at present. Times are any clock's, in seconds."""

    def __init__(self, busy: Callable[[], bool], t: float) -> None:
        """Looks through everything at once, and switches the automatic collector off."""
        self._busy = busy
        self._full_t = t
        gc.disable()
        self._look_through_everything()

    def look(self, t: float) -> None:
        """Collect what is due at `t`. To be called about every YOUNG_S."""
        busy = self._busy()
        if t - self._full_t < (FULL_S if busy else IDLE_S):
            gc.collect(1)
            return
        self._full_t = t
        if not busy:
            gc.unfreeze()
        self._look_through_everything()

    def close(self) -> None:
        """Have Python collect by itself again."""
        gc.unfreeze()
        gc.enable()

    def _look_through_everything(self) -> None:
        gc.collect()
        gc.freeze()


async def keep_collecting(busy: Callable[[], bool], now: Callable[[], float]) -> None:
    """Until cancelled."""
    collector = Collector(busy, now())
    try:
        while True:
            await asyncio.sleep(YOUNG_S)
            collector.look(now())
    finally:
        collector.close()

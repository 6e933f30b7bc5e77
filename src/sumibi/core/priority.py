"""Threads that give way to an engine's steps: what they do may take longer, tokens may not wait for it."""

import os
import sys
import threading
from typing import Final

GIVES_WAY: Final = 5
"""Added to a thread's niceness: beside a step on the same core it gets a quarter of it, not a half."""
_NICEST: Final = 19


def give_way() -> None:
    """Let the calling thread give way to others of its process. Only Linux has that; elsewhere no effect."""
    if sys.platform != "linux":
        return
    # There a thread is a process to the scheduler. Lowering one's own priority is always allowed.
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(usual + GIVES_WAY, _NICEST))

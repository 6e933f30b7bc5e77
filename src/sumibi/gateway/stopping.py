"""How what serves is told to stop: the first signal begins to drain, the second cuts that short."""

import asyncio
import signal


def on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that the running loop sets at SIGTERM or SIGINT: `stop` at the first, `hurry` at the next."""
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    return stop, hurry

"""Where the side channels of prefill engines listen, by their own word, for who knows their names only.

An engine is asked when it is first named, and again when its word is old or a pair with it failed: it may
have been started again, and its side channel be elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from sumibi.core.errors import EngineUnavailable
from sumibi.engines.discovery import TransferInfo, transfer_info

_ASK_S: Final = 2.0
_OLD_S: Final = 10.0
"""Then it is asked again, beside the requests; they go by the old word meanwhile."""
_REST_S: Final = 5.0
"""After an engine did not answer nobody waits for it so long; 2 s of each request would go to it."""

log = logging.getLogger(__name__)


class Sides:
    """Keyed by `host:port` of the engines, of which there are as many as the caller allows."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._told: dict[str, TransferInfo | None] = {}
        self._ask_again_t: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._complained: set[str] = set()

    def told(self, address: str) -> TransferInfo | None:
        """What the engine said last; None: nothing that helps."""
        return self._told.get(address)

    def ask(self, address: str) -> asyncio.Task[None] | None:
        """Have the engine asked if need be; what to wait for before `told` is right, None: nothing."""
        due = self._now() >= self._ask_again_t.get(address, 0.0)
        if due and address not in self._asking:
            self._asking[address] = asyncio.get_running_loop().create_task(self._ask(address))
        return None if address in self._told else self._asking.get(address)

    def doubt(self, address: str) -> None:
        """A pair with the engine failed: its word may not hold any more."""
        if self._told.get(address) is not None:
            del self._told[address]
            self._ask_again_t.pop(address, None)

    def close(self) -> None:
        """Ask no more."""
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, address: str) -> None:
        told, rest_s = None, _OLD_S
        try:
            told = await transfer_info(f"http://{address}", _ASK_S)
            if told is None or not told.remote_port:
                told = None
                self._complain(address, "it does not say where its side channel listens (GET /kv_transfer)")
        except EngineUnavailable as cause:
            rest_s = _REST_S
            self._complain(address, str(cause))
        finally:
            del self._asking[address]
        self._told[address] = told
        self._ask_again_t[address] = self._now() + rest_s

    def _complain(self, address: str, why: str) -> None:
        if address not in self._complained:
            self._complained.add(address)
            log.warning(
                "prefill engine %s: %s: the connector's usual port is taken for it (--kv-port says another)",
                address,
                why,
            )

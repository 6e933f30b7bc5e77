"""Which prefill engines a sidecar's requests may name: addresses as given, and those that names have now.

A name (of a headless Service, say) stands for every address that it resolves to, whatever comes and goes
behind it.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

_EVERY_S: Final = 5.0
"""Between two looks at what the names stand for; a prefill engine takes longer to load a model."""
_TIMEOUT_S: Final = 5.0

Resolver = Callable[[str], Awaitable[Iterable[str]]]

log = logging.getLogger(__name__)


class Allowed:
    """A set of `host:port` words. `refresh` once, then `run` as a task."""

    def __init__(self, words: Iterable[str], resolve: Resolver | None = None) -> None:
        self._resolve = resolve or _resolve
        self._given = frozenset(words)
        self._names = sorted(word for word in self._given if not _is_address(_split(word)[0]))
        self._found: dict[str, frozenset[str]] = {}
        """Name -> what it stood for when it could last be resolved."""
        self._failing: set[str] = set()

    def __contains__(self, word: str) -> bool:
        return word in self._given or any(word in found for found in self._found.values())

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while self._names:
            await asyncio.sleep(_EVERY_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Look at every name. One that cannot be resolved keeps what it stood for; that is logged once."""
        await asyncio.gather(*map(self._look, self._names))

    async def _look(self, name: str) -> None:
        host, port = _split(name)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                addresses = await self._resolve(host)
        except (OSError, UnicodeError, TimeoutError) as cause:
            if name not in self._failing:
                self._failing.add(name)
                log.warning(
                    "--allow-prefiller %s: cannot be resolved (%s); still trying", name, cause or "too slow"
                )
            return
        self._failing.discard(name)
        self._found[name] = frozenset(f"[{at}]:{port}" if ":" in at else f"{at}:{port}" for at in addresses)


def _split(word: str) -> tuple[str, int]:
    host, _, port = word.rpartition(":")
    return host.strip("[]"), int(port)


async def _resolve(host: str) -> list[str]:
    """Raises OSError (UnicodeError for what is no name)."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in answers]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

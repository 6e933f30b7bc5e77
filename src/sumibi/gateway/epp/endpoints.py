"""Endpoints by file, for pickers without Kubernetes: the format of llm-d's `file-discovery`.

    endpoints:
    - {name: vllm-0, address: 10.0.0.1, port: "8000", labels: {llm-d.ai/role: decode}}

The file is read again when it changes. One that cannot be read, or is wrong, changes nothing: the endpoints
of the last good one stay, and the error is logged once.
"""

import asyncio
import ipaddress
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from sumibi.core.errors import ConfigError
from sumibi.gateway.options import EngineOption
from sumibi.routing.events import Role

ROLE_LABEL: Final = "llm-d.ai/role"
"""Its values `prefill` and `decode` are roles; any other leaves the endpoint for everything."""
MAX_BYTES: Final = 1 << 20
_LOOK_S: Final = 1.0

log = logging.getLogger(__name__)


class Listed(msgspec.Struct, omit_defaults=True):
    """One endpoint of a file."""

    name: str
    address: str
    """An IP address."""
    port: str | int
    namespace: str = ""
    labels: dict[str, str] = {}


class Listing(msgspec.Struct):
    """A file."""

    endpoints: list[Listed]


class EventPorts(msgspec.Struct, frozen=True):
    """Where every endpoint publishes KV events, for engines that do not say (vLLM's)."""

    events: int | None = None
    replay: int | None = None


def engine_at(address: str, port: int, labels: Mapping[str, str], ports: EventPorts) -> EngineOption:
    """The engine at an IP address."""
    host = f"[{address}]" if ":" in address else address
    role = {"prefill": Role.PREFILL, "decode": Role.DECODE}.get(labels.get(ROLE_LABEL, ""))
    events = f"tcp://{host}:{ports.events}" if ports.events is not None else None
    replay = f"tcp://{host}:{ports.replay}" if ports.replay is not None and events is not None else None
    return EngineOption(f"http://{host}:{port}", kv_events=events, kv_replay=replay, role=role)


def read(data: bytes, ports: EventPorts) -> list[EngineOption]:
    """The engines that a file (YAML, or JSON, which is YAML too) names. Raises ConfigError."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"it is longer than {MAX_BYTES} bytes")
    try:
        listing = msgspec.yaml.decode(data, type=Listing, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise ConfigError(f"want endpoints: [{{name, address, port, labels}}]: {cause}") from cause
    found: dict[str, EngineOption] = {}
    for number, one in enumerate(listing.endpoints):
        where = f"endpoints[{number}] ({one.name})"
        try:
            ipaddress.ip_address(one.address)
        except ValueError as cause:
            raise ConfigError(f"{where}.address is {one.address!r}: want an IP address") from cause
        port = str(one.port)
        if not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"{where}.port is {one.port!r}: want 1 to 65535")
        engine = engine_at(one.address, int(port), one.labels, ports)
        if engine.url in found:
            raise ConfigError(f"{where}: {engine.url} is named twice")
        found[engine.url] = engine
    return list(found.values())


def write(path: Path, endpoints: Iterable[Listed]) -> None:
    """Write a file that pickers read: never half of one is seen."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(msgspec.yaml.encode(Listing(list(endpoints))))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class FileDiscovery:
    """Watches a file."""

    def __init__(
        self, path: Path, ports: EventPorts, found: Callable[[list[EngineOption]], Awaitable[None]]
    ) -> None:
        self.failures = 0
        """Times that the file changed and could not be used."""
        self._path = path
        self._ports = ports
        self._found = found
        self._seen: tuple[Any, ...] | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Take the file over if it changed."""
        seen: tuple[Any, ...]
        try:
            stat = self._path.stat()
            seen = stat.st_mtime_ns, stat.st_size, stat.st_ino
        except OSError as cause:
            seen = (str(cause),)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            with self._path.open("rb") as file:
                engines = read(file.read(MAX_BYTES + 1), self._ports)
        except (OSError, ConfigError) as cause:
            self.failures += 1
            log.error("--endpoints-file %s: %s; the endpoints stay as they were", self._path, cause)
            return
        await self._found(engines)

"""Asks a gateway on this machine: its admin door (with the key from the state directory) and its metrics.

A client of two HTTP doors, nothing more; the answers' types are the router's and the gateway's own.
"""

import http.client
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from sumibi.core.errors import EngineUnavailable, EnvironmentProblem, WireError
from sumibi.gateway.views import TransferView
from sumibi.routing.decisions import Decision
from sumibi.routing.events import Grade
from sumibi.routing.views import Counters, EndpointView

ADMIN_KEY_FILE = "admin.key"
"""In the state directory; the gateway makes it."""
_TIMEOUT_S = 5.0
_FLEET_TIMEOUT_S = 30.0
_POLL_S = 0.1
_SAMPLE = re.compile(r"^(\w+|\w+:\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Answer = TypeVar("Answer")


class Wire(msgspec.Struct):
    """What the gateway's connections know of an endpoint."""

    transfer: TransferView = TransferView()


class Fleet(msgspec.Struct):
    """The part of /fleet that is used here."""

    endpoints: list[EndpointView]
    counters: Counters
    wire: dict[str, Wire] = {}


class _Placements(msgspec.Struct):
    decisions: list[Decision]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin door at `url`."""

    url: str
    key: str

    @classmethod
    def of(cls, state_dir: Path, url: str) -> "Admin":
        """With the key of the gateway that keeps its state there. Raises EnvironmentProblem."""
        file = state_dir / ADMIN_KEY_FILE
        try:
            return cls(url, file.read_text().strip())
        except OSError as cause:
            raise EnvironmentProblem(f"cannot read the admin key in {file}: {cause.strerror}") from cause

    def fleet(self) -> Fleet:
        """Every endpoint as the router sees it. Raises EngineUnavailable, WireError."""
        return self._get("/fleet", Fleet)

    def endpoint_of(self, request_id: str) -> str:
        """Where a request was sent (the last try). Raises EngineUnavailable, WireError."""
        found = self._get(f"/requests/{quote(request_id, safe='')}", _Placements).decisions
        return max(found, key=lambda decision: decision.attempt).picked.endpoint

    def _get(self, path: str, kind: type[Answer]) -> Answer:
        body = fetch(self.url + path, {"Authorization": f"Bearer {self.key}"})
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as cause:
            raise WireError(f"the admin door's answer to {path} is not understood: {cause}") from cause


def wait_for_fleet(admin: Admin, endpoints: int, report: Callable[[int], None] = lambda ready: None) -> None:
    """Wait until the gateway knows the caches of that many endpoints exactly. Raises EngineUnavailable."""
    until = time.monotonic() + _FLEET_TIMEOUT_S
    while True:
        fleet = admin.fleet()
        ready = sum(one.up and one.grade is Grade.EXACT for one in fleet.endpoints)
        report(ready)
        if ready >= endpoints:
            return
        if time.monotonic() > until:
            seen = "; ".join(f"{one.endpoint} up={one.up} {one.grade}" for one in fleet.endpoints)
            raise EngineUnavailable(
                f"the gateway has no exact view of {endpoints} replicas: {seen or 'none'}"
            )
        time.sleep(_POLL_S)


def metrics(url: str) -> list[Sample]:
    """Every sample of the metrics page at `url`. Raises EngineUnavailable."""
    text = fetch(url).decode(errors="replace")
    return [
        Sample(name, dict(_LABEL.findall(labels)), float(value))
        for name, labels, value in _SAMPLE.findall(text)
    ]


def fetch(url: str, headers: dict[str, str] | None = None) -> bytes:
    """The body of GET `url`. Raises EngineUnavailable unless the answer is 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", parts.path, headers=headers or {})
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as cause:
        raise EngineUnavailable(f"no answer from {url}: {cause}") from cause
    finally:
        connection.close()
    if response.status != 200:
        raise EngineUnavailable(f"{url} answered {response.status}: {body[:300].decode(errors='replace')}")
    return body

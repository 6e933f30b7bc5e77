"""What a request's headers say about its place in a queue: whose it is, how urgent, how long it will wait.

The names are llm-d's, the older ones included. An objective is a word that the operator gave a priority to
(`gateway.objectives` in a stack file, `--objective`); clients cannot make up priorities of their own, and a
word that nobody knows is priority 0. What a client wrote is not kept: see `session`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from xxhash import xxh3_128_hexdigest

from sumibi.core.errors import BadRequest, ConfigError
from sumibi.gateway.session import session_of

OBJECTIVE_HEADERS = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
FAIRNESS_HEADERS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
TTL_HEADER: Final = b"x-llm-d-inference-ttl"

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_MAX_TEXT: Final = 64


class Terms(NamedTuple):
    """See the module."""

    session: str
    """Hash; empty if no header names one."""
    program: str
    """Hash of the fairness id; empty if there is none: then the session counts."""
    priority: int
    ttl_s: float | None
    """None: no wish of its own."""


def terms_of(named: Mapping[bytes, bytes], tenant: str, objectives: Mapping[str, int]) -> Terms:
    """Read the headers (by lower-case name). Raises BadRequest naming the header at fault."""
    fairness = _first(named, FAIRNESS_HEADERS)
    ttl = named.get(TTL_HEADER)
    return Terms(
        session=session_of(named, tenant),
        program=xxh3_128_hexdigest(tenant.encode() + b"\1" + fairness) if fairness else "",
        priority=objectives.get(_first(named, OBJECTIVE_HEADERS).decode("latin-1"), 0) if objectives else 0,
        ttl_s=_ttl_s(ttl) if ttl is not None else None,
    )


def objectives_of(words: Iterable[str]) -> dict[str, int]:
    """Priorities by objective from `NAME=PRIORITY` words. Raises ConfigError naming flag and word."""
    objectives: dict[str, int] = {}
    for word in words:
        name, equals, number = word.rpartition("=")
        if not equals or not name or not re.fullmatch(r"-?\d{1,9}", number):
            raise ConfigError(f"--objective {word!r}: want NAME=PRIORITY, for example critical=100")
        if name in objectives:
            raise ConfigError(f"--objective: {name} is named twice")
        objectives[name] = int(number)
    return objectives


def _first(named: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> bytes:
    for name in names:
        if value := named.get(name):
            return value
    return b""


def _ttl_s(value: bytes) -> float | None:
    """Seconds of a Go duration such as `1m30s` or `250ms`; None for zero, which is no limit."""
    text = value.strip().decode("utf-8", "replace")
    parts = _PART.findall(text)
    if text == "0":
        return None
    if not parts or len(text) > _MAX_TEXT or "".join(number + unit for number, unit in parts) != text:
        name = TTL_HEADER.decode()
        raise BadRequest(f"{name} is {text[:_MAX_TEXT]!r}: want a duration such as 2s or 1m30s", param=name)
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts) or None

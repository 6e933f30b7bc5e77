"""Requests that `flow` holds: each by itself, in the order of its band, and by the blocks it waits for."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

from sumibi.core.errors import SumibiError
from sumibi.routing.config import BandLimits
from sumibi.routing.requests import Request

BYTES_PER_TOKEN: Final = 4
"""Of a request's body: English text, which is what most of a prompt is."""


class Held:
    """A request that waits here."""

    __slots__ = (
        "deadline_t",
        "declined_t",
        "gone",
        "home",
        "known_blocks",
        "lead_s",
        "number",
        "queued_t",
        "request",
        "turn_t",
        "work_ns",
    )

    def __init__(self, request: Request, queued_t: float, deadline_t: float) -> None:
        self.request = request
        self.queued_t = queued_t
        self.deadline_t = deadline_t
        self.turn_t = 0.0
        self.lead_s = 0.0
        """Of its program when it came, as it counts."""
        self.number = 0
        self.home = ""
        self.known_blocks = 0
        """Leading blocks of its prompt that are there, or will be."""
        self.work_ns = 0
        """To compute the others, there."""
        self.declined_t: float | None = None
        """When it first did not go home though its home could begin."""
        self.gone = False

    @property
    def priority(self) -> int:
        """Of its band."""
        return self.request.event.priority

    @property
    def bytes(self) -> int:
        """Of its body, estimated."""
        return self.request.event.prompt_tokens * BYTES_PER_TOKEN

    @property
    def missing(self) -> int | None:
        """The first block of its prompt that has to be computed at its home. None: no whole block has."""
        keys = self.request.event.keys
        return keys[self.known_blocks] if self.known_blocks < len(keys) else None


class Band:
    """The held requests of one priority."""

    __slots__ = ("backlog_ns", "bytes", "limits", "order")

    def __init__(self, limits: BandLimits) -> None:
        self.limits = limits
        self.order: list[tuple[float, int, Held]] = []
        """By turn, then by arrival."""
        self.bytes = 0
        self.backlog_ns: dict[str, int] = {}
        """Home -> work that is held for it."""

    def put(self, held: Held) -> None:
        """Into the order, by its turn."""
        insort(self.order, (held.turn_t, held.number, held))

    def take(self, held: Held) -> None:
        """Out of the order. Its turn is what it was when it was put in."""
        del self.order[bisect_left(self.order, (held.turn_t, held.number, held))]


class Missing:
    """Held requests by the first block that they have to compute (`Held.missing`).

    Keys are chained, so those with the same one begin alike up to it.
    """

    def __init__(self) -> None:
        self._by_key: dict[int, dict[int, Held]] = {}
        """Key -> number -> held, as they came."""

    def add(self, held: Held) -> None:
        """It waits for what is missing to it now."""
        key = held.missing
        if key is not None:
            self._by_key.setdefault(key, {})[held.number] = held

    def remove(self, held: Held) -> None:
        """It does not any more."""
        key = held.missing
        if key is not None:
            waiting = self._by_key[key]
            del waiting[held.number]
            if not waiting:
                del self._by_key[key]

    def beside(self, held: Held) -> Iterable[Held]:
        """Those that wait for the same block as this one, which does not wait any more itself."""
        key = held.missing
        return self._by_key.get(key, {}).values() if key is not None else ()

    def check_integrity(self, held: Iterable[Held]) -> None:
        """Recount; raises SumibiError."""
        expected: dict[int, set[int]] = {}
        for one in held:
            if one.missing is not None:
                expected.setdefault(one.missing, set()).add(one.number)
        if {key: set(waiting) for key, waiting in self._by_key.items()} != expected:
            raise SumibiError("flow: who waits for which block is not what requests say")

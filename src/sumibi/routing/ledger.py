"""The ledger: who has reserved what, where; and what is left of it.

A reservation has two parts, which may lie on different endpoints: *prefill* (until the first token) and
*decode* (KV and a place in the batch, until the end). Each part is counted in the `Load` of one *life* of
one endpoint. A part is released exactly once, by whatever way out the request takes; the part itself knows
the load it was counted in, so a release that comes late, after the endpoint restarted or was removed, goes
to the life it belonged to and can never make a new one's counters negative.

The ledger does not know health, metrics or time-outs: nothing but the end of a request releases its parts.
Quantities are integers (tokens, nanoseconds), so that the sum of what is released is exactly the sum of
what was reserved.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from sumibi.core.errors import SumibiError


class Owner(NamedTuple):
    """Key of a ledger entry. Peers' entries can stand beside ours: a gateway's restart is a new epoch."""

    gateway: str
    epoch: int
    request: str


class Reservation:
    """What one attempt of one request has reserved. Made by `Ledger.reserve`, changed only by it."""

    __slots__ = (
        "decode_on",
        "kv_tokens",
        "owner",
        "prefill_on",
        "priority",
        "streamed",
        "uncached_tokens",
        "work_ns",
    )

    def __init__(
        self,
        owner: Owner,
        *,
        uncached_tokens: int,
        kv_tokens: int,
        work_ns: int,
        streamed: bool,
        priority: int = 0,
    ) -> None:
        self.owner = owner
        self.uncached_tokens = uncached_tokens
        """Prompt tokens that are to be computed."""
        self.kv_tokens = kv_tokens
        """Context at the end of the prefill: what decoding attends to."""
        self.work_ns = work_ns
        """Work of the prefill by the start coefficients of its endpoint (without the fixed part)."""
        self.streamed = streamed
        """False: the first byte comes with the last token, so the end of the prefill is not seen."""
        self.priority = priority
        self.prefill_on: Load | None = None
        self.decode_on: Load | None = None


class Load:
    """What our own requests ask of one life of one endpoint."""

    __slots__ = (
        "changed",
        "coming",
        "coming_kv_tokens",
        "decode_kv_tokens",
        "decode_priorities",
        "decodes",
        "head_since_t",
        "history",
        "inflight",
        "prefill_tokens",
        "prefill_work_ns",
        "prefills",
    )

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.changed = changed
        """Called with every change."""
        self.inflight = 0
        """Requests with any part here."""
        self.prefills: dict[Owner, Reservation] = {}
        """Prefill parts in the order they were reserved."""
        self.prefill_tokens = 0
        self.prefill_work_ns = 0
        self.decodes = 0
        """Decode parts whose prefill is over."""
        self.decode_priorities: dict[int, int] = {}
        """Priority -> how many of `decodes` have it."""
        self.decode_kv_tokens = 0
        self.coming = 0
        """Decode parts whose prompt another endpoint is still computing."""
        self.coming_kv_tokens = 0
        self.head_since_t = 0.0
        """When the endpoint began to work on the first of `prefills`."""
        self.history: list[tuple[float, int]] = []
        """(t, inflight) after each change, for comparing with scrapes; bounded by `remember`."""

    def decode_weight(self, priority: int) -> float:
        """`decodes` as they count for a request of this priority that would hold them up."""
        weight = 0.0
        for other, decodes in self.decode_priorities.items():
            weight += decodes * (1.0 if other == priority else HIGHER if other > priority else 1 / HIGHER)
        return weight


HIGHER: Final = 4.0
"""A second of somebody more urgent counts as so many of one's own, and one of somebody less urgent as so much
less. Which priority is the higher one decides, not by how much: they are ranks, on no scale."""
HISTORY: Final = 256
"""Changes of `inflight` that are remembered per load (the older half is dropped beyond)."""


def remember(load: Load, t: float, change: int) -> None:
    """Count a request in or out of `load`, at `t`."""
    load.changed()
    load.inflight += change
    load.history.append((t, load.inflight))
    if len(load.history) > HISTORY:
        del load.history[: HISTORY // 2]


def inflight_since(load: Load, t: float) -> int:
    """The most requests that `load` had at any time from `t` on: none of these may be called foreign."""
    most = load.inflight
    for at, inflight in reversed(load.history):
        most = max(most, inflight)
        if at <= t:
            break
    return most


class Ledger:
    """All reservations, and the only code that changes a `Load`."""

    def __init__(self) -> None:
        self._entries: dict[Owner, Reservation] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def reserve(self, reservation: Reservation, prefill_on: Load, decode_on: Load, t: float) -> None:
        """Count both parts. Raises SumibiError if the owner has an entry already (a bug of ours)."""
        owner = reservation.owner
        if owner in self._entries:
            raise SumibiError(f"{owner} has a reservation already")
        self._entries[owner] = reservation
        reservation.prefill_on, reservation.decode_on = prefill_on, decode_on
        if not prefill_on.prefills:
            prefill_on.head_since_t = t
        prefill_on.prefills[owner] = reservation
        prefill_on.prefill_tokens += reservation.uncached_tokens
        prefill_on.prefill_work_ns += reservation.work_ns
        remember(prefill_on, t, +1)
        if decode_on is not prefill_on:
            remember(decode_on, t, +1)
            decode_on.coming += 1
            decode_on.coming_kv_tokens += reservation.kv_tokens

    def end_prefill(self, owner: Owner, t: float, served_s: float = 0.0) -> bool:
        """Release the prefill part; the decode part starts to count. False if there is none any more.

        `served_s` is what this prefill is believed to have taken: if it overtook the one at the head, the
        head did not advance meanwhile.
        """
        reservation = self._entries.get(owner)
        if reservation is None or reservation.prefill_on is None:
            return False
        self._drop_prefill(reservation, t, served_s)
        load = reservation.decode_on
        if load is not None:
            load.changed()
            load.decodes += 1
            _count(load.decode_priorities, reservation.priority, +1)
            load.decode_kv_tokens += reservation.kv_tokens
        return True

    def release(self, owner: Owner, t: float) -> Reservation | None:
        """Release every part that is still held. None if the owner holds nothing (released before)."""
        reservation = self._entries.pop(owner, None)
        if reservation is None:
            return None
        prefill_on, decode_on = reservation.prefill_on, reservation.decode_on
        if prefill_on is not None:
            self._drop_prefill(reservation, t, 0.0)
        elif decode_on is not None:
            decode_on.decodes -= 1
            _count(decode_on.decode_priorities, reservation.priority, -1)
            decode_on.decode_kv_tokens -= reservation.kv_tokens
        if decode_on is not None:
            remember(decode_on, t, -1)
        reservation.decode_on = None
        return reservation

    def _drop_prefill(self, reservation: Reservation, t: float, served_s: float) -> None:
        load = reservation.prefill_on
        assert load is not None
        owner = reservation.owner
        load.changed()
        if next(iter(load.prefills)) == owner:
            load.head_since_t = t
        else:
            load.head_since_t = min(load.head_since_t + served_s, t)
        del load.prefills[owner]
        load.prefill_tokens -= reservation.uncached_tokens
        load.prefill_work_ns -= reservation.work_ns
        decode_on = reservation.decode_on
        if load is not decode_on:
            remember(load, t, -1)
            if decode_on is not None:
                decode_on.coming -= 1
                decode_on.coming_kv_tokens -= reservation.kv_tokens
        reservation.prefill_on = None

    def check_integrity(self, loads: list[Load]) -> None:
        """Recount `loads` from the entries; raises SumibiError with what differs. For tests and idle time."""
        for load in loads:
            prefills = [r for r in self._entries.values() if r.prefill_on is load]
            decodes = [r for r in self._entries.values() if r.decode_on is load and r.prefill_on is None]
            coming = [
                r
                for r in self._entries.values()
                if r.decode_on is load and r.prefill_on is not None and r.prefill_on is not load
            ]
            held = sum(r.prefill_on is load or r.decode_on is load for r in self._entries.values())
            expected = (
                held,
                prefills,
                sum(r.uncached_tokens for r in prefills),
                sum(r.work_ns for r in prefills),
                len(decodes),
                Counter(r.priority for r in decodes),
                sum(r.kv_tokens for r in decodes),
                len(coming),
                sum(r.kv_tokens for r in coming),
            )
            found = (
                load.inflight,
                list(load.prefills.values()),
                load.prefill_tokens,
                load.prefill_work_ns,
                load.decodes,
                load.decode_priorities,
                load.decode_kv_tokens,
                load.coming,
                load.coming_kv_tokens,
            )
            if expected != found:
                raise SumibiError(f"ledger: entries say {expected}, counters say {found}")


def _count(counts: dict[int, int], key: int, change: int) -> None:
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]

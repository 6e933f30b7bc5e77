"""The prefill side's books: which requests' blocks are kept for peers, and until when.

Written by the step thread (what is computed), by connections (signs of life, releases) and by the clock
(leases). A block that a connection is reading stays held until it has been read, whatever ends meanwhile.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from threading import Condition

from sumibi.engine.transfer.frames import TransferError, never

_REMEMBERED = 1024
"""Requests whose end is remembered, so that who asks too late is told so at once."""
_SLICE_S = 0.2


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """One block of a kept prompt."""

    content_id: bytes
    block: int


@dataclass(eq=False, slots=True)
class _Offer:
    blocks: list[KeptBlock] = field(default_factory=list)
    pins: list[list[int]] = field(default_factory=list)
    expires_s: float = inf
    """While the prompt is computed there is no lease: the request itself is what ends."""
    cached_tokens: int = 0
    readers: int = 0
    ended: bool = False


class Offers:
    """All of one engine's. Thread-safe; `give_back` is called from any thread and must not wait."""

    def __init__(
        self,
        *,
        lease_s: float,
        give_back: Callable[[list[list[int]]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.expired = 0
        """Leases that ran out."""
        self._lease_s = lease_s
        self._give_back = give_back
        self._clock = clock
        self._offers: dict[str, _Offer] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # why
        self._early: OrderedDict[str, None] = OrderedDict()
        """Released before they began: the peer was faster and does not need them."""
        self._changed = Condition()

    def __len__(self) -> int:
        return len(self._offers)

    def begin(self, key: str) -> bool:
        """A request's blocks will be kept. False if the name is in use, or was a moment ago."""
        with self._changed:
            if key in self._offers or key in self._ended:
                return False
            if key in self._early:
                del self._early[key]
                self._remember(key, "released")
                return True
            self._offers[key] = _Offer()
            self._changed.notify_all()
            return True

    def publish(self, key: str, blocks: list[KeptBlock], pin: Callable[[list[int]], list[int]]) -> None:
        """More blocks of the request are computed; they are pinned by `pin`. No effect if it has ended."""
        with self._changed:
            if (offer := self._offers.get(key)) is not None:
                offer.pins.append(pin([kept.block for kept in blocks]))
                offer.blocks += blocks
                self._changed.notify_all()

    def finish(self, key: str, cached_tokens: int) -> bool:
        """All blocks are there: the lease begins. False if the request has ended already."""
        with self._changed:
            if (offer := self._offers.get(key)) is None:
                return False
            offer.cached_tokens = cached_tokens
            offer.expires_s = self._clock() + self._lease_s
            self._changed.notify_all()
            return True

    def extend(self, key: str) -> None:
        """A sign of life: two thirds of a lease from now at least."""
        with self._changed:
            if (offer := self._offers.get(key)) is not None and offer.expires_s != inf:
                offer.expires_s = max(offer.expires_s, self._clock() + self._lease_s * 2 / 3)

    def end(self, key: str, why: str) -> None:
        """Nobody may have the blocks any more, or will want them: it may come before `begin`."""
        with self._changed:
            if key not in self._offers and key not in self._ended:
                self._early[key] = None
                while len(self._early) > _REMEMBERED:
                    self._early.popitem(last=False)
            self._end(key, why)

    def expire(self) -> list[str]:
        """End what nobody gave a sign of life for; their names."""
        with self._changed:
            now_s = self._clock()
            late = [key for key, offer in self._offers.items() if offer.expires_s <= now_s]
            for key in late:
                self._end(key, "expired")
            self.expired += len(late)
        return late

    def end_all(self) -> None:
        """The engine stops."""
        with self._changed:
            for key in tuple(self._offers):
                self._end(key, "stopped")

    @contextmanager
    def reading(
        self, key: str, index: int, *, until_s: float, unwanted: Callable[[], bool] = never
    ) -> Iterator[KeptBlock]:
        """Block number `index` of the request, held while the context lasts; waits for it.

        Raises TransferError: the request is unknown at `until_s` (or the block not there), or it has ended.
        """
        offer, kept = self._wait(key, index, until_s, unwanted)
        try:
            yield kept
        finally:
            with self._changed:
                offer.readers -= 1
                self._give_back_of(offer)
        self.extend(key)

    def cached_tokens(self, key: str, *, until_s: float, unwanted: Callable[[], bool] = never) -> int:
        """Prompt tokens that were in the cache here, once the prompt is whole. Raises as `reading`."""
        with self._changed:
            while True:
                offer = self._offers.get(key)
                if offer is not None and offer.expires_s != inf:
                    return offer.cached_tokens
                self._pause(key, until_s, unwanted)

    def _wait(
        self, key: str, index: int, until_s: float, unwanted: Callable[[], bool]
    ) -> tuple[_Offer, KeptBlock]:
        with self._changed:
            while True:
                offer = self._offers.get(key)
                if offer is not None and index < len(offer.blocks):
                    offer.readers += 1
                    return offer, offer.blocks[index]
                if offer is not None and offer.expires_s != inf:
                    raise TransferError("content", f"{key} has {len(offer.blocks)} blocks, not {index + 1}")
                self._pause(key, until_s, unwanted)

    def _pause(self, key: str, until_s: float, unwanted: Callable[[], bool]) -> None:
        if (why := self._ended.get(key)) is not None:
            raise TransferError(why, f"the blocks of {key} are not kept any more ({why})")
        left_s = until_s - self._clock()
        if left_s <= 0:
            raise TransferError("unknown", f"no request {key} is known here, or it is not computed in time")
        if unwanted():
            raise TransferError("unwanted", "the peer has gone")
        self._changed.wait(min(left_s, _SLICE_S))

    def _end(self, key: str, why: str) -> None:
        offer = self._offers.pop(key, None)
        if offer is None:
            return
        self._remember(key, why)
        offer.ended = True
        self._give_back_of(offer)
        self._changed.notify_all()

    def _remember(self, key: str, why: str) -> None:
        self._ended[key] = why
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _give_back_of(self, offer: _Offer) -> None:
        if not offer.ended or offer.readers:
            return
        # Last ones first: the pool drops descendants before their ancestors.
        pins, offer.pins = offer.pins[::-1], []
        if pins:
            self._give_back(pins)

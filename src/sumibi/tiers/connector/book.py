"""What the scheduler knows of the tiers: which block lies where, and what the world was told of it.

A block is announced with its tokens. Files found after a restart hold none, so those blocks are announced
when the first prompt that has them comes by. What was announced is taken back when it leaves.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sumibi.tiers.connector.messages import Change
from sumibi.tiers.words import Tier

_BITS = {Tier.HOST: 1, Tier.DISK: 2, Tier.STORE: 4}
_REMEMBERED = 1 << 17
_EVENTS = 1 << 18
_STORE_BLOCKS = 1 << 17


@dataclass(frozen=True, slots=True)
class Told:
    """What an event says of a block."""

    block_hash: bytes
    """The engine's own name."""
    parent_hash: bytes | None
    token_ids: "array[int]"
    more: Any = None
    """Whatever else the engine's events carry: adapter, salt."""


@dataclass(frozen=True, slots=True)
class Happened:
    """To be published: a block came to a tier (`told` is there) or left it."""

    block_hash: bytes
    tier: Tier
    told: Told | None = None


@dataclass(slots=True)
class _Place:
    tiers: int = 0
    announced: int = 0
    block_hash: bytes = b""


class Book:
    """One thread's."""

    def __init__(self, *, remembered: int = _REMEMBERED, store_blocks: int = _STORE_BLOCKS) -> None:
        self._remembered = remembered
        self._store_blocks = store_blocks
        self._places: dict[bytes, _Place] = {}
        self._told: OrderedDict[bytes, Told] = OrderedDict()
        # Blocks that the store was found to have and no report speaks of, oldest first.
        self._asked: OrderedDict[bytes, None] = OrderedDict()
        self._events: deque[Happened] = deque()
        self.events_lost = 0

    def __len__(self) -> int:
        return len(self._places)

    def where(self, content_id: bytes) -> Tier | None:
        """The fastest tier that has it."""
        place = self._places.get(content_id)
        if place is None:
            return None
        return next(tier for tier, bit in _BITS.items() if place.tiers & bit)

    def run(self, ids: Iterable[bytes]) -> list[Tier]:
        """The fastest tiers of the leading ids that lie below."""
        found: list[Tier] = []
        for content_id in ids:
            tier = self.where(content_id)
            if tier is None:
                break
            found.append(tier)
        return found

    def learn(self, changes: Iterable[Change]) -> None:
        """What the worker reported."""
        for change in changes:
            if change.stored:
                if change.tier is Tier.STORE:
                    self._asked.pop(change.content_id, None)
                self._came(change.content_id, change.tier)
            else:
                self._left(change.content_id, change.tier)

    def found_in_store(self, ids: Sequence[bytes]) -> None:
        """The store said that it has these."""
        for content_id in ids:
            place = self._places.get(content_id)
            if place is None or not place.tiers & _BITS[Tier.STORE]:
                self._asked[content_id] = None
                self._came(content_id, Tier.STORE)
        while len(self._asked) > self._store_blocks:
            content_id, _ = self._asked.popitem(last=False)
            self._left(content_id, Tier.STORE)

    def missing(self, ids: Iterable[bytes]) -> None:
        """These are nowhere, whatever was believed."""
        for content_id in ids:
            for tier in Tier:
                self._left(content_id, tier)

    def describe(self, content_id: bytes, told: Told) -> None:
        """What is to be said of a block; if it lies below already it is announced now."""
        self._told[content_id] = told
        self._told.move_to_end(content_id)
        if len(self._told) > self._remembered:
            self._told.popitem(last=False)
        place = self._places.get(content_id)
        if place:
            self._announce(place, told)

    def is_described(self, content_id: bytes) -> bool:
        """Is there nothing left to say of it?"""
        return content_id in self._told

    def forget_all(self) -> None:
        """Everything below is void."""
        for content_id in list(self._places):
            self.missing([content_id])
        self._told.clear()
        self._asked.clear()

    def take_events(self) -> list[Happened]:
        """What is to be published, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def _came(self, content_id: bytes, tier: Tier) -> None:
        place = self._places.setdefault(content_id, _Place())
        place.tiers |= _BITS[tier]
        told = self._told.get(content_id)
        if told:
            self._announce(place, told)

    def _announce(self, place: _Place, told: Told) -> None:
        place.block_hash = told.block_hash
        for tier, bit in _BITS.items():
            if place.tiers & bit and not place.announced & bit:
                place.announced |= bit
                self._publish(Happened(told.block_hash, tier, told))

    def _left(self, content_id: bytes, tier: Tier) -> None:
        place = self._places.get(content_id)
        bit = _BITS[tier]
        if place is None or not place.tiers & bit:
            return
        place.tiers &= ~bit
        if tier is Tier.STORE:
            self._asked.pop(content_id, None)
        if place.announced & bit:
            place.announced &= ~bit
            self._publish(Happened(place.block_hash, tier))
        if not place.tiers:
            del self._places[content_id]
            self._told.pop(content_id, None)

    def _publish(self, event: Happened) -> None:
        if len(self._events) >= _EVENTS:
            self._events.popleft()
            self.events_lost += 1
        self._events.append(event)

"""What lies below the devices: memory of an endpoint's host, its disk, stores that several endpoints read.

A prompt's KV may be in several of them: the leading run that is in any is not computed, and what of it is
not on the device is fetched. That takes the bytes over the link's bandwidth and its latency, behind the
transfers asked for before, and delays the first token; the endpoint computes for others meanwhile. Engines
fetch whatever they find, so a fetch is predicted even where computing would be faster.

Who has what below the device is known from KV events, which name the medium. Where none tell of it: what an
endpoint's device gave up is believed to be in its own tier below, as far as that has room; what was computed
anywhere is believed to be in the stores that this endpoint writes to, the longest unused out first.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple

import msgspec

from sumibi.core.prefixcache import PrefixCache
from sumibi.routing.decisions import Candidate
from sumibi.routing.events import Grade, Tier
from sumibi.routing.index import BlockIndex
from sumibi.routing.recall import Recall
from sumibi.routing.recency import Recency


class Kind(StrEnum):
    """What a tier is."""

    HOST = "host"
    """The host's memory: media that begin with `cpu`."""
    DISK = "disk"
    """Another one of the endpoint's own."""
    STORE = "store"
    """Shared by several endpoints."""


USUAL = {Kind.HOST: (22.7, 0.0), Kind.DISK: (7.0, 80e-6), Kind.STORE: (1.0, 0.03)}
"""(GB/s, latency in s) of reading where an endpoint does not say: DRAM over PCIe as llm-d measured it, one
NVMe disk (gen 4), an object store."""


class Link:
    """A way for KV to the device: one transfer after the other."""

    __slots__ = ("free_t",)

    def __init__(self) -> None:
        self.free_t = 0.0
        """When what was asked for so far has come, as predicted."""


class Store:
    """KV that several endpoints share."""

    def __init__(self, name: str, index: BlockIndex, blocks: int) -> None:
        self.name = name
        self.link = Link()
        self.recall = Recall(index, blocks)
        """What we believe to be there, by our own prompts."""
        self.told = index.new_holder()
        """Holder of what KV events say is there."""
        self.announced = False
        """KV events tell of it: then they alone count."""

    @property
    def holders(self) -> int:
        """Bit set of its holders in the index."""
        return 1 << self.recall.holder | 1 << self.told

    def hear(self) -> None:
        """KV events tell of it."""
        if not self.announced:
            self.announced = True
            self.recall.clear()

    def computed(self, keys: Sequence[int], model: str) -> None:
        """An endpoint that writes to it has computed this prompt, hashed under this name."""
        if not self.announced:
            self.recall.remember(keys, model)


class Place:
    """One tier as one endpoint reads it."""

    __slots__ = ("holders", "kind", "latency_s", "link", "name", "store", "token_s", "tokens")

    def __init__(
        self, tier: Tier, kv_bytes_per_token: int, holders: int, link: Link, store: Store | None = None
    ) -> None:
        self.name = tier.name
        self.kind = kind(tier)
        self.holders = holders
        """Bit set in the index; none if our own requests alone tell."""
        usual_gb_per_s, usual_latency_s = USUAL[self.kind]
        self.token_s = kv_bytes_per_token / ((tier.gb_per_s or usual_gb_per_s) * 1e9)
        self.latency_s = usual_latency_s if tier.latency_s is None else tier.latency_s
        self.tokens = inf if tier.tokens is None else tier.tokens
        self.link = link
        self.store = store


Run = list[tuple[int, Place | None]]
"""How an endpoint has the beginning of a prompt: stretches of so many blocks, each in a place (None: device).
"""


class Fetch(NamedTuple):
    """What is to be fetched for one request."""

    tokens: int
    by_place: list[tuple[Place, int]]
    """Each place once, with its tokens."""

    def of(self, kind: Kind) -> int:
        """Tokens from places of this kind."""
        return sum(tokens for place, tokens in self.by_place if place.kind is kind)

    @property
    def own_tokens(self) -> int:
        """Tokens from tiers of its own: they leave these."""
        return sum(tokens for place, tokens in self.by_place if place.store is None)

    def takes_s(self, start_t: float) -> float:
        """Seconds until all is there, if it is asked for at `start_t`. Links work beside one another."""
        return max(
            max(0.0, place.link.free_t - start_t) + place.latency_s + tokens * place.token_s
            for place, tokens in self.by_place
        )


NO_FETCH = Fetch(0, [])


class Lower:
    """The tiers that one endpoint reads."""

    __slots__ = ("front", "own", "own_tokens", "places", "stores")

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = sorted(places, key=lambda place: place.token_s)
        """The fastest first."""
        own = [place for place in self.places if place.store is None]
        self.own = own[0] if own else None
        """To which its device gives what it evicts."""
        self.own_tokens = sum(place.tokens for place in own)
        """Room of its own tiers."""
        self.stores = [place.store for place in self.places if place.store is not None]
        self.front: PrefixCache | None = None
        """Without KV events: its device alone, in imitation, to tell what of its blocks is where."""

    @property
    def store_token_s(self) -> float | None:
        """Seconds a token from its fastest store; None: it has none."""
        return next((place.token_s for place in self.places if place.store is not None), None)

    def evict_s(
        self, lost_s: float, recency: Recency, out: float, leaves: float, stored: int, block_tokens: int
    ) -> float:
        """What it costs that `leaves` tokens go from the device to what is below, where `stored` blocks are,
        and `out` tokens from there (none if not positive): `lost_s` if nobody had these any more.
        """
        store_s, own = self.store_token_s, self.own
        if store_s is not None:
            # A store has what was computed anywhere.
            wanted = recency.wanted_blocks(0, -int(-out // block_tokens)) if out > 0 else 0.0
            lost_s = min(lost_s, wanted * block_tokens * store_s)
        if own is not None and leaves > 0:
            sinking = recency.wanted_blocks(stored, stored - int(-leaves // block_tokens))
            lost_s += sinking * block_tokens * own.token_s
        return lost_s

    def used(self, keys: Sequence[int], t: float) -> None:
        """A prompt is computed at the endpoint."""
        if self.front is not None:
            self.front.touch(keys, t)
            self.front.removed.clear()

    def begin(self, candidate: Candidate, t: float) -> None:
        """What it fetches was decided upon: the next one comes behind it."""
        asked = {
            Kind.HOST: candidate.host_tokens,
            Kind.DISK: candidate.disk_tokens,
            Kind.STORE: candidate.store_tokens,
        }
        for place in self.places:
            tokens = asked.pop(place.kind, 0)
            if tokens:
                link = place.link
                link.free_t = max(link.free_t, t) + place.latency_s + tokens * place.token_s

    def run(self, keys: Sequence[int], path: list[tuple[int, int]], device: int, holders: int) -> Run:
        """How far the endpoint has `keys`: `device` leading blocks on it (`holders`: its bit set), then
        whatever follows in any place. `path` is the index's for these keys.
        """
        on_device = device
        if self.front is not None and self.own is not None and device:
            on_device = min(device, self.front.match(keys))
        run: Run = [(on_device, None)] if on_device else []
        if on_device < device:
            run.append((device - on_device, self.own))
        at = device
        for end, held in path:
            if end <= at:
                continue
            place: Place | None = None
            if not held & holders:
                place = next((each for each in self.places if held & each.holders), None)
                if place is None:
                    break
            run.append((end - at, place))
            at = end
        return run


def kind(tier: Tier) -> Kind:
    """What a tier is, by its name."""
    if tier.shared:
        return Kind.STORE
    return Kind.HOST if tier.name.startswith("cpu") else Kind.DISK


def fetch(run: Run, blocks: int, block_tokens: int) -> Fetch:
    """What of the first `blocks` of a run is not on the device."""
    by_place: dict[Place, int] = {}
    for length, place in run:
        length = min(length, blocks)
        blocks -= length
        if place is not None and length:
            by_place[place] = by_place.get(place, 0) + length * block_tokens
    if not by_place:
        return NO_FETCH
    return Fetch(sum(by_place.values()), list(by_place.items()))


def levels_of(runs: Sequence[Run], holders: Sequence[int]) -> list[tuple[int, int]]:
    """The runs as `BlockIndex.match` would answer if all were on devices: each under one holder of its
    endpoint, of `holders` (bit sets).
    """
    found: dict[int, int] = {}
    for run, own in zip(runs, holders, strict=True):
        blocks = sum([length for length, _ in run])
        if blocks:
            found[blocks] = found.get(blocks, 0) | own & -own
    return sorted(found.items())


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """A tier as the router knows it, for one endpoint."""

    name: str
    kind: Kind
    blocks: int
    """Routing blocks believed to be there."""
    tokens: int | None
    """Its room; None: not known."""
    gb_per_s: float
    """Of a read, and its latency before the first byte: as the endpoint tells, or what is usual."""
    latency_s: float
    grade: Grade
    """How well its contents are known: by KV events, or by our own prompts."""

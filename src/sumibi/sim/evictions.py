"""Caches of prompts that differ in one thing: which block goes when there must be room.

Counted in edges of the prompts' tree (`sim.arithmetic`): a cache holds a leading part of an edge's blocks,
and lets go of the deepest block of an edge with no resident edge below it. Which edge, an `Order` says.
Orders see what a tier sees: which chain was asked for and when. No session ids, no future.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from sumibi.sim.arithmetic import Count, Request, Stream

WEIGHT = 0.2
"""Of the newest interval in the usual one."""
FIRST_S = 60.0
"""Usual interval of a chain before anything has been seen."""
SAMPLED = 64
"""One block in so many is remembered after it has gone."""
REMEMBERED = 8
"""Blocks of so many capacities are remembered, by their samples."""


class Order(Protocol):
    """Ranks edges; the lowest goes first."""

    def touched(self, edges: Sequence[int], resident: Sequence[bool], t_s: float) -> None:
        """A prompt was asked for. `resident`: of which edges something was there."""
        ...

    def rank(self, edge: int) -> float:
        """Of an edge that was touched."""
        ...

    def gone(self, edge: int) -> None:
        """Its last block was let go."""
        ...


class Cache:
    """At most `capacity` blocks."""

    def __init__(self, lengths: Sequence[int], capacity: int, order: Order) -> None:
        self._lengths, self._capacity, self._order = lengths, capacity, order
        self._held = [0] * len(lengths)
        """Leading blocks of each edge that are resident."""
        self._parent = [-1] * len(lengths)
        self._below = [0] * len(lengths)
        """Resident edges right below each."""
        self._ends: dict[int, None] = {}
        """Resident edges with none below."""
        self._blocks = 0

    def touch(self, edges: Sequence[int], t_s: float) -> int:
        """Look a prompt up, keep it, make room. Returns the leading blocks that were resident."""
        lengths, held = self._lengths, self._held
        run = 0
        for edge in edges:
            run += held[edge]
            if held[edge] < lengths[edge]:
                break
        self._order.touched(edges, [held[edge] > 0 for edge in edges], t_s)
        left, above = self._capacity, -1
        for edge in edges:
            if not left:
                break
            wanted = min(lengths[edge], left)
            if not held[edge]:
                self._parent[edge] = above
                if above >= 0:
                    self._below[above] += 1
                    self._ends.pop(above, None)
                self._ends[edge] = None
            if wanted > held[edge]:
                self._blocks += wanted - held[edge]
                held[edge] = wanted
            left -= wanted
            above = edge
        while self._blocks > self._capacity:
            self._evict(self._blocks - self._capacity)
        return run

    def _evict(self, blocks: int) -> None:
        edge = min(self._ends, key=self._order.rank)
        dropped = min(blocks, self._held[edge])
        self._held[edge] -= dropped
        self._blocks -= dropped
        if self._held[edge]:
            return
        del self._ends[edge]
        above = self._parent[edge]
        if above >= 0:
            self._below[above] -= 1
            if not self._below[above]:
                self._ends[above] = None
        self._order.gone(edge)


class Lru:
    """The edge goes that was touched longest ago."""

    def __init__(self, lengths: Sequence[int], capacity: int) -> None:
        self._last = [0.0] * len(lengths)
        self._number = 0

    def touched(self, edges: Sequence[int], resident: Sequence[bool], t_s: float) -> None:
        """See Order. Of one prompt's edges the upper ones are younger, but only ends can go."""
        self._number += 1
        for edge in edges:
            self._last[edge] = self._number

    def rank(self, edge: int) -> float:
        """See Order."""
        return self._last[edge]

    def gone(self, edge: int) -> None:
        """See Order."""


class Lru2(Lru):
    """The edge goes whose last touch but one was longest ago (O'Neil, O'Neil, Weikum 1993)."""

    def __init__(self, lengths: Sequence[int], capacity: int) -> None:
        super().__init__(lengths, capacity)
        self._before = [0.0] * len(lengths)

    def touched(self, edges: Sequence[int], resident: Sequence[bool], t_s: float) -> None:
        """See Order. It remembers all that ever was: the best case of LRU-2."""
        for edge in edges:
            self._before[edge] = self._last[edge]
        super().touched(edges, resident, t_s)

    def rank(self, edge: int) -> float:
        """See Order."""
        return self._before[edge]


class Gdsf:
    """Greedy-dual by frequency (Cherkasova 1998), blocks of equal size and cost; a new edge counts as often
    used as the one above it.
    """

    def __init__(self, lengths: Sequence[int], capacity: int) -> None:
        self._uses = [0] * len(lengths)
        self._value = [0.0] * len(lengths)
        self._clock = 0.0

    def touched(self, edges: Sequence[int], resident: Sequence[bool], t_s: float) -> None:
        """See Order."""
        above = 0
        for edge in edges:
            self._uses[edge] = (self._uses[edge] or above) + 1
            above = self._uses[edge]
            self._value[edge] = self._clock + above

    def rank(self, edge: int) -> float:
        """See Order."""
        return self._value[edge]

    def gone(self, edge: int) -> None:
        """See Order."""
        self._clock = max(self._clock, self._value[edge])


class ExpectedValue:
    """The edge goes whose blocks are the least likely to be asked for soon.

    Of something that is asked for every `usual` seconds and was asked for `age` seconds ago, one call in
    `usual + age` is the estimate of a rate from one interval and an open one. Blocks have one size and here
    one cost, so value goes with the rate, and the order by it is the order by `last touch - usual`: a number
    that only a touch changes.

    The usual interval is a mean over touches that forgets. A block that is new has that of the block above
    it: a conversation's next turn comes as its last ones did. The first of a chain has the mean of all.
    What has gone is remembered by one block in `sampled`, at most so many as `remembered` capacities have.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        capacity: int,
        *,
        sampled: int = SAMPLED,
        remembered: float = REMEMBERED,
    ) -> None:
        self._last_s = [0.0] * len(lengths)
        self._usual_s = [0.0] * len(lengths)
        self._mean_s = FIRST_S
        self._samples = [_samples(edge, length, sampled) for edge, length in enumerate(lengths)]
        self._gone: OrderedDict[int, int] = OrderedDict()
        """Edges that are remembered, and their samples."""
        self._most = remembered * capacity / sampled
        self._kept = 0

    def touched(self, edges: Sequence[int], resident: Sequence[bool], t_s: float) -> None:
        """See Order."""
        usual_s, interval_s = self._mean_s, None
        for edge, here in zip(edges, resident, strict=True):
            samples = self._gone.pop(edge, None)
            if samples is not None:
                self._kept -= samples
            if here or samples is not None:
                interval_s = t_s - self._last_s[edge]
                usual_s = self._usual_s[edge] + WEIGHT * (interval_s - self._usual_s[edge])
            self._usual_s[edge] = usual_s
            self._last_s[edge] = t_s
        if interval_s is not None:
            # One very long pause must not speak for all.
            self._mean_s += 0.01 * (min(interval_s, 10 * self._mean_s) - self._mean_s)

    def rank(self, edge: int) -> float:
        """See Order."""
        return self._last_s[edge] - self._usual_s[edge]

    def gone(self, edge: int) -> None:
        """See Order."""
        samples = self._samples[edge]
        if not samples:
            return
        self._gone[edge] = samples
        self._kept += samples
        while self._kept > self._most:
            self._kept -= self._gone.popitem(last=False)[1]


def _samples(edge: int, length: int, one_in: int) -> int:
    """How many of an edge's blocks a hash of their ids picks, one in `one_in` on average."""
    if one_in == 1:
        return length
    drawn = int.from_bytes(blake2b(edge.to_bytes(8, "little"), digest_size=8).digest(), "little") / 2**64
    return int(length / one_in + drawn)


def forgetful(lengths: Sequence[int], capacity: int) -> Order:
    """Expected value with no memory of what has gone."""
    return ExpectedValue(lengths, capacity, remembered=0.0)


Made = Callable[[Sequence[int], int], Order]
ORDERS: dict[str, Made] = {
    "LRU": Lru,
    "LRU-2": Lru2,
    "GDSF": Gdsf,
    "expected value, nothing remembered": forgetful,
    "expected value": ExpectedValue,
}


def counted(stream: Stream, where: Sequence[int], replicas: int, capacity: int, order: Made) -> Count:
    """What caches of `capacity` blocks give if request i goes to replica `where[i]`."""
    caches = [Cache(stream.lengths, capacity, order(stream.lengths, capacity)) for _ in range(replicas)]
    hits = 0
    for request, replica in zip(stream.requests, where, strict=True):
        hits += min(caches[replica].touch(request.edges, request.arrival_ms / 1000), request.usable)
    return Count(hits * stream.block_tokens, stream.tokens)


def streams_of(stream: Stream, where: Sequence[int], replicas: int) -> list[Stream]:
    """What each replica gets, for the bounds."""
    parts: list[list[Request]] = [[] for _ in range(replicas)]
    for request, replica in zip(stream.requests, where, strict=True):
        parts[replica].append(request)
    return [Stream(stream.block_tokens, part, stream.lengths) for part in parts]

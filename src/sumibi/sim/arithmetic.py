"""Cache arithmetic: what hit rates a stream of prompts allows, with no time in it.

A prompt's blocks are resident for the next request in the stream at once; outputs are not cached. A hit is
the leading run of resident blocks, and the last token is always computed. So no router can beat
`infinite_cache` here, and pooled LRU and Belady bound what a fleet's summed capacity allows.

Keys are chained: a block has one predecessor, so prompts form a tree. The tree's edges (stretches of blocks
that always occur together) are what everything here counts in: a few hundred thousand instead of millions.

LRU as a stack algorithm: Mattson et al., "Evaluation techniques for storage hierarchies" (1970). The optimal
rule: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
"""

from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

from sumibi.core.prefixcache import PrefixCache
from sumibi.sim.workload import Session, Turn, Workload

PAUSE_MS = 30_000
"""A user starts the next session this long after the last arrival of the one before."""
STAGGER_MS = 600_000
"""User u of N starts at u/N of this."""
LOAD_DECAY = 0.99
"""What is left of a replica's load after each request, in the reference policies."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt of the stream."""

    session: Session
    turn: Turn
    position: tuple[int, int]
    """Of its session in the workload, of the turn in the session."""
    keys: list[int]
    """Of all its blocks, a partial last one included if the trace names it."""
    usable: int
    """Blocks that can be hit: the last token is always computed."""
    edges: "array[int]"
    """Its path in the tree of all prompts."""
    arrival_ms: int = 0

    @property
    def tokens(self) -> int:
        """Of its prompt."""
        return self.turn.prompt_tokens


@dataclass(slots=True)
class Stream:
    """Prompts in the order in which they come, and the tree that they form."""

    block_tokens: int
    requests: list[Request]
    lengths: list[int]
    """Blocks of each edge of the tree."""

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(request.turn.prompt_tokens for request in self.requests)

    @property
    def distinct_blocks(self) -> int:
        """Blocks that an infinite cache would hold at the end."""
        return sum(self.lengths)


@dataclass(slots=True)
class Count:
    """What a cache gave."""

    hit_tokens: int
    prompt_tokens: int

    @property
    def hit_rate(self) -> float:
        """Tokens found over tokens asked."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute."""
        return self.prompt_tokens - self.hit_tokens


@dataclass(slots=True)
class FleetCount(Count):
    """What the caches of several replicas gave."""

    uncached_by_replica: list[int] = field(default_factory=list)

    @property
    def work_share(self) -> float:
        """The busiest replica's uncached tokens over the mean; 1 is balanced."""
        total = sum(self.uncached_by_replica)
        return max(self.uncached_by_replica) * len(self.uncached_by_replica) / total if total else 1.0


def prepare(workload: Workload) -> Stream:
    """The workload's prompts in file order, their keys and their tree; for `in_order`."""
    tree = _Tree()
    requests = []
    for at, session in enumerate(workload.sessions):
        for index, turn in enumerate(session.turns):
            keys = session.prompt_keys(turn)
            if turn.tail is not None:
                keys.append(session.keys[turn.tail])
            tree.insert(keys)
            usable = max(turn.prompt_tokens - 1, 0) // workload.block_tokens
            requests.append(Request(session, turn, (at, index), keys, usable, array("I")))
    for request in requests:
        request.edges = tree.path(request.keys)
    return Stream(workload.block_tokens, requests, [end - start for _, start, end in tree.edges])


def in_order(prepared: Stream, users: int | None = None) -> Stream:
    """The same prompts in the order in which they come by the recorded clock.

    `users`: a closed loop. Sessions are taken in the order of their names' SHA-256; user u is free at
    u/N of STAGGER_MS and again PAUSE_MS after the last arrival of its session; the next session goes to the
    user free first. None: sessions start at their `start_s` (0 without one).
    Ties: by position in the workload.
    """
    by_session: dict[int, list[Request]] = {}
    for request in prepared.requests:
        by_session.setdefault(request.position[0], []).append(request)
    if users is None:
        for one in by_session.values():
            start = round(1000 * (one[0].session.start_s or 0.0))
            for request in one:
                request.arrival_ms = start + request.turn.offset_ms
    else:
        free = [(user * STAGGER_MS // users, user) for user in range(users)]
        heapify(free)
        order = sorted(by_session.values(), key=lambda one: sha256(one[0].session.name.encode()).hexdigest())
        for one in order:
            start, user = free[0]
            for request in one:
                request.arrival_ms = start + request.turn.offset_ms
            heapreplace(free, (max(request.arrival_ms for request in one) + PAUSE_MS, user))
    requests = sorted(prepared.requests, key=lambda request: (request.arrival_ms, request.position))
    return Stream(prepared.block_tokens, requests, prepared.lengths)


def infinite_cache(stream: Stream) -> list[int]:
    """Tokens of each prompt that an endless cache would have."""
    runs = endless_runs(stream)
    return [
        min(run, request.usable) * stream.block_tokens
        for run, request in zip(runs, stream.requests, strict=True)
    ]


def bound(stream: Stream) -> Count:
    """What an endless cache gives: no router can do better."""
    return count(stream, endless_runs(stream))


def pooled_lru(stream: Stream, capacities_blocks: Sequence[int]) -> list[Count]:
    """One LRU cache of each capacity."""
    return [count(stream, runs) for runs in lru_runs(stream, capacities_blocks)]


def pooled_belady(stream: Stream, capacity_blocks: int) -> Count:
    """One cache that knows the future: nothing of this capacity does better."""
    return count(stream, belady_runs(stream, capacity_blocks))


def count(stream: Stream, runs: Sequence[int]) -> Count:
    """Hits from the leading resident blocks of each prompt."""
    hits = sum(min(run, request.usable) for run, request in zip(runs, stream.requests, strict=True))
    return Count(hits * stream.block_tokens, stream.tokens)


def endless_runs(stream: Stream) -> list[int]:
    """Leading resident blocks of each prompt in an endless cache."""
    seen = bytearray(len(stream.lengths))
    runs = []
    for request in stream.requests:
        run = 0
        for edge in request.edges:
            if not seen[edge]:
                break
            run += stream.lengths[edge]
        for edge in reversed(request.edges):
            if seen[edge]:
                break
            seen[edge] = 1
        runs.append(run)
    return runs


def lru_runs(stream: Stream, capacities_blocks: Sequence[int]) -> list[list[int]]:
    """Leading resident blocks of each prompt in one LRU cache of each capacity, all in one pass.

    A prompt's blocks are touched from last to first. So the stack, youngest first, is for each request from
    the last to the first a stretch of one chain: what it touched and no later one did. On a prompt's way
    down the tree the last touches only get older, and within a stretch they lie one below the other: each
    stretch is looked up as a whole.
    """
    lengths = stream.lengths
    touched = [-1] * len(lengths)
    stretches = _Fenwick(len(stream.requests))
    results: list[list[int]] = [[] for _ in capacities_blocks]
    for number, request in enumerate(stream.requests):
        runs = [0] * len(capacities_blocks)
        found = [group for group in _grouped(request.edges, touched, lengths) if group[0] >= 0]
        for last, blocks in found:
            younger = stretches.total - stretches.up_to(last)
            for i, capacity in enumerate(capacities_blocks):
                runs[i] += min(blocks, max(capacity - younger, 0))
        for last, blocks in found:
            stretches.add(last, -blocks)
        stretches.add(number, len(request.keys))
        for edge in request.edges:
            touched[edge] = number
        for result, run in zip(results, runs, strict=True):
            result.append(run)
    return results


def belady_runs(stream: Stream, capacity_blocks: int) -> list[int]:
    """Leading resident blocks of each prompt in one cache that evicts what is used again last.

    Of blocks that are used again by the same prompt, the deepest goes first.

    A block that is never used again is not kept. All blocks whose next use is the same request lie on that
    request's path, so residents are kept as stretches of depths by the request that wants them next.
    """
    wanted: dict[int, list[tuple[int, int]]] = {}
    farthest: list[int] = []
    size = 0
    runs = []
    for number, following in enumerate(_next_uses(stream)):
        run = 0
        for start, end in wanted.pop(number, ()):
            size -= end - start
            if start == run:
                run = end
        runs.append(run)
        for next_use, start, end in following:
            if next_use not in wanted:
                wanted[next_use] = []
                heappush(farthest, -next_use)
            insort(wanted[next_use], (start, end))
            size += end - start
        while size > capacity_blocks:
            last = wanted.get(-farthest[0])
            if not last:
                wanted.pop(-heappop(farthest), None)
                continue
            start, end = last.pop()
            dropped = min(end - start, size - capacity_blocks)
            size -= dropped
            if dropped < end - start:
                last.append((start, end - dropped))
    return runs


class Fleet:
    """Replicas with an LRU cache of their own each, for choosers to look into."""

    def __init__(self, replicas: int, capacity_blocks: int) -> None:
        self.caches = [PrefixCache(capacity_blocks) for _ in range(replicas)]
        self.uncached_tokens = [0] * replicas

    def hit_tokens(self, replica: int, request: Request, block_tokens: int) -> int:
        """What `replica` would find of this prompt now."""
        return min(self.caches[replica].match(request.keys), request.usable) * block_tokens


class Chooser(Protocol):
    """A way to choose replicas."""

    def choose(self, request: Request, fleet: Fleet) -> int:
        """The replica for this request, from 0."""
        ...

    def placed(
        self, request: Request, replica: int, hit_tokens: int, matched: int, removed: list[Sequence[int]]
    ) -> None:
        """It is done: `matched` leading blocks were resident, the others are now (of a prompt longer than
        the cache: the beginning), and the blocks with these keys are gone from the replica.
        """
        ...


def play(stream: Stream, replicas: int, capacity_blocks: int, chooser: Chooser) -> FleetCount:
    """Give every request of the stream to the replica that is chosen, with instantaneous residency."""
    fleet = Fleet(replicas, capacity_blocks)
    hit_tokens = 0
    for request in stream.requests:
        replica = chooser.choose(request, fleet)
        cache = fleet.caches[replica]
        matched = cache.touch(request.keys)
        hit = min(matched, request.usable) * stream.block_tokens
        hit_tokens += hit
        fleet.uncached_tokens[replica] += request.tokens - hit
        removed, cache.removed = cache.removed, []
        chooser.placed(request, replica, hit, matched, removed)
    return FleetCount(hit_tokens, stream.tokens, fleet.uncached_tokens)


class RoundRobin:
    """Request i goes to replica i mod n."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: Request, fleet: Fleet) -> int:
        """See Chooser."""
        self._next += 1
        return self._next % len(fleet.caches)

    def placed(
        self, request: Request, replica: int, hit_tokens: int, matched: int, removed: list[Sequence[int]]
    ) -> None:
        """Nothing to learn."""


class Hash(RoundRobin):
    """By the first 8 hex digits of SHA-256 of the key: the session's name, or what `key` says."""

    def __init__(self, key: Callable[[Request], str] = lambda request: request.session.name) -> None:
        super().__init__()
        self._key = key

    def choose(self, request: Request, fleet: Fleet) -> int:
        """See Chooser."""
        return int(sha256(self._key(request).encode()).hexdigest()[:8], 16) % len(fleet.caches)


class LeastLoad:
    """To the replica with the least load: uncached tokens it was given, ageing with every request."""

    def __init__(self, replicas: int) -> None:
        self.load = [0.0] * replicas

    def choose(self, request: Request, fleet: Fleet) -> int:
        """See Chooser."""
        return self.load.index(min(self.load))

    def placed(
        self, request: Request, replica: int, hit_tokens: int, matched: int, removed: list[Sequence[int]]
    ) -> None:
        """The loads age, the chosen one grows."""
        self.load = [one * LOAD_DECAY for one in self.load]
        self.load[replica] += request.tokens - hit_tokens


class Sticky(LeastLoad):
    """A key stays where its first request went, that one to the least load."""

    def __init__(
        self, replicas: int, key: Callable[[Request], str] = lambda request: request.session.name
    ) -> None:
        super().__init__(replicas)
        self._key = key
        self._home: dict[str, int] = {}

    def choose(self, request: Request, fleet: Fleet) -> int:
        """See Chooser."""
        return self._home.setdefault(self._key(request), self.load.index(min(self.load)))


class PrefixLoad(LeastLoad):
    """To the least of load + tokens to compute, with a perfect index."""

    def __init__(self, replicas: int, block_tokens: int) -> None:
        super().__init__(replicas)
        self._block_tokens = block_tokens

    def choose(self, request: Request, fleet: Fleet) -> int:
        """See Chooser."""
        costs = [
            load + request.tokens - fleet.hit_tokens(replica, request, self._block_tokens)
            for replica, load in enumerate(self.load)
        ]
        return costs.index(min(costs))


def _grouped(edges: Sequence[int], mark: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring edges of a path with the same mark: (mark, blocks), from the root."""
    groups: list[tuple[int, int]] = []
    last, blocks = -2, 0
    for edge in edges:
        if mark[edge] == last:
            blocks += lengths[edge]
        else:
            if blocks:
                groups.append((last, blocks))
            last, blocks = mark[edge], lengths[edge]
    if blocks:
        groups.append((last, blocks))
    return groups


def _next_uses(stream: Stream) -> list[list[tuple[int, int, int]]]:
    """For each request the stretches of its blocks by the request that uses them next: (request, start, end).

    Stretches that are never used again are left out.
    """
    following = [-1] * len(stream.lengths)
    uses: list[list[tuple[int, int, int]]] = []
    for number in range(len(stream.requests) - 1, -1, -1):
        edges = stream.requests[number].edges
        at, found = 0, []
        for next_use, blocks in _grouped(edges, following, stream.lengths):
            if next_use >= 0:
                found.append((next_use, at, at + blocks))
            at += blocks
        uses.append(found)
        for edge in edges:
            following[edge] = number
    uses.reverse()
    return uses


class _Fenwick:
    """Sums of prefixes of a list of counts, in logarithmic time."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self.total = 0

    def add(self, at: int, count: int) -> None:
        self.total += count
        at += 1
        while at < len(self._sums):
            self._sums[at] += count
            at += at & -at

    def up_to(self, at: int) -> int:
        """Sum of counts 0..at."""
        at += 1
        total = 0
        while at:
            total += self._sums[at]
            at &= at - 1
        return total


class _Tree:
    """Prompts as a radix tree: an edge is a stretch of blocks of one prompt, (keys, start, end)."""

    def __init__(self) -> None:
        self.edges: list[tuple[list[int], int, int]] = []
        self._below: list[dict[int, int]] = []
        """Of each edge, the edges that follow, by their first key."""
        self._roots: dict[int, int] = {}

    def insert(self, keys: list[int]) -> None:
        at, below = 0, self._roots
        while at < len(keys):
            edge = below.get(keys[at])
            if edge is None:
                below[keys[at]] = len(self.edges)
                self.edges.append((keys, at, len(keys)))
                self._below.append({})
                return
            at = self._descend(edge, keys)
            below = self._below[edge]

    def _descend(self, edge: int, keys: list[int]) -> int:
        """Walk down an edge as far as `keys` go, splitting it there; the depth reached."""
        own, start, end = self.edges[edge]
        if own is keys or (end <= len(keys) and own[start:end] == keys[start:end]):
            return end
        low, high = start + 1, min(end, len(keys)) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if own[low:middle] == keys[low:middle]:
                low = middle
            else:
                high = middle
        self.edges[edge] = (own, start, low)
        lower = len(self.edges)
        self.edges.append((own, low, end))
        self._below.append(self._below[edge])
        self._below[edge] = {own[low]: lower}
        return low

    def path(self, keys: list[int]) -> "array[int]":
        """Edges of a prompt that was inserted."""
        path = array("I")
        at, below = 0, self._roots
        while at < len(keys):
            edge = below[keys[at]]
            path.append(edge)
            at, below = self.edges[edge][2], self._below[edge]
        return path

"""Which idle conversations are to be brought up before they ask: those that should be back soon and whose KV
has sunk below host memory where they live.

An engine reads its disk only when somebody waits for it, unless it is told before. Who knows that a tool
call should be over soon is the router: it has learnt after how long prefixes are wanted again (`returns`),
and knows by KV events what lies where. So a conversation that was answered is looked at from time to time
while it is idle, and a hint is due when

    chance that it is back within the window  x  that it will still be in host memory then
        x  seconds that host memory spares it

is more than what those lose that would have to leave host memory for it. How much of what is brought up is
still there when it is wanted is learnt at each endpoint: where everything passes through host memory in a
moment, hints are of no use and become rare. The window is as long as return times are sharp: a part of the
time that it has been idle. A conversation gets one hint at most each time that it is idle, none once it has
gone on or its endpoint has begun another life, and none that it has no use for.

Only endpoints count whose KV events arrive: elsewhere nobody knows that something has sunk. Of each
conversation a few keys are kept, evenly spaced, instead of all: what they say of where it lies is right to a
few percent.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil, exp, log
from typing import Final

from sumibi.routing.counters import Counters
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.events import Grade, Instruction, Prefetch, WakeAt
from sumibi.routing.fleet import Fleet, Model
from sumibi.routing.index import BlockIndex
from sumibi.routing.lower import Kind, Place
from sumibi.routing.requests import Attempt, Request
from sumibi.routing.returns import ReturnTimes

MOST_IDLE: Final = 8_192
"""Idle conversations that are watched; those idle longest are given up first."""
SAMPLES: Final = 32
"""Keys kept of each."""
SOON: Final = 0.2
"""Nobody is brought up who returns within the window with less than this chance."""
MARGIN: Final = 1.5
"""By so much the gain has to exceed the loss: chances are estimates, and a hint keeps the disk busy."""
WINDOW_S: Final = 1.0
WINDOW: Final = 0.1
"""How long "soon" is: so many seconds, and this part of the time that it has been idle."""
LATE_S: Final = 0.5
"""So late a look may be: ticks are shared."""
LONGEST_IDLE_S: Final = 3600.0
"""Who has been idle for so long is not looked for any more."""
KEPT_RATE: Final = 0.2
"""How fast an endpoint's part of blocks that stayed follows the last hints."""
FORGIVEN_S: Final = 1800.0
"""In this time half of what went wrong is forgotten: then it is tried again."""
MOST_VICTIMS: Final = 64
"""Conversations in host memory that are looked at, the oldest first, for what a hint would push out."""


def window_s(idle_s: float) -> float:
    """How long ahead a conversation is looked for that has been idle for so long."""
    return WINDOW_S + WINDOW * idle_s


class _Idle:
    """A conversation between two turns."""

    __slots__ = (
        "blocks",
        "endpoint",
        "epoch",
        "hinted",
        "model",
        "request",
        "sample",
        "since_t",
        "sunk",
        "tip",
        "uses",
    )

    def __init__(self, request: Request, attempt: Attempt, model: Model, t: float) -> None:
        keys = request.event.keys
        stride = ceil(len(keys) / SAMPLES)
        self.request = request.event.request
        self.model = model
        self.endpoint = attempt.endpoint
        self.epoch = attempt.endpoint.epoch
        self.since_t = t
        self.uses = model.returns.uses(keys)
        self.tip = keys[-1]
        self.sample = [*keys[stride - 1 : len(keys) - 1 : stride], self.tip]
        """The last key stands for as many blocks as the others do."""
        self.blocks = len(keys) / len(self.sample)
        """Blocks that each stands for."""
        self.hinted = False
        self.sunk = 0.0
        """Blocks that a hint named."""


class Hints:
    """Watches idle conversations. `emit` takes instructions to the shell."""

    def __init__(
        self, fleet: Fleet, index: BlockIndex, count: Counters, emit: Callable[[Instruction], None]
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._count = count
        self._emit = emit
        self._idle: dict[int, _Idle] = {}
        """By the last key of its prompt."""
        self._at: dict[str, OrderedDict[int, _Idle]] = {}
        """The same by endpoint, those idle longest first."""
        self._oldest: OrderedDict[int, None] = OrderedDict()
        self._due: list[tuple[float, int, _Idle]] = []
        """Heap of when to look at which; one that is not idle any more is passed over."""
        self._kept: dict[str, tuple[float, float]] = {}
        """Of each endpoint: the part of brought-up blocks that was still there when they were wanted, as of
        when.
        """
        self._pushed = 0
        self._wake_t: float | None = None
        """A tick is on its way for then."""

    def __len__(self) -> int:
        return len(self._idle)

    def over(self, request: Request, attempt: Attempt, t: float) -> None:
        """A request was answered: its conversation is idle from now on."""
        endpoint = attempt.endpoint
        if not request.event.keys or not attempt.current or not endpoint.prefetches:
            return
        idle = _Idle(request, attempt, self._fleet.models[request.event.model], t)
        self._forget(idle.tip)
        self._idle[idle.tip] = idle
        self._at.setdefault(endpoint.name, OrderedDict())[idle.tip] = idle
        self._oldest[idle.tip] = None
        if len(self._idle) > MOST_IDLE:
            self._forget(next(iter(self._oldest)))
        self._look_again(idle, 0.0)
        self._wake(t)

    def goes_on(self, keys: Sequence[int], t: float) -> None:
        """A request with this prompt was placed: the conversations that it continues are idle no more."""
        if not self._idle or self._idle.keys().isdisjoint(keys):
            return
        for key in [key for key in keys if key in self._idle]:
            idle = self._idle[key]
            if idle.hinted:
                self._count.hints_returned += 1
                self._learn(idle, t)
            self._forget(key)

    def _learn(self, idle: _Idle, t: float) -> None:
        """See how much of what was brought up is still there."""
        endpoint, host = idle.endpoint, _host(idle.endpoint)
        if host is None or idle.epoch != endpoint.epoch or not _can_bring_up(endpoint):
            return
        below, _ = self._lies(idle, host)
        lost = sum(blocks for _, blocks in below) / max(idle.sunk, 1.0)
        kept = self._kept_at(endpoint, t)
        kept += KEPT_RATE * (1.0 - min(1.0, lost) - kept)
        self._kept[endpoint.name] = (kept, t)

    def _kept_at(self, endpoint: Endpoint, t: float) -> float:
        kept, since_t = self._kept.get(endpoint.name, (1.0, t))
        return 1.0 - (1.0 - kept) * exp(log(0.5) * (t - since_t) / FORGIVEN_S)

    def gone(self, endpoint: str) -> None:
        """It was removed."""
        self._kept.pop(endpoint, None)
        for tip in list(self._at.get(endpoint, ())):
            self._forget(tip)

    def tick(self, t: float) -> None:
        """Time passed: look at those that are due, and have them woken that will be."""
        while self._due and self._due[0][0] <= t:
            _, _, idle = heappop(self._due)
            if self._idle.get(idle.tip) is idle:
                self._look(idle, t)
        self._wake(t)

    # --- one conversation ---

    def _look(self, idle: _Idle, t: float) -> None:
        endpoint, idle_s = idle.endpoint, t - idle.since_t
        if idle.epoch != endpoint.epoch or self._fleet.endpoints.get(endpoint.name) is not endpoint:
            self._forget(idle.tip)
            return
        host = _host(endpoint)
        if host is None or not _can_bring_up(endpoint) or not endpoint.up:
            self._look_again(idle, idle_s)
            return
        chance = idle.model.returns.back_within(idle.uses, idle_s, window_s(idle_s))
        chance *= self._kept_at(endpoint, t)
        below, _ = self._lies(idle, host)
        block_tokens = self._fleet.block_tokens(idle.model.name)
        spared_s = sum(blocks * (place.token_s - host.token_s) for place, blocks in below) * block_tokens
        blocks = sum(blocks for _, blocks in below)
        if chance < SOON or spared_s <= 0:
            self._look_again(idle, idle_s)
            return
        lost_s = self._pushed_out_s(endpoint, host, blocks, block_tokens, spared_s / blocks, idle, t)
        if chance * spared_s <= MARGIN * lost_s:
            self._look_again(idle, idle_s)
            return
        idle.hinted, idle.sunk = True, blocks
        self._count.hints += 1
        self._emit(Prefetch(endpoint=endpoint.name, request=idle.request))

    def _lies(self, idle: _Idle, host: Place) -> tuple[list[tuple[Place, float]], float]:
        """(Blocks below host memory, by place; blocks in host memory and not on the device), up to the first
        that is nowhere.
        """
        endpoint, index = idle.endpoint, self._index
        lower = endpoint.lower
        below: dict[Place, float] = {}
        in_host = 0.0
        for key in idle.sample:
            held = index.holders_of(key)
            if held & endpoint.holders:
                continue
            if held & host.holders:
                in_host += idle.blocks
                continue
            place = next((p for p in lower.places if held & p.holders), None) if lower is not None else None
            if place is None:
                break
            below[place] = below.get(place, 0.0) + idle.blocks
        return list(below.items()), in_host

    def _pushed_out_s(
        self,
        endpoint: Endpoint,
        host: Place,
        blocks: float,
        block_tokens: int,
        block_s: float,
        asking: _Idle,
        t: float,
    ) -> float:
        """What it costs those that leave host memory for `blocks` more: `block_s` a block, times the chance
        that they are wanted within the time that the one who asks is looked for.
        """
        counts = self._index.counts
        kept = counts[host.holders.bit_length() - 1] if host.holders else 0
        leave = kept + blocks - host.tokens / block_tokens
        cost_s, chance = 0.0, 0.0
        soon_s = window_s(t - asking.since_t)
        for other in islice(self._at[endpoint.name].values(), MOST_VICTIMS):
            if leave <= 0:
                break
            if other is asking:
                continue
            _, there = self._lies(other, host)
            if there:
                goes = min(there, leave)
                chance = other.model.returns.back_within(other.uses, t - other.since_t, soon_s)
                cost_s += goes * block_s * chance
                leave -= goes
        # Those behind the oldest are younger: they are taken for as likely as the last that was looked at.
        return cost_s + max(0.0, leave) * block_s * chance

    def _look_again(self, idle: _Idle, idle_s: float) -> None:
        """When it has become likely enough, and not before a part of the window has passed."""
        at_s = due_s(idle.model.returns, idle.uses, idle_s + window_s(idle_s) / 4)
        if at_s is None:
            return
        self._pushed += 1
        heappush(self._due, (idle.since_t + at_s, self._pushed, idle))
        if len(self._due) > 4 * MOST_IDLE:
            self._due = [entry for entry in self._due if self._idle.get(entry[2].tip) is entry[2]]
            heapify(self._due)

    def _wake(self, t: float) -> None:
        """Ask for a tick when the first is due, unless one is on its way that comes early enough."""
        if self._wake_t is not None and self._wake_t <= t:
            self._wake_t = None
        if self._due and (self._wake_t is None or self._due[0][0] < self._wake_t - LATE_S):
            self._wake_t = self._due[0][0]
            self._emit(WakeAt(at=self._wake_t))

    def _forget(self, tip: int) -> None:
        idle = self._idle.pop(tip, None)
        if idle is None:
            return
        del self._oldest[tip]
        others = self._at[idle.endpoint.name]
        del others[tip]
        if not others:
            del self._at[idle.endpoint.name]


def due_s(returns: ReturnTimes, uses: int, idle_s: float) -> float | None:
    """From which idle time on, `idle_s` or later, one used so often is back soon with a chance of `SOON`.
    None: from none.
    """
    while idle_s < LONGEST_IDLE_S:
        if returns.back_within(uses, idle_s, window_s(idle_s)) >= SOON:
            return idle_s
        idle_s += window_s(idle_s) / 2
    return None


def _can_bring_up(endpoint: Endpoint) -> bool:
    return (
        endpoint.prefetches
        and endpoint.suspect is None
        and endpoint.grade is Grade.EXACT
        and endpoint.lower is not None
    )


def _host(endpoint: Endpoint) -> Place | None:
    """Its host memory, if KV events tell of it."""
    places = endpoint.lower.places if endpoint.lower is not None else ()
    return next((place for place in places if place.kind is Kind.HOST), None)

r"""Flow control: who waits, in which order, and for how long at most.

A request is placed at once if its pick can begin with it soon; otherwise it is *held* here and its endpoint
chosen when it leaves, by what is known then. So engines always have some seconds of work before them and
never a long queue, whose order nobody could change any more.

Order. Bands (one for each priority) are strict: the higher one first. Within a band by

    turn = arrival + min(MOST_HANDICAP_S, lead) + waiting / share + min(MOST_HANDICAP_S, HASTE * work)

lead: seconds that the request's program is ahead of its fair share of the pool (`fairness`); waiting: work
of its program that is held already; share: what a program gets in a second. So programs that had least go
first, and a flood of requests of one program stands in the others' way no more than its share. work: its own
prefill, of what its home has not got. Those whose prefix is there go before it has to make room, and cold
prompts do not make room for one another meanwhile. A turn never becomes later: whoever comes twice
MOST_HANDICAP_S later (and the time for what its program holds already) cannot pass it within the band any
more, whatever its size or history.

Those that wait for the same blocks go together (`together`): once a prompt is placed, all that begin like it
beyond what is cached have so much less to compute. Their turns become earlier by that, and if the place is
no worse, it becomes their home. Thus a prefix is computed once for all who wait for it, where each alone
would come when it is gone again.

No band starves: once the oldest request held has waited AGED_AFTER_S it goes first, and AGED_SHARE of the
work placed may be taken by such requests. Whoever waits longer than the band's limit is refused; a request
can shorten that for itself.

Homes. A held request has a home, the endpoint where it would go now, often because its prefix is there. What
is held for a home counts as a wait there (`backlog_s`), as it would if it had been sent, so nobody takes a
short queue at an engine for a short wait. It stays with its home until that can begin: to ask
again and again whether to go elsewhere means to go at the worst moment, and to compute its prefix anew when
there is least room for that. It is asked again when an endpoint comes up, and when its home is gone. If
somebody else looks better at the moment when its home can begin, and is busy, it is held on for as long as
that is better by and no longer: nobody waits for ever for what is always about to be better.

At most so many requests and bytes wait in a band (bytes are estimated: BYTES_PER_TOKEN).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import Final

from sumibi.core.errors import SumibiError
from sumibi.routing.config import BandLimits, RouterConfig
from sumibi.routing.fairness import Attained, Rate
from sumibi.routing.held import BYTES_PER_TOKEN, Band, Held, Missing
from sumibi.routing.requests import Request

MOST_HANDICAP_S: Final = 30.0
"""A tenth of the default time limit: neither fairness nor size alone must get a request refused."""
HASTE: Final = 30.0
"""For a second less of work a request may go so many seconds before its arrival would let it."""
AGED_AFTER_S: Final = 30.0
AGED_SHARE: Final = 0.1
FINEST = 1 / 32
"""Part of the bound by which a wake-up may be late, so that there are not too many of them."""
MOST_TRIES: Final = 8
"""Requests priced anew at one event, those that leave not counted."""
MOST_WALKED: Final = 256
"""Requests of a band looked at (not priced) at one event."""


class _Program:
    """The requests of a program that are held."""

    __slots__ = ("last_fair_t", "requests", "work_ns")

    def __init__(self) -> None:
        self.requests = 0
        self.work_ns = 0
        self.last_fair_t = -inf
        """Turn of the newest, its own work left out: those of a program go as they came, but for that."""


class Flow:
    """The queue before one pool of endpoints."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.attained = Attained()
        self.rate = Rate()
        self.bytes = 0
        self.wake_t = inf
        """When the router asked to be woken for this queue."""
        self._held: OrderedDict[str, Held] = OrderedDict()
        """By request, the one held longest first."""
        self._bands: dict[int, Band] = {}
        """The highest priority first; only those with requests in them."""
        self._programs: dict[str, _Program] = {}
        self._missing = Missing()
        self._deadlines: list[tuple[float, int, Held]] = []
        """A heap; may hold some that left already."""
        self._numbers = 0
        self._aged_debt_s = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def limits(self, priority: int) -> BandLimits:
        """Of the band for `priority`."""
        return next((b for b in self._config.bands if b.priority == priority), self._config.other_bands)

    def full(self, request: Request) -> bool:
        """Whether its band takes no more."""
        priority = request.event.priority
        limits, band = self.limits(priority), self._bands.get(priority)
        requests, held_bytes = (len(band.order), band.bytes) if band is not None else (0, 0)
        needed = request.event.prompt_tokens * BYTES_PER_TOKEN
        return requests >= limits.max_requests or held_bytes + needed > limits.max_bytes

    def share_per_s(self, endpoints: int) -> float:
        """Seconds of prefill that each program gets in a second, of those that wait."""
        return self.rate.per_s(endpoints) / max(1, len(self._programs))

    def add(self, held: Held, endpoints: int, t: float) -> None:
        """Hold a request whose home is known (`settle`), before so many endpoints."""
        self.rate.waiting(t, True)
        program = self._programs.setdefault(held.request.program, _Program())
        held.lead_s = min(MOST_HANDICAP_S, self.attained.lead_s(held.request.program, t))
        fair_t = held.queued_t + held.lead_s + program.work_ns * 1e-9 / self.share_per_s(endpoints)
        program.last_fair_t = max(fair_t, program.last_fair_t)
        held.turn_t = program.last_fair_t + _haste_s(held)
        program.requests += 1
        program.work_ns += held.work_ns
        self._numbers += 1
        held.number = self._numbers
        band = self._bands.get(held.priority)
        if band is None:
            band = self._bands[held.priority] = Band(self.limits(held.priority))
            self._bands = dict(sorted(self._bands.items(), reverse=True))
        band.put(held)
        band.bytes += held.bytes
        self.bytes += held.bytes
        band.backlog_ns[held.home] = band.backlog_ns.get(held.home, 0) + held.work_ns
        self._held[held.request.event.request] = held
        self._missing.add(held)
        heappush(self._deadlines, (held.deadline_t, held.number, held))

    def settle(self, held: Held, home: str, work_s: float, known_blocks: int = 0) -> None:
        """Its home is this endpoint now, which has so many leading blocks of its prompt."""
        work_ns = max(1, round(work_s * 1e9))
        if held.number:
            backlog_ns = self._bands[held.priority].backlog_ns
            _lessen(backlog_ns, held.home, held.work_ns)
            backlog_ns[home] = backlog_ns.get(home, 0) + work_ns
            self._programs[held.request.program].work_ns += work_ns - held.work_ns
            self._missing.remove(held)
        held.home, held.work_ns, held.known_blocks = home, work_ns, known_blocks
        if held.number:
            self._missing.add(held)

    def together(self, placed: Held, pick: str, endpoints: int) -> None:
        """It went to `pick`, one of so many `endpoints`: what is missing to others as well will be there."""
        beside = list(islice(self._missing.beside(placed), MOST_WALKED))
        for held in beside:
            before = len(held.request.event.keys) - held.known_blocks
            known = placed.request.common_blocks(held.request)
            # What does not fill a block counts as one.
            work_ns = held.work_ns * (before + held.known_blocks - known + 1) // (before + 1)
            backlog_ns = self._bands[held.priority].backlog_ns
            moves = backlog_ns.get(pick, 0) + work_ns <= backlog_ns[held.home]
            self.settle(held, pick if moves else held.home, work_ns * 1e-9, known)
        for held in beside:
            program = self._programs[held.request.program]
            others_s = (program.work_ns - held.work_ns) * 1e-9
            fair_t = held.queued_t + held.lead_s + others_s / self.share_per_s(endpoints)
            turn_t = fair_t + _haste_s(held)
            if turn_t < held.turn_t:
                band = self._bands[held.priority]
                band.take(held)
                held.turn_t = turn_t
                band.put(held)
                program.last_fair_t = fair_t

    def remove(self, request: str, t: float) -> Held | None:
        """It leaves, whatever the reason. None if it is not here."""
        held = self._held.pop(request, None)
        if held is None:
            return None
        held.gone = True
        band = self._bands[held.priority]
        band.take(held)
        self._missing.remove(held)
        band.bytes -= held.bytes
        self.bytes -= held.bytes
        _lessen(band.backlog_ns, held.home, held.work_ns)
        if not band.order:
            del self._bands[held.priority]
        program = self._programs[held.request.program]
        program.requests -= 1
        program.work_ns -= held.work_ns
        if not program.requests:
            del self._programs[held.request.program]
        if not self._held:
            self.rate.waiting(t, False)
        if len(self._deadlines) > 2 * len(self._held) + 64:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].gone]
            heapify(self._deadlines)
        return held

    def placed(self, work_s: float) -> None:
        """Work was placed, from here or past it: so much less is owed for those that went for their age."""
        self.rate.placed(work_s)
        if self._aged_debt_s:
            self._aged_debt_s = max(0.0, self._aged_debt_s - work_s * AGED_SHARE / (1 - AGED_SHARE))

    def backlog_s(self, priority: int) -> dict[str, float]:
        """Home -> seconds of work that are held for it, of this priority or a higher one."""
        backlog: dict[str, float] = {}
        for band_priority, band in self._bands.items():
            if band_priority < priority:
                break
            for home, work_ns in band.backlog_ns.items():
                backlog[home] = backlog.get(home, 0.0) + work_ns * 1e-9
        return backlog

    def turns(self) -> list[Held]:
        """Held requests in the order of their turns, band by band: the first ones of each."""
        return [held for band in self._bands.values() for _, _, held in islice(band.order, MOST_WALKED)]

    def aged(self, t: float) -> Held | None:
        """The one that may go before its turn: the oldest, if it waited long and nothing is owed."""
        oldest = next(iter(self._held.values()), None)
        if oldest is None or self._aged_debt_s or t - oldest.queued_t < AGED_AFTER_S:
            return None
        return oldest if oldest.priority < next(iter(self._bands)) else None

    def serve(
        self,
        t: float,
        begins_s: dict[str, float],
        place: Callable[[Held, dict[str, float], bool], tuple[str, float, float] | None],
        *,
        anew: bool = False,
    ) -> None:
        """Something changed: let go whoever may go now.

        `begins_s`: endpoint -> seconds until it can begin; it is brought up to date.
        `anew`: there is a new choice, so ask also those whose home cannot begin.
        `place(held, ahead_s, home_open)` is asked to place a request, given the work that goes before it by
        home, and whether its home can begin soon: then it goes, there or where it is better off. It answers
        with the pick, the wait there from now on and the prefill's seconds; it has removed the request if it
        was placed, and else has settled it anew. None: nobody may take it now.
        """
        bound_s = self._config.hold_above_s
        assert bound_s is not None
        ahead_s: dict[str, float] = {}
        tries = 0
        aged, turns = self.aged(t), self.turns()
        for held in turns if aged is None else [aged, *turns]:
            if held.gone:
                continue
            if min(begins_s.values(), default=inf) >= bound_s or tries >= MOST_TRIES:
                break
            home_s = begins_s.get(held.home, inf) + ahead_s.get(held.home, 0.0)
            if home_s < bound_s or anew or held.home not in begins_s:
                answer = place(held, ahead_s, home_s < bound_s)
                if answer is None:
                    continue
                pick, begins_s[pick], work_s = answer
                if held.gone:
                    self.together(held, pick, len(begins_s))
                    if held is aged:
                        self._aged_debt_s = work_s
                    continue
                tries += 1
            if held is not aged:
                ahead_s[held.home] = ahead_s.get(held.home, 0.0) + held.work_ns * 1e-9

    def expired(self, t: float) -> Iterator[Held]:
        """Those whose time is over by now. They stay until they are removed."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= t:
            held = heappop(deadlines)[2]
            if not held.gone:
                yield held

    def due_t(self, t: float, begins_s: dict[str, float]) -> float:
        """When to look again if nothing happens before: a deadline, or an endpoint that gets near its end."""
        while self._deadlines and self._deadlines[0][2].gone:
            heappop(self._deadlines)
        if not self._held:
            return inf
        deadline_t = self._deadlines[0][0]
        bound_s = self._config.hold_above_s
        assert bound_s is not None
        busy = [wait_s - bound_s for wait_s in begins_s.values() if wait_s >= bound_s]
        return min(deadline_t, t + max(min(busy), bound_s * FINEST)) if busy else deadline_t

    def bands(self) -> Iterator[tuple[int, int, int]]:
        """(priority, requests, bytes) of each band that has any, the highest first."""
        for priority, band in self._bands.items():
            yield priority, len(band.order), band.bytes

    def check_integrity(self) -> None:
        """Recount; raises SumibiError. For tests and idle time."""
        inside = [held for band in self._bands.values() for _, _, held in band.order]
        if sorted(h.number for h in inside) != [h.number for h in self._held.values()]:
            raise SumibiError("flow: bands and the list by age differ")
        self._missing.check_integrity(inside)
        found = (
            self.bytes,
            {name: (p.requests, p.work_ns) for name, p in self._programs.items()},
            {priority: (b.bytes, b.backlog_ns) for priority, b in self._bands.items()},
        )
        programs: dict[str, tuple[int, int]] = {}
        bands: dict[int, tuple[int, dict[str, int]]] = {}
        for held in inside:
            requests, work_ns = programs.get(held.request.program, (0, 0))
            programs[held.request.program] = requests + 1, work_ns + held.work_ns
            held_bytes, backlog_ns = bands.get(held.priority, (0, {}))
            backlog_ns[held.home] = backlog_ns.get(held.home, 0) + held.work_ns
            bands[held.priority] = held_bytes + held.bytes, backlog_ns
        expected = (sum(held.bytes for held in inside), programs, bands)
        if found != expected:
            raise SumibiError(f"flow: requests say {expected}, counters say {found}")


def _haste_s(held: Held) -> float:
    """By how much its own work puts its turn off."""
    return min(MOST_HANDICAP_S, HASTE * held.work_ns * 1e-9)


def _lessen(backlog_ns: dict[str, int], home: str, work_ns: int) -> None:
    backlog_ns[home] -= work_ns
    if not backlog_ns[home]:
        del backlog_ns[home]

"""What a request costs at an endpoint at least, as a few numbers that change only when its load does.

From them follows, with a handful of multiplications, a lower bound of the price in `cost`: the prefills
reserved there, this one's compute, those held up by it who decode there, the work itself, and, at a closer
look, followers of a new prompt. Whatever else the price has (evictions, crowding, returns, places, foreign
load, more than a share of the work, forks) is never negative and left out.

Few of a large fleet come near the best, and most of these hold up few requests. So who may come near is found
by one number of each endpoint first; a closer look is taken at those only.
"""

from array import array
from typing import Final

from sumibi.routing.cost import DECODE, LONGER, MILD, WORK
from sumibi.routing.endpoint import Endpoint
from sumibi.routing.fading import faded_s, share_epoch_t
from sumibi.routing.fleet import Roster
from sumibi.routing.learning import MOST, Hardware
from sumibi.routing.spread import Spread, spread

MOST_PRIORITIES: Final = 16
"""Whose rows are kept."""
FEW_NEAR: Final = 12
"""So many endpoints are looked at one by one."""
ROUNDING: Final = 1e-9
"""By this part a bound may be above what it bounds."""
LEAST = 1 / MOST
"""No factor is learnt below this, an endpoint's own included."""


class _Part:
    """Endpoints of one kind of hardware, by their place in it: multipliers of what a request is on it, and
    its own speeds.
    """

    __slots__ = (
        "fixed",
        "hardware",
        "held",
        "least_held",
        "least_own",
        "least_own_decode",
        "own",
        "places",
        "rest_s",
        "settled",
        "steps",
        "work",
        "worked",
    )

    def __init__(self, hardware: Hardware, places: list[int]) -> None:
        self.hardware = hardware
        self.places = places
        """In the roster."""
        zeros = [0.0] * len(places)
        self.held = array("d", zeros)
        """This request and, as they count, those it holds up."""
        self.least_held = 1.0
        """No endpoint has less."""
        self.least_own = self.least_own_decode = 1.0
        """None of them has, or had, smaller factors of its own."""
        self.own = zeros.copy()
        """Factor of its own on prefills."""
        self.fixed = zeros.copy()
        """Of a fixed cost: this prefill's, for those it holds up too, and of those reserved but the first."""
        self.work = zeros.copy()
        """Of its work."""
        self.rest_s = zeros.copy()
        """Work of all prefills reserved there but the first, by the start's coefficients."""
        self.worked = zeros.copy()
        """What was computed there lately, see `spread`."""
        self.settled = zeros.copy()
        """And what settled."""
        self.steps = zeros.copy()
        """Of what one more sequence adds to all steps of an answer, the endpoint's own factor included."""


class Rows:
    """Of each endpoint of a roster, for requests of one priority: what bounds need, and what is summed over
    all. Kept up to date by what the roster's endpoints say of themselves.
    """

    __slots__ = (
        "_changes",
        "_count",
        "_endpoints",
        "_inflight",
        "_oldest_t",
        "_places",
        "_priority",
        "_seen",
        "_shares_t",
        "_typical_s",
        "head_s",
        "parts",
        "since_t",
        "where",
    )

    def __init__(self, roster: Roster, priority: int, t: float) -> None:
        self._endpoints, self._priority = roster.endpoints, priority
        self._changes, self._count, self._seen = roster.changes, -1, 0
        self._places = roster.at
        count = len(roster.endpoints)
        self.parts = [_Part(hardware, places) for hardware, places in roster.groups.items()]
        self.where = [(0, 0)] * count
        """Number of the part and place in it, by place in the roster."""
        for number, part in enumerate(self.parts):
            for i, place in enumerate(part.places):
                self.where[place] = number, i
        self.head_s: list[float | None] = [None] * count
        """Work of the first prefill reserved there; None if there is none."""
        self.since_t = [0.0] * count
        """When it was begun."""
        self._typical_s = [0.0] * count
        self._inflight = [0] * count
        self._shares_t = 0.0
        """What was computed there lately, as of that time."""
        self._oldest_t = float("inf")
        """Not after the oldest order of victims."""
        self.refresh(t)

    def refresh(self, t: float) -> None:
        """Take over what changed."""
        log, shares_t = self._changes.log, share_epoch_t(t)
        if self._count != self._changes.count or self._shares_t != shares_t:
            self._count, self._shares_t = self._changes.count, shares_t
            for place, endpoint in enumerate(self._endpoints):
                self._fill(place, endpoint)
        elif len(log) > self._seen:
            for endpoint in set(log[self._seen :]):
                if (at := self._places.get(endpoint)) is not None:
                    self._fill(at, endpoint)
        self._seen = len(log)

    def spread(self, t: float) -> Spread:
        """How evenly they were given work."""
        return spread(
            [(part.hardware, part.worked, part.settled) for part in self.parts],
            self.faded(t),
            sum(self._typical_s),
            sum(self._inflight),
            len(self._endpoints),
        )

    def faded(self, t: float) -> float:
        """What shares count by now."""
        return faded_s(1.0, t - self._shares_t)

    def ordered_since(self, t: float) -> bool:
        """Whether no order of victims is older."""
        if self._oldest_t < t:
            self._oldest_t = min([e.recency.computed_t for e in self._endpoints])
        return self._oldest_t >= t

    def _fill(self, place: int, endpoint: Endpoint) -> None:
        number, i = self.where[place]
        part = self.parts[number]
        load, learner = endpoint.load, endpoint.learner
        decodes = load.decode_weight(self._priority)
        held_up = DECODE * decodes
        prefills = load.prefills
        part.own[i] = own = learner.own
        if own < part.least_own:
            part.least_own = own
        if learner.own_decode < part.least_own_decode:
            part.least_own_decode = learner.own_decode
        part.held[i] = held = 1.0 + held_up
        if held < part.least_held:
            part.least_held = held
        if prefills:
            head_s = next(iter(prefills.values())).work_ns * 1e-9
            part.fixed[i] = held_up + len(prefills)
            part.rest_s[i] = load.prefill_work_ns * 1e-9 - head_s
            self.head_s[place], self.since_t[place] = head_s, load.head_since_t
        else:
            part.fixed[i] = held_up + 1.0
            part.rest_s[i] = 0.0
            self.head_s[place] = None
        part.work[i] = held_up + (1.0 + WORK - MILD)
        part.steps[i] = learner.own_decode * LONGER * (decodes + len(prefills))
        self._typical_s[place] = endpoint.typical_prefill_s
        self._inflight[place] = load.inflight
        part.worked[i] = endpoint.worked_lately_s(self._shares_t)
        part.settled[i] = endpoint.settled_lately_s(self._shares_t)
        self._oldest_t = min(self._oldest_t, endpoint.recency.computed_t)


def rows(roster: Roster, priority: int, t: float) -> Rows:
    """As the endpoints are now, for requests of this priority."""
    known = roster.rows.get(priority)
    if known is None:
        if len(roster.rows) >= MOST_PRIORITIES:
            roster.rows.clear()
        known = roster.rows[priority] = Rows(roster, priority, t)
    else:
        known.refresh(t)
    roster.changes.latest = known
    return known


class Floors:
    """Bounds of one request's price, in seconds, at the endpoints of `rows`."""

    __slots__ = (
        "_head_s",
        "_held_up",
        "_least_settled_s",
        "_parts",
        "_prompt_tokens",
        "_since_t",
        "_t",
        "_where",
    )

    def __init__(
        self,
        rows: Rows,
        t: float,
        *,
        prompt_tokens: int,
        output_tokens: float,
        spread: Spread,
        company_s: float,
    ) -> None:
        """`company_s`: see `cost.company_s`."""
        self._where = rows.where
        self._t = t
        self._head_s, self._since_t = rows.head_s, rows.since_t
        self._prompt_tokens = prompt_tokens
        self._least_settled_s = spread.least_settled_s
        self._held_up = 1.0 + DECODE * spread.inflight
        faded, each_s = rows.faded(t), company_s / spread.settled_level_s
        self._parts: list[tuple[_Part, _Terms, float, float]] = []
        """Each part with: what it costs; what a second of settled work counts now; what each costs a prompt
        that is new."""
        for part in rows.parts:
            terms = _Terms(part.hardware, prompt_tokens, output_tokens)
            settles_s = each_s * terms.steps_s * part.least_own_decode
            self._parts.append((part, terms, faded * part.hardware.work, settles_s))

    def idlest(self) -> list[int]:
        """Of each kind of hardware the place of the endpoint where a request holds up the fewest."""
        return [part.places[part.held.index(min(part.held))] for part, _, _, _ in self._parts]

    def near(self, limit_s: float, reused_tokens: int) -> list[tuple[float, int]]:
        """(bound, place) of all endpoints where the price may be within the limit, if they have at most
        `reused_tokens` that need not be computed.
        """
        limit_s *= 1.0 + ROUNDING
        found: list[tuple[float, int]] = []
        for part, terms, _, _ in self._parts:
            work_s = terms.work_s(reused_tokens)
            most_held = terms.most_held(limit_s, part, work_s)
            if most_held < part.least_held:
                continue  # nobody: the usual case
            places = [place for place, held in zip(part.places, part.held, strict=True) if held <= most_held]
            if not places:
                part.least_held = min(part.held)
            elif len(places) <= FEW_NEAR:
                found += [(self.at(place, reused_tokens), place) for place in places]
            else:
                found += terms.near(limit_s, part, work_s)
        return found

    def at(self, place: int, reused_tokens: int) -> float:
        """At one, which has so much."""
        number, i = self._where[place]
        part, terms, counts, each_s = self._parts[number]
        own = part.own[i]
        fixed_s = terms.fixed_s * own if own > terms.fixed_from else terms.least_fixed_s
        factor = terms.factor * own if own > terms.factor_from else LEAST
        bound_s = (
            fixed_s * part.fixed[i]
            + factor * (terms.work_s(reused_tokens) * part.work[i] + part.rest_s[i])
            + terms.steps_s * part.steps[i]
        )
        more_s = part.settled[i] * counts - self._least_settled_s
        if more_s > 0:
            most_s = factor * terms.whole_s * self._held_up
            bound_s += min(each_s * more_s, most_s) * (1.0 - reused_tokens / self._prompt_tokens)
        head_s = self._head_s[place]
        if head_s is None:
            return bound_s
        return bound_s + max(0.0, fixed_s + factor * head_s + self._since_t[place] - self._t)


class _Terms:
    """A request's costs on one kind of hardware: with factors that times an endpoint's own one, or LEAST if
    that is more, are never above what the endpoint is priced with.
    """

    __slots__ = (
        "_b_s",
        "_half_q_s",
        "_prompt_tokens",
        "factor",
        "factor_from",
        "fixed_from",
        "fixed_s",
        "least_fixed_s",
        "steps_s",
        "whole_s",
    )

    def __init__(self, hardware: Hardware, prompt_tokens: int, output_tokens: float) -> None:
        start = hardware.start
        fixed, self.factor, decode = hardware.least()
        self.fixed_s, self.least_fixed_s = start.a_s * fixed, start.a_s * LEAST
        self.fixed_from, self.factor_from = LEAST / fixed, LEAST / self.factor
        """Own factors from which on it is not LEAST."""
        context = prompt_tokens + output_tokens / 2
        self.steps_s = output_tokens * decode * (start.d1_s + start.d2_s * context)
        """What one more sequence adds to all steps of the answer."""
        self._prompt_tokens, self._b_s, self._half_q_s = prompt_tokens, start.b_s, start.q_s / 2
        self.whole_s = self.work_s(0)
        """Work of the whole prompt."""

    def work_s(self, reused_tokens: int) -> float:
        """Work of the prefill by the start's coefficients."""
        prompt_tokens = self._prompt_tokens
        return (prompt_tokens - reused_tokens) * (
            self._b_s + self._half_q_s * (prompt_tokens + reused_tokens)
        )

    def most_held(self, limit_s: float, part: _Part, work_s: float) -> float:
        """Where more is held up the limit is exceeded by this prefill on the quickest endpoint alone."""
        own = part.least_own
        compute_s = max(self.fixed_s * own, self.least_fixed_s) + max(self.factor * own, LEAST) * work_s
        step_s = self.steps_s * part.least_own_decode * (LONGER / DECODE)
        return (limit_s + step_s) / (compute_s + step_s)

    def near(self, limit_s: float, part: _Part, work_s: float) -> list[tuple[float, int]]:
        """(bound, place) where it is not, by all that is known but what the first prefill there has left."""
        fixed_s, least_fixed_s, fixed_from = self.fixed_s, self.least_fixed_s, self.fixed_from
        factor, factor_from, steps_s = self.factor, self.factor_from, self.steps_s
        return [
            (bound_s, place)
            for place, own, fixed, work, rest_s, steps in zip(
                part.places, part.own, part.fixed, part.work, part.rest_s, part.steps, strict=True
            )
            if (
                bound_s := (fixed_s * own if own > fixed_from else least_fixed_s) * fixed
                + (factor * own if own > factor_from else LEAST) * (work_s * work + rest_s)
                + steps_s * steps
            )
            <= limit_s
        ]

"""What a request costs at an endpoint at least, as a few numbers that change only when its load does.

From them follows, with a handful of multiplications, a lower bound of the price in `cost`: the prefills
reserved there, this one's compute, those held up by it who decode there, and the work itself. Whatever else
the price has (evictions, crowding, returns, places, foreign load, more than a share of the work) is never
negative and left out.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from sumibi.routing.cost import DECODE, MILD, WORK
from sumibi.routing.fleet import Roster
from sumibi.routing.learning import Hardware

MOST_KINDS = 16
"""Whose rows are kept."""


class Rows:
    """Of each endpoint of a roster, for one kind of request: multipliers beside what its hardware learnt
    (`Terms`), and what is summed over all. Numbers that are next to each other, not in as many objects.
    """

    __slots__ = (
        "_changes",
        "_count",
        "_endpoints",
        "_kind",
        "_places",
        "_seen",
        "fixed",
        "head",
        "head_s",
        "ordered_t",
        "rest_s",
        "since_t",
        "steps",
        "typical_s",
        "work",
        "worked_s",
        "worked_t",
    )

    def __init__(self, roster: Roster, kind: tuple[int, int]) -> None:
        """`kind`: (priority, tokens of a block)."""
        self._endpoints, self._kind = roster.endpoints, kind
        self._changes, self._count, self._seen = roster.changes, -1, 0
        self._places = {endpoint: place for place, endpoint in enumerate(roster.endpoints)}
        zeros = bytes(8 * len(roster.endpoints))
        self.fixed = array("d", zeros)
        """Of a fixed cost: this prefill's, for those it holds up too, and of those reserved but the first."""
        self.work = array("d", zeros)
        """Of its work."""
        self.steps = array("d", zeros)
        """Of what one more sequence adds to all steps of an answer."""
        self.rest_s = array("d", zeros)
        """Work of all prefills reserved there but the first."""
        self.head = array("d", zeros)
        """Of the first one's fixed cost; 0 if there is none."""
        self.head_s = array("d", zeros)
        """Its work."""
        self.since_t = array("d", zeros)
        """When it was begun."""
        self.typical_s = array("d", zeros)
        self.worked_s = array("d", zeros)
        self.worked_t = array("d", zeros)
        self.ordered_t = array("d", zeros)
        """As of when its victims are ordered."""
        self.refresh()

    def refresh(self) -> None:
        """Take over what changed."""
        log = self._changes.log
        if self._count != self._changes.count:
            self._count = self._changes.count
            changed = set(self._endpoints)
        elif len(log) > self._seen:
            changed = set(log[self._seen :])
        else:
            return
        self._seen = len(log)
        for endpoint in changed:
            place = self._places.get(endpoint)
            if place is not None:
                self._fill(place)

    def _fill(self, place: int) -> None:
        endpoint, (priority, _) = self._endpoints[place], self._kind
        load, learner = endpoint.load, endpoint.learner
        own = learner.own
        held_up = DECODE * load.decode_weight(priority)
        others = head_s = rest_s = 0.0
        if load.prefills:
            others = len(load.prefills) - 1.0
            head_s = next(iter(load.prefills.values())).work_ns * 1e-9
            rest_s = load.prefill_work_ns * 1e-9 - head_s
        self.fixed[place] = own * (1.0 + held_up + others)
        self.work[place] = own * (1.0 + held_up + WORK - MILD)
        self.steps[place] = learner.own_decode * (held_up + DECODE * len(load.prefills))
        self.rest_s[place] = own * rest_s
        self.head[place] = own if load.prefills else 0.0
        self.head_s[place] = own * head_s
        self.since_t[place] = load.head_since_t
        self.typical_s[place] = endpoint.typical_prefill_s
        self.worked_s[place], self.worked_t[place] = endpoint.worked_s, endpoint.worked_t
        self.ordered_t[place] = endpoint.recency.computed_t


def rows(roster: Roster, kind: tuple[int, int]) -> Rows:
    """As the endpoints are now, for requests of this kind: (priority, tokens of a block)."""
    known = roster.rows.get(kind)
    if known is None:
        if len(roster.rows) >= MOST_KINDS:
            roster.rows.clear()
        known = roster.rows[kind] = Rows(roster, kind)
    known.refresh()
    return known


def least(
    rows: Rows,
    roster: Roster,
    t: float,
    *,
    prompt_tokens: int,
    reused_tokens: Sequence[int],
    output_tokens: float,
) -> list[float]:
    """What a request costs at each endpoint, in seconds, at least. `reused_tokens` need not be computed."""
    result = [0.0] * len(roster.endpoints)
    every = zip(
        rows.fixed,
        rows.work,
        rows.steps,
        rows.rest_s,
        rows.head,
        rows.head_s,
        rows.since_t,
        reused_tokens,
        strict=True,
    )
    several = list(every) if len(roster.groups) > 1 else []
    for hardware, places in roster.groups.items():
        fixed_s, factor, steps_s = terms(hardware, prompt_tokens, output_tokens)
        prefill_s = {n: factor * work_s(hardware, prompt_tokens, n) for n in set(reused_tokens)}
        found = [
            fixed_s * fixed
            + prefill_s[reused] * work
            + steps_s * steps
            + factor * rest_s
            + (left_s if head and (left_s := fixed_s * head + factor * head_s + since_t - t) > 0 else 0.0)
            for fixed, work, steps, rest_s, head, head_s, since_t, reused in (
                [several[place] for place in places] if several else every
            )
        ]
        if not several:
            return found
        for place, bound_s in zip(places, found, strict=True):
            result[place] = bound_s
    return result


class Terms(NamedTuple):
    """A request's costs on one kind of hardware, in seconds. Factors may be smaller than learnt."""

    fixed_s: float
    work_factor: float
    steps_s: float
    """What one more sequence adds to all steps of its answer."""


def terms(hardware: Hardware, prompt_tokens: int, output_tokens: float) -> Terms:
    """What a request is on this hardware."""
    start = hardware.start
    fixed, work, decode = hardware.least()
    context = prompt_tokens + output_tokens / 2
    return Terms(
        start.a_s * fixed,
        work,
        output_tokens * decode * (start.d1_s + start.d2_s * context),
    )


def work_s(hardware: Hardware, prompt_tokens: int, reused_tokens: int) -> float:
    """Work of a prefill by the start's coefficients."""
    start = hardware.start
    return (prompt_tokens - reused_tokens) * (start.b_s + start.q_s / 2 * (prompt_tokens + reused_tokens))

"""How much of a pool's work each program had lately: who is ahead of its fair share, and by how long.

A program is an agent conversation together with its sub-agents. Each has a clock. Work that it gets moves
the clock forward, by the time in which the program would be due that work: seconds of prefill, divided by
its fair share of the pool (the work that the pool does in a second while requests wait for it, over the
programs that wait). By how much the clock is ahead of the present is the program's *lead*. It ages by a
second a second: who asks for no more than its share has none, whoever was away for a while starts anew.

Work is that of uncached tokens only. It is charged when a request is placed, by what the request is expected
to compute, and corrected at its end by what the engine says that it had cached.

Beside that, the tokens themselves are kept for show, fading by half every minute.
"""

from collections import OrderedDict
from typing import Final

HALF_LIFE_S: Final = 60.0
"""Of the tokens that a program had and of what is remembered of the pool's rate. llm-d's value."""
FORGET_S = 5 * HALF_LIFE_S
"""After so long without a charge a program is forgotten, unless it has a lead."""
MOST_PROGRAMS: Final = 10_000
PRIOR_S: Final = 5.0
"""For so long the pool is taken to do nothing but prefills on all its endpoints."""


class _Program:
    __slots__ = ("clock_t", "tokens", "tokens_t")

    def __init__(self, t: float) -> None:
        self.clock_t = t
        self.tokens = 0.0
        self.tokens_t = t


class Attained:
    """What the programs of one pool had lately. Beyond a limit the one charged longest ago is forgotten."""

    def __init__(self, most_programs: int = MOST_PROGRAMS) -> None:
        self._most = most_programs
        self._programs: OrderedDict[str, _Program] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def charge(self, program: str, tokens: float, due_s: float, t: float) -> None:
        """It gets work, which it is due in `due_s`; negative amounts give back what was too much."""
        known = self._programs.get(program)
        if known is None:
            known = self._programs[program] = _Program(t)
            self._forget(t)
        self._programs.move_to_end(program)
        known.clock_t = max(known.clock_t, t) + due_s
        known.tokens = max(0.0, known.tokens * _fade(t - known.tokens_t) + tokens)
        known.tokens_t = t

    def correct(self, program: str, tokens: float, due_s: float, since_t: float, t: float) -> None:
        """At `since_t` it was charged so much too little (if negative: too much)."""
        if program in self._programs:
            self.charge(program, tokens * _fade(t - since_t), due_s, t)

    def _forget(self, t: float) -> None:
        """Another one came: let one or two of the oldest go."""
        for _ in range(2):
            oldest = next(iter(self._programs.values()))
            idle = t - oldest.tokens_t > FORGET_S and oldest.clock_t < t
            if not idle and len(self._programs) <= self._most:
                break
            self._programs.popitem(last=False)

    def lead_s(self, program: str, t: float) -> float:
        """How far it is ahead of its share."""
        known = self._programs.get(program)
        return max(0.0, known.clock_t - t) if known is not None else 0.0

    def tokens(self, program: str, t: float) -> float:
        """Uncached tokens that it had lately."""
        known = self._programs.get(program)
        return known.tokens * _fade(t - known.tokens_t) if known is not None else 0.0

    def jain(self, t: float) -> float:
        """Jain's index of these tokens: 1 if all programs had the same, 1/n if one of n had all.

        Programs with less than a token left do not count. 1 if there are none.
        """
        shares = [tokens for name in self._programs if (tokens := self.tokens(name, t)) >= 1.0]
        squares = sum(x * x for x in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


class Rate:
    """Work that a pool takes in a second while requests wait for it: its capacity, whatever limits it."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._time_s = 0.0
        self._prior_s = PRIOR_S
        self._at_t: float | None = None
        """Until when the time is counted; None: nobody waits."""

    def waiting(self, t: float, anybody: bool) -> None:
        """Whether anybody waits from `t` on."""
        if self._at_t is not None:
            fade = _fade(t - self._at_t)
            self._work_s *= fade
            self._prior_s *= fade
            self._time_s = self._time_s * fade + t - self._at_t
        self._at_t = t if anybody else None

    def placed(self, work_s: float) -> None:
        """Work was placed. It counts if anybody waits."""
        if self._at_t is not None:
            self._work_s += work_s

    def per_s(self, endpoints: int) -> float:
        """Seconds of prefill a second; as many as there are endpoints, until it was seen."""
        return (self._work_s + self._prior_s * endpoints) / (self._time_s + self._prior_s)


def _fade(elapsed_s: float) -> float:
    fade: float = 0.5 ** (elapsed_s / HALF_LIFE_S)
    return fade

"""How much of the fleet's work each program has had lately, in uncached prompt tokens.

A program is an agent conversation together with its sub-agents. What it had fades by half every minute, so
it is lately that counts: a program that was heavy an hour ago is as good as new. A request is charged when
it is placed, with the tokens that it is expected to compute, and corrected at its end by what the engine
says that it had cached.

Programs are remembered as long as they are charged now and then: beyond a limit the one charged longest ago
is forgotten, which is a program with next to nothing left.
"""

from collections import OrderedDict
from collections.abc import Iterator

HALF_LIFE_S = 60.0
"""Of what a program had. As llm-d's program-aware plugin has it."""
MOST_PROGRAMS = 10_000


class Attained:
    """Attained service of the programs of one pool of endpoints."""

    def __init__(self, most_programs: int = MOST_PROGRAMS) -> None:
        self._most = most_programs
        self._programs: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Program -> (tokens, as of when), the one charged longest ago first."""

    def __len__(self) -> int:
        return len(self._programs)

    def charge(self, program: str, tokens: float, t: float) -> None:
        """It gets work: so many uncached tokens; a negative number gives back what was charged too much."""
        self._programs[program] = (max(0.0, self.tokens(program, t) + tokens), t)
        self._programs.move_to_end(program)
        if len(self._programs) > self._most:
            self._programs.popitem(last=False)

    def correct(self, program: str, charged: float, actual: float, since_t: float, t: float) -> None:
        """What was charged at `since_t` was `actual` in truth: as if it had been charged then."""
        if program in self._programs:
            self.charge(program, (actual - charged) * _fade(t - since_t), t)

    def tokens(self, program: str, t: float) -> float:
        """What it had lately."""
        tokens, at = self._programs.get(program, (0.0, t))
        return tokens * _fade(t - at)

    def jain(self, t: float) -> float:
        """Jain's index of what programs had lately: 1 if all had the same, 1/n if one of n had all.

        Programs with less than a token left do not count. 1 if there are none.
        """
        shares = [tokens for tokens in self._all(t) if tokens >= 1.0]
        squares = sum(x * x for x in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0

    def _all(self, t: float) -> Iterator[float]:
        for tokens, at in self._programs.values():
            yield tokens * _fade(t - at)


def _fade(elapsed_s: float) -> float:
    fade: float = 0.5 ** (elapsed_s / HALF_LIFE_S)
    return fade

"""Prompts that grow, as block keys without any text: the clay that generators make workloads of."""

from array import array
from collections.abc import Iterator
from itertools import count
from math import log, sqrt
from random import Random
from struct import Struct

from xxhash import xxh3_64_intdigest

from sumibi.sim.workload import Session, Turn

_PIECE = Struct("<QII").pack
_Z90 = 1.2815515655446004
"""90th percentile of a standard normal variable."""


class History:
    """One branch of a session's prompt. Equal texts in equal order give equal keys, in any session."""

    __slots__ = ("_chain", "_filled", "block_tokens", "blocks", "keys", "tokens")

    def __init__(self, keys: list[int], block_tokens: int) -> None:
        self.keys = keys
        """Of the session; new blocks are added."""
        self.block_tokens = block_tokens
        self.blocks: array[int] = array("I")
        """Full blocks so far, as indexes into `keys`."""
        self.tokens = 0
        self._chain = 0
        self._filled = 0
        """Tokens of the block that is not full yet."""

    def add(self, text: int, tokens: int) -> "History":
        """Append a text: `text` names it (64 bits), the same everywhere."""
        at = 0
        while at < tokens:
            taken = min(self.block_tokens - self._filled, tokens - at)
            self._chain = xxh3_64_intdigest(_PIECE(text, at, taken), self._chain)
            at += taken
            self._filled += taken
            if self._filled == self.block_tokens:
                self._filled = 0
                self.blocks.append(len(self.keys))
                self.keys.append(self._chain)
        self.tokens += tokens
        return self

    def fork(self) -> "History":
        """A branch that begins with all that was said here."""
        other = History(self.keys, self.block_tokens)
        other.blocks, other.tokens = self.blocks[:], self.tokens
        other._chain, other._filled = self._chain, self._filled
        return other


class Writer:
    """Appends turns to a session. Texts that nobody else has come from `fresh`."""

    __slots__ = ("_texts", "block_tokens", "session")

    def __init__(self, session: Session, block_tokens: int, scope: str) -> None:
        """`scope`: unique among the sessions of a workload, seed included."""
        self.session = session
        self.block_tokens = block_tokens
        self._texts: Iterator[int] = count(named(scope))

    def history(self) -> History:
        """An empty prompt."""
        return History(self.session.keys, self.block_tokens)

    def fresh(self) -> int:
        """A text of its own."""
        return next(self._texts) & ((1 << 64) - 1)

    def ask(
        self,
        history: History,
        output_tokens: int,
        *,
        after: int | None = None,
        delay_s: float = 0.0,
        agent: str = "",
        max_tokens: int | None = None,
    ) -> int:
        """One request with this prompt; its answer becomes part of the history. The turn's index."""
        turns = self.session.turns
        offset_ms = round(1000 * delay_s)
        if after is not None:
            offset_ms += turns[after].offset_ms + round(1000 * nominal_s(turns[after].output_tokens))
        turns.append(
            Turn(
                blocks=history.blocks[:],
                prompt_tokens=history.tokens,
                output_tokens=output_tokens,
                after=after,
                delay_s=delay_s,
                offset_ms=offset_ms,
                agent=agent,
                max_tokens=max_tokens,
            )
        )
        history.add(self.fresh(), output_tokens)
        return len(turns) - 1


def nominal_s(output_tokens: int) -> float:
    """How long a request takes where no fleet is played (cache arithmetic): 2 s and 40 tokens a second."""
    return 2.0 + output_tokens / 40


def named(text: str) -> int:
    """The number of a text that several sessions share."""
    return xxh3_64_intdigest(text)


def lognormal(random: Random, p50: float, p90: float) -> float:
    """By its median and its 90th percentile."""
    return random.lognormvariate(log(p50), log(p90 / p50) / _Z90)


def lognormal_by_mean(random: Random, mean: float, deviation: float, low: float, high: float) -> float:
    """By its mean and standard deviation before it is cut to low..high."""
    variance = log(1 + (deviation / mean) ** 2)
    drawn = random.lognormvariate(log(mean) - variance / 2, sqrt(variance))
    return min(max(drawn, low), high)


def geometric(random: Random, mean: float, low: int, high: int) -> int:
    """A whole number from `low` on, each more by the same chance, cut at `high`; `mean` before the cut."""
    go_on = (mean - low) / (mean - low + 1)
    return min(low + (int(log(1 - random.random()) / log(go_on)) if go_on > 0 else 0), high)


def bounded(value: float, low: int, high: int) -> int:
    """Rounded, within low..high."""
    return min(max(round(value), low), high)

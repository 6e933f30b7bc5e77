"""The demonstration of KV tiers: what is sent, and what it claims. Pure: texts and steps from a seed.

Five conversations of 2,000 tokens on an engine whose device holds one. One of them, A, goes on after the
others have had their turn: without tiers, then with host memory and disk below the device; there the engine
is killed and started again between two of its turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

from sumibi.demo.claims import BLOCK_TOKENS, Claim
from sumibi.demo.script import Message
from sumibi.demo.texts import Texts

SEED = 11
CONTEXT_TOKENS = 1_960
QUESTION_TOKENS = 40
OTHERS = "BCDE"
KV_BLOCKS = 80
"""Of 32 tokens. Each conversation has some 63 to begin with and A 75 at its end: one fits, two do not."""
HOST_BYTES = 512 << 20
DISK_BYTES = 2 << 30
FOUND_SHARE = 0.95
TTFT_AT_MOST = {"host": 0.12, "disk": 0.2}
"""Against the median of the turns that are computed, which are about as long."""

Side = Literal["off", "on"]
Place = Literal["computed", "device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `restart_first`: kill -9 the engine, once all is on disk, and start it again."""

    side: Side
    label: str
    messages: list[Message] = field(repr=False)
    wanted: Place = "computed"
    restart_first: bool = False


@dataclass(frozen=True, slots=True)
class Played:
    """What a turn cost, and where its prompt's KV was."""

    side: Side
    label: str
    wanted: Place
    prompt_tokens: int
    cached_by_tier: dict[str, int]
    ttft_s: float
    killed_before: bool

    @property
    def place(self) -> str:
        """Where most of the prompt's KV came from."""
        shares = {"computed": self.prompt_tokens - sum(self.cached_by_tier.values()), **self.cached_by_tier}
        return max(shares, key=shares.__getitem__)


def script(texts: Texts) -> list[Turn]:
    """All turns, those without tiers first."""
    a = _Conversation(texts, "A")
    others = [Turn("off", f"{name}, turn 1", _Conversation(texts, name).next()) for name in OTHERS]
    first, second = a.next(), a.next()
    return [
        Turn("off", "A, turn 1", first),
        *others,
        Turn("off", "A, turn 2", second),
        Turn("on", "A, turn 1", first),
        Turn("on", "A, turn 2", second, "device"),
        *(Turn("on", turn.label, turn.messages) for turn in others),
        Turn("on", "A, turn 3", a.next(), "host"),
        Turn("on", "A, turn 4", a.next(), "disk", restart_first=True),
        Turn("on", "A, turn 5", a.next(), "device"),
    ]


def judge(played: Sequence[Played]) -> list[Claim]:
    """Every claim, from all turns of a run."""
    computed = _one(played, "off", "A, turn 2")
    claims = [
        _at_most(
            "without tiers, what the device lost is computed again: found share of the prompt",
            sum(computed.cached_by_tier.values()) / computed.prompt_tokens,
            0.05,
        )
    ]
    mine = [turn for turn in played if turn.side == "on" and turn.label.startswith("A")]
    for before, turn in pairwise(mine):
        known = before.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        name = f"{turn.label}: share of the turn before that {turn.wanted} gave"
        if turn.killed_before:
            name += ", after kill -9"
        share = turn.cached_by_tier.get(turn.wanted, 0) / known
        claims.append(Claim(name, share, ">=", FOUND_SHARE, share >= FOUND_SHARE))
        if turn.wanted in TTFT_AT_MOST:
            name = f"{turn.label}: TTFT from {turn.wanted} / computed"
            claims.append(_at_most(name, turn.ttft_s / computed_s(played), TTFT_AT_MOST[turn.wanted]))
    return claims


def computed_s(played: Sequence[Played]) -> float:
    """Median TTFT of the turns that had to be computed."""
    return median(turn.ttft_s for turn in played if turn.wanted == "computed")


def _one(played: Sequence[Played], side: Side, label: str) -> Played:
    (turn,) = (turn for turn in played if (turn.side, turn.label) == (side, label))
    return turn


def _at_most(name: str, value: float, target: float) -> Claim:
    return Claim(name, value, "<=", target, value <= target)


class _Conversation:
    """Grows by a fixed answer and a question a turn, so that both sides see the same prompts."""

    def __init__(self, texts: Texts, name: str) -> None:
        self._texts = texts
        self._name = name
        self._turn = 0
        self._history: list[Message] = [
            {"role": "system", "content": texts.of(CONTEXT_TOKENS, f"context {name}")}
        ]

    def next(self) -> list[Message]:
        """The messages of its next turn."""
        self._turn += 1
        name = f"{self._name} {self._turn}"
        if self._turn > 1:
            self._history.append({"role": "assistant", "content": self._texts.of(24, f"answer {name}")})
        question = self._texts.of(QUESTION_TOKENS, f"question {name}")
        self._history.append({"role": "user", "content": question})
        return list(self._history)

"""Which program a prompt belongs to, from its keys alone: the conversation that it goes on with.

Keys are chained, so the key of a prompt's last full block stands for the whole prompt: it is that prompt's
*tip*. A later prompt that contains a tip begins with all that was said then, which makes it the next turn of
that conversation, or a sub-agent that starts with what its parent knew: in both cases the same program.

One thing looks the same and is not: prompts that have a system prompt in common and too few words of their
own to fill a block. What tells them apart is that a conversation goes on once from its first prompt, a
shared beginning goes on many times. So a tip of a first turn is taken for a conversation until it comes a
second time; from then on whoever contains it is somebody new. Tips of later turns may branch as they like.
The price of the rule: with every shared beginning one stranger may be taken for a member of the program that
came first, and a program whose very first prompt branches is taken for several.

Clients that name their program or session are not guessed at (see `Arrived.program`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

MOST_TIPS: Final = 50_000
STRETCH: Final = 64
"""Blocks of a prompt that are passed over at once where no tip can be."""


class _Tip:
    __slots__ = ("mark", "program", "turn", "used")

    def __init__(self, program: str, turn: int, mark: int) -> None:
        self.program = program
        self.turn = turn
        """1: of a conversation's first prompt."""
        self.mark = mark
        """Key of the first block of the stretch that it is in."""
        self.used = False
        """A prompt went on from here."""


class Programs:
    """The conversations of one model, by the tips of their prompts. Those used longest ago are forgotten."""

    def __init__(self, most_tips: int = MOST_TIPS) -> None:
        self._most = most_tips
        self._tips: OrderedDict[int, _Tip] = OrderedDict()
        self._marks: dict[int, int] = {}
        """First key of a stretch -> tips in it. A prompt that has a tip has its mark, as keys are chained."""
        self._made = 0

    def __len__(self) -> int:
        return len(self._tips)

    def recognise(self, keys: Sequence[int], known_blocks: int) -> str:
        """The program of a prompt that was just admitted; it is remembered as that program's newest.

        `known_blocks`: leading blocks that earlier prompts had; further on there can be no tip. Prompts
        without a full block cannot be recognised: each is a program of its own.
        """
        tips, found = self._tips, None
        at = self._newest(keys, min(known_blocks, len(keys)))
        if at is not None:
            found = tips[keys[at]]
            tips.move_to_end(keys[at])
            shared = found.turn == 1 and (found.used or at == len(keys) - 1)
            found.used = True
            if not shared:
                if at < len(keys) - 1:
                    self._remember(keys, found.program, found.turn + 1)
                return found.program
        self._made += 1
        program = f"~{self._made}"
        if keys and keys[-1] not in tips:
            self._remember(keys, program, 1)
        return program

    def _newest(self, keys: Sequence[int], known_blocks: int) -> int | None:
        """The last block of the first `known_blocks` that is a tip."""
        tips, marks = self._tips, self._marks
        for start in range((known_blocks - 1) // STRETCH * STRETCH, -1, -STRETCH):
            if keys[start] in marks:
                for at in range(min(start + STRETCH, known_blocks) - 1, start - 1, -1):
                    if keys[at] in tips:
                        return at
        return None

    def _remember(self, keys: Sequence[int], program: str, turn: int) -> None:
        """A prompt's tip; it was none before."""
        mark = keys[(len(keys) - 1) // STRETCH * STRETCH]
        self._tips[keys[-1]] = _Tip(program, turn, mark)
        self._marks[mark] = self._marks.get(mark, 0) + 1
        if len(self._tips) > self._most:
            _, old = self._tips.popitem(last=False)
            self._marks[old.mark] -= 1
            if not self._marks[old.mark]:
                del self._marks[old.mark]

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

MOST_TIPS = 50_000


class _Tip:
    __slots__ = ("program", "turn", "used")

    def __init__(self, program: str, turn: int) -> None:
        self.program = program
        self.turn = turn
        """1: of a conversation's first prompt."""
        self.used = False
        """A prompt went on from here."""


class Programs:
    """The conversations of one model, by the tips of their prompts. Those used longest ago are forgotten."""

    def __init__(self, most_tips: int = MOST_TIPS) -> None:
        self._most = most_tips
        self._tips: OrderedDict[int, _Tip] = OrderedDict()
        self._made = 0

    def __len__(self) -> int:
        return len(self._tips)

    def recognise(self, keys: Sequence[int], known_blocks: int) -> str:
        """The program of a prompt that was just admitted; it is remembered as that program's newest.

        `known_blocks`: leading blocks that earlier prompts had; further on there can be no tip. Prompts
        without a full block cannot be recognised: each is a program of its own.
        """
        tips, found = self._tips, None
        for at in range(min(known_blocks, len(keys)) - 1, -1, -1):
            found = tips.get(keys[at])
            if found is not None:
                break
        if found is not None:
            tips.move_to_end(keys[at])
            shared = found.turn == 1 and (found.used or at == len(keys) - 1)
            found.used = True
            if not shared:
                if at < len(keys) - 1:
                    self._remember(keys[-1], _Tip(found.program, found.turn + 1))
                return found.program
        self._made += 1
        program = f"~{self._made}"
        if keys and keys[-1] not in tips:
            self._remember(keys[-1], _Tip(program, 1))
        return program

    def _remember(self, key: int, tip: _Tip) -> None:
        self._tips[key] = tip
        if len(self._tips) > self._most:
            self._tips.popitem(last=False)

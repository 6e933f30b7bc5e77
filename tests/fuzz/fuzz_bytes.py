"""From the bytes that a fuzzer makes up to things worth trying: choices out of lists, then small damage.

A parser that sees random bytes refuses the first one. So targets take most bytes as choices: of words that
mean something to the parser, whole and broken, in any order; a coverage-guided fuzzer learns to choose.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """What is left of a fuzzer's bytes. Behind their end every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def over(self) -> bool:
        """No byte is left."""
        return self._at >= len(self._data)

    def below(self, bound: int) -> int:
        """0 .. bound - 1; bound is at most 65,536."""
        size = 1 if bound <= 256 else 2
        piece = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(piece, "big") % bound

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.below(len(options))]

    def once_in(self, often: int) -> bool:
        """True about once in so many times, never at the end."""
        return not self.over and self.below(often) == often - 1

    def raw(self, most: int) -> bytes:
        """Up to so many bytes as they are."""
        size = self.below(most + 1)
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece

    def rest(self) -> bytes:
        """All that is left."""
        piece, self._at = self._data[self._at :], len(self._data)
        return piece

    def damaged(self, data: bytes, most: int = 3) -> bytes:
        """`data` with a few bytes put in, taken out or replaced; often with none."""
        out = bytearray(data)
        for _ in range(max(0, self.below(most + 4) - 3)):
            at = self.below(min(len(out) + 1, 65_536))
            match self.below(3):
                case 0:
                    out[at:at] = self.raw(3)
                case 1:
                    del out[at : at + 1 + self.below(3)]
                case _:
                    out[at : at + 1] = self.raw(1)
        return bytes(out)

    def cut(self, data: bytes) -> list[bytes]:
        """`data` in pieces, none empty: whole, byte by byte, or at random points."""
        match self.below(4):
            case 0:
                return [data] if data else []
            case 1:
                return [data[at : at + 1] for at in range(len(data))]
            case _:
                pieces, at = [], 0
                while at < len(data):
                    size = len(data) - at if self.over else 1 + self.below(40)
                    pieces.append(data[at : at + size])
                    at += size
                return pieces

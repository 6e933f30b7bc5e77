"""From a choice's tokens to its text: whole characters only, and never a part of a stop string.

Knows tokens and strings; how answers look on the wire is not its business. A piece that might still turn
out to be the beginning of a stop string is held back until that is decided.
"""

from dataclasses import dataclass

from sumibi.prompts.tokenizer import Tokenizer


class StopStrings:
    """Finds the stop string that is complete first in a text that comes in pieces, however it is cut."""

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """With `include`, the stop string itself is part of the text."""
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """The text that is now certain, and the stop string that ends it, if one is complete."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            self._held = ""
            return text[: end if self._include else at], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def rest(self) -> str:
        """What is held back, when nothing more will come."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, `stop` itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a request says about the text of its answer."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings do not count within the first so many tokens."""


class ChoiceText:
    """The text of one choice."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], options: TextOptions) -> None:
        """`prompt` tells whether the answer begins within a word."""
        self._detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopStrings(options.stops, include=options.include_stop)
        self._options = options
        self._tokens = 0
        self.stop: str | None = None
        """The stop string that ended the text."""

    def push(self, token: int) -> str:
        """One more token; the text that is certain now. Not to be called once `stop` is set."""
        self._tokens += 1
        piece = self._detokenizer.push([token])
        if self._tokens <= self._options.min_tokens:
            return piece
        text, self.stop = self._stops.feed(piece)
        return text

    def finish(self) -> str:
        """The rest of the text, when no more tokens come: half a character comes out as U+FFFD."""
        if self.stop is not None:
            return ""
        text, self.stop = self._stops.feed(self._detokenizer.finish())
        return text if self.stop is not None else text + self._stops.rest()

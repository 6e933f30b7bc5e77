"""Whether engines find in their caches what the router believes to be there: the alarm for foreign tokens.

Keys that are made of other tokens than the engine's (another template, tokenizer or salt) raise no error:
prompts are placed as if nobody knew them, or where nothing of them is, for ever. What gives it away are
sums: cached tokens foreseen beside those that engines report. They differ by chance (evictions, other
clients), but not by a factor of ten over many prompts.
"""

from typing import Final

ENOUGH_TOKENS: Final = 16_384
"""Cached tokens, foreseen or reported, before anything is concluded."""
APART: Final = 0.1
"""The lesser of the two sums is below this share of the greater: they disagree."""
MEMORY_TOKENS = 16 * ENOUGH_TOKENS
"""When the greater sum passes this, both are halved: the latest requests count most."""

NOT_FOUND = (
    "engines have almost nothing of what was sent there before: is prefix caching on, and are tokenizer, chat"
    " template and cache salt theirs?"
)
NOT_FORESEEN = (
    "engines have prompts cached of which almost nothing was matched: are tokenizer, chat template and cache"
    " salt theirs? (or do others send the same prompts there?)"
)


class Agreement:
    """Of one model: cached tokens foreseen and reported."""

    __slots__ = ("actual", "alarm", "predicted")

    def __init__(self) -> None:
        self.predicted = 0
        self.actual = 0
        self.alarm = ""
        """What is wrong; empty while the sums agree."""

    def observe(self, predicted_tokens: int, actual_tokens: int) -> str:
        """A prompt was computed and its engine said what it had of it. The alarm, if it begins with this."""
        self.predicted += predicted_tokens
        self.actual += actual_tokens
        greater, lesser = max(self.predicted, self.actual), min(self.predicted, self.actual)
        if greater < ENOUGH_TOKENS:
            return ""
        if greater > MEMORY_TOKENS:
            self.predicted //= 2
            self.actual //= 2
        before, self.alarm = self.alarm, ""
        if lesser < APART * greater:
            self.alarm = NOT_FOUND if self.predicted > self.actual else NOT_FORESEEN
        return self.alarm if self.alarm != before else ""

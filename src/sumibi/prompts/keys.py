"""Prompts to routing keys: rendered and tokenised once, with a cache for what repeats and grows."""

from enum import StrEnum

import msgspec

from sumibi.core.keys import DEFAULT_BLOCK_TOKENS
from sumibi.prompts.dialects import PromptRequest
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer


class PromptGrade(StrEnum):
    """How well a prompt's keys are known. The router uses the same words."""

    EXACT = "exact"
    """Rendered and tokenised as the engine does it."""
    ESTIMATED = "estimated"
    """Known prefix exact, the length of the rest estimated."""
    APPROXIMATE = "approximate"
    """Byte-chunk keys, no tokenizer: comparable among themselves only."""


class Prompt(msgspec.Struct, kw_only=True):
    """What the router needs to know of one request's prompt."""

    keys: list[int]
    """Routing keys of the full blocks, in order. Shared with the cache: do not change."""
    prompt_tokens: int
    """Whole prompt, partial last block included; of all prompts, if the request has several."""
    grade: PromptGrade
    token_ids: list[int] | None = None
    """The prompt's tokens, None if the grade is not exact. Shared with the cache: do not change."""
    reused_tokens: int = 0
    """Tokens that came from the cache instead of the tokenizer."""


class PromptReader:
    """Reads prompts for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        *,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        raise NotImplementedError

    def read(self, request: PromptRequest) -> Prompt:
        """The routing keys of `request`'s prompt (the first one, if it has several)."""
        raise NotImplementedError

    def read_each(self, request: PromptRequest) -> list[Prompt]:
        """One `Prompt` for each prompt of the request, in order."""
        raise NotImplementedError

"""Requests of the OpenAI dialects: a view of the fields that placement and limits need.

Only those are decoded; everything else passes through the gateway untouched as bytes. A field of the
wrong type or out of range is answered here, before any engine is asked, with its path and what is allowed.
"""

from enum import StrEnum
from typing import Any

import msgspec

from sumibi.prompts.template import Message


class PromptKind(StrEnum):
    """In what form a request brings its prompt."""

    CHAT = "chat"
    """Messages, rendered by the model's chat template."""
    TEXT = "text"
    """One text or several."""
    TOKENS = "tokens"
    """One list of token ids or several."""


class PromptRequest(msgspec.Struct, kw_only=True):
    """One request, whatever its dialect. Exactly one of `messages`, `texts`, `token_ids` is not None."""

    kind: PromptKind
    model: str
    messages: list[Message] | None = None
    texts: list[str] | None = None
    """One prompt each (a completion request may carry several)."""
    token_ids: list[list[int]] | None = None
    """One prompt each."""
    tools: list[dict[str, Any]] | None = None
    template_arguments: dict[str, Any] = {}
    """Variables for the chat template: `chat_template_kwargs` and what the dialect adds to them."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """Whether the tokenizer adds BOS and the like (False for a chat: its template writes them)."""
    cache_salt: str = ""
    stream: bool = False
    include_usage: bool = False
    """`stream_options.include_usage`: the client wants usage in the stream."""
    n: int = 1
    max_tokens: int | None = None
    """Limit on output tokens (`max_completion_tokens` before `max_tokens`), None if the client gave none."""


def parse_request(path: str, body: bytes) -> PromptRequest:
    """Parse the body of `POST path`. Raises BadRequest naming the field and what is allowed.

    Paths: `/v1/chat/completions`, `/v1/completions`.
    """
    raise NotImplementedError

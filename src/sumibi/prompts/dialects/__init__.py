"""Requests of all dialects that are spoken: OpenAI's, Anthropic's, and those of the engines themselves.

`parse_request(path, body)` gives a `PromptRequest`, whatever the dialect. Its `messages` and `tools` are the
chat messages and tools that an engine makes of the request for its chat template; `fields` has what else
reads JSON bodies.
"""

from collections.abc import Callable

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects.anthropic import parse_count, parse_messages
from sumibi.prompts.dialects.fields import decode_body, decode_objects
from sumibi.prompts.dialects.generate import parse_generate, parse_sglang
from sumibi.prompts.dialects.openai import parse_chat, parse_completion
from sumibi.prompts.dialects.request import (
    NO_CONVERSATION,
    Conversion,
    Dialect,
    PromptKind,
    PromptRequest,
    settled,
)
from sumibi.prompts.dialects.responses import parse_response

__all__ = [
    "DIALECTS",
    "NO_CONVERSATION",
    "Conversion",
    "Dialect",
    "PromptKind",
    "PromptRequest",
    "decode_body",
    "decode_objects",
    "parse_request",
    "settled",
]

DIALECTS = {
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/completions": Dialect.COMPLETIONS,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/messages": Dialect.MESSAGES,
    "/v1/messages/count_tokens": Dialect.COUNT_TOKENS,
    "/inference/v1/generate": Dialect.GENERATE,
    "/generate": Dialect.SGLANG,
}
"""By path."""

_PARSERS: dict[Dialect, Callable[[bytes], PromptRequest]] = {
    Dialect.CHAT: parse_chat,
    Dialect.COMPLETIONS: parse_completion,
    Dialect.RESPONSES: parse_response,
    Dialect.MESSAGES: parse_messages,
    Dialect.COUNT_TOKENS: parse_count,
    Dialect.GENERATE: parse_generate,
    Dialect.SGLANG: parse_sglang,
}


def parse_request(path: str, body: bytes) -> PromptRequest:
    """Parse the body of `POST path`. Raises BadRequest naming the field and what is allowed.

    Paths: those of `DIALECTS`, also with `/render` after them.
    """
    dialect = DIALECTS.get(path.removesuffix("/render"))
    if dialect is None:
        raise BadRequest(f"{path}: not a path with a prompt; use one of {', '.join(DIALECTS)}")
    return _PARSERS[dialect](body)

"""What is read of OpenAI's request bodies. A file of its own: see docs/decisions/0029."""

from typing import Annotated, Any

import msgspec

from sumibi.prompts.dialects.fields import NonEmpty, NotNegative, Positive, Raw, TransferFields


class StreamOptions(msgspec.Struct):
    """How a stream is to be sent."""

    include_usage: bool | None = None


class View(TransferFields, kw_only=True):
    """Fields that chat and plain completions share. Unknown fields are skipped, not refused."""

    model: NonEmpty
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    cache_salt: NonEmpty | None = None
    truncate_prompt_tokens: int | None = None


class ChatView(View, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Raw], msgspec.Meta(min_length=1)]
    tools: Raw = Raw()
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionView(View, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Raw = Raw()
    prompt_embeds: Raw = Raw()
    # The dialect's own default, 16; an explicit null lifts it. With `echo` it may be 0.
    max_tokens: NotNegative | None = 16
    add_special_tokens: bool = True

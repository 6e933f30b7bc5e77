"""The dialects of the door: what each asks beside its prompt, and how its answers look.

Prompts themselves are read by `sumibi.prompts.dialects`, for all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sumibi.core.errors import SumibiError
from sumibi.engine.choices import Choices
from sumibi.engine.dialects.chat import ChatWriter, read_chat
from sumibi.engine.dialects.completions import CompletionWriter, read_completion
from sumibi.engine.dialects.generate import WITHIN, GenerateWriter, read_generate
from sumibi.engine.dialects.messages import MessagesWriter, messages_error, read_messages
from sumibi.engine.dialects.responses import ResponsesWriter, read_responses
from sumibi.engine.dialects.writing import Writer, error_body
from sumibi.engine.fields import Fields
from sumibi.prompts.tokenizer import Tokenizer

__all__ = ["COUNT_TOKENS", "SPOKEN", "Spoken", "Writer", "error_body_for"]

COUNT_TOKENS = "/v1/messages/count_tokens"


@dataclass(frozen=True, slots=True)
class Spoken:
    """One dialect."""

    read: Callable[[bytes], Fields]
    """A body's fields beside the prompt. Raises BadRequest."""
    writer: Callable[[str, Choices, Tokenizer], Writer]
    """Of one answer: (the model's name, its choices, their tokenizer)."""
    limit: str = "max_tokens"
    """What the limit on output tokens is called."""
    within: str = ""
    """What stands before the names of other fields."""


SPOKEN = {
    "/v1/chat/completions": Spoken(read_chat, ChatWriter),
    "/v1/completions": Spoken(read_completion, CompletionWriter),
    "/v1/responses": Spoken(read_responses, ResponsesWriter, limit="max_output_tokens"),
    "/v1/messages": Spoken(read_messages, MessagesWriter),
    "/inference/v1/generate": Spoken(
        read_generate, GenerateWriter, limit=f"{WITHIN}max_tokens", within=WITHIN
    ),
}
"""By path."""


def error_body_for(path: str, error: SumibiError) -> bytes:
    """The body of an error answer to a request of `path`, in its dialect's shape."""
    return messages_error(error) if path in ("/v1/messages", COUNT_TOKENS) else error_body(error)

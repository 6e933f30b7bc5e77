"""What all dialects come to: one view of a request with the fields that placement and limits need.

Only those are decoded; everything else passes through the gateway untouched, as bytes. A field of the
wrong type or out of range is answered here, before any engine is asked, with its path and what is allowed.

Messages stay undecoded slices of the body until somebody asks for them: a conversation that comes again
is recognised by its bytes (`sumibi.prompts.keys`), and 100 KB of them need not become objects first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects.fields import Raw
from sumibi.prompts.template import ChatTemplate, Message

Tools = list[dict[str, Any]]

_SHARED_TOOLS_BYTES = 256 << 10
"""Longer lists of tools are decoded each time, so that what is kept has a bound."""


class Dialect(StrEnum):
    """Whose words a request is in; each has its own path."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    """Anthropic's."""
    COUNT_TOKENS = "count_tokens"
    """Anthropic's question how long a prompt is: nothing is generated."""
    GENERATE = "generate"
    """vLLM's: tokens in, tokens out."""
    SGLANG = "sglang"
    """SGLang's own `/generate`."""


class PromptKind(StrEnum):
    """In what form a request brings its prompt."""

    CHAT = "chat"
    """Messages, rendered by the model's chat template."""
    TEXT = "text"
    """One text or several."""
    TOKENS = "tokens"
    """One list of token ids or several."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """From one dialect's conversation to chat messages and tools, as engines make them for a template."""

    name: str
    """Part of a prompt's name: the same bytes may mean something else in another dialect."""
    field: str
    """Where the request has its messages, for error messages."""
    messages: Callable[[Raw | None, list[Raw], int], list[Message]]
    """(what stands before the messages, some of them in a row, index of the first of these) -> chat
    messages. Without the part before them and from any message on it must give what it gives for the
    whole, unless a message joins the one before it (then the first of the result is an assistant's).
    Raises BadRequest for malformed ones, `UnsupportedContent` for what is no text.
    """
    tools: Callable[[bytes], Tools | None]
    """The dialect's tools -> the form that engines give to templates. Raises as `messages` does."""
    one_to_one: bool = False
    """Each raw message is one chat message, and there is nothing before them."""


def _none(head: Raw | None, raws: list[Raw], start: int) -> list[Message]:
    return []


NO_CONVERSATION = Conversion("", "prompt", _none, lambda raw: None)
"""Of prompts that are texts or tokens."""


class PromptRequest(msgspec.Struct, kw_only=True):
    """One request, whatever its dialect: `raw_messages`, `texts` or `token_ids` is filled, as `kind` says."""

    dialect: Dialect = Dialect.CHAT
    kind: PromptKind
    model: str
    """Empty where the dialect allows that and the request names none: the only one served is meant."""
    conversion: Conversion = NO_CONVERSATION
    raw_head: Raw | None = None
    """What stands before the messages, as JSON (Anthropic's `system`, `instructions` of responses)."""
    raw_messages: list[Raw] = []
    """Each message or item as JSON; `messages` decodes them."""
    raw_tools: Raw | None = None
    """The list of tools as JSON; `tools` decodes it."""
    texts: list[str] = []
    """One prompt each (a completion request may carry several)."""
    token_ids: list[list[int]] = []
    """One prompt each."""
    template_arguments: dict[str, Any] = {}
    """Variables for the chat template: `chat_template_kwargs` and what the dialect adds to them."""
    thinking_off: bool = False
    """Thinking is to be switched off in the way that the template knows: see `settled`."""
    joins_systems: bool = False
    """All system texts are joined at the front: see `settled`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """Whether the tokenizer adds BOS and the like (usually not for a chat: its template writes them)."""
    cache_salt: str = ""
    opaque: str = ""
    """The field that makes the prompt's tokens unknowable here (it names a template of the client's own,
    or cuts the prompt to a length); empty if there is none."""
    transfer: str = ""
    """The field with which the client itself says where KV is to come from; empty if there is none."""
    stateful: str = ""
    """The field by which the request means something only at the engine that answered an earlier one, or
    that must remember this one; empty if there is none."""
    stream: bool = False
    include_usage: bool = False
    """The stream has usage: the client asks (`stream_options.include_usage`), or the dialect says so."""
    n: int = 1
    max_tokens: int | None = None
    """Limit on output tokens as the client or the dialect's default gives it; None if only the context
    length limits them."""

    _messages: list[Message] | None = None

    @property
    def messages(self) -> list[Message]:
        """The messages of a chat in the form of OpenAI's. Raises as `Conversion.messages` does."""
        if self._messages is None:
            messages = self.conversion.messages(self.raw_head, self.raw_messages, 0)
            self._messages = joined_systems(messages) if self.joins_systems else messages
        return self._messages

    @property
    def tools(self) -> Tools | None:
        """The decoded tools in the form that engines give to templates, None if the request has none.

        Shared by all requests with the same tools: do not change. Raises BadRequest if one is malformed.
        """
        if self.raw_tools is None:
            return None
        raw, read = bytes(self.raw_tools), self.conversion.tools
        return _tools_again(read, raw) if len(raw) <= _SHARED_TOOLS_BYTES else read(raw)

    @property
    def prompts(self) -> int:
        """How many prompts the request carries."""
        return 1 if self.kind is PromptKind.CHAT else len(self.texts) + len(self.token_ids)


def settled(request: PromptRequest, template: ChatTemplate | None) -> PromptRequest:
    """The request with what engines decide by the template (of Anthropic's dialect): how thinking is
    switched off, and whether system texts between the messages move to the front.

    To be called before anything is rendered or named; None: the template is not known here.
    """
    if request.dialect not in (Dialect.MESSAGES, Dialect.COUNT_TOKENS):
        return request
    effort, arguments = "none", request.template_arguments
    if template is not None and request.thinking_off:
        effort = template.effort_without_thinking
    return msgspec.structs.replace(
        request,
        thinking_off=False,
        template_arguments=with_effort(arguments, effort) if request.thinking_off else arguments,
        joins_systems=template is not None and template.refuses_late_systems,
    )


def joined_systems(messages: list[Message]) -> list[Message]:
    """The same messages with all system texts joined at the front: for templates that refuse later ones."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *others] if texts else others


def template_arguments(
    chat_template_kwargs: dict[str, Any] | None, reasoning_effort: str | None
) -> dict[str, Any]:
    """The variables that vLLM gives to a template for a request's arguments and its effort.

    Raises BadRequest for one that the request has a field of its own for.
    """
    arguments = dict(chat_template_kwargs or {})
    for name in ("messages", "tools", "chat_template", "tokenize"):
        if name in arguments:
            path = f"chat_template_kwargs.{name}"
            raise BadRequest(f"{path}: not allowed, the request has its own field", param=path)
    # Request fields win over these.
    arguments.pop("add_generation_prompt", None)
    arguments.pop("continue_final_message", None)
    return with_effort(arguments, reasoning_effort)


def with_effort(arguments: dict[str, Any], reasoning_effort: str | None) -> dict[str, Any]:
    """The same with an effort: that also says whether to think at all, if the arguments do not."""
    if reasoning_effort is None or reasoning_effort == "auto":
        return arguments
    enable = arguments.get("enable_thinking", reasoning_effort != "none")
    return {**arguments, "enable_thinking": enable, "reasoning_effort": reasoning_effort}


@lru_cache(maxsize=16)
def _tools_again(read: Callable[[bytes], Tools | None], raw: bytes) -> Tools | None:
    """An agent sends the same tools with every turn."""
    return read(raw)

"""Requests of the OpenAI dialects: a view of the fields that placement and limits need.

Only those are decoded; everything else passes through the gateway untouched, as bytes. A field of the
wrong type or out of range is answered here, before any engine is asked, with its path and what is allowed.

Messages stay undecoded slices of the body until somebody asks for them: a conversation that comes again
is recognised by its bytes (`sumibi.prompts.keys`), and 100 KB of them need not become objects first.
"""

import re
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.prompts.template import Message, SharedObject

Raw = msgspec.Raw
T = TypeVar("T")


class PromptKind(StrEnum):
    """In what form a request brings its prompt."""

    CHAT = "chat"
    """Messages, rendered by the model's chat template."""
    TEXT = "text"
    """One text or several."""
    TOKENS = "tokens"
    """One list of token ids or several."""


class PromptRequest(msgspec.Struct, kw_only=True):
    """One request, whatever its dialect: `raw_messages`, `texts` or `token_ids` is filled, as `kind` says."""

    kind: PromptKind
    model: str
    raw_messages: list[Raw] = []
    """Each message as JSON; `messages` decodes them."""
    raw_tools: Raw | None = None
    """The list of tools as JSON; `tools` decodes it."""
    texts: list[str] = []
    """One prompt each (a completion request may carry several)."""
    token_ids: list[list[int]] = []
    """One prompt each."""
    template_arguments: dict[str, Any] = {}
    """Variables for the chat template: `chat_template_kwargs` and what the dialect adds to them."""
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
    stream: bool = False
    include_usage: bool = False
    """`stream_options.include_usage`: the client wants usage in the stream."""
    n: int = 1
    max_tokens: int | None = None
    """Limit on output tokens as the client or the dialect's default gives it; None if only the context
    length limits them."""

    _messages: list[Message] | None = None

    @property
    def messages(self) -> list[Message]:
        """The decoded messages of a chat, as sent. Raises BadRequest if one is no JSON object."""
        if self._messages is None:
            self._messages = decode_objects(self.raw_messages, "messages")
        return self._messages

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The decoded tools in the form that engines give to templates, None if the request has none.

        Shared by all requests with the same tools: do not change. Raises BadRequest if one is malformed.
        """
        if self.raw_tools is None:
            return None
        raw = bytes(self.raw_tools)
        return _tools_again(raw) if len(raw) <= _SHARED_TOOLS_BYTES else _tools(raw)

    @property
    def prompts(self) -> int:
        """How many prompts the request carries."""
        return 1 if self.kind is PromptKind.CHAT else len(self.texts) + len(self.token_ids)


def parse_request(path: str, body: bytes) -> PromptRequest:
    """Parse the body of `POST path`. Raises BadRequest naming the field and what is allowed.

    Paths: `/v1/chat/completions` and `/v1/completions`, also with `/render` after them.
    """
    match path.removesuffix("/render"):
        case "/v1/chat/completions":
            return _chat(decode_body(_chat_view, body))
        case "/v1/completions":
            return _completion(decode_body(_completion_view, body))
    raise BadRequest(f"{path}: not a path with a prompt; use /v1/chat/completions or /v1/completions")


def decode_body(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """Decode a JSON body. Raises BadRequest naming the field that is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as cause:
        problem, _, path = str(cause).partition(" - at `$")
        param = path.rstrip("`").removeprefix(".") or None
        if problem.startswith("Object missing required field"):
            param = problem.split("`")[1]
            problem = "this field is required"
        raise BadRequest(f"{param or 'request body'}: {problem}", param=param) from cause
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise BadRequest(f"the request body is not valid JSON: {cause}") from cause


def decode_objects(raws: list[Raw], field: str, start: int = 0) -> list[dict[str, Any]]:
    """Decode JSON objects; BadRequest names `field[index]` of one that is none, counting from `start`."""
    out: list[dict[str, Any]] = []
    for index, raw in enumerate(raws, start):
        try:
            out.append(_object.decode(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
            path = f"{field}[{index}]"
            raise BadRequest(f"{path}: a JSON object is needed: {cause}", param=path) from cause
    return out


Positive = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _View(msgspec.Struct, kw_only=True):
    """Fields that chat and plain completions share. Unknown fields are skipped, not refused."""

    model: NonEmpty
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Positive | None = None
    cache_salt: NonEmpty | None = None
    truncate_prompt_tokens: int | None = None
    kv_transfer_params: Raw = Raw()
    bootstrap_host: Raw = Raw()


class _ChatView(_View, kw_only=True):
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


class _CompletionView(_View, kw_only=True):
    prompt: Raw
    # The dialect's own default, 16; an explicit null lifts it.
    max_tokens: Positive | None = 16
    add_special_tokens: bool = True


_object = msgspec.json.Decoder(dict[str, Any])
_raws = msgspec.json.Decoder(list[Raw])
_chat_view = msgspec.json.Decoder(_ChatView)
_completion_view = msgspec.json.Decoder(_CompletionView)
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[TokenId])
_id_lists = msgspec.json.Decoder(list[list[TokenId]])
_first_item = re.compile(rb"\s*\[\s*(\S)")


def _chat(view: _ChatView) -> PromptRequest:
    if view.continue_final_message and view.add_generation_prompt:
        raise BadRequest(
            "continue_final_message: allowed only with add_generation_prompt false",
            param="continue_final_message",
        )
    limit = view.max_completion_tokens
    return PromptRequest(
        kind=PromptKind.CHAT,
        model=view.model,
        raw_messages=view.messages,
        raw_tools=_given(view.tools),
        template_arguments=_template_arguments(view),
        add_generation_prompt=view.add_generation_prompt,
        continue_final_message=view.continue_final_message,
        add_special_tokens=view.add_special_tokens,
        cache_salt=view.cache_salt or "",
        opaque="chat_template" if view.chat_template is not None else _truncation(view),
        transfer=_transfer(view),
        stream=bool(view.stream),
        include_usage=_include_usage(view),
        n=view.n or 1,
        max_tokens=limit if limit is not None else view.max_tokens,
    )


def _transfer(view: _View) -> str:
    for name, value in (
        ("kv_transfer_params", view.kv_transfer_params),
        ("bootstrap_host", view.bootstrap_host),
    ):
        if bytes(value) not in (b"", b"null"):
            return name
    return ""


def _given(tools: Raw) -> Raw | None:
    """The field `tools` if it is there and not null."""
    text = bytes(tools)
    if text[:1] not in (b"", b"n", b"["):
        raise BadRequest("tools: Expected `array | null`", param="tools")
    return tools if text.startswith(b"[") else None


def _template_arguments(view: _ChatView) -> dict[str, Any]:
    """The variables that vLLM gives to a template, for the same request fields."""
    arguments = dict(view.chat_template_kwargs or {})
    for name in ("messages", "tools", "chat_template", "tokenize"):
        if name in arguments:
            path = f"chat_template_kwargs.{name}"
            raise BadRequest(f"{path}: not allowed, the request has its own field", param=path)
    # Request fields win over these.
    arguments.pop("add_generation_prompt", None)
    arguments.pop("continue_final_message", None)
    if view.reasoning_effort is not None:
        arguments.setdefault("enable_thinking", view.reasoning_effort != "none")
        arguments["reasoning_effort"] = view.reasoning_effort
    if view.documents is not None:
        arguments["documents"] = view.documents
    return arguments


def _completion(view: _CompletionView) -> PromptRequest:
    texts, token_ids = _prompts(view.prompt)
    return PromptRequest(
        kind=PromptKind.TOKENS if token_ids else PromptKind.TEXT,
        model=view.model,
        texts=texts,
        token_ids=token_ids,
        add_special_tokens=view.add_special_tokens,
        cache_salt=view.cache_salt or "",
        opaque=_truncation(view),
        transfer=_transfer(view),
        stream=bool(view.stream),
        include_usage=_include_usage(view),
        n=view.n or 1,
        max_tokens=view.max_tokens,
    )


def _prompts(raw: Raw) -> tuple[list[str], list[list[int]]]:
    """A prompt field is a text, a list of texts, a list of token ids, or a list of such lists."""
    first_item = _first_item.match(raw)
    if first_item is None:
        return [_decode_prompt(_text, raw)], []
    if first_item[1] == b'"':
        return _decode_prompt(_texts, raw), []
    if first_item[1] == b"[":
        lists = _decode_prompt(_id_lists, raw)
    else:
        lists = [_decode_prompt(_ids, raw)]
    if [] in lists:
        raise BadRequest("prompt: at least one text or one token id is needed", param="prompt")
    return [], lists


def _decode_prompt(decoder: "msgspec.json.Decoder[T]", raw: Raw) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
        raise BadRequest(
            f"prompt: a text, a list of texts, a list of token ids or a list of such lists: {cause}",
            param="prompt",
        ) from cause


def _truncation(view: _View) -> str:
    return "truncate_prompt_tokens" if view.truncate_prompt_tokens is not None else ""


def _include_usage(view: _View) -> bool:
    return bool(view.stream_options is not None and view.stream_options.include_usage)


def _tools(raw: bytes) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(decode_objects(_raws.decode(raw), "tools"))]


_tools_again = lru_cache(maxsize=16)(_tools)
"""An agent sends the same tools with every turn."""

_SHARED_TOOLS_BYTES = 256 << 10
"""Longer lists are decoded each time, so that what is kept has a bound."""


def _tool(tool: dict[str, Any], path: str) -> SharedObject:
    """One tool with the fields that engines keep, in their order; an absent description is null."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise BadRequest(f'{path}: {{"type": "function", "function": {{...}}}} is needed', param=path)
    if not isinstance(function.get("name"), str):
        raise BadRequest(f"{path}.function.name: a string is needed", param=f"{path}.function.name")
    kept = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        kept["strict"] = function["strict"]
    return SharedObject({"type": "function", "function": SharedObject(kept)})

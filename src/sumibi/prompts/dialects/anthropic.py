"""Anthropic's messages, and its question for their length: what engines make of them for a chat template.

vLLM's reading (0.32) is the measure, SGLang's is the same in what is ordinary: system texts are joined;
`tool_use` blocks become tool calls, `thinking` blocks the reasoning of their message; each `tool_result`
becomes a message of role `tool`, before what else its user message says. Claude Code's attribution header,
another one with each request, is left out as there.
"""

from typing import Annotated, Any

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects.fields import (
    NonEmpty,
    Positive,
    Raw,
    TransferFields,
    decode_body,
    decode_objects,
    given,
    present,
    raw_list,
)
from sumibi.prompts.dialects.openai import function_tool
from sumibi.prompts.dialects.request import (
    Conversion,
    Dialect,
    PromptKind,
    PromptRequest,
    Tools,
    template_arguments,
)
from sumibi.prompts.template import Message, UnsupportedContent

_ATTRIBUTION = "x-anthropic-billing-header"
_ROLES = ("user", "assistant", "system")


class _Thinking(msgspec.Struct):
    type: str | None = None


class _OutputConfig(msgspec.Struct):
    effort: str | None = None


class _CountView(TransferFields, kw_only=True):
    """Fields of both. Unknown fields are skipped, not refused."""

    model: NonEmpty
    messages: Annotated[list[Raw], msgspec.Meta(min_length=1)]
    system: Raw = Raw()
    tools: Raw = Raw()
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _MessagesView(_CountView, kw_only=True):
    max_tokens: Positive
    stream: bool | None = None
    cache_salt: NonEmpty | None = None


_count_view = msgspec.json.Decoder(_CountView)
_messages_view = msgspec.json.Decoder(_MessagesView)
_value = msgspec.json.Decoder()


def parse_messages(body: bytes) -> PromptRequest:
    """`POST /v1/messages`. Raises BadRequest naming the field and what is allowed."""
    view = decode_body(_messages_view, body)
    request = _request(view, Dialect.MESSAGES)
    request.cache_salt = view.cache_salt or ""
    request.stream = request.include_usage = bool(view.stream)
    request.max_tokens = view.max_tokens
    return request


def parse_count(body: bytes) -> PromptRequest:
    """`POST /v1/messages/count_tokens`. Raises as `parse_messages` does."""
    return _request(decode_body(_count_view, body), Dialect.COUNT_TOKENS)


def _request(view: _CountView, dialect: Dialect) -> PromptRequest:
    off = view.thinking is not None and view.thinking.type == "disabled"
    effort = view.output_config.effort if view.output_config is not None else None
    return PromptRequest(
        dialect=dialect,
        kind=PromptKind.CHAT,
        conversion=MESSAGES,
        model=view.model,
        raw_head=view.system if present(view.system) else None,
        raw_messages=view.messages,
        raw_tools=given(view.tools, "tools"),
        template_arguments=template_arguments(view.chat_template_kwargs, None if off else effort),
        thinking_off=off,
        transfer=view.transfer,
    )


def _messages(head: Raw | None, raws: list[Raw], start: int) -> list[Message]:
    out: list[Message] = []
    if head is not None:
        system = _decoded(head, "system")
        if isinstance(system, str):
            out += [{"role": "system", "content": system}] if system else []
        else:
            _put_system(out, system, "system")
    for index, message in enumerate(decode_objects(raws, "messages", start), start):
        path, role, content = f"messages[{index}]", message.get("role"), message.get("content")
        if role not in _ROLES:
            raise BadRequest(f"{path}.role: {', '.join(_ROLES)} are allowed", param=f"{path}.role")
        if role == "system":
            _put_system(out, content, f"{path}.content")
        elif isinstance(content, str):
            out.append({"role": role, "content": content})
        else:
            _put_blocks(out, role, _blocks(content, f"{path}.content"), f"{path}.content")
    return out


def _decoded(raw: Raw, field: str) -> object:
    try:
        return _value.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise BadRequest(f"{field}: {cause}", param=field) from cause


def _blocks(content: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadRequest(f"{path}: a text or a list of content blocks is allowed", param=path)
    return content


def _put_system(out: list[Message], content: object, path: str) -> None:
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [_block_text(block, path) for block in _blocks(content, path)]
    text = "".join(text for text in texts if not text.startswith(_ATTRIBUTION))
    if text:
        out.append({"role": "system", "content": text})


def _block_text(block: dict[str, Any], path: str) -> str:
    if block.get("type") != "text":
        raise _unsupported(block, path)
    return _text(block, "text", path)


def _text(block: dict[str, Any], field: str, path: str) -> str:
    text = block.get(field)
    if text is not None and not isinstance(text, str):
        raise BadRequest(f"{path}: {field} of a block must be a string", param=path)
    return text or ""


def _unsupported(block: dict[str, Any], path: str) -> UnsupportedContent:
    return UnsupportedContent(f"{path}: a block of type {block.get('type')!r} is not supported", param=path)


def _put_blocks(out: list[Message], role: str, blocks: list[dict[str, Any]], path: str) -> None:
    """One message of blocks: its tool results first, each a message of its own, then what else it says."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts += filter(None, [_text(block, "text", path)])
            case "thinking":
                thoughts += [_text(block, "thinking", path)] if block.get("thinking") is not None else []
            case "redacted_thinking":
                pass  # nobody but its maker can read it
            case "tool_use":
                calls.append(_call(block, path))
            case "tool_result" if role == "user":
                out.append(_result(block, path))
            case "tool_result":
                texts.append(f"Tool result: {block['content'] if block.get('content') else ''}")
            case _:
                raise _unsupported(block, path)
    message: Message = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if len(texts) == 1:
        message["content"] = texts[0]
    elif texts:
        message["content"] = [{"type": "text", "text": text} for text in texts]
    if role == "assistant" or texts:
        out.append(message)


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    given_input, name, call = block.get("input"), block.get("name"), block.get("id")
    if not isinstance(given_input, dict | None):
        raise BadRequest(f"{path}: input of a tool_use block must be an object", param=path)
    if not isinstance(name, str) or not isinstance(call, str):
        raise BadRequest(f"{path}: a tool_use block needs an id and a name", param=path)
    return {"id": call, "type": "function", "function": {"name": name, "arguments": given_input or {}}}


def _result(block: dict[str, Any], path: str) -> Message:
    content, call = block.get("content"), block.get("tool_use_id")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        inside = f"{path}: content of a tool_result block"
        text = "\n".join(_block_text(item, inside) for item in _blocks(content, inside))
    return {"role": "tool", "tool_call_id": call if isinstance(call, str) else "", "content": text}


def _tools(raw: bytes) -> Tools:
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(decode_objects(raw_list(raw), "tools"))]


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(tool.get("name"), str):
        raise BadRequest(f"{path}.name: a string is needed", param=f"{path}.name")
    if schema is None:  # a tool of Anthropic's own, which the model knows by its type
        raise UnsupportedContent(f"{path}: a tool without an input_schema is not supported", param=path)
    if not isinstance(schema, dict):
        raise BadRequest(f"{path}.input_schema: an object is needed", param=f"{path}.input_schema")
    return function_tool(tool, schema if "type" in schema else {**schema, "type": "object"})


MESSAGES = Conversion("anthropic", "messages", _messages, _tools)

"""OpenAI's responses, without a memory: what engines make of `instructions` and `input` for a chat template.

vLLM's reading (0.32, models without harmony) is the measure: what an assistant thought, said and called
becomes one message; of a message by an assistant only the first part counts; tools that are no functions
are not shown to the model.
"""

import json
from typing import Any

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects.fields import (
    NonEmpty,
    Positive,
    Raw,
    TransferFields,
    decode_body,
    decode_objects,
    first_byte,
    first_present,
    given,
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

_NAMESPACE_SEPARATOR = "__"
_FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters that vLLM shows for a tool of type `custom`."""
_UNFINISHED = ("in_progress", "incomplete")


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class _View(TransferFields, kw_only=True):
    """Unknown fields are skipped, not refused."""

    input: Raw
    model: NonEmpty | None = None
    instructions: str | None = None
    tools: Raw = Raw()
    reasoning: _Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    cache_salt: NonEmpty | None = None
    background: bool | None = None
    previous_response_id: Raw = Raw()
    conversation: Raw = Raw()
    prompt: Raw = Raw()
    previous_input_messages: Raw = Raw()


class _Item(msgspec.Struct):
    type: str = "message"
    status: str | None = None


_view = msgspec.json.Decoder(_View)
_last = msgspec.json.Decoder(_Item)
_string = msgspec.json.Decoder(str)


def parse_response(body: bytes) -> PromptRequest:
    """`POST /v1/responses`. Raises BadRequest naming the field and what is allowed."""
    view = decode_body(_view, body)
    if first_byte(view.input) == b"[":
        items = raw_list(view.input)
    elif first_byte(view.input) == b'"':
        items = [Raw(b'{"role":"user","content":%b}' % bytes(view.input))]
    else:
        raise BadRequest("input: Expected `str | array`", param="input")
    if not items and not view.instructions:
        raise BadRequest("input: at least one item is needed", param="input")
    stateful = "background" if view.background else ""
    stateful = stateful or first_present(
        previous_response_id=view.previous_response_id, conversation=view.conversation
    )
    hidden = first_present(prompt=view.prompt, previous_input_messages=view.previous_input_messages)
    effort = view.reasoning.effort if view.reasoning is not None else None
    tools = given(view.tools, "tools")
    continued = bool(items) and _continued(items[-1])
    return PromptRequest(
        dialect=Dialect.RESPONSES,
        kind=PromptKind.CHAT,
        conversion=RESPONSES,
        model=view.model or "",
        raw_head=Raw(msgspec.json.encode(view.instructions)) if view.instructions else None,
        raw_messages=items,
        raw_tools=tools if tools is not None and raw_list(tools) else None,
        template_arguments=template_arguments(view.chat_template_kwargs, effort),
        add_generation_prompt=not continued,
        continue_final_message=continued,
        cache_salt=view.cache_salt or "",
        opaque=hidden or stateful,
        transfer=view.transfer,
        stateful=stateful,
        stream=bool(view.stream),
        include_usage=bool(view.stream),
        max_tokens=view.max_output_tokens,
    )


def _continued(item: Raw) -> bool:
    """Whether the model is to go on with the last message instead of writing the next one."""
    try:
        last = _last.decode(item)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return last.type in ("message", "reasoning") and last.status in _UNFINISHED


def _messages(head: Raw | None, raws: list[Raw], start: int) -> list[Message]:
    out: list[Message] = []
    if head is not None:
        out.append({"role": "system", "content": _string.decode(head)})
    for index, item in enumerate(decode_objects(raws, "input", start), start):
        _put(out, item, f"input[{index}]")
    return out


def _put(out: list[Message], item: dict[str, Any], path: str) -> None:
    """An item as a message of its own, or as part of the one before, if that is the assistant's too."""
    kind = item.get("type", "message")
    match kind:
        case "function_call":
            name, space = _text(item, "name", path), item.get("namespace")
            full = f"{space}{_NAMESPACE_SEPARATOR}{name}" if isinstance(space, str) and space else name
            _put_call(out, item, full, _text(item, "arguments", path), path)
        case "custom_tool_call":
            payload = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
            _put_call(out, item, _text(item, "name", path), payload, path)
        case "function_call_output" | "custom_tool_call_output":
            out.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        case "reasoning":
            if item.get("encrypted_content"):
                raise UnsupportedContent(f"{path}.encrypted_content: is not supported", param=path)
            thought = _first_text(item.get("content"), path) or _first_text(item.get("summary"), path)
            _join(out, "reasoning", thought or "")
        case "message" if item.get("role") == "assistant":
            content = item.get("content")
            said = content if isinstance(content, str) else _first_text(content, path)
            if said is None:
                raise UnsupportedContent(f"{path}.content: a text is needed", param=path)
            _join(out, "content", said)
        case "message" if "role" in item:
            out.append(item)
        case _:
            raise UnsupportedContent(f"{path}.type: {kind!r} is not supported", param=f"{path}.type")


def _put_call(out: list[Message], item: dict[str, Any], name: str, arguments: str, path: str) -> None:
    function = {"name": name, "arguments": arguments}
    call = {"id": _text(item, "call_id", path), "function": function, "type": "function"}
    if out and out[-1]["role"] == "assistant":
        out[-1].setdefault("tool_calls", []).append(call)
    else:
        out.append({"role": "assistant", "tool_calls": [call]})


def _join(out: list[Message], field: str, text: str) -> None:
    if out and out[-1]["role"] == "assistant" and out[-1].get(field) is None:
        out[-1][field] = text
    else:
        out.append({"role": "assistant", field: text})


def _text(item: dict[str, Any], field: str, path: str) -> str:
    text = item.get(field)
    if not isinstance(text, str):
        raise BadRequest(f"{path}.{field}: a string is needed", param=f"{path}.{field}")
    return text


def _first_text(parts: object, path: str) -> str | None:
    """The text of the first part; None if there is no part. Raises UnsupportedContent if it is no text."""
    if not isinstance(parts, list) or not parts:
        return None
    text = parts[0].get("text") if isinstance(parts[0], dict) else None
    if not isinstance(text, str):
        raise UnsupportedContent(f"{path}: a part that is no text is not supported", param=path)
    return text


def _tools(raw: bytes) -> Tools:
    """Function tools as they are, free-form ones as functions with one text, namespaces laid open."""
    out: Tools = []
    for at, tool in enumerate(decode_objects(raw_list(raw), "tools")):
        path = f"tools[{at}]"
        match tool.get("type"):
            case "function":
                out.append(_function(tool, path))
            case "custom":
                name, described = _text(tool, "name", path), tool.get("description")
                out.append(function_tool({"name": name, "description": described}, _FREE_FORM))
            case "namespace":
                inner = tool.get("tools")
                if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                    raise BadRequest(f"{path}.tools: a list of tools is needed", param=f"{path}.tools")
                space = _text(tool, "name", path) + _NAMESPACE_SEPARATOR
                out += [
                    _function({**one, "name": space + _text(one, "name", path)}, path)
                    for one in inner
                    if one.get("type") == "function"
                ]
    return out


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    _text(tool, "name", path)
    return function_tool(tool, tool.get("parameters"))


RESPONSES = Conversion("responses", "input", _messages, _tools)

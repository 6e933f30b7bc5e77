"""OpenAI's chats and completions, with vLLM's additions."""

from typing import Any

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects.fields import (
    Raw,
    decode_body,
    decode_objects,
    first_byte,
    given,
    raw_list,
)
from sumibi.prompts.dialects.inputs import prompts_of
from sumibi.prompts.dialects.openai_views import ChatView, CompletionView, View
from sumibi.prompts.dialects.request import (
    Conversion,
    Dialect,
    PromptKind,
    PromptRequest,
    Tools,
    template_arguments,
)
from sumibi.prompts.template import Message, SharedObject

_chat_view = msgspec.json.Decoder(ChatView)
_completion_view = msgspec.json.Decoder(CompletionView)


def parse_chat(body: bytes) -> PromptRequest:
    """`POST /v1/chat/completions`. Raises BadRequest naming the field and what is allowed."""
    view = decode_body(_chat_view, body)
    if view.continue_final_message and view.add_generation_prompt:
        raise BadRequest(
            "continue_final_message: allowed only with add_generation_prompt false",
            param="continue_final_message",
        )
    arguments = template_arguments(view.chat_template_kwargs, view.reasoning_effort)
    if view.documents is not None:
        arguments["documents"] = view.documents
    limit = view.max_completion_tokens
    return PromptRequest(
        dialect=Dialect.CHAT,
        kind=PromptKind.CHAT,
        conversion=CHAT,
        model=view.model,
        raw_messages=view.messages,
        raw_tools=given(view.tools, "tools"),
        template_arguments=arguments,
        add_generation_prompt=view.add_generation_prompt,
        continue_final_message=view.continue_final_message,
        add_special_tokens=view.add_special_tokens,
        cache_salt=view.cache_salt or "",
        opaque="chat_template" if view.chat_template is not None else _truncation(view),
        transfer=view.transfer,
        stream=bool(view.stream),
        include_usage=_include_usage(view),
        n=view.n or 1,
        max_tokens=limit if limit is not None else view.max_tokens,
    )


def parse_completion(body: bytes) -> PromptRequest:
    """`POST /v1/completions`. Raises as `parse_chat` does."""
    view = decode_body(_completion_view, body)
    embeds = first_byte(view.prompt_embeds) in (b'"', b"[")
    token_ids: list[list[int]] = []
    if first_byte(view.prompt) not in (b"", b"n"):
        texts, token_ids = prompts_of(view.prompt)
    elif embeds:
        texts = [bytes(view.prompt_embeds).decode()]
    else:
        raise BadRequest("prompt: this field is required", param="prompt")
    return PromptRequest(
        dialect=Dialect.COMPLETIONS,
        kind=PromptKind.TOKENS if token_ids else PromptKind.TEXT,
        model=view.model,
        texts=texts,
        token_ids=token_ids,
        add_special_tokens=view.add_special_tokens,
        cache_salt=view.cache_salt or "",
        opaque="prompt_embeds" if embeds else _truncation(view),
        transfer=view.transfer,
        stream=bool(view.stream),
        include_usage=_include_usage(view),
        n=view.n or 1,
        max_tokens=view.max_tokens if view.max_tokens is None else max(1, view.max_tokens),
    )


def _truncation(view: View) -> str:
    return "truncate_prompt_tokens" if view.truncate_prompt_tokens is not None else ""


def _include_usage(view: View) -> bool:
    return bool(view.stream_options is not None and view.stream_options.include_usage)


def _messages(head: Raw | None, raws: list[Raw], start: int) -> list[Message]:
    return decode_objects(raws, "messages", start)


def _tools(raw: bytes) -> Tools:
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(decode_objects(raw_list(raw), "tools"))]


def _tool(tool: dict[str, Any], path: str) -> SharedObject:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise BadRequest(f'{path}: {{"type": "function", "function": {{...}}}} is needed', param=path)
    if not isinstance(function.get("name"), str):
        raise BadRequest(f"{path}.function.name: a string is needed", param=f"{path}.function.name")
    return function_tool(function, function.get("parameters"))


def function_tool(function: dict[str, Any], parameters: object) -> SharedObject:
    """One tool with the fields that engines keep, in their order; an absent description is null."""
    kept = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": parameters,
    }
    for name in ("strict", "defer_loading"):
        if function.get(name) is not None:
            kept[name] = function[name]
    return SharedObject({"type": "function", "function": SharedObject(kept)})


CHAT = Conversion("", "messages", _messages, _tools, one_to_one=True)

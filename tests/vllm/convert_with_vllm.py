"""Runs in vLLM's environment: what its own code makes of bodies, one JSON text a line in, one out.

In: `{"path": ..., "body": ...}`. Out: the chat messages, tools and template arguments before a template sees
them, or `{"refused": ...}`.
"""

import json
import sys
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts


def of_messages(body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's messages, late systems left where they are."""
    request = AnthropicMessagesRequest.model_validate(body)
    messages: list[dict[str, Any]] = []
    AnthropicServingMessages._convert_system_message(request, messages)
    AnthropicServingMessages._convert_messages(request.messages, messages)
    chat = AnthropicServingMessages.to_chat_completion_request(request)
    tools = None if chat.tools is None else [tool.model_dump() for tool in chat.tools]
    return {"messages": messages, "tools": tools, "arguments": _arguments(chat)}


def of_responses(body: dict[str, Any]) -> dict[str, Any]:
    """The input of responses."""
    request = ResponsesRequest.model_validate(body)
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input
    )
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    return {"messages": messages, "tools": tools, "arguments": _arguments(request)}


def _arguments(request: Any) -> dict[str, Any]:
    return dict(request.build_chat_params(None, "auto").chat_template_kwargs)


def main() -> None:
    """Convert until the input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        convert = of_responses if asked["path"] == "/v1/responses" else of_messages
        try:
            out = convert(asked["body"])
        except Exception as refusal:
            out = {"refused": f"{type(refusal).__name__}: {refusal}"}
        print("=" + json.dumps(out, default=lambda value: value.model_dump()), flush=True)


main()

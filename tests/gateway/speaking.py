"""Every dialect as it stands on the wire: a request, and what an engine answers to it, whole and streamed.

All answers say the same: a prompt of 7 tokens, 4 of them cached, 3 tokens of output, ended by itself.
"""

import json
from typing import Any

MODEL = "test-model"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
GENERATE, SGLANG = "/inference/v1/generate", "/generate"
GENERATING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE, SGLANG)
"""Paths at which text is generated."""
NAMELESS = (RESPONSES, GENERATE, SGLANG)
"""Those that need no model."""

HI = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": HI},
    COMPLETIONS: {"model": MODEL, "prompt": "hello"},
    RESPONSES: {"model": MODEL, "input": "hello"},
    MESSAGES: {"model": MODEL, "messages": HI, "max_tokens": 9},
    COUNT: {"model": MODEL, "messages": HI},
    GENERATE: {"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": {}},
    SGLANG: {"text": "hello", "sampling_params": {}},
}
FINISH = {
    CHAT: "stop",
    COMPLETIONS: "stop",
    RESPONSES: "completed",
    MESSAGES: "end_turn",
    GENERATE: "stop",
    SGLANG: "stop",
}
"""Why its answer ended, in each dialect's word."""

_USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}
_RESPONSE_USAGE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 3,
    "total_tokens": 10,
}
_MESSAGE_USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 3}


def _response(status: str, usage: object) -> dict[str, Any]:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "abc"}]}
    return {"id": "resp_1", "object": "response", "status": status, "output": [said], "usage": usage}


def _message(stop: str | None, usage: object) -> dict[str, Any]:
    content = [{"type": "text", "text": "abc"}]
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": content,
        "stop_reason": stop,
        "usage": usage,
    }


def _sglang(tokens: int, reason: object) -> dict[str, Any]:
    meta = {"prompt_tokens": 7, "completion_tokens": tokens, "cached_tokens": 4, "finish_reason": reason}
    return {"text": "abc"[:tokens], "meta_info": meta}


WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {"choices": [{"message": {"content": "abc"}, "finish_reason": "stop"}], "usage": _USAGE},
    COMPLETIONS: {"choices": [{"text": "abc", "finish_reason": "stop"}], "usage": _USAGE},
    RESPONSES: _response("completed", _RESPONSE_USAGE),
    MESSAGES: _message("end_turn", _MESSAGE_USAGE),
    COUNT: {"input_tokens": 7},
    GENERATE: {"choices": [{"index": 0, "token_ids": [1, 2, 3], "finish_reason": "stop"}], "usage": _USAGE},
    SGLANG: _sglang(3, {"type": "stop", "matched": 2}),
}


def plain(*events: object) -> list[str]:
    """Events without names, and the marker of their end."""
    return [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]


def named(*events: dict[str, Any]) -> list[str]:
    """Events with their names and no marker."""
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]


def _delta(**fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, **fields}]}


STREAMS: dict[str, list[str]] = {
    CHAT: plain(
        _delta(delta={"role": "assistant", "content": ""}),
        *[_delta(delta={"content": word}) for word in "ab"],
        _delta(delta={"content": "c"}, finish_reason="stop"),
        {"choices": [], "usage": _USAGE},
    ),
    COMPLETIONS: plain(
        *[_delta(text=word) for word in "ab"],
        _delta(text="c", finish_reason="stop"),
        {"choices": [], "usage": _USAGE},
    ),
    RESPONSES: named(
        {"type": "response.created", "response": _response("in_progress", None), "sequence_number": 0},
        {"type": "response.output_item.added", "item": {"status": "in_progress"}, "sequence_number": 1},
        *[
            {"type": "response.output_text.delta", "delta": word, "sequence_number": at}
            for at, word in enumerate("abc", 2)
        ],
        {"type": "response.output_item.done", "item": {"status": "completed"}, "sequence_number": 5},
        {
            "type": "response.completed",
            "response": _response("completed", _RESPONSE_USAGE),
            "sequence_number": 6,
        },
    ),
    MESSAGES: named(
        {"type": "message_start", "message": _message(None, {"input_tokens": 7, "output_tokens": 0})},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *[
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
            for word in "abc"
        ],
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": _MESSAGE_USAGE,
        },
        {"type": "message_stop"},
    ),
    GENERATE: plain(
        *[_delta(token_ids=[at]) for at in (1, 2)],
        _delta(token_ids=[3], finish_reason="stop"),
        {"choices": [], "usage": _USAGE},
    ),
    SGLANG: plain(_sglang(1, None), _sglang(2, None), _sglang(3, {"type": "stop"})),
}


def error_of(path: str, body: bytes) -> tuple[str, str]:
    """(type, message) of an error answer, which must have the shape that clients of `path` expect."""
    said = json.loads(body)
    if path in (MESSAGES, COUNT):
        assert set(said) == {"type", "error"}
        assert said["type"] == "error"
        assert set(said["error"]) == {"type", "message"}
    else:
        assert set(said) == {"error"}
        assert set(said["error"]) == {"message", "type", "param", "code"}
    return said["error"]["type"], said["error"]["message"]


def ending_error(path: str, event: str) -> str:
    """The message of an error event that ended a stream of `path`, in its own shape."""
    name, data = "", event
    if "\n" in event:
        name, _, data = event.partition("\n")
    said = json.loads(data.removeprefix("data: "))
    if path == MESSAGES:
        assert (name, said["type"], said["error"]["type"]) == ("event: error", "error", "api_error")
        return said["error"]["message"]
    if path == RESPONSES:
        assert (name, said["type"], said["param"]) == ("event: error", "error", None)
        assert isinstance(said["sequence_number"], int)
        assert said["message"] == said["error"]["message"]
        return said["message"]
    assert name == ""
    return said["error"]["message"]


def answering(*, chunked_at: int | None = None):
    """An engine's behaviour: the dialect's own answer, streamed if asked for."""

    async def behave(request, writer):
        if request.json.get("stream"):
            data = "".join(STREAMS[request.path]).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            size = chunked_at or len(data)
            for at in range(0, len(data), size):
                piece = data[at : at + size]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            data = json.dumps(WHOLE[request.path]).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
                data
            )
            writer.write(head + data)
        await writer.drain()

    return behave

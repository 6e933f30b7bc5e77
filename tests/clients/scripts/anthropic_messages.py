"""Anthropic's client."""

from typing import Any

import anthropic
import told
from told import MODEL, OUTPUT_TOKENS, QUESTION, SYSTEM

client = anthropic.Anthropic(base_url=told.URL, api_key=told.KEY, max_retries=0)
# This version's own signature has no temperature any more.
LIMITS: dict[str, Any] = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "extra_body": {"temperature": 0}}
ASKED: dict[str, Any] = {"system": SYSTEM, "messages": [{"role": "user", "content": QUESTION}]}
TOOL = {"name": "weather", "description": "The weather in a city.", "input_schema": told.PARAMETERS}
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Kyoto"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "Sunny, 21 degrees."}
HISTORY: list[Any] = [
    {"role": "user", "content": "What is the weather in Kyoto?"},
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [RESULT]},
]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": told.PIXEL}}


def answer_of(message):
    usage = message.usage
    cached = usage.cache_read_input_tokens
    prompt = usage.input_tokens + cached + usage.cache_creation_input_tokens
    finish = {"max_tokens": "length", "end_turn": "stop"}.get(message.stop_reason)
    (block,) = message.content
    return told.answer(block.text, finish, prompt, usage.output_tokens, cached)


def ask(**fields):
    return answer_of(client.messages.create(**LIMITS | fields))


def streamed():
    with client.messages.stream(**ASKED, **LIMITS) as stream:
        text = "".join(stream.text_stream)
        return answer_of(stream.get_final_message()) | {"text": text}


def raw_stream():
    return [event.type for event in client.messages.create(stream=True, **ASKED, **LIMITS)]


def beta():
    got = client.beta.messages.create(betas=["context-1m-2025-08-07"], **ASKED, **LIMITS)
    return answer_of(got)


def request_id():
    asked = ASKED | {"extra_headers": {"X-Request-Id": "anthropic-named"}}
    return client.messages.create(**asked, **LIMITS)._request_id


def two_turns():
    system = told.long_system("anthropic")
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    one = client.messages.create(system=system, messages=messages, **LIMITS)
    # What the answer had to say goes back as it came.
    messages += [{"role": "assistant", "content": one.content}, {"role": "user", "content": "And now?"}]
    return [answer_of(one), ask(system=system, messages=messages)]


def cancelled():
    headers = {"X-Request-Id": "anthropic_messages-cancelled"}
    messages: list[Any] = [{"role": "user", "content": told.ENDLESS}]
    with client.messages.stream(
        model=MODEL,
        messages=messages,
        max_tokens=told.ENDLESS_TOKENS,
        extra_headers=headers,
        extra_body={"temperature": 0, "ignore_eos": True},
    ) as stream:
        texts = stream.text_stream
        for _ in range(3):
            next(texts)
        return [stream.current_message_snapshot.id]


def count():
    return client.messages.count_tokens(model=MODEL, **ASKED).input_tokens


def refused(**fields):
    return told.error_of(lambda: ask(**ASKED | fields))


told.main(
    {
        "models": lambda: [model.id for model in client.models.list()],
        "whole": lambda: ask(**ASKED),
        "streamed": streamed,
        "raw_stream": raw_stream,
        "beta": beta,
        "request_id": request_id,
        "two_turns": two_turns,
        "count": count,
        "tools": lambda: ask(
            messages=HISTORY, tools=[TOOL], tool_choice={"type": "auto"}, max_tokens=told.ENOUGH_TOKENS
        ),
        "tool_choice": lambda: refused(tools=[TOOL], tool_choice={"type": "any"}),
        "image": lambda: refused(messages=[{"role": "user", "content": [IMAGE]}]),
        "wrong_model": lambda: refused(model="gpt-9"),
        "bad_field": lambda: refused(extra_body={"temperature": -1}),
        "too_long": lambda: refused(messages=[{"role": "user", "content": "word " * 20_000}]),
        "cancelled": cancelled,
    }
)

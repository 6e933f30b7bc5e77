"""OpenAI's client: chat and completions."""

import asyncio
from typing import Any

import told
from openai import AsyncOpenAI, OpenAI
from told import MESSAGES, MODEL, OUTPUT_TOKENS

client = OpenAI(base_url=f"{told.URL}/v1", api_key=told.KEY, max_retries=0)
LIMITS: dict[str, Any] = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "temperature": 0}


def answer_of(text, finish, usage):
    cached = usage.prompt_tokens_details.cached_tokens
    return told.answer(text, finish, usage.prompt_tokens, usage.completion_tokens, cached)


def ask(messages=MESSAGES, **fields):
    got = client.chat.completions.create(messages=messages, **LIMITS | fields)
    (choice,) = got.choices
    return answer_of(choice.message.content, choice.finish_reason, got.usage)


def streamed():
    events = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **LIMITS
    )
    return gathered(list(events))


def gathered(chunks):
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    return answer_of(text, choices[-1].finish_reason, chunks[-1].usage)


def asynchronous():
    async def run():
        async with AsyncOpenAI(base_url=f"{told.URL}/v1", api_key=told.KEY, max_retries=0) as client:
            events = await client.chat.completions.create(
                messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **LIMITS
            )
            return gathered([event async for event in events])

    return asyncio.run(run())


def helper():
    """The SDK's own way of putting a stream together; it takes an answer that met its limit for an error."""
    asked = LIMITS | {"max_tokens": told.ENOUGH_TOKENS}
    with client.chat.completions.stream(
        messages=told.TOOL_HISTORY, tools=[told.TOOL], stream_options={"include_usage": True}, **asked
    ) as stream:
        got = stream.get_final_completion()
    return answer_of(got.choices[0].message.content, got.choices[0].finish_reason, got.usage)


def two_turns():
    messages = [
        {"role": "system", "content": told.long_system("openai")},
        {"role": "user", "content": "Hello!"},
    ]
    first = ask(messages)
    more = [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And now?"}]
    return [first, ask(messages + more)]


def tools():
    return ask(told.TOOL_HISTORY, tools=[told.TOOL], tool_choice="auto", max_tokens=told.ENOUGH_TOKENS)


def cancelled():
    headers = {"X-Request-Id": "openai_chat-cancelled"}
    messages = [{"role": "user", "content": told.ENDLESS}]
    fields = LIMITS | {"max_tokens": told.ENDLESS_TOKENS, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(
        messages=messages, stream=True, extra_headers=headers, **fields
    ) as stream:
        return [next(stream).id for _ in range(3)]


def completion():
    got = client.completions.create(prompt="Charcoal is", **LIMITS)
    parts = list(
        client.completions.create(
            prompt="Charcoal is", stream=True, stream_options={"include_usage": True}, **LIMITS
        )
    )
    choices = [choice for part in parts for choice in part.choices]
    text = "".join(choice.text for choice in choices)
    return [
        answer_of(got.choices[0].text, got.choices[0].finish_reason, got.usage),
        answer_of(text, choices[-1].finish_reason, parts[-1].usage),
    ]


def request_id():
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, extra_headers={"X-Request-Id": "openai-named"}, **LIMITS
    )
    return raw.headers["x-request-id"], raw.parse()._request_id


told.main(
    {
        "models": lambda: [model.id for model in client.models.list()],
        "whole": ask,
        "streamed": streamed,
        "asynchronous": asynchronous,
        "helper": helper,
        "completion": completion,
        "two_turns": two_turns,
        "request_id": request_id,
        "tools": tools,
        "tool_choice": lambda: told.error_of(lambda: ask(tools=[told.TOOL], tool_choice="required")),
        "image": lambda: told.error_of(lambda: ask([{"role": "user", "content": told.IMAGE_PARTS}])),
        "wrong_model": lambda: told.error_of(lambda: ask(model="gpt-9")),
        "bad_field": lambda: told.error_of(lambda: ask(temperature=-1)),
        "too_long": lambda: told.error_of(lambda: ask([{"role": "user", "content": "word " * 20_000}])),
        "no_such_path": lambda: told.error_of(lambda: client.embeddings.create(input="x", model=MODEL)),
        "cancelled": cancelled,
    }
)

"""litellm's `completion`, as OpenAI-compatible servers are named there."""

import litellm
import told
from told import MESSAGES, OUTPUT_TOKENS

litellm.telemetry = False


def call(messages=MESSAGES, **fields):
    asked = {
        "model": f"openai/{told.MODEL}",
        "api_base": f"{told.URL}/v1",
        "api_key": told.KEY,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "max_retries": 0,
    }
    return litellm.completion(messages=messages, **asked | fields)


def answer_of(text, finish, usage):
    cached = usage.prompt_tokens_details.cached_tokens
    return told.answer(text, finish, usage.prompt_tokens, usage.completion_tokens, cached)


def ask(messages=MESSAGES, **fields):
    got = call(messages, **fields)
    (choice,) = got.choices
    return answer_of(choice.message.content, choice.finish_reason, got.usage)


def streamed():
    chunks = list(call(stream=True, stream_options={"include_usage": True}))
    got = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    return answer_of(got.choices[0].message.content, got.choices[0].finish_reason, got.usage)


def by_messages():
    """Anthropic's API, as litellm names its models."""
    return ask(model=f"anthropic/{told.MODEL}", api_base=told.URL)


def by_responses():
    got = litellm.responses(
        model=f"openai/{told.MODEL}",
        api_base=f"{told.URL}/v1",
        api_key=told.KEY,
        instructions=told.SYSTEM,
        input=told.QUESTION,
        max_output_tokens=OUTPUT_TOKENS,
        temperature=0,
    )
    (part,) = got.output[0].content
    usage = got.usage
    cached = usage.input_tokens_details.cached_tokens
    return told.answer(part.text, "length", usage.input_tokens, usage.output_tokens, cached)


def two_turns():
    messages = [
        {"role": "system", "content": told.long_system("litellm")},
        {"role": "user", "content": "Hello!"},
    ]
    first = ask(messages)
    more = [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And now?"}]
    return [first, ask(messages + more)]


def tools():
    return ask(told.TOOL_HISTORY, tools=[told.TOOL], tool_choice="auto", max_tokens=told.ENOUGH_TOKENS)


def cancelled():
    stream = call(
        [{"role": "user", "content": told.ENDLESS}],
        stream=True,
        max_tokens=told.ENDLESS_TOKENS,
        extra_headers={"X-Request-Id": "litellm_chat-cancelled"},
        extra_body={"ignore_eos": True},
    )
    seen = [next(stream).id for _ in range(3)]
    stream.completion_stream.close()
    return seen


told.main(
    {
        "whole": ask,
        "streamed": streamed,
        "by_messages": by_messages,
        "by_responses": by_responses,
        "two_turns": two_turns,
        "tools": tools,
        "tool_choice": lambda: told.error_of(lambda: ask(tools=[told.TOOL], tool_choice="required")),
        "image": lambda: told.error_of(lambda: ask([{"role": "user", "content": told.IMAGE_PARTS}])),
        "wrong_model": lambda: told.error_of(lambda: ask(model="openai/gpt-9")),
        "bad_field": lambda: told.error_of(lambda: ask(temperature=-1)),
        "too_long": lambda: told.error_of(lambda: ask([{"role": "user", "content": "word " * 20_000}])),
        "cancelled": cancelled,
    }
)

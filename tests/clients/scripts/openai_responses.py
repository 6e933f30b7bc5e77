"""OpenAI's client: responses."""

from typing import Any

import told
from openai import OpenAI
from told import MODEL, OUTPUT_TOKENS, QUESTION, SYSTEM

client = OpenAI(base_url=f"{told.URL}/v1", api_key=told.KEY, max_retries=0)
LIMITS: dict[str, Any] = {"model": MODEL, "max_output_tokens": OUTPUT_TOKENS, "temperature": 0}
ASKED: dict[str, Any] = {"instructions": SYSTEM, "input": QUESTION}
TOOL = {"type": "function", "name": "weather", "description": "The weather in a city.", "strict": False}
TOOL["parameters"] = told.PARAMETERS
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Kyoto"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "Sunny, 21 degrees."}
HISTORY = [{"role": "user", "content": "What is the weather in Kyoto?"}, CALL, RESULT]
IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{told.PIXEL}", "detail": "auto"}


def answer_of(response):
    usage = response.usage
    cut = response.incomplete_details
    finish = "length" if cut is not None and cut.reason == "max_output_tokens" else "stop"
    cached = usage.input_tokens_details.cached_tokens
    return told.answer(response.output_text, finish, usage.input_tokens, usage.output_tokens, cached)


def ask(**fields):
    return answer_of(client.responses.create(**LIMITS | fields))


def streamed():
    events = list(client.responses.create(stream=True, **ASKED, **LIMITS))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return answer_of(events[-1].response) | {"text": text}


def helper():
    with client.responses.stream(**ASKED, **LIMITS | {"max_output_tokens": told.ENOUGH_TOKENS}) as stream:
        return answer_of(stream.get_final_response())


def two_turns():
    first_input = [{"role": "user", "content": "Hello!"}]
    system = told.long_system("responses")
    one = client.responses.create(instructions=system, input=first_input, store=False, **LIMITS)
    # What the answer had to say goes back as it came.
    said = [item.model_dump() for item in one.output]
    more = [*first_input, *said, {"role": "user", "content": "And now?"}]
    return [answer_of(one), ask(instructions=system, input=more)]


def cancelled():
    headers = {"X-Request-Id": "openai_responses-cancelled"}
    fields = LIMITS | {"max_output_tokens": told.ENDLESS_TOKENS, "extra_body": {"ignore_eos": True}}
    seen = []
    with client.responses.create(input=told.ENDLESS, stream=True, extra_headers=headers, **fields) as stream:
        while len(seen) < 3:
            event = next(stream)
            if event.type == "response.output_text.delta":
                seen.append(event.item_id)
    return seen


told.main(
    {
        "whole": lambda: ask(**ASKED),
        "streamed": streamed,
        "helper": helper,
        "helped": lambda: ask(**ASKED, max_output_tokens=told.ENOUGH_TOKENS),
        "two_turns": two_turns,
        "tools": lambda: ask(
            input=HISTORY, tools=[TOOL], tool_choice="auto", max_output_tokens=told.ENOUGH_TOKENS
        ),
        "tool_choice": lambda: told.error_of(lambda: ask(**ASKED, tools=[TOOL], tool_choice="required")),
        "image": lambda: told.error_of(lambda: ask(input=[{"role": "user", "content": [IMAGE]}])),
        "wrong_model": lambda: told.error_of(lambda: ask(**ASKED, model="gpt-9")),
        "bad_field": lambda: told.error_of(lambda: ask(**ASKED, temperature=-1)),
        "too_long": lambda: told.error_of(lambda: ask(input="word " * 20_000)),
        "previous": lambda: told.error_of(lambda: ask(**ASKED, previous_response_id="resp_1")),
        "cancelled": cancelled,
    }
)

"""LangChain's OpenAI class."""

from typing import Any

import told
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from told import OUTPUT_TOKENS, QUESTION, SYSTEM

ASKED = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]


def model(**fields: Any) -> ChatOpenAI:
    asked = {
        "model": told.MODEL,
        "base_url": f"{told.URL}/v1",
        "api_key": told.KEY,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "max_retries": 0,
        "stream_usage": True,
    }
    return ChatOpenAI(**asked | fields)


def answer_of(message):
    usage = message.usage_metadata
    return told.answer(
        message.content,
        message.response_metadata["finish_reason"],
        usage["input_tokens"],
        usage["output_tokens"],
        usage["input_token_details"]["cache_read"],
    )


def streamed():
    whole = None
    for chunk in model().stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    return answer_of(whole)


def by_responses():
    got = model(use_responses_api=True).invoke(ASKED)
    usage = got.usage_metadata
    cached = usage["input_token_details"]["cache_read"]
    return told.answer(got.text, "length", usage["input_tokens"], usage["output_tokens"], cached)


def two_turns():
    messages = [SystemMessage(told.long_system("langchain")), HumanMessage("Hello!")]
    first = model().invoke(messages)
    second = model().invoke([*messages, first, HumanMessage("And now?")])
    return [answer_of(first), answer_of(second)]


def tools():
    call = {"name": "weather", "args": {"city": "Kyoto"}, "id": "call_1"}
    history = [
        HumanMessage("What is the weather in Kyoto?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("Sunny, 21 degrees.", tool_call_id="call_1"),
    ]
    return answer_of(
        model(max_tokens=told.ENOUGH_TOKENS).bind_tools([told.TOOL], tool_choice="auto").invoke(history)
    )


def cancelled():
    headers = {"X-Request-Id": "langchain_chat-cancelled"}
    endless = model(max_tokens=told.ENDLESS_TOKENS, default_headers=headers, extra_body={"ignore_eos": True})
    stream = endless.stream([HumanMessage(told.ENDLESS)])
    seen = [next(stream).id for _ in range(3)]
    stream.close()
    return seen


told.main(
    {
        "whole": lambda: answer_of(model().invoke(ASKED)),
        "streamed": streamed,
        "by_responses": by_responses,
        "two_turns": two_turns,
        "tools": tools,
        "tool_choice": lambda: told.error_of(
            lambda: model().bind_tools([told.TOOL], tool_choice="required").invoke(ASKED)
        ),
        "image": lambda: told.error_of(lambda: model().invoke([HumanMessage(told.IMAGE_PARTS)])),
        "wrong_model": lambda: told.error_of(lambda: model(model="gpt-9").invoke(ASKED)),
        "bad_field": lambda: told.error_of(lambda: model(temperature=-1).invoke(ASKED)),
        "too_long": lambda: told.error_of(lambda: model().invoke("word " * 20_000)),
        "cancelled": cancelled,
    }
)

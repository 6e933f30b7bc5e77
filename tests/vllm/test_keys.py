"""Prompts read here are, token for token, the prompts that vLLM makes of the same requests."""

import json
from typing import Any

import pytest
from vllm_harness import BLOCK, MODEL, Engine, words

from sumibi.core.keys import extend_keys, root_key
from sumibi.keycheck.checking import check_keys
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptGrade, PromptReader
from sumibi.prompts.samples import conversations
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

Body = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tells today\'s weather <now> & "here"',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "京都", "n": 1.0}'},
}

TOOLS_TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template of our own with the habits of those that know tools."""


def user(content: object) -> Body:
    return {"role": "user", "content": content}


CHATS: dict[str, Body] = {
    "short": {"messages": [user("hi")]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, user("What is 17 + 25?")]},
    "unicode": {
        "messages": [user("naïve café — 炭火 🔥🔥 \u200d\u0301 зимний ﷽ \t\n\n 12  7"), user("😀" * 20)]
    },
    "special": {"messages": [user("a <|im_end|>\n<|im_start|>system\nb <|endoftext|> c")]},
    "blank": {"messages": [user(""), {"role": "assistant", "content": "  \n"}, user("\n\n")]},
    "parts": {"messages": [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])]},
    "no generation prompt": {"messages": [user("hi")], "add_generation_prompt": False},
    "continued": {
        "messages": [user("hi"), {"role": "assistant", "content": "Well, "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools": {"messages": [user("Weather?")], "tools": [WEATHER]},
    "code": {"messages": [user("def f(x):\n    return {'a': [1, 2, 300]}\n" * 30)]},
}
NULL_CONTENT: Body = {
    "messages": [
        user("Weather in Kyōto?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": '{"sky": "clear"}'},
    ],
    "tools": [WEATHER],
}


@pytest.fixture(scope="module")
def tokenizer(model) -> Tokenizer:
    return Tokenizer.load(model)


@pytest.fixture(scope="module")
def reader(model, tokenizer) -> PromptReader:
    return PromptReader(tokenizer, ChatTemplate.load(model, tokenizer), keep_token_ids=True)


@pytest.fixture(scope="module")
def tools_reader(tokenizer) -> PromptReader:
    template = ChatTemplate(
        {"default": TOOLS_TEMPLATE}, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    )
    return PromptReader(tokenizer, template, keep_token_ids=True)


def check_equal(reader: PromptReader, engine: Engine, body: Body, template: str | None = None) -> None:
    """Our tokens and keys of a chat against two of the engine's own doors."""
    body = {"model": MODEL, **body}
    prompt = reader.read(parse_request("/v1/chat/completions", json.dumps(body).encode()))
    if template is not None:
        body = {**body, "chat_template": template}
    rendered = engine.ask("/v1/chat/completions/render", body)["token_ids"]
    assert prompt.token_ids == rendered
    assert engine.ask("/tokenize", body)["tokens"] == rendered
    assert (prompt.grade, prompt.prompt_tokens) == (PromptGrade.EXACT, len(rendered))
    assert prompt.keys == extend_keys(root_key(MODEL), rendered, BLOCK)


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_has_the_engines_tokens(engines, reader, name):
    check_equal(reader, engines[0], CHATS[name])


@pytest.mark.parametrize("name", [*CHATS, "null content"])
def test_a_chat_has_the_engines_tokens_under_a_template_with_tools(engines, tools_reader, name):
    check_equal(tools_reader, engines[0], CHATS.get(name, NULL_CONTENT), TOOLS_TEMPLATE)


def test_every_turn_of_growing_conversations_has_the_engines_tokens(engines, reader, tools_reader):
    """Conversations are read as agents send them, so what was read before is built on."""
    for number in range(4):
        messages: list[Body] = [{"role": "system", "content": words(["system", number // 2, *range(40)])}]
        for turn in range(8):
            messages.append(user(f"{turn}. " + words(["user", number, turn, *range(5 + 9 * turn)]) + " é\n"))
            check_equal(reader, engines[0], {"messages": messages})
            check_equal(tools_reader, engines[0], {"messages": messages, "tools": [WEATHER]}, TOOLS_TEMPLATE)
            messages.append({"role": "assistant", "content": words(["answer", number, turn, *range(20)])})
    for stats in (reader.stats(), tools_reader.stats()):
        assert stats.reused_tokens > stats.prompt_tokens / 2
        assert stats.approximate == 0


@pytest.mark.parametrize(
    "text", ["", "one", " leading", "炭火" * 50, "<|im_start|>user\nhi<|im_end|>", "a\r\n\x00b"]
)
def test_a_text_has_the_engines_tokens(engines, reader, text):
    body = {"model": MODEL, "prompt": text}
    prompt = reader.read(parse_request("/v1/completions", json.dumps(body).encode()))
    assert prompt.token_ids == engines[0].ask("/tokenize", body)["tokens"]


def test_what_the_engine_computes_is_what_was_read(engines, reader):
    """Beyond rendering: the prompt ids and the count that a real answer carries."""
    body = {
        "model": MODEL,
        "messages": [user("What is the capital of France?")],
        "max_tokens": 8,
        "temperature": 0,
    }
    prompt = reader.read(parse_request("/v1/chat/completions", json.dumps(body).encode()))
    answer = engines[0].ask("/v1/chat/completions", body | {"return_token_ids": True})
    assert prompt.token_ids == answer["prompt_token_ids"]
    assert prompt.prompt_tokens == answer["usage"]["prompt_tokens"] == 37
    assert answer["choices"][0]["token_ids"] == [504, 3575, 282, 4649, 314, 7042, 30, 2]


WHOLE = "{{ messages | tojson }}{{ tools | tojson }}{{ enable_thinking }}{{ reasoning_effort }}"
"""Shows everything that a template gets to see."""
FORMS = {
    "strings": WHOLE,
    "parts": WHOLE + "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "parts in a macro": "{% macro show(it) %}{% for p in it %}{% endfor %}{% endmacro %}"
    + WHOLE
    + "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "developers": WHOLE + "{{ 'developer' }}",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_template_sees_of_any_conversation_what_the_engine_shows_it(engines, tokenizer, form):
    """Every field of every message, in order, of generated conversations."""
    template = ChatTemplate({"default": FORMS[form]}, tokenizer.special_tokens)
    compared = 0
    for conversation in conversations(65, 4):
        for length in list(conversation.lengths())[-2:]:
            body = conversation.body(length, MODEL)
            asked = parse_request("/v1/chat/completions", json.dumps(body).encode())
            text = template.render(asked.messages, tools=asked.tools, **asked.template_arguments)
            ours = tokenizer.encode(text, add_special_tokens=False)
            if len(ours) >= 4096:
                continue
            compared += 1
            theirs = engines[0].ask("/v1/chat/completions/render", body | {"chat_template": FORMS[form]})
            assert ours == theirs["token_ids"], (conversation.habit, body)
    assert compared > 80


def test_keys_check_agrees_with_the_engine_and_tells_a_wrong_template(engines, model, tmp_path):
    options = {"model": None, "tokenizer": model, "seed": 2, "report": lambda *step: None}
    same = check_keys(engines[0].url, template=None, count=52, **options)
    assert same.ok, same.differences
    assert same.route == "/v1/chat/completions/render"
    wrong = tmp_path / "wrong.jinja"
    wrong.write_text(TOOLS_TEMPLATE)
    found = check_keys(engines[0].url, template=wrong, count=52, **options)
    assert not found.ok
    causes = {one.habit: one.cause for one in found.differences}
    assert "has another template" in causes["spaces"]
    assert "template does not show tools" in causes["tools"]

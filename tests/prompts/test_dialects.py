"""Requests become the few fields that placement needs; a wrong one is named with what is allowed."""

import json

import pytest

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects import PromptKind, parse_request

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse_request(CHAT, json.dumps({"model": "m", "messages": HI, **fields}).encode())


def plain(prompt="hi", **fields):
    return parse_request(PLAIN, json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


def refused(path, body):
    with pytest.raises(BadRequest) as refusal:
        parse_request(path, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert refusal.value.status == 400
    return refusal.value


def test_a_chat_with_nothing_said_has_the_defaults():
    request = chat()
    assert (request.kind, request.model, request.messages, request.tools) == (PromptKind.CHAT, "m", HI, None)
    assert (request.stream, request.include_usage, request.n, request.max_tokens) == (False, False, 1, None)
    assert (request.add_generation_prompt, request.add_special_tokens, request.cache_salt) == (
        True,
        False,
        "",
    )
    assert (request.template_arguments, request.opaque, request.prompts) == ({}, "", 1)


def test_a_completion_has_its_own_defaults():
    request = plain()
    assert (request.kind, request.texts, request.max_tokens) == (PromptKind.TEXT, ["hi"], 16)
    assert request.add_special_tokens
    assert plain(max_tokens=None).max_tokens is None


def test_what_is_said_is_read():
    request = chat(
        stream=True, stream_options={"include_usage": True}, n=3, max_tokens=7, cache_salt="s", seed=1
    )
    assert (request.stream, request.include_usage, request.n) == (True, True, 3)
    assert (request.max_tokens, request.cache_salt) == (7, "s")
    assert chat(max_tokens=7, max_completion_tokens=8).max_tokens == 8


def test_nulls_mean_the_default():
    names = ["stream", "stream_options", "n", "cache_salt", "tools", "chat_template_kwargs", "max_tokens"]
    assert chat(**dict.fromkeys(names)) == chat()


def test_the_render_endpoint_takes_the_same_body():
    body = json.dumps({"model": "m", "messages": HI}).encode()
    assert parse_request(CHAT + "/render", body) == parse_request(CHAT, body)


@pytest.mark.parametrize(
    ("prompt", "texts", "token_ids"),
    [
        ("a [b", ["a [b"], []),
        (["a", "b"], ["a", "b"], []),
        ([1, 2], [], [[1, 2]]),
        ([[1], [2, 3]], [], [[1], [2, 3]]),
        ("", [""], []),
    ],
)
def test_a_prompt_has_four_forms(prompt, texts, token_ids):
    request = plain(prompt)
    assert (request.texts, request.token_ids) == (texts, token_ids)
    assert request.prompts == len(texts) + len(token_ids)
    assert request.kind is (PromptKind.TOKENS if token_ids else PromptKind.TEXT)


@pytest.mark.parametrize(
    "prompt",
    [None, 3, {}, [], [[]], [[1], []], ["a", 1], [1, "a"], [[1], "a"], [-1], [1 << 32], [1.5], [True]],
)
def test_any_other_prompt_is_refused(prompt):
    error = refused(PLAIN, {"model": "m", "prompt": prompt})
    assert error.param == "prompt"
    assert str(error).startswith("prompt: ")


def test_a_prompt_of_embeddings_is_one_that_nobody_reads_here():
    request = parse_request(PLAIN, json.dumps({"model": "m", "prompt_embeds": "AAAA"}).encode())
    assert request.opaque == "prompt_embeds"
    both = {"model": "m", "prompt": None, "prompt_embeds": ["AAAA", "BBBB"]}
    assert parse_request(PLAIN, json.dumps(both).encode()).opaque == "prompt_embeds"


def test_a_completion_that_only_echoes_may_have_no_tokens():
    body = {"model": "m", "prompt": "hi", "echo": True, "max_tokens": 0}
    assert parse_request(PLAIN, json.dumps(body).encode()).max_tokens == 1  # the router's least


BAD_FIELDS = [
    ({"model": 3}, "model", "`str`"),
    ({"model": ""}, "model", "length >= 1"),
    ({"messages": "hi"}, "messages", "`array`"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": "2"}, "n", "`int | null`"),
    ({"n": 1.5}, "n", "`int | null`"),
    ({"max_tokens": -1}, "max_tokens", ">= 1"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_completion_tokens": -5}, "max_completion_tokens", ">= 1"),
    ({"stream": "yes"}, "stream", "`bool | null`"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "`bool | null`"),
    ({"cache_salt": ""}, "cache_salt", "length >= 1"),
    ({"cache_salt": 3}, "cache_salt", "`str | null`"),
    ({"tools": {}}, "tools", "`array | null`"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "`object | null`"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "not allowed"),
    ({"documents": ["a"]}, "documents[0]", "`object`"),
    ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt false"),
]


@pytest.mark.parametrize(
    ("fields", "param", "allowed"), BAD_FIELDS, ids=[str(case[0]) for case in BAD_FIELDS]
)
def test_a_wrong_field_is_named_with_what_is_allowed(fields, param, allowed):
    error = refused(CHAT, {"model": "m", "messages": HI, **fields})
    assert error.param == param
    assert param in str(error)
    assert allowed in str(error)


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "messages"), (CHAT, "model"), (PLAIN, "prompt"), (PLAIN, "model")]
)
def test_a_missing_field_is_named(path, field):
    body = {"model": "m", "messages": HI, "prompt": "hi"}
    del body[field]
    error = refused(path, body)
    assert (error.param, str(error)) == (field, f"{field}: this field is required")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": "m",}', b'{"model": "\xff"}', b"nonsense", b"\x00"],
)
def test_a_body_that_is_no_json_is_refused(body):
    assert "the request body is not valid JSON" in str(refused(CHAT, body))


def test_a_body_that_is_nested_without_end_is_refused():
    assert "nested too deeply" in str(refused(CHAT, b'{"x": ' + b"[" * 100_000))


def test_a_body_that_is_no_object_is_refused():
    assert "request body: Expected `object`, got `array`" in str(refused(CHAT, b"[1]"))


def test_an_unknown_path_is_refused():
    assert "/v1/chat/completions" in str(refused("/v1/embeddings", b"{}"))


@pytest.mark.parametrize("message", [b"3", b"[]", b'{"content": "\xff"}'], ids=["number", "list", "not-utf8"])
def test_a_message_that_is_no_object_is_refused_when_messages_are_read(message):
    body = b'{"model": "m", "messages": [{"role": "user"}, ' + message + b"]}"
    request = parse_request(CHAT, body)
    with pytest.raises(BadRequest) as error:
        _ = request.messages
    assert error.value.param == "messages[1]"


def test_tools_get_the_form_that_engines_give_to_templates():
    sent = [
        {"function": {"name": "f", "parameters": {"type": "object"}, "unknown": 1}, "cache_control": {}},
        {"type": "function", "function": {"strict": True, "description": "d", "name": "g"}},
    ]
    assert json.dumps(chat(tools=sent).tools) == json.dumps(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": {"type": "object"}},
            },
            {
                "type": "function",
                "function": {"name": "g", "description": "d", "parameters": None, "strict": True},
            },
        ]
    )


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (3, "tools[0]"),
        ({}, "tools[0]"),
        ({"type": "custom", "function": {"name": "f"}}, "tools[0]"),
        ({"function": {"name": 3}}, "tools[0].function.name"),
    ],
)
def test_a_malformed_tool_is_named(tool, param):
    request = chat(tools=[tool])
    with pytest.raises(BadRequest) as error:
        _ = request.tools
    assert error.value.param == param


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        ({"documents": [{"title": "t"}]}, {"documents": [{"title": "t"}]}),
    ],
)
def test_template_arguments_are_those_that_engines_make_of_a_request(fields, arguments):
    assert chat(**fields).template_arguments == arguments


@pytest.mark.parametrize("field", ["chat_template", "truncate_prompt_tokens"])
def test_a_field_that_hides_the_prompt_is_told(field):
    value = "{{ messages }}" if field == "chat_template" else 10
    assert chat(**{field: value}).opaque == field

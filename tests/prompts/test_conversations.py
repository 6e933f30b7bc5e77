"""Conversations in Anthropic's words and in those of responses become the chats that engines make of them.

The expected chats were written down from what vLLM 0.32 makes of the same bodies; `tests/vllm` asks it again.
"""

import json

import pytest

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects import Dialect, PromptKind, parse_request, settled
from sumibi.prompts.template import ChatTemplate, UnsupportedContent

MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
GENERATE, SGLANG = "/inference/v1/generate", "/generate"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def parse(path, **fields):
    return parse_request(path, json.dumps({"model": "m", **fields}).encode())


def anthropic(messages=HI, **fields):
    return parse(MESSAGES, messages=messages, max_tokens=5, **fields)


def says(role, *blocks):
    return {"role": role, "content": list(blocks)}


def text(words):
    return {"type": "text", "text": words}


def use(name, **arguments):
    return {"type": "tool_use", "id": f"id-{name}", "name": name, "input": arguments}


def result(name, content):
    return {"type": "tool_result", "tool_use_id": f"id-{name}", "content": content}


def call(name, arguments):
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


ANTHROPIC = {
    "a text": (HI, HI),
    "one block is a text, several are parts": (
        [says("user", text("a")), says("assistant", text("b"), text("c"))],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": [text("b"), text("c")]}],
    ),
    "empty blocks say nothing": (
        [says("user", text("")), says("assistant", text("")), says("user", text("x"), text(""))],
        [{"role": "assistant"}, {"role": "user", "content": "x"}],
    ),
    "thoughts are reasoning": (
        [
            *HI,
            says("assistant", {"type": "thinking", "thinking": "hm", "signature": "s"}, text("yes")),
            says("assistant", {"type": "redacted_thinking", "data": "eA=="}, text("no")),
        ],
        [
            *HI,
            {"role": "assistant", "reasoning": "hm", "content": "yes"},
            {"role": "assistant", "content": "no"},
        ],
    ),
    "calls and their results": (
        [
            *HI,
            says("assistant", text("look"), use("f", a=1), use("g")),
            says("user", result("f", "one"), text("and"), result("g", [text("two"), text("three")])),
        ],
        [
            *HI,
            {
                "role": "assistant",
                "tool_calls": [call("f", {"a": 1}), call("g", {})],
                "content": "look",
            },
            {"role": "tool", "tool_call_id": "id-f", "content": "one"},
            {"role": "tool", "tool_call_id": "id-g", "content": "two\nthree"},
            {"role": "user", "content": "and"},
        ],
    ),
    "a result alone": (
        [*HI, says("assistant", use("f")), says("user", result("f", None))],
        [
            *HI,
            {"role": "assistant", "tool_calls": [call("f", {})]},
            {"role": "tool", "tool_call_id": "id-f", "content": ""},
        ],
    ),
}


@pytest.mark.parametrize("name", ANTHROPIC)
def test_anthropics_messages_become_a_chat(name):
    sent, chat = ANTHROPIC[name]
    assert anthropic(sent).messages == chat


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("be brief", "be brief"),
        ([text("a"), {**text("b"), "cache_control": {"type": "ephemeral"}}], "ab"),
        ([text("x-anthropic-billing-header: cc=1"), text("a")], "a"),
        ("", None),
        ([], None),
        (None, None),
    ],
)
def test_anthropics_system_comes_first(system, said):
    before = [] if said is None else [{"role": "system", "content": said}]
    assert anthropic(system=system).messages == [*before, *HI]


def test_late_systems_stay_or_move_as_the_template_wants():
    late = {"role": "system", "content": "now"}
    request = anthropic([*HI, late, *HI], system="first")
    patient = ChatTemplate({"default": "{% for m in messages %}{{ m.role }}{% endfor %}"})
    strict = ChatTemplate(
        {
            "default": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('system first') }}{% endif %}{% endfor %}"
        }
    )
    assert settled(request, patient).messages == [{"role": "system", "content": "first"}, *HI, late, *HI]
    assert settled(request, strict).messages == [{"role": "system", "content": "firstnow"}, *HI, *HI]


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        ("{{ enable_thinking }}", {"reasoning_effort": "none", "enable_thinking": False}),
        ("{{ reasoning_effort }}", {"reasoning_effort": "none", "enable_thinking": False}),
        ("the same", {"reasoning_effort": "low", "enable_thinking": True}),
        (
            "{% if reasoning_effort not in ['low'] %}{{ raise_exception('unknown') }}{% endif %}",
            {"reasoning_effort": "low", "enable_thinking": True},
        ),
    ],
)
def test_thinking_is_switched_off_as_the_template_knows_it(template, arguments):
    request = anthropic(thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert settled(request, ChatTemplate({"default": template})).template_arguments == arguments


def test_an_effort_is_a_template_argument():
    request = anthropic(output_config={"effort": "high"}, thinking={"type": "adaptive"})
    assert request.template_arguments == {"reasoning_effort": "high", "enable_thinking": True}
    assert settled(request, None).template_arguments == request.template_arguments


def test_anthropics_tools_are_functions():
    tools = [
        {"name": "f", "input_schema": {"properties": {}}, "cache_control": {}},
        {"name": "g", "description": "d", "input_schema": SCHEMA, "strict": True, "defer_loading": False},
    ]
    assert json.dumps(anthropic(tools=tools).tools) == json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": None,
                    "parameters": {"properties": {}, "type": "object"},
                },
            },
            {
                "type": "function",
                "function": {
                    "name": "g",
                    "description": "d",
                    "parameters": SCHEMA,
                    "strict": True,
                    "defer_loading": False,
                },
            },
        ]
    )


def test_what_anthropics_requests_say_besides():
    request = anthropic(stream=True, cache_salt="s", stop_sequences=["x"])
    assert (request.dialect, request.kind, request.model) == (Dialect.MESSAGES, PromptKind.CHAT, "m")
    assert (request.stream, request.include_usage, request.max_tokens) == (True, True, 5)
    assert (request.cache_salt, request.n, request.opaque, request.tools) == ("s", 1, "", None)
    count = parse(COUNT, messages=HI)
    assert (count.dialect, count.messages, count.max_tokens) == (Dialect.COUNT_TOKENS, HI, None)


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


@pytest.mark.parametrize(
    "request_",
    [
        anthropic([says("user", PICTURE)]),
        anthropic([says("user", result("f", [PICTURE]))]),
        anthropic([says("user", {"type": "document", "source": {}})]),
        anthropic([*HI, says("system", {"type": "tool_removal", "tool": {}})]),
        parse(RESPONSES, input=[{"type": "item_reference", "id": "x"}]),
        parse(RESPONSES, input=[{"type": "reasoning", "summary": [], "encrypted_content": "eA=="}]),
    ],
)
def test_what_only_the_engine_knows_is_told(request_):
    with pytest.raises(UnsupportedContent):
        _ = request_.messages


def test_a_tool_that_only_the_model_knows_is_told():
    with pytest.raises(UnsupportedContent):
        _ = anthropic(tools=[{"type": "bash_20250124", "name": "bash"}]).tools


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([*HI, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([says("user", {"type": "text", "text": 3})], "messages[0].content"),
        (
            [says("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": [1]})],
            "messages[0].content",
        ),
    ],
)
def test_a_malformed_message_is_named(messages, param):
    with pytest.raises(BadRequest) as error:
        _ = anthropic(messages).messages
    assert error.value.param == param


def message(role, content, kind="output_text"):
    return {"type": "message", "role": role, "content": [{"type": kind, "text": content}]}


def thought(words, **fields):
    return {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": words}],
        **fields,
    }


def called(name, arguments="{}", **fields):
    return {"type": "function_call", "call_id": f"id-{name}", "name": name, "arguments": arguments, **fields}


def output(name, content):
    return {"type": "function_call_output", "call_id": f"id-{name}", "output": content}


INPUTS = {
    "a text": ("hi", HI),
    "messages with and without a type": (
        [*HI, message("user", "x", "input_text")],
        [*HI, message("user", "x", "input_text")],
    ),
    "what an assistant did is one message": (
        [
            *HI,
            thought("hm"),
            message("assistant", "look"),
            called("f", '{"a": 1}'),
            called("g"),
            output("f", "1"),
        ],
        [
            *HI,
            {
                "role": "assistant",
                "reasoning": "hm",
                "content": "look",
                "tool_calls": [call("f", '{"a": 1}'), call("g", "{}")],
            },
            {"role": "tool", "content": "1", "tool_call_id": "id-f"},
        ],
    ),
    "only what is missing joins": (
        [*HI, thought("a"), thought("b"), {"role": "assistant", "content": "c"}, message("assistant", "d")],
        [
            *HI,
            {"role": "assistant", "reasoning": "a"},
            {"role": "assistant", "reasoning": "b", "content": "c"},
            {"role": "assistant", "content": "d"},
        ],
    ),
    "a summary stands in for a thought": (
        [*HI, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "id": "r"}],
        [*HI, {"role": "assistant", "reasoning": "s"}],
    ),
    "free-form calls and namespaces": (
        [
            *HI,
            {"type": "custom_tool_call", "call_id": "id-p", "name": "p", "input": "é"},
            {"type": "custom_tool_call_output", "call_id": "id-p", "output": "ok"},
            called("f", namespace="space"),
        ],
        [
            *HI,
            {"role": "assistant", "tool_calls": [call("p", '{"input": "é"}')]},
            {"role": "tool", "content": "ok", "tool_call_id": "id-p"},
            {"role": "assistant", "tool_calls": [{**call("space__f", "{}"), "id": "id-f"}]},
        ],
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_input_of_responses_becomes_a_chat(name):
    sent, chat = INPUTS[name]
    assert parse(RESPONSES, input=sent).messages == chat
    before = {"role": "system", "content": "be brief"}
    assert parse(RESPONSES, input=sent, instructions="be brief").messages == [before, *chat]


def test_tools_of_responses_are_functions():
    tools = [
        {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True},
        {"type": "web_search"},
        {"type": "custom", "name": "p", "description": "patch"},
        {"type": "namespace", "name": "space", "tools": [{"type": "function", "name": "g"}]},
    ]
    shown = parse(RESPONSES, input="hi", tools=tools).tools
    assert [tool["function"]["name"] for tool in shown] == ["f", "p", "space__g"]
    assert shown[0]["function"] == {"name": "f", "description": None, "parameters": SCHEMA, "strict": True}
    assert shown[1]["function"]["parameters"]["required"] == ["input"]
    assert parse(RESPONSES, input="hi", tools=[]).tools is None
    assert parse(RESPONSES, input="hi", tools=[{"type": "web_search"}]).tools == []


def test_what_responses_say_besides():
    request = parse(
        RESPONSES, input="hi", max_output_tokens=9, stream=True, reasoning={"effort": "low"}, store=True
    )
    assert (request.dialect, request.max_tokens, request.stream, request.include_usage) == (
        Dialect.RESPONSES,
        9,
        True,
        True,
    )
    assert request.template_arguments == {"reasoning_effort": "low", "enable_thinking": True}
    assert (request.stateful, request.opaque) == ("", "")
    assert parse_request(RESPONSES, b'{"input": "hi"}').model == ""


def test_an_unfinished_last_message_is_continued():
    unfinished = {**message("assistant", "Well, "), "status": "incomplete"}
    request = parse(RESPONSES, input=[*HI, unfinished])
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert not parse(RESPONSES, input=[*HI, message("assistant", "Well")]).continue_final_message


@pytest.mark.parametrize(
    ("fields", "stateful"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"background": False, "previous_response_id": None, "conversation": None}, ""),
    ],
)
def test_what_needs_a_memory_is_told(fields, stateful):
    assert parse(RESPONSES, input="hi", **fields).stateful == stateful


def test_tokens_in_vllms_words():
    request = parse(
        GENERATE, token_ids=[1, 2], sampling_params={"max_tokens": 3, "n": 2}, cache_salt="s", stream=True
    )
    assert (request.dialect, request.kind, request.token_ids) == (
        Dialect.GENERATE,
        PromptKind.TOKENS,
        [[1, 2]],
    )
    assert (request.max_tokens, request.n, request.cache_salt, request.stream) == (3, 2, "s", True)
    assert parse(GENERATE, token_ids=[1], sampling_params={}).max_tokens is None
    assert parse(GENERATE, token_ids=[1], sampling_params={}, features={"mm_hashes": {}}).opaque == "features"


def test_prompts_in_sglangs_words():
    request = parse_request(
        SGLANG, b'{"text": "hi", "sampling_params": {"max_new_tokens": 3}, "stream": true}'
    )
    assert (request.dialect, request.kind, request.texts, request.model) == (
        Dialect.SGLANG,
        PromptKind.TEXT,
        ["hi"],
        "",
    )
    assert (request.max_tokens, request.stream, request.add_special_tokens) == (3, True, True)
    tokens = parse_request(SGLANG, b'{"input_ids": [[1], [2, 3]], "cache_salt": "a", "extra_key": "b"}')
    assert (tokens.token_ids, tokens.max_tokens, tokens.cache_salt) == ([[1], [2, 3]], 128, "ab")
    assert parse_request(SGLANG, b'{"text": "a", "image_data": "x"}').opaque == "image_data"


BAD = [
    (MESSAGES, {"messages": HI}, "max_tokens"),
    (MESSAGES, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (MESSAGES, {"messages": [], "max_tokens": 1}, "messages"),
    (MESSAGES, {"messages": HI, "max_tokens": 1, "tools": {}}, "tools"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": 3}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
    (GENERATE, {"token_ids": [1]}, "sampling_params"),
    (GENERATE, {"token_ids": [], "sampling_params": {}}, "token_ids"),
    (GENERATE, {"token_ids": [-1], "sampling_params": {}}, "token_ids[0]"),
    (GENERATE, {"token_ids": [[1]], "sampling_params": {}}, "token_ids[0]"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    (SGLANG, {}, "text"),
    (SGLANG, {"text": 3}, "text"),
    (SGLANG, {"text": [1]}, "text"),
    (SGLANG, {"input_ids": ["a"]}, "input_ids"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD)
def test_a_wrong_field_is_named(path, fields, param):
    with pytest.raises(BadRequest) as error:
        parse(path, **fields)
    assert error.value.param == param
    assert param in str(error.value)


@pytest.mark.parametrize("path", [MESSAGES, COUNT, RESPONSES, GENERATE])
@pytest.mark.parametrize(
    "field", ["kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_room"]
)
def test_a_client_that_says_where_kv_is_is_told(path, field):
    prompt = {"messages": HI, "input": "hi", "token_ids": [1], "sampling_params": {}, "max_tokens": 1}
    assert parse(path, **prompt, **{field: {}}).transfer == field
    assert parse(path, **prompt, **{field: None}).transfer == ""

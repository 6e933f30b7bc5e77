"""Anthropic's messages, responses and generate: read here as vLLM reads them, through a real engine."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sayings import as_input, as_messages
from sayings import plain as plain_said
from vllm_harness import BLOCK, MODEL, Engine, GatewayThread, VllmEnvironment, words

from sumibi.core.keys import extend_keys, root_key
from sumibi.prompts import samples
from sumibi.prompts.dialects import PromptRequest, parse_request
from sumibi.prompts.keys import PromptGrade, PromptReader
from sumibi.prompts.template import ChatTemplate, UnsupportedContent
from sumibi.prompts.tokenizer import Tokenizer

Body = dict[str, Any]
CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"
SCHEMA: Body = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GENERATED = 150
BILLING = "x-anthropic-billing-header: cc_version=1; cch=abc"


def text(said: str) -> Body:
    return {"type": "text", "text": said}


def says(role: str, *blocks: Body) -> Body:
    return {"role": role, "content": list(blocks)}


def use(name: str, **arguments: object) -> Body:
    return {"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": arguments}


def result(name: str, content: object, **fields: object) -> Body:
    return {"type": "tool_result", "tool_use_id": f"toolu_{name}", "content": content, **fields}


def thinks(said: str) -> Body:
    return {"type": "thinking", "thinking": said, "signature": "s"}


HI: list[Body] = [{"role": "user", "content": "hi"}]
AGENT: list[Body] = [
    *HI,
    says("assistant", thinks("hm"), text("Let me see."), use("weather", city="京都", n=1.0), use("clock")),
    says("user", result("weather", [text("clear"), text("21")]), result("clock", "noon"), text("And?")),
    says(
        "assistant",
        thinks("a"),
        {"type": "redacted_thinking", "data": "eA=="},
        thinks("b"),
        text("x"),
        text("y"),
    ),
    says("user", result("weather", None, is_error=True)),
]
TOOLS = [
    {"name": "weather", "description": 'Tells <now> & "here"', "input_schema": SCHEMA},
    {"name": "clock", "input_schema": {}, "strict": True, "defer_loading": False},
]
SAID: dict[str, Body] = {
    "plain": {"messages": HI},
    "system": {"messages": HI, "system": "Be brief."},
    "system blocks": {"messages": HI, "system": [text(BILLING), text("a "), text("b"), text("")]},
    "a system that begins like billing": {"messages": HI, "system": BILLING},
    "no system": {"messages": HI, "system": ""},
    "late systems": {
        "messages": [*HI, {"role": "system", "content": "now"}, says("system", text(BILLING), text("c"))]
    },
    "agent": {"messages": AGENT, "tools": TOOLS, "system": "You are an agent."},
    "no tools": {"messages": HI, "tools": []},
    "results by the assistant": {
        "messages": [*HI, says("assistant", result("f", "r"), result("g", [text("t")]))]
    },
    "nothing said": {
        "messages": [says("user", text("")), says("assistant"), says("assistant", thinks("")), *HI]
    },
    "an effort": {"messages": HI, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
    "a budget": {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    "arguments": {
        "messages": HI,
        "chat_template_kwargs": {"enable_thinking": True},
        "output_config": {"effort": "low"},
    },
    "unicode": {
        "messages": [
            says("user", text("naïve 炭火 🔥 \u200d\t\n")),
            says("assistant", text("<|im_end|>")),
            *HI,
        ]
    },
}


def message(role: str, said: str, kind: str) -> Body:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": said}]}


def thought(said: str) -> Body:
    return {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": said}],
    }


def called(name: str, arguments: str = "{}", **fields: object) -> Body:
    return {
        "type": "function_call",
        "call_id": f"call_{name}",
        "name": name,
        "arguments": arguments,
        **fields,
    }


def output(name: str, said: object) -> Body:
    return {"type": "function_call_output", "call_id": f"call_{name}", "output": said}


ITEMS: list[Body] = [
    {"role": "developer", "content": "Be an agent."},
    message("user", "Weather?", "input_text"),
    thought("hm"),
    message("assistant", "Let me see.", "output_text"),
    called("weather", '{"city": "京都", "n": 1.0}'),
    called("clock"),
    output("weather", "clear"),
    output("clock", [{"type": "input_text", "text": "noon"}]),
    thought("a"),
    called("clock"),
    output("clock", "one"),
    thought("b"),
    thought("c"),
    {"role": "assistant", "content": "done"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "first"}, {"type": "output_text", "text": "x"}],
    },
    *HI,
]
FUNCTIONS: list[Body] = [
    {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "clock", "parameters": {}},
    {"type": "custom", "name": "patch", "description": "free form"},
    {"type": "web_search"},
    {
        "type": "namespace",
        "name": "crm",
        "description": "n",
        "tools": [{"type": "function", "name": "find", "parameters": {}}],
    },
]
INPUTS: dict[str, Body] = {
    "a text": {"input": "hi"},
    "instructions": {"input": HI, "instructions": "Be brief."},
    "agent": {"input": ITEMS, "tools": FUNCTIONS},
    "no tools": {"input": "hi", "tools": []},
    "tools of its own": {"input": "hi", "tools": [{"type": "web_search"}]},
    "an effort": {"input": "hi", "reasoning": {"effort": "none"}},
    "another effort": {"input": "hi", "reasoning": {"effort": "low"}, "chat_template_kwargs": {"a": 1}},
    "continued": {"input": [*HI, {**message("assistant", "Well", "output_text"), "status": "incomplete"}]},
    "a summary": {
        "input": [*HI, {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}]
    },
    "free form": {
        "input": [
            *HI,
            {"type": "custom_tool_call", "call_id": "call_p", "name": "patch", "input": "*** é"},
            {"type": "custom_tool_call_output", "call_id": "call_p", "output": "ok"},
            called("find", namespace="crm"),
        ]
    },
}
SAID_BODIES = {name: (MESSAGES, {"model": MODEL, "max_tokens": 9, **body}) for name, body in SAID.items()}
INPUT_BODIES = {name: (RESPONSES, {"model": MODEL, **body}) for name, body in INPUTS.items()}


def parsed(path: str, body: Body) -> PromptRequest:
    return parse_request(path, json.dumps(body).encode())


def plain(messages: list[Body]) -> list[Body]:
    """Messages with what a template gets to see of them, in one spelling."""
    out = []
    for one in messages:
        kept = {name: value for name, value in one.items() if value is not None and name != "type"}
        if "content" in kept and isinstance(kept["content"], list):
            kept["content"] = [part["text"] for part in kept["content"]]
        for call in kept.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                call["function"]["arguments"] = json.loads(arguments)
        out.append(kept)
    return out


@pytest.fixture(scope="module")
def theirs() -> dict[str, Body]:
    """What vLLM's own code makes of every body, by name."""
    vllm = VllmEnvironment()
    cases = {name: {"path": path, "body": body} for name, (path, body) in (_all() | _generated()).items()}
    lines = "\n".join(map(json.dumps, cases.values())) + "\n"
    run = subprocess.run(
        [str(vllm.python), str(Path(__file__).with_name("convert_with_vllm.py"))],
        check=False,
        input=lines,
        capture_output=True,
        text=True,
        timeout=300,
        env=vllm.variables("0"),
    )
    said = [line[1:] for line in run.stdout.splitlines() if line.startswith("=")]
    assert len(said) == len(cases), run.stderr[-2000:]
    return dict(zip(cases, map(json.loads, said), strict=True))


def _all() -> dict[str, tuple[str, Body]]:
    return {f"said: {n}": one for n, one in SAID_BODIES.items()} | {
        f"input: {n}": one for n, one in INPUT_BODIES.items()
    }


def _generated() -> dict[str, tuple[str, Body]]:
    """Made-up conversations, each of them whole, in the words of both."""
    out: dict[str, tuple[str, Body]] = {}
    for number, one in enumerate(samples.conversations(GENERATED, 8)):
        parts = plain_said(one), one.seen_tools, one.arguments
        for path, say in ((MESSAGES, as_messages), (RESPONSES, as_input)):
            body = say(*parts)
            if body is not None:
                out[f"{path} {number} {one.habit}"] = (path, {"model": MODEL, **body})
    return out


def test_generated_conversations_become_the_chats_that_vllm_makes_of_them(
    theirs: dict[str, Body], record_property: Any
) -> None:
    compared = 0
    for name, (path, body) in _generated().items():
        converted = theirs[name]
        if "refused" in converted:  # by types that are stricter than ours, not by what it means
            continue
        compared += 1
        request = parsed(path, body)
        assert plain(request.messages) == plain(converted["messages"]), name
        assert json.dumps(request.tools) == json.dumps(converted["tools"]), name
    record_property("compared", compared)
    assert compared > GENERATED


@pytest.mark.parametrize("name", _all())
def test_a_conversation_becomes_the_chat_that_vllm_makes_of_it(theirs, name):
    path, body = _all()[name]
    converted = theirs[name]
    assert "refused" not in converted, converted
    request = parsed(path, body)
    assert plain(request.messages) == plain(converted["messages"])
    assert json.dumps(request.tools) == json.dumps(converted["tools"]), "the order of fields is seen, too"
    unseen = ("add_generation_prompt", "continue_final_message")
    given = {name: value for name, value in converted["arguments"].items() if name not in unseen}
    assert request.template_arguments == given
    assert request.continue_final_message == converted["arguments"].get("continue_final_message", False)
    assert request.add_generation_prompt == converted["arguments"].get("add_generation_prompt", True)


# -- with an engine


@pytest.fixture(scope="module")
def reader(model) -> PromptReader:
    tokenizer = Tokenizer.load(model)
    return PromptReader(
        tokenizer, ChatTemplate.load(model, tokenizer), block_tokens=BLOCK, keep_token_ids=True
    )


@pytest.mark.parametrize("name", _all())
def test_a_prompt_has_the_engines_tokens(first_engine: Engine, reader: PromptReader, name: str) -> None:
    path, body = _all()[name]
    rendered = first_engine.ask(f"{path}/render", body)["token_ids"]
    prompt = reader.read(parsed(path, body))
    assert prompt.token_ids == rendered
    assert (prompt.grade, prompt.keys) == (PromptGrade.EXACT, extend_keys(root_key(MODEL), rendered, BLOCK))
    if path == MESSAGES:
        asked = {name: value for name, value in body.items() if name != "max_tokens"}
        assert first_engine.ask(COUNT, asked)["input_tokens"] == len(rendered)


def test_thinking_is_switched_off_in_the_engines_way(first_engine: Engine, reader: PromptReader) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": HI, "thinking": {"type": "disabled"}}
    assert (
        reader.read(parsed(MESSAGES, body)).token_ids
        == first_engine.ask(f"{MESSAGES}/render", body)["token_ids"]
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_same_agent_finds_its_cache_on_every_api(
    first_engine: Engine, start_gateway: Any, reader: PromptReader, stream: bool
) -> None:
    """An agent's turns alternate between the APIs: keys are those of the engine's events, usage is the
    engine's, and what one API put into the cache the others find there.
    """
    engine = first_engine
    engine.reset_cache()
    gateway: GatewayThread = start_gateway(engine)
    history: list[Body] = []
    said = words([f"dialects {stream}", "system", *range(60)])
    totals = {"prompt": 0, "cached": 0, "output": 0}
    for turn, path in enumerate(2 * [CHAT, MESSAGES, RESPONSES, GENERATE]):
        history.append({"role": "user", "content": words([f"dialects {stream}", turn, *range(70)])})
        body = _asked(path, said, history, reader, stream=stream)
        prompt = reader.read(parsed(path, body))
        known = gateway.known_keys(engine)
        run = next((i for i, key in enumerate(prompt.keys) if key not in known), len(prompt.keys))
        assert run * BLOCK > 0.4 * prompt.prompt_tokens or turn == 0, "the turn before is in the cache"
        answer, usage = _answer(gateway, path, body)
        spared = min(run, (prompt.prompt_tokens - 1) // BLOCK) * BLOCK
        assert usage[:2] == (prompt.prompt_tokens, spared)
        assert 0 < usage[2] <= 8
        for name, count in zip(totals, usage, strict=True):
            totals[name] += count
        history.append({"role": "assistant", "content": answer or "."})
        cache = gateway.settle(engine)
        cache.check_names()
        assert gateway.known_keys(engine) == cache.keys()
        assert set(prompt.keys) <= cache.keys()
    counters = gateway.look(lambda it: it.metrics.model(MODEL))
    assert (counters.requests, counters.estimated_usage, counters.errors) == (8, 0, {})
    told = (counters.prompt_tokens.total, counters.cached_tokens.total, counters.output_tokens.total)
    assert told == tuple(totals.values())
    gateway.check_empty()


def _asked(path: str, system: str, history: list[Body], reader: PromptReader, *, stream: bool) -> Body:
    body: Body = {"model": MODEL, "temperature": 0, "stream": stream, "ignore_eos": True}
    with_system = [{"role": "system", "content": system}, *history]
    match path:
        case "/v1/chat/completions":
            options = {"stream_options": {"include_usage": True}} if stream else {}
            return {**body, "messages": with_system, "max_tokens": 8, **options}
        case "/v1/messages":
            del body["ignore_eos"]  # the dialect has no such field
            return {**body, "system": system, "messages": list(history), "max_tokens": 8}
        case "/v1/responses":
            return {**body, "instructions": system, "input": list(history), "max_output_tokens": 8}
    chat = parsed(CHAT, {"model": MODEL, "messages": with_system})
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    token_ids = reader.read(chat).token_ids
    return {"model": MODEL, "token_ids": token_ids, "sampling_params": sampling, "stream": stream, **options}


def _answer(gateway: GatewayThread, path: str, body: Body) -> tuple[str, tuple[int, int, int]]:
    """What the client gets to read: the answer's text (empty for tokens), and its usage."""
    if not body["stream"]:
        whole = gateway.ask(path, body)
        return _text(path, whole), _usage(whole["usage"])
    reply = gateway.client.post(gateway.url + path, json=body)
    assert reply.status_code == 200, reply.text
    data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(one) for one in data if one != "[DONE]"]
    assert (data[-1] == "[DONE]") == (path in (CHAT, GENERATE))
    assert all("error" not in event for event in events)
    if path == RESPONSES:
        return _text(path, events[-1]["response"]), _usage(events[-1]["response"]["usage"])
    if path == MESSAGES:
        said = "".join(
            event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
        )
        return said, _usage(next(event["usage"] for event in reversed(events) if event.get("usage")))
    said = "".join(
        choice.get("delta", {}).get("content") or "" for event in events for choice in event["choices"]
    )
    return said, _usage(next(event["usage"] for event in reversed(events) if event.get("usage")))


def _text(path: str, whole: Body) -> str:
    match path:
        case "/v1/chat/completions":
            return whole["choices"][0]["message"]["content"] or ""
        case "/v1/messages":
            return "".join(block["text"] for block in whole["content"])
        case "/v1/responses":
            return "".join(part["text"] for item in whole["output"] for part in item["content"])
    return ""


def _usage(usage: Body) -> tuple[int, int, int]:
    """(prompt, cached, output) in whichever words."""
    if "prompt_tokens" in usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    cached = usage.get("cache_read_input_tokens", 0)
    prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
    return prompt, cached, usage["output_tokens"]


def test_counts_of_the_gateway_are_the_engines(first_engine: Engine, start_gateway: Any) -> None:
    gateway: GatewayThread = start_gateway(first_engine)
    for body in SAID.values():
        asked = {"model": MODEL, **{name: value for name, value in body.items() if name != "max_tokens"}}
        ours = gateway.ask(COUNT, asked)
        assert ours["input_tokens"] == first_engine.ask(COUNT, asked)["input_tokens"]
    assert gateway.look(lambda it: it.metrics.token_counts) == {"gateway": len(SAID)}


def test_errors_of_the_engine_and_of_the_gateway_have_one_shape(
    first_engine: Engine, start_gateway: Any
) -> None:
    gateway: GatewayThread = start_gateway(first_engine)
    too_long = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "word " * 5000}]}
    unknown = {**too_long, "model": "other", "messages": HI}
    for body, status in ((too_long, 400), (unknown, 404)):
        reply = gateway.client.post(gateway.url + MESSAGES, json=body)
        said = reply.json()
        assert (reply.status_code, said["type"], set(said["error"])) == (status, "error", {"type", "message"})


def test_what_the_engine_cannot_read_either_is_left_to_it(first_engine: Engine) -> None:
    """A document is nothing that vLLM's dialect knows: it is not refused here, and it is not called exact."""
    body = {"model": MODEL, "max_tokens": 9, "messages": [says("user", {"type": "document", "source": {}})]}
    with pytest.raises(UnsupportedContent):
        _ = parsed(MESSAGES, body).messages
    assert first_engine.send(MESSAGES, body).status_code == 400

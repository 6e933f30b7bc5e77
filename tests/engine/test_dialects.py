"""The same conversation in every dialect, over real HTTP, with the tiny model; answers as the SDKs' types."""

import json

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

SYSTEM = "Be brief."
MESSAGES = [
    {"role": "user", "content": "Hello, who is there?"},
    {"role": "assistant", "content": "A fire."},
    {"role": "user", "content": "What keeps it warm?"},
]
CHAT = {"messages": [{"role": "system", "content": SYSTEM}, *MESSAGES]}
RESPONSES = {"instructions": SYSTEM, "input": MESSAGES}
ANTHROPIC = {"system": SYSTEM, "messages": MESSAGES}

message_event: TypeAdapter = TypeAdapter(RawMessageStreamEvent)
response_event: TypeAdapter = TypeAdapter(ResponseStreamEvent)


def ask(served, path, **body):
    answer = served.http.post(path, json={"model": "tiny", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(served, **fields):
    return ask(served, "/v1/chat/completions", **CHAT, return_token_ids=True, **fields)


def stream(served, path, **body):
    """Events as (name, data), and the raw text."""
    body = {"model": "tiny", "temperature": 0, "stream": True, **body}
    answer = served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for block in answer.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields.get("event"), fields["data"]))
    return events


# -- Anthropic's messages


def test_a_message_is_the_chat_of_the_same_conversation(served):
    oracle = chat(served, max_tokens=20)
    body = ask(served, "/v1/messages", **ANTHROPIC, max_tokens=20)
    message = Message.model_validate_json(json.dumps(body), strict=True)
    (block,) = message.content
    assert block.text == oracle["choices"][0]["message"]["content"]
    assert message.stop_reason == "max_tokens"
    assert message.model == "tiny"
    usage = message.usage
    said = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert said == oracle["usage"]["prompt_tokens"]
    assert usage.output_tokens == 20


def test_the_stream_of_a_message_is_the_whole_one_in_pieces(served):
    whole = ask(served, "/v1/messages", **ANTHROPIC, max_tokens=30)
    events = stream(served, "/v1/messages", **ANTHROPIC, max_tokens=30)
    parsed = [message_event.validate_json(data, strict=True) for _, data in events]
    assert [name for name, _ in events] == [event.type for event in parsed]
    kinds = [event.type for event in parsed]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert parsed[0].message.content == []
    assert parsed[0].message.stop_reason is None
    assert "".join(event.delta.text for event in parsed[2:-3]) == whole["content"][0]["text"]
    assert parsed[-2].delta.stop_reason == whole["stop_reason"]
    last = parsed[-2].usage
    assert last.output_tokens == whole["usage"]["output_tokens"]
    assert last.input_tokens + last.cache_read_input_tokens == sum(
        whole["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


def test_tokens_that_were_cached_are_read_not_input(served):
    turn = {"system": "A rule that nobody else has. " * 20, "messages": MESSAGES, "max_tokens": 1}
    first, second = (ask(served, "/v1/messages", **turn)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0
    read = second["cache_read_input_tokens"]
    assert read % 32 == 0
    assert first["input_tokens"] - 32 <= read < first["input_tokens"]
    assert second["input_tokens"] == first["input_tokens"] - read
    start = stream(served, "/v1/messages", **turn)[0][1]
    assert json.loads(start)["message"]["usage"]["cache_read_input_tokens"] == read


def test_a_stop_sequence_is_named(served):
    text = ask(served, "/v1/messages", **ANTHROPIC, max_tokens=40)["content"][0]["text"]
    stop = text[10:13]
    body = ask(served, "/v1/messages", **ANTHROPIC, max_tokens=40, stop_sequences=[stop])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)
    assert body["content"][0]["text"] == text[: text.index(stop)]


def test_count_tokens_counts_what_a_chat_has(served):
    counted = ask(served, "/v1/messages/count_tokens", **ANTHROPIC)
    assert counted == {"input_tokens": chat(served, max_tokens=1)["usage"]["prompt_tokens"]}


def test_tool_use_and_results_in_the_history_are_those_of_a_chat(served):
    call = {"name": "weather", "arguments": '{"city": "Kyoto"}'}
    oracle = ask(
        served,
        "/v1/chat/completions",
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "a", "content": "Sunny."},
        ],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
        max_tokens=5,
    )
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Kyoto"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Sunny."}]}
    got = ask(
        served,
        "/v1/messages",
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
        tools=[{"name": "weather", "input_schema": {"type": "object"}}],
        tool_choice={"type": "auto"},
        max_tokens=5,
    )
    assert got["content"][0]["text"] == oracle["choices"][0]["message"]["content"]
    usage = got["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == oracle["usage"]["prompt_tokens"]


def test_what_agents_send_besides_changes_nothing(served):
    """Blocks with cache marks, hints and switches, as coding agents send them."""
    plain = ask(served, "/v1/messages", **ANTHROPIC, max_tokens=9)
    mark = {"cache_control": {"type": "ephemeral"}}
    decorated = [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"], **mark}]}
        for one in MESSAGES
    ]
    got = ask(
        served,
        "/v1/messages?beta=true",
        system=[{"type": "text", "text": SYSTEM, **mark}],
        messages=decorated,
        max_tokens=9,
        metadata={"user_id": "someone"},
        service_tier="auto",
        thinking={"type": "disabled"},
        tool_choice={"type": "none", "disable_parallel_tool_use": True},
        container=None,
        mcp_servers=[],
    )
    assert got["content"] == plain["content"]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "said"),
    [
        ({"model": "gpt"}, 404, "not_found_error", "'gpt'"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "invalid_request_error", "thinking"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            400,
            "invalid_request_error",
            "output_config",
        ),
        ({"mcp_servers": [{"name": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"max_tokens": 1 << 20}, 400, "invalid_request_error", "max_tokens"),
    ],
)
def test_a_refused_message_says_so_in_anthropic_s_shape(served, fields, status, kind, said):
    body = {"model": "tiny", "max_tokens": 4, **ANTHROPIC, **fields}
    answer = served.http.post("/v1/messages", json=body)
    assert answer.status_code == status
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert said in error["error"]["message"]


def test_other_errors_of_its_paths_have_anthropic_s_shape_too(served):
    assert served.http.get("/v1/messages").json()["type"] == "error"
    counted = served.http.post("/v1/messages/count_tokens", json={"model": "tiny"})
    assert (counted.status_code, counted.json()["type"]) == (400, "error")
    assert "messages" in counted.json()["error"]["message"]


# -- responses


def test_a_response_is_the_chat_of_the_same_conversation(served):
    oracle = chat(served, max_tokens=20)
    body = ask(served, "/v1/responses", **RESPONSES, max_output_tokens=20, metadata={"a": "b"})
    response = Response.model_validate_json(json.dumps(body), strict=True)
    assert response.output_text == oracle["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == oracle["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == 20
    assert response.usage.total_tokens == oracle["usage"]["total_tokens"]
    assert response.instructions == SYSTEM
    assert response.metadata == {"a": "b"}
    assert body["store"] is False


def test_the_stream_of_a_response_is_the_whole_one_in_pieces(served):
    asked = RESPONSES | {"max_output_tokens": 30}
    whole = ask(served, "/v1/responses", **asked)
    events = stream(served, "/v1/responses", **asked)
    parsed = [response_event.validate_json(data, strict=True) for _, data in events]
    assert [name for name, _ in events] == [event.type for event in parsed]
    assert [event.sequence_number for event in parsed] == list(range(len(parsed)))
    kinds = [event.type.removeprefix("response.") for event in parsed]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(event.delta for event in parsed[4:-4]) == parsed[-4].text == text
    last = parsed[-1].response
    assert last.output_text == text
    assert last.output[0].id == parsed[2].item.id == parsed[5].item_id
    assert last.id == parsed[0].response.id
    assert last.usage.output_tokens == whole["usage"]["output_tokens"]
    assert last.usage.input_tokens == whole["usage"]["input_tokens"]


def test_a_response_that_ends_by_itself_is_completed(served):
    text = chat(served, max_tokens=40)["choices"][0]["message"]["content"]
    body = ask(served, "/v1/responses", **RESPONSES, max_output_tokens=40, stop=[text[10:13]])
    assert (body["status"], body["incomplete_details"]) == ("completed", None)
    events = stream(served, "/v1/responses", **RESPONSES, max_output_tokens=40, stop=[text[10:13]])
    assert events[-1][0] == "response.completed"
    assert json.loads(events[-1][1])["response"]["output"][0]["status"] == "completed"


def test_a_response_tells_cached_tokens_and_logprobs(served):
    asked = {"input": "Ember. " * 40, "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
    asked |= {"top_logprobs": 2}
    ask(served, "/v1/responses", **asked)
    response = Response.model_validate(ask(served, "/v1/responses", **asked))
    details = response.usage.input_tokens_details
    assert 0 < response.usage.input_tokens - details.cached_tokens <= 32
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == 3
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    assert all(one.top_logprobs[0].logprob == one.logprob for one in logprobs)  # greedy: the best one
    last = response_event.validate_json(stream(served, "/v1/responses", **asked)[-1][1])
    assert last.response.output[0].content[0].logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "text.format"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1 << 20}, "max_output_tokens"),
        ({"input": 5}, "input"),
        ({"input": "x" * 20_000}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(served, fields, param):
    answer = served.http.post("/v1/responses", json={"model": "tiny", **RESPONSES, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if param is None:
        assert "is not text" in error["message"]
    else:
        assert error["param"] == param
        assert param in error["message"]


def test_what_asks_a_response_for_nothing_more_is_not_refused(served):
    ask(
        served,
        "/v1/responses",
        **RESPONSES,
        max_output_tokens=1,
        store=True,
        background=False,
        truncation="disabled",
        tool_choice="auto",
        parallel_tool_calls=False,
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        include=["reasoning.encrypted_content"],
        user="someone",
    )


# -- vLLM's generate


def test_tokens_in_and_tokens_out_are_those_of_a_completion(served):
    prompt = list(range(40, 120))
    sampling = {"max_tokens": 12, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    oracle = served.complete(prompt, max_tokens=12, logprobs=2, prompt_logprobs=1)
    got = ask(served, "/inference/v1/generate", token_ids=prompt, sampling_params=sampling, request_id="mine")
    (choice,), (expected,) = got["choices"], oracle["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["finish_reason"] == "length"
    assert "text" not in choice
    assert got["request_id"] == "mine"
    assert got["output_mode"] == "tokens"
    assert got["prompt_logprobs"] == expected["prompt_logprobs"]
    assert got["usage"]["prompt_tokens"] == 80
    content = choice["logprobs"]["content"]
    assert [one["token_id"] for one in content] == choice["token_ids"]
    assert [one["logprob"] for one in content] == expected["logprobs"]["token_logprobs"]
    assert all(one["rank"] == 1 and one["top_logprobs"][0]["token_id"] == one["token_id"] for one in content)
    assert [len(one["top_logprobs"]) for one in content] == [2] * 12


def test_generated_text_comes_with_its_tokens_if_asked_for(served):
    sampling = {"max_tokens": 12, "temperature": 0, "n": 2, "seed": 1}
    got = ask(
        served,
        "/inference/v1/generate",
        token_ids=[72, 105],
        sampling_params=sampling,
        output_mode="text",
        return_token_ids=True,
    )
    text = served.complete([72, 105], max_tokens=12)["choices"][0]["text"]
    assert [choice["text"] for choice in got["choices"]] == [text, text]
    assert got["prompt_token_ids"] == [72, 105]


def test_the_stream_of_generated_tokens_is_the_whole_answer_in_pieces(served):
    asked = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 20, "temperature": 0}}
    whole = ask(served, "/inference/v1/generate", **asked)
    events = stream(served, "/inference/v1/generate", **asked, stream_options={"include_usage": True})
    assert events.pop() == (None, "[DONE]")
    *chunks, last = [json.loads(data) for _, data in events]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 20


def test_what_a_render_says_can_be_generated(served):
    body = {"model": "tiny", **CHAT, "max_tokens": 9, "temperature": 0}
    rendered = served.http.post("/v1/chat/completions/render", json=body).json()
    got = served.http.post("/inference/v1/generate", json=rendered)
    assert got.status_code == 200, got.text
    assert got.json()["choices"][0]["token_ids"] == chat(served, max_tokens=9)["choices"][0]["token_ids"]


def test_a_limit_that_is_not_given_is_the_context(make_served):
    asked = {"token_ids": [1] * 10, "sampling_params": {"temperature": 0, "ignore_eos": True}}
    with make_served(max_model_len=64) as engine:
        got = ask(engine, "/inference/v1/generate", **asked)
    assert got["usage"]["total_tokens"] == 64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1 << 20]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"bad_words": ["a"]}}, "sampling_params.bad_words"),
        ({"sampling_params": {"stop_token_ids": [1 << 20]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"max_tokens": 1 << 20}}, "sampling_params.max_tokens"),
        ({"priority": 3}, "priority"),
        ({"output_mode": "images"}, "output_mode"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_what_generate_cannot_have_is_refused_by_name(served, fields, param):
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}} | fields
    answer = served.http.post("/inference/v1/generate", json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


# -- streams that break off


def cut_short(make_served, path, cut, **body):
    """Events of a stream that `cut` ends in its middle."""
    with make_served() as engine:
        sent = {"model": "tiny", "stream": True, "ignore_eos": True, **body}
        with engine.http.stream("POST", path, json=sent) as answer:
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(20)]
            engine._loop.call_soon_threadsafe(cut, engine.door.engine)
            seen += lines
    return [json.loads(line.removeprefix("data: ")) for line in seen if line.startswith("data: {")]


LONG = {
    "/v1/messages": ANTHROPIC | {"max_tokens": 3000},
    "/v1/responses": RESPONSES | {"max_output_tokens": 3000},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 3000, "ignore_eos": True}},
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/messages", lambda last: (last["type"], last["error"]["type"], last["error"]["message"])),
        ("/v1/responses", lambda last: (last["type"], last["code"], last["message"])),
        ("/inference/v1/generate", lambda last: ("error", last["error"]["code"], last["error"]["message"])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_that_fails_ends_a_stream_with_an_error_event(make_served, path, found):
    events = cut_short(make_served, path, lambda engine: engine._fail("out of memory"), **LONG[path])
    kind, code, message = found(events[-1])
    assert kind == "error"
    assert code in ("overloaded_error", "engine_unavailable")
    assert "out of memory" in message
    if path == "/v1/responses":
        response_event.validate_python(events[-1], strict=True)


def test_an_aborted_response_is_a_failed_one(make_served):
    events = cut_short(
        make_served, "/v1/responses", lambda engine: engine.abort_all(), **LONG["/v1/responses"]
    )
    last = response_event.validate_json(json.dumps(events[-1]), strict=True)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"


# -- the official clients, without a gateway


def test_anthropic_s_client_works(served):
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    asked = {"model": "tiny", "max_tokens": 10, **ANTHROPIC, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as streaming:
        text = "".join(streaming.text_stream)
        final = streaming.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens == 10
    counted = client.messages.count_tokens(model="tiny", **ANTHROPIC)
    assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**asked | {"extra_body": {"temperature": -1}})


def test_openai_s_client_has_responses(served):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "max_output_tokens": 10, "temperature": 0, **RESPONSES}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as streaming:
        deltas = [event.delta for event in streaming if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert whole.usage.output_tokens == 10
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**asked, previous_response_id="resp_1")

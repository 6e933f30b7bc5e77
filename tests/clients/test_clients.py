"""What every client is promised, whichever API it speaks; what only one of them has is tested apart."""

import pytest

CLIENTS = ("openai_chat", "openai_responses", "anthropic_messages", "litellm_chat", "langchain_chat")
by_client = pytest.mark.parametrize("client", CLIENTS)
BLOCK = 32
"""Tokens of a block of the engines: what of a prompt can be cached is a multiple of it."""
MESSAGES = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is charcoal, and what do people use it for?"},
]


def whole(answer: dict) -> dict:
    assert "raised" not in answer, answer["raised"]
    return answer


@by_client
def test_every_client_gets_the_text_and_the_counts_of_the_engine(client, seen, stack):
    direct = stack.ask("/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=24)
    got = whole(seen(client)["whole"])
    assert got["text"] == direct["choices"][0]["message"]["content"]
    assert got["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert got["output_tokens"] == direct["usage"]["completion_tokens"] == 24


@by_client
def test_a_streamed_answer_is_the_whole_one(client, seen):
    one, other = whole(seen(client)["whole"]), whole(seen(client)["streamed"])
    for field in ("text", "finish", "prompt_tokens", "output_tokens"):
        assert one[field] == other[field], field


@by_client
def test_the_second_turn_finds_the_first_one_cached_and_says_so(client, seen):
    first, second = map(whole, seen(client)["two_turns"])
    assert first["cached_tokens"] == 0
    said = first["prompt_tokens"] + first["output_tokens"]
    assert first["prompt_tokens"] // BLOCK * BLOCK <= second["cached_tokens"] <= said // BLOCK * BLOCK
    assert second["cached_tokens"] % BLOCK == 0
    assert second["cached_tokens"] > 0.8 * second["prompt_tokens"]


@by_client
def test_tools_and_their_results_reach_the_model(client, seen, stack):
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city": "Kyoto"}'}
    history = [
        {"role": "user", "content": "What is the weather in Kyoto?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
    ]
    direct = stack.ask("/v1/chat/completions", messages=history, temperature=0, max_tokens=100)
    got = whole(seen(client)["tools"])
    assert got["text"] == direct["choices"][0]["message"]["content"]
    assert "21 degrees" in got["text"]
    assert got["prompt_tokens"] == direct["usage"]["prompt_tokens"]


REFUSED = {
    "wrong_model": ("NotFoundError", 404, "gpt-9"),
    "bad_field": ("BadRequestError", 400, "temperature"),
    "image": ("BadRequestError", 400, "image"),
    "tool_choice": ("BadRequestError", 400, "tool_choice: not supported by this engine"),
    "too_long": ("BadRequestError", 400, "context is 8192 tokens"),
}


@by_client
@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_the_clients_own_exception_and_names_the_field(client, what, seen):
    error = whole(seen(client)[what])
    expected, status, said = REFUSED[what]
    assert expected in error["classes"]
    assert error["status"] == status
    assert said in error["message"]


@by_client
def test_a_client_that_leaves_a_stream_frees_the_engine_at_once(client, seen, stack):
    assert len(set(whole(seen(client)["cancelled"]))) == 1
    assert seen(client)["still_running"] == 0
    record = stack.record(f"{client}-cancelled")
    assert record["reason"] == "client_gone"
    assert record["duration_s"] < 20  # to the end it is minutes


def test_openai_s_other_ways_to_stream_agree(seen):
    found = seen("openai_chat")
    assert whole(found["asynchronous"])["text"] == found["whole"]["text"]
    assert whole(found["helper"])["text"] == found["tools"]["text"]
    one, other = found["completion"]
    assert one == other | {"cached_tokens": one["cached_tokens"]}


def test_openai_s_client_sees_models_request_ids_and_paths_that_are_not_there(seen, stack):
    found = seen("openai_chat")
    assert found["models"] == [stack.model]
    assert found["request_id"] == ["openai-named", "openai-named"]
    assert "NotFoundError" in whole(found["no_such_path"])["classes"]


def test_responses_without_memory_say_so(seen):
    found = seen("openai_responses")
    error = whole(found["previous"])
    assert "BadRequestError" in error["classes"]
    assert "previous_response_id" in error["message"]
    assert whole(found["helper"]) == whole(found["helped"])


def test_anthropic_s_client_counts_tokens_and_gets_every_event(seen):
    found = seen("anthropic_messages")
    assert found["count"] == found["whole"]["prompt_tokens"]
    assert found["request_id"] == "anthropic-named"
    assert whole(found["beta"])["text"] == found["whole"]["text"]
    events = found["raw_stream"]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}


@pytest.mark.parametrize(
    ("client", "way"),
    [("litellm_chat", "by_messages"), ("litellm_chat", "by_responses"), ("langchain_chat", "by_responses")],
)
def test_clients_that_speak_several_apis_get_the_same_by_each(client, way, seen):
    assert whole(seen(client)[way]) == seen(client)["whole"]

"""The engine over real HTTP, with the tiny model in float32."""

import math
import time
from pathlib import Path

import openai
import pytest

from sumibi.engines.signals import parse_signals
from sumibi.prompts.tokenizer import Tokenizer

PROMPT = [(7 * i) % 256 for i in range(100)]


def test_greedy_answers_repeat_and_tokens_are_told(served):
    first = served.complete(PROMPT, max_tokens=12)
    again = served.complete(PROMPT, max_tokens=12)
    (choice,) = first["choices"]
    assert choice["token_ids"] == again["choices"][0]["token_ids"]
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert first["usage"]["completion_tokens"] == len(choice["token_ids"]) == 12
    assert first["usage"]["prompt_tokens"] == 100


def test_cached_tokens_are_whole_blocks_and_leave_one_token(served):
    prompt = [3, *PROMPT[:95]]  # 96 tokens: three blocks of 32

    def cached(tokens, **fields):
        return served.complete(tokens, max_tokens=1, **fields)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    assert cached(prompt) == 0
    assert cached(prompt) == 64
    assert cached([*prompt, 1]) == 96
    assert cached([*prompt[:70], 9, 9]) == 64
    assert cached(prompt, cache_salt="tenant") == 0
    assert cached(prompt, cache_salt="tenant") == 64


def test_a_cached_prefix_changes_no_token_and_no_logprob(served):
    prompt = [5, *PROMPT]
    cold, warm = (served.complete(prompt, max_tokens=16, logprobs=3)["choices"][0] for _ in range(2))
    assert warm["token_ids"] == cold["token_ids"]
    assert warm["logprobs"]["token_logprobs"] == pytest.approx(cold["logprobs"]["token_logprobs"], abs=1e-4)


def test_streamed_pieces_add_up_to_the_whole_answer(served):
    fields = {"prompt": "Say something", "max_tokens": 40, "temperature": 1, "seed": 3}
    whole = served.complete(fields.pop("prompt"), **fields)
    events = served.stream(
        "/v1/completions",
        prompt="Say something",
        return_token_ids=True,
        stream_options={"include_usage": True},
        **fields,
    )
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {
        "prompt_tokens_details": None
    }
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert [t for piece in pieces for t in piece["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_chat_is_its_rendered_prompt(served):
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 9}
    rendered = served.http.post("/v1/chat/completions/render", json=body).json()
    tokenized = served.http.post("/tokenize", json={"messages": messages}).json()
    chat = served.http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == chat["usage"]["prompt_tokens"]
    assert rendered["token_ids"] == tokenized["tokens"] == chat["prompt_token_ids"]
    assert served.http.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": text}
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["choices"][0]["token_ids"] == served.tokens(tokenized["tokens"], max_tokens=9)


def test_a_chat_stream_opens_with_the_role_and_ends_with_a_reason(served):
    events = served.stream(
        "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=20, temperature=0
    )
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert choices[-1]["finish_reason"] == "length"
    assert all("usage" not in event for event in events)


def test_streams_never_hold_half_a_character(served):
    """Random bytes are mostly no UTF-8: what is broken shows as U+FFFD, the same way in both forms."""
    for seed in range(5):
        fields = {"max_tokens": 60, "temperature": 1.5, "seed": seed}
        events = served.stream("/v1/completions", prompt="x", **fields)
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == served.complete("x", **fields)["choices"][0]["text"]
        tokens = served.tokens("x", **fields)
        assert text == bytes(t for t in tokens if t < 256).decode(errors="replace")


def test_stop_strings_end_the_text_in_front_of_them(served):
    fields = {"max_tokens": 120, "temperature": 1, "seed": 11, "ignore_eos": True}
    free = served.complete("stop", **fields)["choices"][0]["text"]
    stop = free[40:43]
    at = free.index(stop)
    answer = served.complete("stop", stop=[stop, "never there"], **fields)
    (choice,) = answer["choices"]
    assert choice["text"] == free[:at]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) < 120
    events = served.stream("/v1/completions", prompt="stop", stop=stop, **fields)
    assert "".join(event["choices"][0]["text"] for event in events) == free[:at]
    included = served.complete("stop", stop=stop, include_stop_str_in_output=True, **fields)
    assert included["choices"][0]["text"] == free[: at + len(stop)]


def test_stop_tokens_end_the_output_and_are_no_text(served):
    tokens = served.tokens("abc", max_tokens=30, temperature=1, seed=1)
    stop = tokens[7]
    at = tokens.index(stop)
    (choice,) = served.complete("abc", max_tokens=30, temperature=1, seed=1, stop_token_ids=[stop])["choices"]
    assert choice["token_ids"] == tokens[: at + 1]
    assert choice["text"] == bytes(t for t in tokens[:at] if t < 256).decode(errors="replace")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_the_models_own_end_of_sequence_stops_it_unless_ignored(served):
    bias = {"258": 100}
    (choice,) = served.complete("abc", max_tokens=5, logit_bias=bias)["choices"]
    assert choice["token_ids"] == [258]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
    (choice,) = served.complete("abc", max_tokens=5, logit_bias=bias, ignore_eos=True)["choices"]
    assert (choice["token_ids"], choice["text"]) == ([258] * 5, "")
    (choice,) = served.complete("abc", max_tokens=5, logit_bias=bias, min_tokens=3)["choices"]
    assert choice["token_ids"][3:] == [258]


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(make_served):
    requests = [
        {
            "prompt": [i, *PROMPT[: 20 + 9 * i]],
            "max_tokens": 24,
            "temperature": 1,
            "seed": 40 + i,
            "top_p": 0.9 if i % 2 else 1.0,
        }
        for i in range(6)
    ]
    with make_served(max_num_batched_tokens=64) as engine:
        alone = [engine.tokens(**fields) for fields in requests]
        assert engine.http.post("/reset_prefix_cache").json() == {"success": True}
        assert engine.together(requests) == alone


def test_preempted_requests_answer_as_if_they_had_the_engine_alone(make_served):
    requests = [
        {
            "prompt": [i, *PROMPT[:40]],
            "max_tokens": 60,
            "temperature": i % 2,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(5)
    ]
    with make_served(num_gpu_blocks_override=20, block_size=8) as small, make_served() as ample:
        squeezed = small.together(requests)
        assert small.metric("vllm:num_preemptions_total") > 0
        assert squeezed == [ample.tokens(**fields) for fields in requests]


def test_choices_share_the_prompt_and_differ_by_seed(served):
    answer = served.complete(PROMPT, n=3, max_tokens=16, temperature=1, seed=5)
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert tokens == [served.tokens(PROMPT, max_tokens=16, temperature=1, seed=5 + i) for i in range(3)]
    assert answer["usage"]["prompt_tokens"] == 100
    assert answer["usage"]["completion_tokens"] == 48


def test_several_prompts_are_answered_in_order(served):
    prompts = ["one", "two, longer", "three"]
    answer = served.complete(prompts, n=2, max_tokens=8, temperature=1, seed=9)
    expected = [served.tokens(p, max_tokens=8, temperature=1, seed=9 + i) for p in prompts for i in range(2)]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_chat_logprobs_hold_the_chosen_token_and_its_rivals(served):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    body |= {"temperature": 0, "logprobs": True, "top_logprobs": 20}
    entries = served.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert len(entry["top_logprobs"]) == 20
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert math.fsum(math.exp(value) for value in values) < 1


def test_prompt_logprobs_are_the_logprobs_of_the_same_tokens_as_output(served):
    tokens = [1, 2, 3]
    answer = served.complete(tokens, max_tokens=20, logprobs=0)["choices"][0]
    prompt = [*tokens, *answer["token_ids"]]
    first, *rest = served.complete(prompt, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(prompt) - 1
    values = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], rest, strict=True)]
    assert values[2:] == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-4)
    assert all(entry[str(token)]["rank"] == 1 for token, entry in zip(prompt[3:], rest[2:], strict=True))
    assert all(len(entry) in (2, 3) for entry in rest)


def wait_until(engine, metric, value):
    deadline = time.monotonic() + 20
    while engine.metric(metric) != value:
        assert time.monotonic() < deadline
        time.sleep(0.01)


ENDLESS = {"prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served, stream):
    wait_until(served, "vllm:num_requests_running", 0)
    with served.asking(**ENDLESS, stream=stream):
        wait_until(served, "vllm:num_requests_running", 1)
        assert served.metric("vllm:kv_cache_usage_perc") > 0
    wait_until(served, "vllm:num_requests_running", 0)
    assert served.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_waits_for_a_place_loses_its_turn(make_served, stream):
    with make_served(max_num_seqs=1) as engine, engine.asking(**ENDLESS, stream=True):
        wait_until(engine, "vllm:num_requests_running", 1)
        with engine.asking(**ENDLESS, stream=stream):
            wait_until(engine, "vllm:num_requests_waiting", 1)
        wait_until(engine, "vllm:num_requests_waiting", 0)
        assert engine.metric("vllm:num_requests_running") == 1


BAD = [
    ({"model": "other"}, 404, "model"),
    ({"model": None}, 400, "model"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [1, 999]}, 400, "prompt"),
    ({"prompt": [1] * 9000}, 400, "prompt"),
    ({"prompt": "a" * 3_000_000}, 400, "prompt"),  # refused before it is tokenised
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 9000}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"min_tokens": 9}, 400, "min_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"n": 0}, 400, "n"),
    ({"n": 1000}, 400, "n"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"999": 1}}, 400, "logit_bias"),
    ({"stop": ["a"] * 17}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    ({"echo": True}, 400, "echo"),
    ({"suffix": "end"}, 400, "suffix"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"guided_json": {}}, 400, "guided_json"),
]


@pytest.mark.parametrize(("fields", "status", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_refused_by_name(served, fields, status, param):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4} | fields
    answer = served.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 10**30},
        {"temperature": 1e300, "top_p": 1e-300},
        {"temperature": 1e-5, "min_p": 1e-320},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300, "top_k": 3},
        {"seed": -(10**40)},
        {"stop_token_ids": list(range(259)), "min_tokens": 2, "logprobs": 20},
        {"logit_bias": {str(i): -100 for i in range(259)}, "top_p": 0.5},
    ],
    ids="-".join,
)
def test_the_most_extreme_values_that_are_allowed_are_answered(served, fields):
    (choice,) = served.complete("abc", max_tokens=3, **{"temperature": 1, **fields})["choices"]
    assert choice["token_ids"]


def test_what_asks_for_nothing_is_not_refused(served):
    harmless = {"echo": False, "best_of": 1, "suffix": None, "response_format": {"type": "text"}}
    served.complete("x", max_tokens=1, user="somebody", unknown=1, logit_bias={}, **harmless)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": "tiny", "prompt": "\xff"}'])
def test_a_body_that_is_no_json_object_is_refused(served, body):
    answer = served.http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request_error"


def test_unknown_routes_and_methods_answer_in_the_same_shape(served):
    assert served.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    answer = served.http.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (405, None)


def test_the_door_tells_what_it_serves(served):
    (card,) = served.http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 8192)
    tokenizer = Tokenizer.load(Path(card["root"]))  # what a gateway beside the engine does
    assert tokenizer.encode("hé", add_special_tokens=False) == list("hé".encode())
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/version").json()["version"].startswith("sumibi ")
    page = served.http.get("/metrics").text
    assert 'vllm:cache_config_info{block_size="32"' in page
    assert parse_signals(page.encode()).max_sequences == 64  # --max-num-seqs
    assert 'kv_cache_size_tokens="32768"' in page
    assert "process_start_time_seconds" in page


def test_an_answer_without_a_limit_ends_with_the_context(make_served):
    with make_served(num_gpu_blocks_override=3, block_size=16) as engine:
        for length in (1, 15, 16, 17, 32, 47):
            body = {"model": "tiny", "prompt": PROMPT[:length], "max_tokens": 48 - length, "ignore_eos": True}
            usage = engine.http.post("/v1/completions", json=body).json()["usage"]
            assert (usage["prompt_tokens"], usage["total_tokens"]) == (length, 48)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
        answer = engine.http.post("/v1/chat/completions", json=chat).json()
        assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (48, "length")
        refused = engine.http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT[:48]})
        assert refused.json()["error"]["param"] == "prompt"


def test_counters_follow_the_tokens(make_served):
    with make_served() as engine:
        engine.tokens(PROMPT, max_tokens=5)
        engine.tokens([*PROMPT, 1], max_tokens=5)
        assert engine.metric("vllm:prompt_tokens_total") == 201
        assert engine.metric("vllm:prefix_cache_hits_total") == 96
        assert engine.metric("vllm:generation_tokens_total") == 10
        assert engine.metric("vllm:time_to_first_token_seconds_count") == 2
        assert engine.metric("vllm:inter_token_latency_seconds_count") == 8
        assert engine.metric("vllm:request_success_total") == 2
        assert engine.metric("vllm:iteration_tokens_total_count") == 10
        assert engine.metric("vllm:iteration_tokens_total_sum") == 201 - 96 + 10 - 2


def test_the_cache_is_cleared_only_in_development_mode(make_served, served):
    served.tokens(PROMPT, max_tokens=1)
    assert served.http.post("/reset_prefix_cache").json() == {"success": True}
    assert served.complete(PROMPT, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with make_served(enable_dev_mode=False) as engine:
        assert engine.http.post("/reset_prefix_cache").status_code == 404


def test_the_official_client_works(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, logprobs=True)
        assert answer.usage.completion_tokens == 5
        assert len(answer.choices[0].logprobs.content) == 5
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
        completion = client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=3, logprobs=2)
        assert completion.choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError, match="other"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="tiny", prompt="x", max_tokens=-4)

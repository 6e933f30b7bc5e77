"""The default model through the whole engine, against values that vLLM and transformers gave for it."""

import random
import time

import pytest

pytestmark = pytest.mark.real_model

NAME = "smollm2-135m-instruct"

PROBE = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 378, 2365, 6354, 16438, 27003]
PROBE_LOGPROBS = [-14.41, -6.19, -1.42, -7.03, -0.01, -2.85, -2.82]
PROBE_LOGPROBS += [-0.12, -1.80, -2.87, -3.27, -0.03, -0.15, -3.84]
"""transformers in bfloat16; in float32 values differ from these by up to 0.39."""


@pytest.fixture(scope="module")
def engine(make_served, smollm2):
    with make_served(model=str(smollm2), num_gpu_blocks_override=128) as served:
        yield served


def test_the_chat_template_and_tokenizer_count_as_vllm_does(engine):
    messages = [{"role": "user", "content": "hi"}]
    assert engine.http.post("/tokenize", json={"messages": messages}).json()["count"] == 31


def test_the_greedy_answer_is_vllms(engine):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": NAME, "messages": messages, "temperature": 0, "return_token_ids": True}
    answer = engine.http.post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert (choice["finish_reason"], answer["usage"]["prompt_tokens"]) == ("stop", 37)


def test_prompt_logprobs_are_transformers(engine):
    body = {"model": NAME, "prompt": PROBE, "max_tokens": 1, "prompt_logprobs": 0}
    answer = engine.http.post("/v1/completions", json=body).json()
    _, *entries = answer["choices"][0]["prompt_logprobs"]
    values = [entry[str(token)]["logprob"] for token, entry in zip(PROBE[1:], entries, strict=True)]
    assert values == pytest.approx(PROBE_LOGPROBS, abs=0.4)


def random_tokens(count, *, seed):
    return random.Random(seed).choices(range(100, 40_000), k=count)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine):
    requests = [
        {
            "prompt": PROBE[i:],
            "max_tokens": 16,
            "temperature": 0.8,
            "top_p": 0.95,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(3)
    ]
    alone = [engine.tokens(**fields) for fields in requests]
    assert engine.http.post("/reset_prefix_cache").json() == {"success": True}
    assert engine.together(requests) == alone


STEP_TOKENS = 256


@pytest.mark.parametrize("cached", [0, 512])
def test_a_request_behind_a_long_prefill_has_its_first_token_within_two_steps(engine, cached):
    """Counted in tokens that the engine computes between the request and its first token."""

    def computed():
        return engine.metric("vllm:iteration_tokens_total_sum")

    short = random_tokens(cached + 40, seed=1 + cached)
    if cached:
        engine.tokens(short[: cached + 1], max_tokens=1)
    before = computed()
    with engine.asking(prompt=random_tokens(2000, seed=2 + cached), max_tokens=1):
        while (at := computed()) == before:  # the long prefill's first step
            time.sleep(0.01)
        usage = engine.complete(short, max_tokens=1)["usage"]
        assert computed() - at <= 2 * STEP_TOKENS
        assert engine.metric("vllm:num_requests_running") == 1
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached

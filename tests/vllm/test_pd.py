"""Prefill on one real engine, decode on another, the KV in between over NIXL."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm_harness import BLOCK, MODEL, Engine, GatewayThread, eventually

from sumibi.gateway.options import engine_options

NOTHING_REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What the prefill leg's request carries."""


@pytest.fixture(scope="module")
def pair(start_engine, tmp_path_factory) -> Iterator[tuple[Engine, Engine]]:
    """(prefill, decode), in float32. Stopped after these tests: they are never quite idle."""
    scratch = tmp_path_factory.mktemp("pair")
    prefill = start_engine("prefill", half=0, nixl=True, scratch=scratch)
    decode = start_engine("decode", half=1, nixl=True, scratch=scratch)
    yield prefill.wait_ready(), decode.wait_ready()
    prefill.stop()
    decode.stop()


def prompt_of(tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(20, 49_000) for _ in range(tokens)]


def completion(prompt: list[int], **fields: object) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    return {**body, **fields}


@pytest.mark.parametrize("tokens", [70, 500])
def test_the_two_requests_of_a_pair_give_the_tokens_of_one(pair, tokens):
    """The wire itself, spoken by hand: what a connector of the gateway's has to say, and gets."""
    prefill, decode = pair
    prompt = prompt_of(tokens, seed=tokens)
    first = prefill.ask(
        "/v1/completions", completion(prompt, max_tokens=1, kv_transfer_params=NOTHING_REMOTE)
    )
    handed = first["kv_transfer_params"]
    assert len(handed["remote_block_ids"][0]) == -(-tokens // BLOCK)
    assert {"remote_engine_id", "remote_request_id", "remote_host", "remote_port"} <= handed.keys()

    sent = decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    apart = decode.ask("/v1/completions", completion(prompt, kv_transfer_params=handed))
    sent = decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") - sent
    assert sent >= tokens - 1, "it was computed again, not fetched"
    whole = decode.ask("/v1/completions", completion(prompt, cache_salt="computed here"))
    assert apart["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    assert decode.metric("vllm:nixl_num_failed_transfers_total") == 0


@pytest.fixture
def gateway(pair, start_gateway) -> GatewayThread:
    """Before the pair, with a policy that pairs every request whatever it costs."""
    prefill, decode = pair
    options = engine_options(
        [f"{prefill.url},role=prefill,connector=nixlv2", f"{decode.url},role=decode,connector=nixlv2"]
    )
    return start_gateway(prefill, decode, engines=options, policy="round-robin")


def fetched_tokens(engine: Engine) -> float:
    """Prompt tokens that came from another engine, since it started."""
    return engine.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def text_of(stream: str) -> tuple[str, dict[str, Any]]:
    """(all text, the last usage) of a streamed completion."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return "".join(choice["text"] for event in events for choice in event["choices"]), usage


def test_the_gateways_pairs_give_the_tokens_of_one_engine(pair, gateway):
    prefill, decode = pair
    for tokens, seed in ((90, 1), (300, 2)):
        prompt = prompt_of(tokens, seed)
        before = fetched_tokens(decode)
        apart = gateway.ask("/v1/completions", completion(prompt))
        assert fetched_tokens(decode) - before >= tokens - 1
        whole = decode.ask("/v1/completions", completion(prompt, cache_salt="computed here"))
        assert apart["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        assert apart["usage"]["completion_tokens"] == 24
        assert apart["usage"]["prompt_tokens"] == tokens
    gateway.check_empty()

    prompt = prompt_of(200, seed=4)
    body = completion(prompt, stream=True, stream_options={"include_usage": True})
    reply = gateway.client.post(f"{gateway.url}/v1/completions", json=body)
    assert reply.status_code == 200
    text, usage = text_of(reply.text)
    whole = decode.ask("/v1/completions", completion(prompt, cache_salt="computed here"))
    assert (text, usage["completion_tokens"]) == (whole["choices"][0]["text"], 24)

    # Said again, the prefill engine has it: its blocks, and the count that reaches the client.
    again = gateway.ask("/v1/completions", completion(prompt))
    assert again["choices"][0]["text"] == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    gateway.check_empty()
    assert prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


def test_a_prefill_engine_killed_meanwhile_costs_nobody_an_answer(pair, gateway):
    """kill -9 while it computes: each client gets one whole answer, from the decode engine alone."""
    prefill, decode = pair
    prompts = [prompt_of(500, seed) for seed in (5, 6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(gateway.ask, "/v1/completions", completion(prompt)) for prompt in prompts]
        # Its own page shows nothing of a request that it finishes in the step in which it began.
        eventually(lambda: gateway.view(prefill).prefilling, "the prefill engine has a request")
        time.sleep(0.5)
        prefill.kill()
        answers = [future.result() for future in asked]
    try:
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = decode.ask("/v1/completions", completion(prompt, cache_salt="computed here"))
            assert answer["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        counted = gateway.look(lambda gateway: gateway.router.counters())
        assert counted.disagg["decode-only"]["fallback"] >= 1, "it was killed too late"
        gateway.check_empty()
        eventually(lambda: not gateway.view(prefill).up, "the gateway knows that it is gone")
        # What comes now does not wait for it.
        gateway.ask("/v1/completions", completion(prompt_of(90, seed=8)))
        assert decode.metric("vllm:num_requests_running") == 0
    finally:
        prefill.start()
        prefill.wait_ready()
    gateway.wait_exact(prefill, decode)
    before = fetched_tokens(decode)
    gateway.ask("/v1/completions", completion(prompt_of(90, seed=9)))
    assert fetched_tokens(decode) > before, "a prefill engine that came back is used again"
    gateway.check_empty()

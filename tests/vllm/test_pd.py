"""Prefill on one real engine, decode on another, the KV in between over NIXL."""

import random
from typing import Any

import pytest
from vllm_harness import BLOCK, MODEL, Engine

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
def pair(start_engine, tmp_path_factory) -> tuple[Engine, Engine]:
    """(prefill, decode), in float32."""
    scratch = tmp_path_factory.mktemp("pair")
    prefill = start_engine("prefill", half=0, nixl=True, scratch=scratch)
    decode = start_engine("decode", half=1, nixl=True, scratch=scratch)
    return prefill.wait_ready(), decode.wait_ready()


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

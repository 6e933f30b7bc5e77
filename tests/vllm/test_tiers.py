"""Our tiers under a real engine: what it finds below is what it computed, and it finds it."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_harness import BLOCK, MODEL, REPOSITORY, Engine, eventually

from sumibi.tiers.blockfile import HEADER_BYTES, decode_header

ANSWER_TOKENS = 12
BLOCK_BYTES = 30 * 2 * 3 * 64 * BLOCK * 4
"""30 layers of keys and values for 3 heads of 64, in float32."""
FILE_BYTES = BLOCK_BYTES + HEADER_BYTES
DISK_BLOCKS, HOST_BLOCKS = 90, 20


def prompt_of(tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(20, 49_000) for _ in range(tokens)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("tiers")
    return SimpleNamespace(root=root, disk=root / "disk", store=root / "store")


@pytest.fixture(scope="module")
def pair(start_engine, folder) -> tuple[Engine, Engine]:
    """Two engines that share a store; the first has host memory and a disk too."""
    store = {"url": str(folder.store), "bytes": "2GiB"}
    first = {"host_bytes": HOST_BLOCKS * BLOCK_BYTES, "store": store}
    first["disk"] = {"path": str(folder.disk), "bytes": DISK_BLOCKS * FILE_BYTES}
    second = {"store": store}
    started = [
        start_engine(
            name, half=half, kv_transfer=transfer(tiers), pythonpath=[REPOSITORY / "src"], scratch=folder.root
        )
        for half, (name, tiers) in enumerate((("tiers", first), ("sharer", second)))
    ]
    return started[0].wait_ready(), started[1].wait_ready()


def transfer(tiers: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "SumibiTiersConnector",
        "kv_connector_module_path": "sumibi.tiers.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": tiers,
    }


class Answer:
    """Tokens, their log-probabilities, and how many of the prompt's tokens came from below."""

    def __init__(self, engine: Engine, prompt: list[int], **fields: object) -> None:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "logprobs": 1,
        }
        before = from_below(engine)
        said = engine.ask("/v1/completions", {**body, "return_token_ids": True, **fields})
        self.loaded = from_below(engine) - before
        self.cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.tokens = said["choices"][0]["token_ids"]
        self.logprobs = said["choices"][0]["logprobs"]["token_logprobs"]

    def check_like(self, other: "Answer") -> None:
        assert self.tokens == other.tokens
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def from_below(engine: Engine) -> int:
    return int(engine.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))


def counted(engine: Engine, name: str, tier: str) -> float:
    return engine.metric(f"sumibi:kv_tier_{name}", tier=tier)


def test_what_left_the_device_is_found_below(pair):
    engine, _ = pair
    prompt = prompt_of(800, seed=1)
    cold = Answer(engine, prompt)
    assert (cold.loaded, cold.cached) == (0, 0)
    here = Answer(engine, prompt)
    assert (here.loaded, here.cached) == (0, 768)
    engine.reset_cache()
    again = Answer(engine, prompt)
    assert (again.loaded, again.cached) == (768, 768)
    cold.check_like(again)
    assert again.logprobs == here.logprobs, "the same bytes, and the same tokens left to compute"

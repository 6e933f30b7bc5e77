"""Our tiers under a real engine: what it finds below is what it computed, and it finds it."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from vllm_harness import BLOCK, MODEL, REPOSITORY, Engine, eventually

from sumibi.tiers.blockfile import HEADER_BYTES, decode_header

ANSWER_TOKENS = 12
BLOCK_BYTES = 30 * 2 * 3 * 64 * BLOCK * 4
"""30 layers of keys and values for 3 heads of 64, in float32."""
FILE_BYTES = BLOCK_BYTES + HEADER_BYTES
DISK_BLOCKS, HOST_BLOCKS = 60, 52


def prompt_of(tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(20, 49_000) for _ in range(tokens)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("tiers")
    return SimpleNamespace(root=root, disk=root / "disk", store=root / "store")


@pytest.fixture(scope="module")
def pair(start_engine, folder) -> Iterator[tuple[Engine, Engine]]:
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
    yield started[0].wait_ready(), started[1].wait_ready()
    for engine in started:
        engine.stop()


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


def leave(engine: Engine, prompt: list[int]) -> None:
    """Ask, and go at once."""
    with suppress(httpx.TimeoutException):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 100, "ignore_eos": True}
        httpx.post(f"{engine.url}/v1/completions", json=body, timeout=0.1)


def from_below(engine: Engine) -> int:
    return int(engine.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))


def counted(engine: Engine, name: str, tier: str) -> float:
    gauge = name in ("bytes", "blocks")
    return engine.metric(f"sumibi:kv_tier_{name}" + ("" if gauge else "_total"), tier=tier)


@pytest.fixture(scope="module")
def cold(pair) -> Answer:
    """The first prompt, computed by the first engine when nobody had any of it."""
    answer = Answer(pair[0], prompt_of(800, seed=1))
    assert (answer.loaded, answer.cached) == (0, 0)
    return answer


def test_what_left_the_device_is_found_below(pair, cold, folder):
    engine, _ = pair
    here = Answer(engine, prompt_of(800, seed=1))
    assert (here.loaded, here.cached) == (0, 768)
    engine.reset_cache()
    again = Answer(engine, prompt_of(800, seed=1))
    assert (again.loaded, again.cached) == (768, 768)
    again.check_like(cold)
    assert again.logprobs == here.logprobs, "the same bytes below, and the same tokens left to compute"
    assert engine.metric("vllm:prompt_tokens_cached_by_source_total", source="host") == 768
    assert counted(engine, "bytes", "host") == 25 * BLOCK_BYTES

    engine.reset_cache()
    part = prompt_of(800, seed=1)[:700] + prompt_of(100, seed=2)
    shared = Answer(engine, part)
    assert (shared.loaded, shared.cached) == (672, 672), "21 blocks of 32 are in the first 700 tokens"
    shared.check_like(Answer(engine, part, cache_salt="computed here"))


def test_another_engine_finds_it_in_the_store(pair, cold, folder):
    eventually(lambda: len(blocks_in(folder.store)) >= 25, "the first engine has written")
    second = pair[1]
    answer = Answer(second, prompt_of(800, seed=1))
    assert (answer.loaded, answer.cached) == (768, 768)
    answer.check_like(cold)
    assert counted(second, "hits", "store") == 24
    mixed = Answer(second, prompt_of(800, seed=1), cache_salt="a tenant's")
    assert (mixed.loaded, mixed.cached) == (0, 0), "salted prompts are other prompts"


def blocks_in(place: Path) -> dict[bytes, Path]:
    """Content id and file of every block in a directory, of any namespace."""
    found = {}
    for path in place.glob("*/*/*.kv"):
        found[decode_header(path.read_bytes()[:HEADER_BYTES]).content_id] = path
    return found


def test_tiers_stay_within_their_bounds(pair, cold, folder):
    engine, _ = pair
    computed = []
    for seed in (3, 4, 5):
        before = set(blocks_in(folder.store))
        computed.append(Answer(engine, prompt_of(400, seed)))
        assert computed[-1].loaded == 0
        eventually(lambda before=before: len(set(blocks_in(folder.store)) - before) == 12, "it is written")
        assert len(blocks_in(folder.disk)) <= DISK_BLOCKS
        assert counted(engine, "blocks", "host") <= HOST_BLOCKS
    assert counted(engine, "evicted", "disk") > 0
    assert counted(engine, "evicted", "host") > 0
    engine.reset_cache()
    for seed, answer in zip((3, 4, 5), computed, strict=True):
        again = Answer(engine, prompt_of(400, seed))
        assert again.loaded == 384, "the store has what the disk let go"
        again.check_like(answer)

    # All of them at once, and twice, while others compute and one whose client leaves has asked as well.
    engine.reset_cache()
    loaded = from_below(engine)
    asked = [(prompt_of(400, seed), answer) for seed, answer in zip((3, 4, 5), computed, strict=True)] * 2
    asked += [(prompt_of(800, seed=1), cold)]
    with ThreadPoolExecutor(len(asked) + 2) as pool:
        pool.submit(leave, engine, prompt_of(800, seed=1))
        other = pool.submit(Answer, engine, prompt_of(300, seed=9))
        at_once = [(pool.submit(Answer, engine, prompt), answer) for prompt, answer in asked]
        for future, answer in at_once:
            future.result().check_like(answer)
        other.result()
    assert from_below(engine) - loaded >= 3 * 384 + 768
    eventually(lambda: engine.metric("vllm:num_requests_running") == 0, "the one that left is gone")
    eventually(lambda: engine.metric("vllm:kv_cache_usage_perc") == 0, "and so are the blocks of its load")


def test_a_killed_engine_finds_what_it_had_and_not_what_broke(pair, cold, folder):
    """kill -9, then one block broken and one gone, after the engine looked at what it has."""
    engine, _ = pair
    prompts = [prompt_of(400, seed) for seed in (6, 7, 8)]
    answers, files = [], []
    for prompt in prompts:
        before = set(blocks_in(folder.store))
        answers.append(Answer(engine, prompt))
        eventually(lambda before=before: len(set(blocks_in(folder.store)) - before) == 12, "it is written")
        chain = chain_of(set(blocks_in(folder.store)) - before, folder.store)
        eventually(lambda chain=chain: set(chain) <= set(blocks_in(folder.disk)), "to disk as well")
        files.append([blocks_in(place)[chain[5]] for place in (folder.disk, folder.store)])
    engine.kill()
    engine.start()
    engine.wait_ready()

    again = Answer(engine, prompts[2])
    assert (again.loaded, again.cached) == (384, 384)
    again.check_like(answers[2])
    assert engine.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") == 384
    # What the disk had let go of is in the store.
    oldest = Answer(engine, prompt_of(800, seed=1))
    assert oldest.loaded == 768
    oldest.check_like(cold)

    for path in files[0]:
        data = bytearray(path.read_bytes())
        data[HEADER_BYTES + BLOCK_BYTES // 2] ^= 1
        path.write_bytes(data)
    for path in files[1]:
        path.unlink()
    for prompt, answer in zip(prompts[:2], answers[:2], strict=True):
        recomputed = Answer(engine, prompt)
        assert recomputed.loaded == 384, "it was believed to be there"
        recomputed.check_like(answer)
    assert counted(engine, "corrupt", "disk") == 1
    assert counted(engine, "corrupt", "store") == 1
    assert engine.log.read_text(errors="replace").count("1 request(s) rescheduled (224 tokens affected)") == 2
    engine.reset_cache()
    for prompt, answer in zip(prompts[:2], answers[:2], strict=True):
        healed = Answer(engine, prompt)
        assert healed.loaded == 384
        healed.check_like(answer)
    assert counted(engine, "corrupt", "disk") == 1, "the computed block was stored in its place"


def chain_of(ids: set[bytes], place: Path) -> list[bytes]:
    """Ids of one prompt's blocks in order, by what the headers say of parents."""
    after = {}
    for content_id, path in blocks_in(place).items():
        if content_id in ids:
            after[decode_header(path.read_bytes()[:HEADER_BYTES]).parent] = content_id
    chain, at = [], None
    while at in after:
        at = after[at]
        chain.append(at)
    assert set(chain) == ids
    return chain


def test_a_request_that_is_frozen_over_a_reset_goes_on_and_stores_nothing_old(pair):
    """As an update of weights does it: pause, clear, go on. What it computes anew is stored, and right."""
    engine, _ = pair
    prompt, long = prompt_of(200, seed=10), {"max_tokens": 60, "ignore_eos": True}
    whole = Answer(engine, prompt, cache_salt="not paused", **long)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Answer, engine, prompt, **long)
        eventually(lambda: engine.metric("vllm:num_requests_running") == 1, "it runs")
        engine.ask("/pause", {}, mode="keep", clear_cache="true")
        frozen = not asked.done()
        engine.ask("/resume", {})
        asked.result().check_like(whole)
    assert frozen, "it was paused too late"
    engine.reset_cache()
    again = Answer(engine, prompt, **long)
    assert again.loaded == 192
    again.check_like(whole)


def test_a_reset_of_all_is_one_and_the_gateway_knows_what_lies_where(pair, cold, folder, start_gateway):
    engine, second = pair
    assert engine.send("/reset_prefix_cache", {}, reset_external="true").json()["success"]
    engine.reset_cache()
    computed = Answer(engine, prompt_of(800, seed=1))
    assert (computed.loaded, computed.cached) == (0, 0)
    computed.check_like(cold)
    second.reset_cache()
    assert Answer(second, prompt_of(800, seed=1)).loaded == 768, "the store is the other engine's as well"

    gateway = start_gateway(engine, second)
    cache = gateway.settle(engine)
    on_disk = len(blocks_in(folder.disk))
    assert on_disk == 25, "what was there before is gone"
    copies = cache.below["STORAGE"]
    assert sum(copies.values()) == 2 * on_disk, "on disk and in the store"
    assert len(cache.keys("CPU")) == counted(engine, "blocks", "host") == 25
    for one, said in ((engine, cache), (second, gateway.settle(second))):
        said.check_names()
        for medium in ("CPU", "STORAGE"):
            assert gateway.known_below(one, medium) == said.keys(medium)
        assert gateway.known_keys(one) == said.keys()
    assert len(gateway.known_below(second, "STORAGE")) >= 24

    lives = {one.url: gateway.view(one).epoch for one in (engine, second)}
    for seed in (1, 11, 12, 1):
        body = {"model": MODEL, "prompt": prompt_of(800, seed), "max_tokens": 4, "temperature": 0}
        usage = gateway.ask("/v1/completions", body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (768 if seed == 1 else 0)
    for one in (engine, second):
        assert gateway.view(one).up
        assert gateway.view(one).epoch == lives[one.url], "requests and their events end no life"

"""The index of an engine that a gateway follows is that engine's cache, whatever happens to it."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm_harness import BLOCK, MODEL, Engine, EngineCache, GatewayThread, words

from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import Prompt, PromptReader
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
Body = dict[str, Any]


def mixed_requests(count: int, seed: int) -> Iterator[tuple[str, Body]]:
    """Chats with shared beginnings, conversations that go on, texts, token ids, salts, and repeats."""
    chance = random.Random(seed)
    beginnings = [words([seed, "beginning", n, *range(100 + 40 * n)]) for n in range(5)]
    conversations: list[list[dict[str, str]]] = [[] for _ in range(6)]
    sent: list[tuple[str, Body]] = []
    for number in range(count):
        text = words([seed, number, *range(chance.randrange(1, 60))])
        body: Body = {"model": MODEL, "max_tokens": chance.choice([1, 2, 5, 12, 40]), "temperature": 0}
        body["ignore_eos"] = True
        path = CHAT
        match chance.choice(["shared", "shared", "conversation", "conversation", "text", "ids", "again"]):
            case "again" if sent:
                yield chance.choice(sent)
                continue
            case "conversation":
                messages = chance.choice(conversations)
                if len(messages) > 12:
                    messages.clear()
                messages += [{"role": "user", "content": text}]
                body["messages"] = list(messages)
                messages += [{"role": "assistant", "content": words([seed, "answer", number, *range(12)])}]
            case "text":
                path = COMPLETION
                body["prompt"] = chance.choice(beginnings) + " " + text
            case "ids":
                path = COMPLETION
                body["prompt"] = [chance.randrange(20, 49_000) for _ in range(chance.randrange(1, 200))]
            case _:
                system = {"role": "system", "content": chance.choice(beginnings)}
                body["messages"] = [system, {"role": "user", "content": text}]
        if chance.random() < 0.3:
            body["cache_salt"] = chance.choice(["tenant-a", "tenant-b"])
        sent.append((path, body))
        yield path, body


def play(gateway: GatewayThread, requests: list[tuple[str, Body]]) -> None:
    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(gateway.ask, path, body) for path, body in requests]:
            future.result()


def check_equal(gateway: GatewayThread, engine: Engine) -> EngineCache:
    cache = gateway.settle(engine)
    cache.check_names()
    view = gateway.view(engine)
    assert (view.grade, view.suspect) == ("exact", None)
    known = gateway.known_keys(engine)
    assert len(known) == len(cache.blocks) == view.blocks
    assert known == cache.keys()
    return cache


@pytest.fixture(scope="module")
def reader(model) -> PromptReader:
    tokenizer = Tokenizer.load(model)
    return PromptReader(tokenizer, ChatTemplate.load(model, tokenizer), block_tokens=BLOCK)


def check_hits(
    gateway: GatewayThread, engine: Engine, reader: PromptReader, requests: list[tuple[str, Body]]
) -> tuple[int, int]:
    """What the index says of prompts is what the engine finds of them; (whole misses, hits) seen."""
    misses = hits = 0
    for path, body in requests:
        prompt: Prompt = reader.read(parse_request(path, _encoded(body)))
        known = gateway.known_keys(engine)
        run = next((i for i, key in enumerate(prompt.keys) if key not in known), len(prompt.keys))
        usage = engine.ask(path, body | {"max_tokens": 1})["usage"]
        assert usage["prompt_tokens"] == prompt.prompt_tokens
        # An engine always computes the last token.
        most = (prompt.prompt_tokens - 1) // BLOCK
        assert usage["prompt_tokens_details"]["cached_tokens"] == min(run, most) * BLOCK
        misses, hits = misses + (run == 0 and most > 0), hits + (run > 0)
        check_equal(gateway, engine)
    return misses, hits


def _encoded(body: Body) -> bytes:
    return json.dumps(body).encode()


def test_the_index_equals_the_cache_through_evictions_a_reset_and_a_restart(
    engines, start_gateway, reader: PromptReader
):
    engine = engines[0]
    engine.reset_cache()
    gateway = start_gateway(engine)
    requests = list(mixed_requests(200, seed=4))

    play(gateway, requests[:120])
    cache = check_equal(gateway, engine)
    assert cache.removed > 100, "the pool was meant to be too small"
    assert len({salt for salt, _ in cache.chains.values()}) == 3
    chosen = random.Random(4).sample(requests[:60], 6) + requests[112:118]
    misses, hits = check_hits(gateway, engine, reader, chosen)
    assert misses >= 2
    assert hits >= 2

    engine.reset_cache()
    assert check_equal(gateway, engine).cleared >= 1
    play(gateway, requests[120:160])
    check_equal(gateway, engine)

    lives = gateway.view(engine).epoch
    engine.stop()
    engine.start()
    engine.wait_ready()
    gateway.wait_exact(engine)
    play(gateway, requests[160:])
    cache = check_equal(gateway, engine)
    assert cache.cleared == 0, "this engine is a new one"
    assert gateway.view(engine).epoch == lives + 1
    check_hits(gateway, engine, reader, requests[100:104] + requests[194:198])
    gateway.check_empty()


def test_a_gateway_that_comes_later_learns_the_whole_cache(engines, start_gateway):
    engine = engines[1]
    engine.reset_cache()
    for path, body in mixed_requests(12, seed=5):
        engine.ask(path, body)
    gateway = start_gateway(engine)
    assert check_equal(gateway, engine).blocks

"""Conversations that need four times what the device holds: how much of their prompts is found."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tiers.client import ask, random_tokens

from sumibi.bench import report
from sumibi.core.prefixcache import PrefixCache
from sumibi.demo.lone import LoneEngine

BLOCK_TOKENS = 32
BLOCK_BYTES = 737_280
CONVERSATIONS = 8
CONTEXT_TOKENS = 1_664
TURN_TOKENS = 128
TURNS = 7
KV_BLOCKS = 152
WORKING_SET = CONVERSATIONS * (CONTEXT_TOKENS + TURNS * TURN_TOKENS) // BLOCK_TOKENS
"""Blocks of all conversations at their ends: 640, 4.2 times the device's."""
HOST_BYTES = 2 * KV_BLOCKS * BLOCK_BYTES
DISK_BYTES = 2 * WORKING_SET * BLOCK_BYTES
SEED = 20_262


@dataclass(frozen=True, slots=True)
class Found:
    """What one engine found of every prompt, in order."""

    cached: list[int]
    prompts: list[int]
    by_tier: dict[str, int]

    @property
    def rate(self) -> float:
        """Cached share of all prompt tokens."""
        return sum(self.cached) / sum(self.prompts)


def requests() -> list[list[int]]:
    """Prompts of all conversations, in one random order of their turns."""
    order = [conversation for conversation in range(CONVERSATIONS) for _ in range(TURNS)]
    random.Random(SEED).shuffle(order)
    histories = [random_tokens(f"context {each}", CONTEXT_TOKENS) for each in range(CONVERSATIONS)]
    prompts = []
    for at, conversation in enumerate(order):
        histories[conversation] = histories[conversation] + random_tokens(f"turn {at}", TURN_TOKENS)
        prompts.append(histories[conversation])
    return prompts


def arithmetic(prompts: list[list[int]], capacity: int) -> Found:
    """What an LRU cache of `capacity` blocks finds, by the rules: whole blocks, one token is computed."""
    cache = PrefixCache(capacity)
    cached = []
    for at, prompt in enumerate(prompts):
        ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        keys = [hash(tuple(prompt[:end])) for end in ends]
        cached.append(min(cache.touch(keys, float(at)), (len(prompt) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS)
    return Found(cached, [len(prompt) for prompt in prompts], {})


def played(engine: LoneEngine, prompts: list[list[int]], say: Callable[[str], None], name: str) -> Found:
    """What an engine finds, one request at a time."""
    cached, lengths = [], []
    by_tier: dict[str, int] = {}
    for at, prompt in enumerate(prompts, 1):
        answer = ask(engine.url, engine.model, prompt, 1)
        cached.append(answer.cached_tokens)
        lengths.append(answer.prompt_tokens)
        for tier, tokens in answer.cached_by_tier.items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
        if at % 8 == 0:
            say(f"{name}: {at} of {len(prompts)} prompts, {sum(cached) / sum(lengths):.3f} found")
    return Found(cached, lengths, by_tier)


def measure(
    model: Path, directory: Path, threads: int, cmd: str, say: Callable[[str], None]
) -> tuple[list[report.Figure], dict[str, Found]]:
    """Figures, and what was found by whom."""
    prompts = requests()
    tiers = {"host_bytes": HOST_BYTES, "disk": {"path": str(directory / "kv-sets"), "bytes": DISK_BYTES}}
    found = {
        "device alone, by arithmetic": arithmetic(prompts, KV_BLOCKS),
        "unbounded, by arithmetic": arithmetic(prompts, 10 * WORKING_SET),
    }
    with LoneEngine(model, kv_blocks=WORKING_SET + 64, threads=threads) as engine:
        found["an engine that holds all"] = played(engine, prompts, say, "all on the device")
    flags = ["--max-model-len", "4096"]
    with LoneEngine(model, kv_blocks=KV_BLOCKS, threads=threads, tiers=tiers, flags=flags) as engine:
        found["tiers"] = played(engine, prompts, say, "tiers")
    if found["an engine that holds all"].cached != found["unbounded, by arithmetic"].cached:
        raise SystemExit("an engine that holds everything does not find what arithmetic says")
    figures = [
        report.figure(f"token hit rate: {name}", [each.rate], "", cmd=cmd) for name, each in found.items()
    ]
    unbounded = found["unbounded, by arithmetic"].rate
    name = "token hit rate: tiers / unbounded"
    share = found["tiers"].rate / unbounded
    figures.append(report.figure(name, [share], "x", at_least=0.95, baseline=unbounded, cmd=cmd))
    total = sum(found["tiers"].cached)
    for tier, tokens in found["tiers"].by_tier.items():
        figures.append(report.figure(f"found with tiers: share from {tier}", [tokens / total], "", cmd=cmd))
    return figures, found

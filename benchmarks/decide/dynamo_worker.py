"""Dynamo's index as a contestant, in its own environment: the same content, fed as its events."""

import json
from importlib.metadata import version

from benchmarks.decide import content
from benchmarks.decide.worker import Tasks, each_us, serve
from dynamo._core import RadixTree

REPEATS = 20


def _event(number: int, parent: int | None, keys: list[int]) -> bytes:
    blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
    return json.dumps(
        {"event_id": number, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}
    ).encode()


def _make() -> tuple[Tasks, str]:
    held = content.make()
    tree = RadixTree()
    for number, (endpoint, parent, keys) in enumerate(content.stored(held)):
        tree.apply_event(endpoint, _event(number, parent, keys))
    hot = content.hot_prompts(held, content.MATCH_BLOCKS)
    usual = content.prompts(held, content.SEED, 100, content.MATCH_BLOCKS)
    find = tree.find_matches
    ends = {len(find(prompt).scores) for prompt in hot}
    assert ends == {content.ENDPOINTS}, ends
    tasks: Tasks = {
        "match usual": lambda _: each_us(find, usual * 2),
        "match hot": lambda _: each_us(find, hot * REPEATS),
        "reach": lambda _: {"blocks": sum(sum(find(prompt).scores.values()) for prompt in usual + hot)},
    }
    return tasks, f"ai-dynamo-runtime {version('ai-dynamo-runtime')}, RadixTree.find_matches"


if __name__ == "__main__":
    serve(_make)

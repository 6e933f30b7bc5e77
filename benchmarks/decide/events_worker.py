"""KV events from wire bytes to the index, and what an entry takes: our router alone, in its own process."""

import gc
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.decide import content
from benchmarks.decide.worker import Results, Tasks, serve
from xxhash import xxh3_64_intdigest

import sumibi
from sumibi.core.kvevents import BlockRemoved, BlockStored, KVEvent, decode_batch, encode_batch
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import EndpointUp, EngineBatch
from sumibi.routing.router import Router

ENGINE_BLOCK = 16
BLOCKS_AN_EVENT = 16
EVENTS = 6_000
"""In a round."""
TURN_EVENTS = 12
"""Events with which one chain grows."""
ENDPOINTS = 8


def _router(block_tokens: int, endpoints: int = ENDPOINTS) -> Router:
    router = Router(RouterConfig(max_index_blocks=4_000_000))
    # The first endpoint that names a block size fixes the model's.
    for name, tokens in [("first", block_tokens), *((str(i), ENGINE_BLOCK) for i in range(endpoints))]:
        router.handle(
            EndpointUp(
                t=0.0, endpoint=name, models=["m"], engine_block_tokens=tokens, has_events=name != "first"
            )
        )
    assert router.block_tokens("m") == block_tokens
    return router


def _chains(rng: random.Random, events: int) -> Iterator[BlockStored]:
    """Stored events of growing conversations, random hashes and tokens."""
    parent = None
    tokens = rng.choices(range(150_000), k=1 << 16)
    for number in range(events):
        if number % TURN_EVENTS == 0:
            parent = None
        hashes = [rng.getrandbits(64) for _ in range(BLOCKS_AN_EVENT)]
        start = rng.randrange(len(tokens) - BLOCKS_AN_EVENT * ENGINE_BLOCK)
        ids = [number, *tokens[start + 1 : start + BLOCKS_AN_EVENT * ENGINE_BLOCK]]
        yield BlockStored(hashes, parent, ids, ENGINE_BLOCK)
        parent = hashes[-1]


class Feeder:
    """Bytes of numbered batches to endpoints, as the gateway hands them on."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._next: dict[int, int] = {}

    def take(self, payloads: list[tuple[int, bytes]]) -> float:
        """CPU seconds."""
        handle, numbers = self._router.handle, self._next
        cpu = time.process_time()
        for endpoint, payload in payloads:
            seq = numbers.get(endpoint, 0)
            numbers[endpoint] = seq + 1
            digest = xxh3_64_intdigest(payload)
            batch = decode_batch(seq, payload)
            handle(EngineBatch(t=0.0, endpoint=str(endpoint), batch=batch, digest=digest))
        return time.process_time() - cpu


def rate(block_tokens: int, number: int, *, removed: bool) -> Results:
    """Engine blocks per CPU second; `removed`: as many leave as come, one event for each, as vLLM says it."""
    rng = random.Random(content.SEED + number)
    router = _router(block_tokens)
    feeder = Feeder(router)
    batches = []
    resident: list[list[list[int]]] = [[] for _ in range(ENDPOINTS)]
    for at, event in enumerate(_chains(rng, EVENTS)):
        endpoint = at // TURN_EVENTS % ENDPOINTS
        events: list[KVEvent] = [event]
        resident[endpoint].append(event.block_hashes)
        if removed and len(resident[endpoint]) > 2 * TURN_EVENTS:
            chain = resident[endpoint]
            # The end of the oldest chain goes first.
            oldest = chain.pop(TURN_EVENTS - 1 - len(batches) % TURN_EVENTS)
            events = [*(BlockRemoved([block]) for block in reversed(oldest)), event]
        batches.append((endpoint, encode_batch(0.0, events)))
    gc.collect()
    cpu_s = feeder.take(batches)
    count = router.counters()
    assert count.skipped_events == count.orphan_blocks_now == 0, count
    if not removed:
        assert count.index_blocks_now == EVENTS * BLOCKS_AN_EVENT * ENGINE_BLOCK // block_tokens, count
    return {"blocks_per_cpu_s": EVENTS * BLOCKS_AN_EVENT / cpu_s}


def memory(block_tokens: int, entries: int, holders: int) -> Results:
    """Resident bytes an entry (a block at an endpoint): every block is at `holders` endpoints."""
    rng = random.Random(content.SEED)
    router = _router(block_tokens, 64)
    feeder = Feeder(router)
    events = entries * block_tokens // (BLOCKS_AN_EVENT * ENGINE_BLOCK) // holders
    feeder.take([(0, encode_batch(0.0, [event])) for event in _chains(rng, TURN_EVENTS)])
    base = router.counters().index_blocks_now
    gc.collect()
    before = _resident_bytes()
    for at, event in enumerate(_chains(rng, events)):
        for other in range(holders):
            endpoint = (at // TURN_EVENTS + other) % 64
            feeder.take([(endpoint, encode_batch(0.0, [event]))])
    gc.collect()
    taken = _resident_bytes() - before
    blocks = router.counters().index_blocks_now - base
    return {"bytes": taken / (blocks * holders), "blocks": blocks}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _make() -> tuple[Tasks, str]:
    tasks: Tasks = {
        "events 16": lambda number: rate(16, number, removed=False),
        "events 64": lambda number: rate(64, number, removed=False),
        "events full": lambda number: rate(16, number, removed=True),
        "memory one": lambda _: memory(16, 1_000_000, 1),
        "memory four": lambda _: memory(16, 1_000_000, 4),
        "memory 64": lambda _: memory(64, 250_000, 1),
    }
    return tasks, f"sumibi {sumibi.__version__}"


if __name__ == "__main__":
    serve(_make)

"""Our router as a contestant: an index of a million blocks, live loads, decisions."""

import gc
import time
from collections import deque

from benchmarks.decide import content
from benchmarks.decide.worker import Results, Tasks, each_us, serve, spread_us

import sumibi
from sumibi.core.latency import LatencyModel
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatch,
    Dispatched,
    EndpointUp,
    Finished,
    FinishReason,
    FirstToken,
    KeysAdded,
    KeysRemoved,
    Residency,
)
from sumibi.routing.router import Router

REPEATS = 20
DECISIONS = 500
"""In a round."""
DECODING, PREFILLING = 12.0, 0.5
"""Requests at each endpoint, on average: half of the time it computes a prefill."""
FILLING = round(1.5 * (DECODING + PREFILLING) * content.ENDPOINTS)
"""Requests before the first that is timed."""
LATEST = 0.1
"""The index grows by this part of its blocks at most: engines evict as well."""
STEP_S = 0.02
"""Between arrivals: a prefill takes some 0.6 s then."""
HOLD_ABOVE_S = 600.0
"""Every request is placed when it comes: what is timed is always the same."""
KV_TOKENS = 1_770_000
LATENCY = LatencyModel(a_s=0.02, b_s=4.0e-5, q_s=2e-10, d0_s=0.02, d1_s=2e-4, d2_s=2e-9)
"""Of a large model on one node; what it is does not matter to the time of a decision."""


class Lab:
    """The router with its clock and the requests under way."""

    def __init__(self) -> None:
        self.router = Router(RouterConfig(max_index_blocks=2 * content.BLOCKS, hold_above_s=HOLD_ABOVE_S))
        self.t = 0.0
        self._number = 0
        self._prefilling: deque[tuple[Dispatch, list[int]]] = deque()
        self._decoding: deque[Dispatch] = deque()
        self._added: deque[tuple[str, list[int]]] = deque()
        """Blocks stored since the start, by endpoint, the oldest first."""
        for endpoint in range(content.ENDPOINTS):
            self._tell(
                EndpointUp(
                    t=0.0,
                    endpoint=_name(endpoint),
                    models=["m"],
                    engine_block_tokens=content.BLOCK_TOKENS,
                    kv_tokens=KV_TOKENS,
                    max_sequences=256,
                    has_events=True,
                    latency=LATENCY,
                )
            )

    def _blocks(self) -> int:
        return len(self.router._index)

    def _tell(self, event):
        return self.router.handle(event)

    def evict(self, endpoint: str, keys: list[int]) -> None:
        """KV events tell that these blocks are gone, the deepest first."""
        self._tell(Residency(t=self.t, endpoint=endpoint, changes=[KeysRemoved("gpu", keys[::-1])]))

    def store(self, endpoint: str, parent: int | None, keys: list[int]) -> None:
        """KV events told of these blocks."""
        changes = [KeysAdded("gpu", parent, keys)]
        self._tell(Residency(t=self.t, endpoint=endpoint, changes=changes))

    def decide(self, keys: list[int]) -> tuple[int, int, int]:
        """A request arrives and is placed: nanoseconds of match, price and reserve, wall and CPU; and CPU of
        what the router puts off until it has answered.
        """
        self.t += STEP_S
        self._number += 1
        name = f"r{self._number}"
        arrived = Arrived(
            t=self.t,
            request=name,
            model="m",
            keys=keys[: content.PROMPT_TOKENS // content.BLOCK_TOKENS],
            prompt_tokens=content.PROMPT_TOKENS,
            max_tokens=1000,
            stream=True,
        )
        admitted = Admitted(t=self.t, request=name)
        handle = self.router.handle
        cpu = time.process_time_ns()
        begun = time.perf_counter_ns()
        handle(arrived)
        instructions = handle(admitted)
        wall = time.perf_counter_ns() - begun
        cpu = time.process_time_ns() - cpu
        (dispatch,) = [each for each in instructions if isinstance(each, Dispatch)]
        fields = {"request": name, "attempt": dispatch.attempt}
        dispatched = Dispatched(t=self.t, endpoint=dispatch.endpoint, **fields)
        after = time.process_time_ns()
        handle(dispatched)
        after = time.process_time_ns() - after
        self._prefilling.append((dispatch, keys))
        return wall, cpu, after

    def go_on(self) -> None:
        """The oldest prefill ends and its blocks are announced; the oldest decode ends."""
        if len(self._prefilling) > PREFILLING * content.ENDPOINTS:
            dispatch, keys = self._prefilling.popleft()
            self._tell(FirstToken(t=self.t, request=dispatch.request, attempt=dispatch.attempt))
            full = keys[: content.PROMPT_TOKENS // content.BLOCK_TOKENS]
            before = self._blocks()
            self.store(dispatch.endpoint, None, full)
            # What is new is the prompt's end; the index stays as large as it was, but for the latest of them.
            if added := self._blocks() - before:
                self._added.append((dispatch.endpoint, full[-added:]))
            while self._blocks() > content.BLOCKS * (1 + LATEST):
                self.evict(*self._added.popleft())
            self._decoding.append(dispatch)
        if len(self._decoding) > DECODING * content.ENDPOINTS:
            dispatch = self._decoding.popleft()
            self._tell(
                Finished(
                    t=self.t,
                    request=dispatch.request,
                    attempt=dispatch.attempt,
                    reason=FinishReason.STOP,
                    answered=True,
                    prompt_tokens=content.PROMPT_TOKENS,
                    output_tokens=300,
                )
            )


def _name(endpoint: int) -> str:
    return f"http://engine-{endpoint}:8000#0"


def _make() -> tuple[Tasks, str]:
    held = content.make()
    gc.collect()
    gc.freeze()  # a gateway has no such lists for its collector to walk
    lab = Lab()
    for endpoint, parent, keys in content.stored(held):
        lab.store(_name(endpoint), parent, keys)
    blocks = lab.router.counters().index_blocks_now
    assert blocks == content.BLOCKS, blocks
    hot = content.hot_prompts(held, content.MATCH_BLOCKS)
    usual = content.prompts(held, content.SEED, 100, content.MATCH_BLOCKS)
    index = lab.router._index
    everyone = (1 << len(index.counts)) - 1
    filling = content.prompts(held, content.SEED + 1, FILLING, content.PROMPT_BLOCKS)

    def match(keys):
        return index.match(keys, content.MATCH_BLOCKS, everyone)

    def reach(number: int) -> Results:
        return {
            "blocks": sum(blocks * here.bit_count() for keys in usual + hot for blocks, here in match(keys))
        }

    def decide(number: int, *, collector: bool = True) -> Results:
        """Decisions; without the collector: it runs only between them."""
        some = content.prompts(held, content.SEED + 2 + number, DECISIONS, content.PROMPT_BLOCKS)
        gc.collect()
        walls, cpus, afters = [], [], []
        for keys in some:
            if not collector:
                gc.disable()
            wall_ns, cpu_ns, after_ns = lab.decide(keys)
            gc.enable()
            walls.append(wall_ns)
            cpus.append(cpu_ns)
            afters.append(after_ns)
            lab.go_on()
        cpu = {f"cpu_{name}": value for name, value in spread_us(cpus).items()}
        after = {f"after_{name}": value for name, value in spread_us(afters).items()}
        return spread_us(walls) | cpu | after

    tasks: Tasks = {
        "match usual": lambda _: each_us(match, usual * 2),
        "match hot": lambda _: each_us(match, hot * REPEATS),
        "reach": reach,
        "decide": decide,
        "decide without collector": lambda number: decide(DECISIONS + number, collector=False),
    }
    first = tasks["reach"](0)
    for keys in filling:
        lab.decide(keys)
        lab.go_on()
    tasks["reach"] = lambda _: first
    return tasks, f"sumibi {sumibi.__version__}, {index.stretches} stretches"


if __name__ == "__main__":
    serve(_make)

"""What is asked of the sides: answers that stream while long prompts keep arriving.

Two ways to ask. A *burst*: so many streams at all times, and so many long prompts waiting for their first
token at all times, so every engine that prefills has something to prefill. A *load*: requests sent at given
times whatever became of those before them, the same for every side.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.pd.sides import Running, busy_s, step_tokens, tree_cpu_s

from sumibi.demo.streams import Arrival, Heard, Kind, keep, play

STREAM = Kind("stream", prompt_tokens=64, output_tokens=200)
LONG = Kind("long", prompt_tokens=2_000, output_tokens=32)
STREAMS, PROMPTS = 4, 4
"""Of a burst: at all times, on both engines together."""
STREAM_RATE = 0.3
"""Streams a second, of a load: two at a time if steps take 30 ms."""
SETTLE_S = 3.0
"""A burst has begun so long before it is measured."""
_STEP_S = 10.0
"""Longest wait for the end of a step."""
_IDLE_S = 120.0
"""Until engines are idle after what is under way was cut off: the longest step, on a very busy machine."""


@dataclass(slots=True)
class Window:
    """One side for a while under one load."""

    side: str
    load: str
    heard: list[Heard]
    begun_s: float
    """Clock of `heard`: what came before is not measured."""
    lasted_s: float
    cpu_s: dict[str, float]
    """By process."""
    step_tokens_per_s: float
    """Computed by both engines."""
    others_cores: float = 0.0
    """What everything else used of the machine: no engine, gateway or load of this benchmark."""
    decisions: dict[str, float] = field(default_factory=dict)
    """Requests by what was decided: whole, or pair."""

    def of(self, kind: Kind) -> list[Heard]:
        """Its requests of a kind."""
        return [one for one in self.heard if one.kind is kind]

    def gaps_s(self, kind: Kind) -> list[float]:
        """Between tokens, from the beginning of the measurement on."""
        return [
            gap
            for one in self.of(kind)
            for gap, at_s in zip(one.gaps_s, one.token_s[1:], strict=True)
            if at_s - gap >= self.begun_s
        ]

    def ttfts_s(self, kind: Kind) -> list[float]:
        """Of first tokens that came within the measurement."""
        return [one.ttft_s for one in self.of(kind) if one.token_s and one.token_s[0] >= self.begun_s]

    @property
    def output_tokens(self) -> int:
        """That came within the measurement."""
        return sum(at_s >= self.begun_s for one in self.heard for at_s in one.token_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second: all tokens of steps but those that were sampled from."""
        return self.step_tokens_per_s - self.output_tokens / self.lasted_s


def burst(up: Running, lasts_s: float, seed: str) -> Window:
    """A burst of `SETTLE_S` and `lasts_s`, which is measured."""
    heard: list[Heard] = []
    books, edges = [], []

    async def measured() -> None:
        asking = asyncio.ensure_future(
            keep(
                up.target,
                streams=[STREAM] * STREAMS,
                prompts=[LONG] * PROMPTS,
                seed=seed,
                lasts_s=SETTLE_S + lasts_s + 3 * _STEP_S,
                heard=heard,
            )
        )
        await asyncio.sleep(SETTLE_S)
        edges.append(await _edges(up))
        books.append(await asyncio.to_thread(_Books.of, up))
        await asyncio.sleep(lasts_s)
        books.append(await asyncio.to_thread(_Books.of, up))
        edges.append(await _edges(up))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(measured())
    begun, ended = books
    for one in heard:  # what came after the books were closed
        one.token_s = [at_s for at_s in one.token_s if at_s <= ended.at_s]
    rate = sum((b.tokens - a.tokens) / (b.at_s - a.at_s) for a, b in zip(*edges, strict=True))
    window = _window(up, "burst", heard, begun, ended, rate)
    _until_idle(up)
    return window


class _Edge(NamedTuple):
    """The end of a step."""

    at_s: float
    tokens: float
    """Computed until then."""


async def _edges(up: Running) -> list[_Edge]:
    """The next end of a step of each engine: long steps would be counted wrongly at any other time."""
    return await asyncio.gather(*(asyncio.to_thread(_edge, url) for url in up.engines))


def _edge(url: str) -> _Edge:
    before, until_s = step_tokens(url), time.perf_counter() + _STEP_S
    while True:
        now, now_s = step_tokens(url), time.perf_counter()
        if now != before or now_s > until_s:  # an engine that has nothing to do has no steps
            return _Edge(now_s, now)
        time.sleep(0.03)


def arrivals(rate: float, lasts_s: float, seed: str) -> list[Arrival]:
    """Streams at their rate, long prompts at `rate` a second, each somewhere in its own stretch of time."""
    found = []
    for kind, each in ((STREAM, STREAM_RATE), (LONG, rate)):
        draw = random.Random(f"{seed}/{kind.name}")
        for number in range(round(lasts_s * each)):
            found.append(Arrival((number + draw.random()) / each, kind, f"{seed}/{kind.name}/{number}"))
    return found


def loaded(up: Running, rate: float, lasts_s: float, late_s: float, seed: str) -> Window:
    """A load of `lasts_s`; answers may come for `late_s` after the last request."""
    begun = _Books.of(up)
    heard = asyncio.run(play(up.target, arrivals(rate, lasts_s, seed), late_s=late_s))
    ended = _Books.of(up)
    steps = (sum(ended.step_tokens) - sum(begun.step_tokens)) / (ended.at_s - begun.at_s)
    window = _window(up, f"{rate:g}", heard, begun, ended, steps)
    _until_idle(up)
    return window


@dataclass(frozen=True, slots=True)
class _Books:
    """What processes have counted so far."""

    at_s: float
    cpu_s: dict[str, float]
    busy_s: float
    """Of all cores, by anybody."""
    own_s: float
    """By this process and all below it, the sides that wait included."""
    step_tokens: list[float]
    decisions: dict[str, float]

    @classmethod
    def of(cls, up: Running) -> "_Books":
        return cls(
            time.perf_counter(),
            up.cpu_s(),
            busy_s(),
            tree_cpu_s(),
            [step_tokens(url) for url in up.engines],
            up.decisions(),
        )


def _window(
    up: Running, load: str, heard: list[Heard], begun: _Books, ended: _Books, step_tokens_per_s: float
) -> Window:
    others_s = (ended.busy_s - begun.busy_s) - (ended.own_s - begun.own_s)
    return Window(
        side=up.side.name,
        load=load,
        heard=heard,
        begun_s=begun.at_s,
        lasted_s=ended.at_s - begun.at_s,
        cpu_s={name: cpu_s - begun.cpu_s[name] for name, cpu_s in ended.cpu_s.items()},
        others_cores=max(0.0, others_s / (ended.at_s - begun.at_s)),
        step_tokens_per_s=step_tokens_per_s,
        decisions={name: n - begun.decisions.get(name, 0.0) for name, n in ended.decisions.items()},
    )


def _until_idle(up: Running) -> None:
    until_s = time.monotonic() + _IDLE_S
    while up.busy():
        if time.monotonic() > until_s:
            raise SystemExit(f"{up.side.name}: engines are not idle {_IDLE_S:.0f} s after the load's end")
        time.sleep(0.1)

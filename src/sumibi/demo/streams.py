"""Many streamed answers at once, each with the time of every token, as a client's socket sees them.

Prompts are token ids, so nobody has to tokenise; answers have a fixed length. One thread: asyncio reads all
connections, and does little else, for it shares the machine with what it measures.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sumibi.core.errors import EngineUnavailable

_TOKENS = (32, 250)
"""Ordinary tokens of every vocabulary that is used here, the tiny model's too."""
_CONNECT_S = 10.0
_MAX_LINE_BYTES = 1 << 20


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_event = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that are alike but for their words."""

    name: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be sent `at_s` seconds after the beginning; equal `seed`s give equal prompts."""

    at_s: float
    kind: Kind
    seed: str


@dataclass(slots=True)
class Heard:
    """What came of one request. Times are of `time.perf_counter`."""

    kind: Kind
    asked_s: float
    token_s: list[float] = field(default_factory=list)
    """When each token was there."""
    error: str = ""
    """Empty if none was told; an answer that was cut off has fewer tokens than its kind."""

    @property
    def whole(self) -> bool:
        """Whether every token came."""
        return not self.error and len(self.token_s) == self.kind.output_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite if none came."""
        return self.token_s[0] - self.asked_s if self.token_s else float("inf")

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one token and the next."""
        return [after - before for before, after in pairwise(self.token_s)]


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    url: str
    model: str


async def ask(
    target: Target, kind: Kind, seed: str, heard: list[Heard], begun: asyncio.Event | None = None
) -> Heard:
    """Send one request and read its answer; it is in `heard` from the start. Errors are in the result.

    `begun` is set with the first token, or the end.
    """
    one = Heard(kind, time.perf_counter())
    heard.append(one)
    try:
        async for tokens in _tokens(target, kind, seed):
            one.token_s += [time.perf_counter()] * tokens
            if begun is not None:
                begun.set()
    except (OSError, EngineUnavailable, msgspec.MsgspecError, ValueError) as cause:
        one.error = str(cause) or type(cause).__name__
    finally:
        if begun is not None:
            begun.set()
    return one


async def play(target: Target, arrivals: Iterable[Arrival], *, late_s: float) -> list[Heard]:
    """Send each request at its time, whatever became of those before it, and wait for all answers: at most
    `late_s` after the last was sent, then what is missing is cut off.
    """
    heard: list[Heard] = []
    begun_s = time.perf_counter()
    under_way = []
    for arrival in sorted(arrivals, key=lambda each: each.at_s):
        await asyncio.sleep(max(0.0, begun_s + arrival.at_s - time.perf_counter()))
        under_way.append(asyncio.ensure_future(ask(target, arrival.kind, arrival.seed, heard)))
    await _end(under_way, late_s)
    return heard


async def keep(
    target: Target,
    *,
    streams: Sequence[Kind],
    prompts: Sequence[Kind],
    seed: str,
    lasts_s: float,
    heard: list[Heard] | None = None,
) -> list[Heard]:
    """A user for each of `streams` asks anew whenever an answer is whole, one for each of `prompts` whenever
    the first token of its last one is there. What is under way after `lasts_s` is cut off.
    """
    heard = [] if heard is None else heard
    readers: list[asyncio.Future[Heard]] = []

    async def user(number: int, kind: Kind, *, at_first: bool) -> None:
        for turn in count():
            begun = asyncio.Event()
            asking = asyncio.ensure_future(ask(target, kind, f"{seed}/{number}/{turn}", heard, begun))
            readers.append(asking)
            await (begun.wait() if at_first else asking)
            if asking.done() and asking.result().error:
                await asyncio.sleep(0.5)  # else a gateway that is down is asked a thousand times a second

    users = [(kind, False) for kind in streams] + [(kind, True) for kind in prompts]
    tasks = [
        asyncio.ensure_future(user(number, kind, at_first=at_first))
        for number, (kind, at_first) in enumerate(users)
    ]
    try:
        await _end(tasks, lasts_s)
    finally:
        await _end(readers, 0.0)
    return heard


def prompt(tokens: int, seed: str) -> list[int]:
    """Token ids; equal seeds give equal ones, others give others from the first token on."""
    draw = random.Random(seed)
    return [draw.randrange(*_TOKENS) for _ in range(tokens)]


async def _end(tasks: Sequence["asyncio.Future[Any]"], after_s: float) -> None:
    """Wait so long, then cut off what is left; at once, if this is cut off itself."""
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=after_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tokens(target: Target, kind: Kind, seed: str) -> AsyncIterator[int]:
    """How many tokens each event of the answer brings. Raises OSError, EngineUnavailable, MsgspecError."""
    parts = urlsplit(target.url)
    body = msgspec.json.encode(
        {
            "model": target.model,
            "prompt": prompt(kind.prompt_tokens, seed),
            "max_tokens": kind.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,  # else a token whose text is not certain yet has no event
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=_MAX_LINE_BYTES)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if status.split()[1:2] != [b"200"]:
            said = (await reader.read(2_000)).decode(errors="replace")
            raise EngineUnavailable(f"the gateway answered {status.decode(errors='replace').strip()}: {said}")
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue  # headers, sizes of chunks, empty lines, the end
            event = _event.decode(line[6:])
            if event.error is not None:
                raise EngineUnavailable(f"the stream ended with an error: {event.error}")
            if tokens := sum(len(choice.token_ids) for choice in event.choices):
                yield tokens
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

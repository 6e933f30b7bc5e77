"""What a soak asks of a gateway: ordinary requests, requests that ask for trouble, clients that misbehave.

Every request knows what its client may see of it. What goes wrong with a whole engine is known by its time:
while an engine comes and goes, requests that were under way there may break, and no others.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.client import Client, chat, request_bytes
from benchmarks.soak.engine import reset

CLIENTS = 30
PAUSE_S = 0.3
"""Mean of a client's pause between requests: some 60 requests a second in all."""
TROUBLE = 0.15
"""Part of the requests that ask for trouble."""
MISBEHAVIOUR = 0.05
"""Part of the requests whose client vanishes, half-closes, dribbles or sends no request."""
AFTERMATH_S = 6.0
"""How long after an engine's fault its requests may still be seen to break: longer than any limit."""
_TEXTS = 1000
"""Different prompts: more than the engines' caches hold, and soon seen by all that remembers prompts. That
endless distinct ones are forgotten in time is tested elsewhere (F32)."""

EXPECTED: dict[str, tuple[str, str]] = {
    "well": ("ok", "ok"),
    "hang": ("ok", "ok"),
    "reset": ("ok", "ok"),
    "garbage-status": ("ok", "ok"),
    "429": ("ok", "ok"),
    "500": ("ok", "ok"),
    "400": ("400", "400"),
    "hang-midway": ("cut", "error event: timeout"),
    "reset-midway": ("cut", "error event: engine_gone"),
    "close-midway": ("cut", "error event: engine_gone"),
    "length-too-long": ("cut", "cut"),
    "garbage-chunk": ("error event: engine_gone", "error event: engine_gone"),
    "error-in-stream": ("error event: the engine's", "error event: the engine's"),
    "length-too-short": ("ok", "ok"),
    "garbage-stream": ("ok", "ok"),
    "usage-negative": ("ok", "ok"),
    "usage-huge": ("ok", "ok"),
    "usage-contradicts": ("ok", "ok"),
}
"""Trouble -> what a client sees of it without streaming and with. Whatever happens before a byte of the
answer costs a second try and nothing else."""
_TOO_EARLY = ("reset-midway", "garbage-chunk")
"""Of these the first byte may be lost with what breaks the answer: then it is a second try, too."""
BROKEN = {"cut", "502", "503", "504", "error event: engine_gone", "error event: timeout"}
"""What may be seen beside that of a request that was under way while an engine came and went."""


@dataclass(slots=True)
class Log:
    """What clients saw, and when engines were in trouble."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    disturbed_until: float = 0.0
    """Requests under way at any time before this may break (monotonic seconds)."""

    def disturb(self, what: str, lasts_s: float = 0.0) -> None:
        """An engine is in trouble from now on for so long."""
        self.faults[what] += 1
        self.disturbed_until = max(self.disturbed_until, time.monotonic() + lasts_s + AFTERMATH_S)


async def client(port: int, draw: random.Random, log: Log, until: float) -> None:
    """One client's life."""
    mine = Client(port)
    while time.monotonic() < until:
        await asyncio.sleep(draw.uniform(0, 2 * PAUSE_S))
        if draw.random() < MISBEHAVIOUR:
            await _misbehave(port, draw, log)
            continue
        name = draw.choice(list(EXPECTED)) if draw.random() < TROUBLE else "well"
        body = _request(draw, name)
        began = time.monotonic()
        try:
            outcome = (await mine.ask(body, within_s=40.0)).outcome
        except TimeoutError:
            outcome = "no answer"
            mine.close()
        log.outcomes[outcome] += 1
        allowed = {EXPECTED[name][body["stream"]]}
        if name in _TOO_EARLY:
            allowed.add("ok")
        if began < log.disturbed_until:
            allowed |= BROKEN
        if outcome not in allowed:
            when = f"{began - log.disturbed_until:.1f} s after the last fault"
            log.unexpected.append(f"{name}, stream {body['stream']}: {outcome} ({when})")
    mine.close()


def _request(draw: random.Random, trouble: str) -> dict[str, Any]:
    number = draw.randrange(_TEXTS)
    text = f"text {number} " * (1 + number % 600)
    return chat(
        text,
        trouble=trouble,
        stream=draw.random() < 0.6,
        max_tokens=draw.choice((1, 5, 20)),
        pace_s=draw.choice((0.0, 0.01, 0.05)),
    )


async def _misbehave(port: int, draw: random.Random, log: Log) -> None:
    """Leave without a word, in one of many ways."""
    body = request_bytes(chat(f"{draw.randrange(1000)}", stream=True, max_tokens=200, pace_s=0.05))
    way = draw.choice(("vanishes", "resets", "half-closes", "dribbles", "sends garbage", "sends half"))
    log.outcomes[f"client {way}"] += 1
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(6.0):
                match way:
                    case "sends garbage":
                        writer.write(draw.randbytes(200))
                        await reader.read()
                    case "sends half":
                        writer.write(body[: draw.randrange(1, len(body))])
                        await asyncio.sleep(draw.uniform(0, 3))
                    case "dribbles":
                        for at in range(0, len(body), 3):
                            if writer.transport.is_closing():
                                break
                            writer.write(body[at : at + 3])
                            await asyncio.sleep(0.1)
                    case _:
                        writer.write(body)
                        if draw.random() < 0.8:
                            await reader.readuntil(b"data: ")
                        if way == "half-closes":
                            writer.write_eof()
                            await reader.read()
        finally:
            (reset if way == "resets" else asyncio.StreamWriter.close)(writer)

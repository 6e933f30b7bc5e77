"""Many open streams through one process: does one break, and what does the gateway add between two events?

The kit's generator holds most of them; a few are read here, event by event, through the gateway and from the
engines directly.
"""

import asyncio
import json
import os
import resource
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from statistics import median

from benchmarks.gateway.kit import BASE_PORT, WORKERS, Kit

PORT = 9100
EVENTS_S = 10
SECONDS = 60
STREAMS = 5_000
WATCHED = 100
"""Of these, read here."""
OPENING_S = 20
BODY = json.dumps(
    {
        "model": "fake-model",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": EVENTS_S * SECONDS,
        "stream": True,
    }
).encode()


@dataclass(slots=True)
class Watched:
    """What was seen of a stream."""

    gaps_s: list[float] = field(default_factory=list)
    events: int = 0
    whole: bool = False


async def watch(port: int, wait_s: float) -> Watched:
    """Open one stream after a while and read it to its end."""
    seen = Watched()
    await asyncio.sleep(wait_s)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n"
    writer.write(head.encode() + BODY)
    last = None
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            seen.whole = True
            break
        if line.startswith(b"data:"):
            now = time.perf_counter()
            if last is not None:
                seen.gaps_s.append(now - last)
            last = now
            seen.events += 1
    writer.close()
    return seen


async def watch_all(ports: list[int]) -> list[Watched]:
    """`WATCHED` streams, opened one after another, at these ports in turn."""
    return await asyncio.gather(
        *(watch(ports[n % len(ports)], OPENING_S * n / WATCHED) for n in range(WATCHED))
    )


@dataclass(slots=True)
class Outcome:
    """Of one run."""

    broken: int
    answered: int
    gap_p50_s: float
    gap_p99_s: float
    cpu_part: float
    """Of one core, the gateway's, while all streams were open; 0 without a gateway."""


def run(kit: Kit, *, through: bool) -> Outcome:
    """All streams, through the gateway or (the watched ones alone count) straight to the engines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 32_768)), hard))
    engines = f"{BASE_PORT}-{BASE_PORT + WORKERS - 1}"
    started: list[subprocess.Popen[bytes]] = []

    def start(core: int, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ("taskset", "-c", str(core), *words), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        started.append(process)
        return process

    try:
        tokens = str(EVENTS_S * SECONDS)
        pace_us = str(1_000_000 // EVENTS_S)
        start(1, str(kit.build / "fakeoai"), "--ports", engines, "--chunks", tokens, "--itl-us", pace_us)
        gateway = None
        ports = list(range(BASE_PORT, BASE_PORT + WORKERS))
        if through:
            urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
            command = kit.ours(events=False).replace("@WORKERS_CSV@", urls).replace("@PORT@", str(PORT))
            gateway = start(0, *shlex.split(command))
            ports = [PORT]
        time.sleep(5.0)
        kit.bodies("streams").write_bytes(BODY + b"\n")
        words = [
            str(kit.build / "lg"),
            "-f",
            str(kit.bodies("streams")),
            "-t",
            "120",
            "-d",
            "110",
            "-p",
            str(ports[0]),
        ]
        rate = (STREAMS - WATCHED) / OPENING_S
        words += ["-c", str(STREAMS - WATCHED), "-n", str(STREAMS - WATCHED), "-r", str(rate)]
        load = subprocess.Popen(("taskset", "-c", "1", *words), stdout=subprocess.PIPE)
        os.sched_setaffinity(0, {1})
        seen = asyncio.run(_watched(ports, gateway))
        out, _ = load.communicate(timeout=180)
    finally:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=60)
    told = json.loads(out)
    watched, cpu_part = seen
    gaps = sorted(gap for one in watched for gap in one.gaps_s)
    whole = sum(one.whole and one.events > EVENTS_S * SECONDS for one in watched)
    return Outcome(
        broken=told["errors"] + told["unfinished"] + WATCHED - whole,
        answered=told["ok"] + whole,
        gap_p50_s=median(gaps),
        gap_p99_s=gaps[int(0.99 * len(gaps))],
        cpu_part=cpu_part,
    )


async def _watched(
    ports: list[int], gateway: "subprocess.Popen[bytes] | None"
) -> tuple[list[Watched], float]:
    """The watched streams, and what part of a core the gateway took while all were open."""

    def cpu_s() -> float:
        if gateway is None:
            return 0.0
        with open(f"/proc/{gateway.pid}/schedstat") as stat:
            return int(stat.read().split()[0]) / 1e9

    async def busy() -> float:
        await asyncio.sleep(OPENING_S + 5)
        before = cpu_s()
        await asyncio.sleep(SECONDS - OPENING_S - 10)
        return (cpu_s() - before) / (SECONDS - OPENING_S - 10)

    watched, part = await asyncio.gather(watch_all(ports), busy())
    return watched, part

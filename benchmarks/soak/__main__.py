"""`make soak MINUTES=60`: a gateway under mixed load with faults at random, watched for what it does not give
back; beside it a million mixed exits without sockets (`exits`), each part of which is counted.

Three engines that break on demand, one gateway with limits of seconds, some 60 requests a second: all real
processes, all ended at the end. The run fails if memory is not flat, if anything is held when nobody is
served, or if a client saw what it should not have seen.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.load import CLIENTS, Log, client
from benchmarks.soak.processes import EngineProcess, GatewayProcess

from sumibi.bench import report

HERE = Path(__file__).parent
LIMITS = {
    "request_head_s": 2.0,
    "request_body_s": 2.0,
    "keep_alive_s": 4.0,
    "client_write_s": 2.0,
    "connect_s": 2.0,
    "first_byte_s": 4.0,
    "between_bytes_s": 4.0,
}
SAMPLE_S = 2.0
FAULT_EVERY_S = 12.0
"""Mean time between two faults of engines; evenly from 0 to twice that."""
WARM_UP = 0.25
"""Part of the time in which memory may grow: caches fill."""
GROWTH_MB = 4.0
"""That memory may grow by afterwards: the median slope between samples, over the time that is left."""
MORE_FILES = 5
EXITS_S = 3600.0
"""A million exits take a quarter of this."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The gateway at one time."""

    t_s: float
    rss_mb: float
    fds: int
    requests: float


def main() -> int:
    """Soak, judge, write; the exit code is 1 if a target was missed."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of every `finally`
    with tempfile.TemporaryDirectory(prefix="sumibi-soak-") as home:
        exits = _start_exits(options, Path(home))
        try:
            figures = _soak(options, Path(home))
            figures += _exits(options, exits, Path(home))
        finally:
            exits.kill()
            exits.wait()
    title = "A soak: mixed load, faults at random"
    return report.finish(_head(options) + figures, options.json, options.results, title)


def _options() -> argparse.Namespace:
    known = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    known.add_argument("--json", type=Path, default=Path("out/soak.json"), help="figures, as a list")
    known.add_argument("--results", type=Path, default=HERE / "RESULTS.md", help="the page made from them")
    known.add_argument("--minutes", type=float, default=60.0, help="of load [default: 60]")
    known.add_argument("--seed", type=int, default=1, help="of everything that is drawn [default: 1]")
    known.add_argument("--exits", type=int, default=1_000_000, help="without sockets [default: 1000000]")
    options = known.parse_args()
    options.cmd = f"make soak MINUTES={options.minutes:g}"
    return options


def _head(options: argparse.Namespace) -> list[report.Figure]:
    return [
        report.machine(),
        report.statement("command", f"{options.cmd} (seed {options.seed})"),
        report.statement(
            "load",
            f"{CLIENTS} clients; 15 % of their requests ask an engine for trouble (hangs, resets, garbage,"
            " false lengths and usage, errors), 5 % come from clients that vanish, half-close, dribble or"
            f" send garbage; every {FAULT_EVERY_S:g} s on average an engine flaps, restarts, is unwell, or"
            " floods, loses or garbles KV events, or the gateway is stopped for two seconds",
        ),
        report.statement(
            "memory",
            f"resident, every {SAMPLE_S:g} s; growth is the median slope between any two samples after the"
            f" first {WARM_UP:.0%} of the time, over the rest of it",
        ),
        report.statement("not measured", "speed: the machine is shared with engines and clients"),
    ]


# --- with sockets


def _soak(options: argparse.Namespace, home: Path) -> list[report.Figure]:
    engines = [EngineProcess(events=number == 0) for number in range(3)]
    gateway = None
    try:
        gateway = GatewayProcess(engines, home / "gateway", timeouts=LIMITS)
        fds = gateway.fds()
        log, samples = Log(), []
        asyncio.run(_load(options, engines, gateway, log, samples))
        held = _left(gateway, fds + MORE_FILES)
        figures = _judged(options, log, samples, held, gateway.fds() - fds, gateway)
    finally:
        code = gateway.stop() if gateway is not None else 0
        for engine in engines:
            engine.stop()
    return [*figures, report.figure("the gateway's exit code", [code], "", at_most=0, cmd=options.cmd)]


async def _load(
    options: argparse.Namespace,
    engines: list[EngineProcess],
    gateway: GatewayProcess,
    log: Log,
    samples: list[Sample],
) -> None:
    began = time.monotonic()
    until = began + 60 * options.minutes
    names = [f"{options.seed}/client {number}" for number in range(CLIENTS)]
    clients = [asyncio.create_task(client(gateway.port, random.Random(name), log, until)) for name in names]
    faults = asyncio.create_task(
        _faults(engines, gateway, random.Random(f"{options.seed}/faults"), log, until)
    )
    watching = asyncio.create_task(_watch(gateway, samples, began, log))
    try:
        await asyncio.gather(faults, *clients)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.sleep(0.1)  # what was closed is closed by then


async def _faults(
    engines: list[EngineProcess], gateway: GatewayProcess, draw: random.Random, log: Log, until: float
) -> None:
    """One engine at a time is in trouble, or the gateway pauses."""
    while True:
        wait_s = draw.uniform(0.2, 2) * FAULT_EVERY_S
        if time.monotonic() + wait_s + 10 > until:  # the last one is over before the end
            return
        await asyncio.sleep(wait_s)
        engine = draw.choice(engines)
        match draw.choice(("flap", "restart", "unwell", "publish", "lose", "disorder", "garble", "pause")):
            case "flap":
                log.disturb("flaps", 4.0)
                await _tell(engine, "flap", every_s=0.5)
                await asyncio.sleep(4.0)
                await _tell(engine, "flap", every_s=0)
                log.disturb("ends of flaps")
            case "restart":
                log.disturb("restarts")
                await _tell(engine, "restart")
            case "unwell":
                log.disturb("ill health", 3.0)
                await _tell(engine, "health", **{"is": False})
                await asyncio.sleep(3.0)
                await _tell(engine, "health", **{"is": True})
            case "publish":
                log.faults["floods of events"] += 1
                await _tell(engines[0], "publish", batches=draw.choice((50, 500, 5000)))
            case "lose" | "disorder" as how:
                log.faults[f"batches: {how}"] += 1
                await _tell(engines[0], "publish", batches=20, **{how: True})
                await _tell(engines[0], "publish", batches=20)
            case "garble":
                log.faults["garbled events"] += 1
                await _tell(engines[0], "garble", messages=50)
            case "pause":
                # Long enough to be one, short enough for engines and clients with limits of their own.
                log.disturb("pauses of the gateway", 2.0)
                os.kill(gateway.process.pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(2.0)
                finally:
                    os.kill(gateway.process.pid, signal.SIGCONT)


async def _tell(engine: EngineProcess, do: str, **how: object) -> None:
    await asyncio.to_thread(lambda: engine.tell(do, **how))


async def _watch(gateway: GatewayProcess, samples: list[Sample], began: float, log: Log) -> None:
    told = shown = 0
    while True:
        await asyncio.sleep(SAMPLE_S)
        t_s = time.monotonic() - began
        try:
            held = await asyncio.to_thread(gateway.held)
        except OSError:
            continue  # it is paused
        samples.append(Sample(t_s, gateway.rss_bytes() / 1e6, gateway.fds(), held["requests"]))
        if t_s // 60 > told:
            told = int(t_s // 60)
            last = samples[-1]
            print(
                f"{told} min: {log.outcomes.total():,} requests, {log.faults.total()} faults, "
                f"{len(log.unexpected)} unexpected; {last.rss_mb:.1f} MB, {last.fds} files, "
                f"{last.requests:.0f} requests now",
                *log.unexpected[shown:],
                sep="\n  ",
                flush=True,
            )
            shown = len(log.unexpected)


def _left(gateway: GatewayProcess, fds: int) -> dict[str, float]:
    """What is held although nobody is served any more; idle connections to engines are given their time."""
    for _ in range(100):
        held = {name: value for name, value in gateway.held().items() if value}
        if not held and gateway.fds() <= fds:
            break
        time.sleep(0.2)
    return held


def _judged(
    options: argparse.Namespace,
    log: Log,
    samples: list[Sample],
    held: dict[str, float],
    more_fds: int,
    gateway: GatewayProcess,
) -> list[report.Figure]:
    def figure(name: str, value: float, unit: str = "", at_most: float | None = None) -> report.Figure:
        return report.figure(name, [value], unit, at_most=at_most, cmd=options.cmd)

    growth_mb = growth(samples)
    warm = [each for each in samples if each.t_s >= WARM_UP * samples[-1].t_s]
    told = gateway.said()
    for line in log.unexpected[:20]:
        print(f"unexpected: {line}")
    outcomes = ", ".join(f"{what} {count:,}" for what, count in log.outcomes.most_common())
    faults = ", ".join(f"{what} {count}" for what, count in log.faults.most_common())
    return [
        report.statement("what clients saw", outcomes),
        report.statement("faults", faults),
        report.statement("held at the end", json.dumps(held) if held else "nothing"),
        figure("requests", log.outcomes.total()),
        figure("requests that ended as they should not", len(log.unexpected), at_most=0),
        figure("kinds of what is held when nobody is served", len(held), at_most=0),
        figure("growth of memory", growth_mb, "MB", at_most=GROWTH_MB),
        figure("growth of memory, an hour", growth_mb * 3600 / (warm[-1].t_s - warm[0].t_s), "MB"),
        figure("memory, median", statistics.median(each.rss_mb for each in warm), "MB"),
        figure("memory, most", max(each.rss_mb for each in samples), "MB"),
        figure("more open files than before", more_fds, at_most=MORE_FILES),
        figure("tracebacks in the gateway's log", told.count("Traceback"), at_most=0),
        figure("the gateway's log", len(told) / 1e6, "MB"),
    ]


def growth(samples: list[Sample]) -> float:
    """MB by which memory grew after the warm-up, by the median of all slopes (Theil and Sen): single jumps
    do not count.
    """
    warm = [each for each in samples if each.t_s >= WARM_UP * samples[-1].t_s]
    step = max(1, len(warm) // 400)  # 80,000 pairs are enough
    warm = warm[::step]
    slopes = [
        (later.rss_mb - one.rss_mb) / (later.t_s - one.t_s)
        for number, one in enumerate(warm)
        for later in warm[number + 1 :]
    ]
    return statistics.median(slopes) * (warm[-1].t_s - warm[0].t_s) if slopes else 0.0


# --- without


def _start_exits(options: argparse.Namespace, home: Path) -> "subprocess.Popen[bytes]":
    command = ["nice", sys.executable, "-m", "benchmarks.soak.exits"]
    command += ["--exits", str(options.exits), "--seed", str(options.seed)]
    with (home / "exits.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _exits(
    options: argparse.Namespace, process: "subprocess.Popen[bytes]", home: Path
) -> list[report.Figure]:
    code = process.wait(EXITS_S)
    said = (home / "exits.log").read_text()
    found = json.loads(said[said.index("{\n") : said.rindex("}") + 1]) if code == 0 else {}
    if code != 0:
        print(said[-2000:])
    ways = ", ".join(f"{name} {count:,}" for name, count in found.items())
    return [
        report.statement("exits without sockets", ways or "it failed"),
        report.figure(
            "exits without sockets, every part given back once",
            [found.get("exits", 0)],
            "",
            at_least=options.exits,
            cmd=options.cmd,
        ),
        report.figure("parts reserved in them", [found.get("parts", 0)], "", cmd=options.cmd),
    ]


if __name__ == "__main__":
    sys.exit(main())

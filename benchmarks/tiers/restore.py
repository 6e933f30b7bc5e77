"""How fast blocks come up, beside memcpy and `dd` of the same bytes."""

import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.contestant import Process
from benchmarks.tiers.cold import drop
from benchmarks.tiers.restore_worker import BLOCK_BYTES

from sumibi.bench import report

BLOCKS = 256
SEED = 20_261
MEGABYTES = BLOCKS * BLOCK_BYTES / 1e6
SIDES = (
    "memcpy",
    "host memory",
    "dd, cold",
    "disk, cold, nothing kept above it",
    "disk, cold, kept in new host memory",
)


def measure(
    directory: Path, rounds: int, cmd: str, say: Callable[[str], None]
) -> tuple[list[report.Figure], dict[str, list[float]]]:
    """Figures, and MB/s by side and round."""
    files = directory / "blocks"
    with ExitStack() as stack:

        def worker(name: str, where: str) -> Process:
            command = [sys.executable, "-m", "benchmarks.tiers.restore_worker"]
            command += [where, str(files), str(BLOCKS), str(SEED)]
            return stack.enter_context(Process(name, command, dict(os.environ)))

        copier, host, disk = (worker(name, name) for name in ("copy", "host", "disk"))
        blocks = [Path(path) for path in disk.ask({"do": "fill"})]
        assert sum(path.stat().st_size // BLOCK_BYTES for path in blocks) == BLOCKS
        whole = directory / "whole"
        with whole.open("wb") as file:
            for path in blocks:
                with path.open("rb") as block:
                    shutil.copyfileobj(block, file, 1 << 20)
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        cpu: dict[str, list[float]] = {side: [] for side in SIDES}
        warm = 0

        def took(side: str, times: dict[str, float]) -> None:
            rates[side].append(MEGABYTES / times["wall_s"])
            cpu[side].append(MEGABYTES / times["cpu_s"])

        for turn in range(rounds + 1):
            took("memcpy", copier.ask({"do": "copy"}))
            took("host memory", host.ask({"do": "load"}))
            warm += drop([whole])
            took("dd, cold", _dd(whole))
            for side, host_bytes in zip(SIDES[3:], (0, 2 * BLOCKS * BLOCK_BYTES), strict=True):
                disk.ask({"do": "open", "host": host_bytes})
                warm += drop(blocks)
                took(side, disk.ask({"do": "load"}))
            if not turn:  # what lies below a virtual disk warms up, too
                for side in SIDES:
                    rates[side].clear()
                    cpu[side].clear()
                continue
            say("restore, MB/s: " + ", ".join(f"{side} {rate[-1]:.0f}" for side, rate in rates.items()))
    figures = [report.figure("pages of the files still in the page cache", [warm], "", at_most=0, cmd=cmd)]
    for side in SIDES:
        figures.append(report.figure(f"restore: {side}", rates[side], "MB/s", cmd=cmd))
        figures.append(report.figure(f"restore: {side}, of CPU time", cpu[side], "MB/s", cmd=cmd))
    for side, peer, at_least in (
        ("host memory", "memcpy", 0.5),
        (SIDES[3], "dd, cold", None),
        (SIDES[4], "dd, cold", 0.7),
    ):
        ratios = [ours / theirs for ours, theirs in zip(rates[side], rates[peer], strict=True)]
        name = f"restore: {side} / {peer.split(',')[0]}"
        peers = statistics.median(rates[peer])
        figures.append(report.figure(name, ratios, "x", at_least=at_least, baseline=peers, cmd=cmd))
    return figures, rates


def _dd(path: Path) -> dict[str, float]:
    """By its own clock, which leaves out that it had to be started."""
    before = os.times()
    run = subprocess.run(
        ["dd", f"if={path}", "of=/dev/null", "bs=1M"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"LC_ALL": "C"},
    )
    after = os.times()
    found = re.search(r" copied, ([\d.e+-]+) s", run.stderr)
    if found is None:
        raise SystemExit(f"dd said what nobody expected: {run.stderr}")
    cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
    return {"wall_s": float(found[1]), "cpu_s": max(cpu_s, 0.01)}

"""`make bench-tiers`: KV below the device on the real model, with real engines, real files and cold disks.

Four parts: how fast blocks come up (beside memcpy and `dd`), time to first token by where the prompt lies,
how much conversations that need four devices find, and whether decodes wait while tiers write. What is
compared is compared in one run and in turn, each side in a process of its own on the same cores.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.tiers import places, restore, sets, writes

from sumibi.bench import report
from sumibi.demo.lone import cores
from sumibi.engine.fetch import DEFAULT_MODEL, ensure_model

HERE = Path(__file__).parent
CORES = 2
NEEDED_BYTES = 4 << 30


def main() -> int:
    """Measure, print, write; 1 if a target was missed."""
    options = _options()
    pinned = cores(CORES)
    os.sched_setaffinity(0, pinned)  # and every child's
    options.directory.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(options.directory).free
    if free_bytes < NEEDED_BYTES:
        raise SystemExit(f"--directory {options.directory}: {free_bytes >> 20} MiB are free, 4096 are needed")
    model = ensure_model(DEFAULT_MODEL, lambda what, done: print(f"{what}: {done:.0%}", end="\r"))
    cmd, threads, begun_s = "make bench-tiers", len(pinned), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-tiers-", dir=options.directory) as scratch:
        directory = Path(scratch)
        rates_figures, rates = restore.measure(directory, options.rounds, cmd, _say)
        times_figures, times = places.measure(model, directory, options.rounds, threads, cmd, _say)
        found_figures, found = sets.measure(model, directory, threads, cmd, _say)
        windows_figures, windows = writes.measure(model, directory, options.windows, threads, cmd, _say)
    load = os.getloadavg()[1]
    figures = [
        report.machine(),
        report.statement("command", cmd),
        report.statement(
            "workload",
            f"{DEFAULT_MODEL} in bf16, blocks of 32 tokens (737,280 bytes), random token ids; engines with "
            f"{threads} threads, everything on cores {sorted(pinned)}; {options.rounds} rounds after one to "
            f"warm up, {options.windows} windows; medians of ratios within a round",
        ),
        report.statement(
            "restore",
            f"{restore.BLOCKS} blocks, {restore.MEGABYTES:.0f} MB, as the engine loads them: "
            "`BlockTiers.load` into buffers, sums checked; writing to the device's cache is not in it. "
            "`memcpy` copies the same bytes from one array to another, `dd` reads them from one file (bs=1M)",
        ),
        report.statement(
            "cold",
            "before each read the files are synced and their pages dropped from the page cache, and it is "
            "looked whether any are left; what lies below a virtual disk may have them, for all alike",
        ),
        report.statement(
            "working set",
            f"{sets.CONVERSATIONS} conversations of {sets.TURNS} turns in random order, "
            f"{sets.WORKING_SET} blocks at their end; device {sets.KV_BLOCKS}, host memory "
            f"{2 * sets.KV_BLOCKS}, the rest on disk",
        ),
        report.statement(
            "windows",
            f"{writes.STREAMS} streams of {writes.STREAM_TOKENS} tokens while prompts of "
            f"{writes.PREFILL_TOKENS} keep coming, steps of {writes.STEP_TOKENS} tokens: every step "
            "prefills, and all of it is written to host memory and disk",
        ),
        report.statement("load of the machine", f"{load:.1f} over the last five minutes, this included"),
        report.statement("took", f"{time.monotonic() - begun_s:.0f} s"),
        report.statement("not measured", "a shared store; GPUs"),
        *rates_figures,
        *times_figures,
        *found_figures,
        *windows_figures,
    ]
    code = report.finish(figures, options.json, options.results, "KV tiers below the device")
    try:
        from benchmarks.tiers.picture import draw

        draw(options.results.with_name("tiers.png"), rates, times, found, windows)
    except ImportError:
        _say("no picture: matplotlib is not installed")
    return code


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    made.add_argument("--json", type=Path, default=Path("out/bench-tiers.json"), help="figures, as a list")
    made.add_argument("--results", type=Path, default=HERE / "RESULTS.md", help="the page made from them")
    made.add_argument("--rounds", type=int, default=7, help="of restore and places [default: 7]")
    made.add_argument("--windows", type=int, default=5, help="of decoding, each side [default: 5]")
    made.add_argument("--directory", type=Path, default=Path("out"), help="on the disk to measure")
    return made.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

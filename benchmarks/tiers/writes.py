"""Does writing to the tiers hold up decodes? Windows with and without tiers in turn, the same traffic."""

import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tiers.client import ask, random_tokens

from sumibi.bench import report
from sumibi.demo.lone import LoneEngine

STREAMS = 4
STREAM_PROMPT = 64
STREAM_TOKENS = 100
PREFILL_TOKENS = 512
STEP_TOKENS = 64
KV_BLOCKS = 512
HOST_BYTES = 512 << 20
DISK_BYTES = 2 << 30
BLOCK_BYTES = 737_280
AT_MOST = 1.15


@dataclass(frozen=True, slots=True)
class Window:
    """One window of one engine."""

    p50_s: float
    p95_s: float
    p99_s: float
    prefills: int


def measure(
    model: Path, directory: Path, windows: int, threads: int, cmd: str, say: Callable[[str], None]
) -> tuple[list[report.Figure], dict[str, list[Window]]]:
    """Figures, and all windows by side."""
    tiers = {"host_bytes": HOST_BYTES, "disk": {"path": str(directory / "kv-writes"), "bytes": DISK_BYTES}}
    seen: dict[str, list[Window]] = {"off": [], "on": []}
    written: list[float] = []
    with ExitStack() as stack:

        def engine(tiers: dict[str, object] | None) -> LoneEngine:
            flags = ["--max-num-batched-tokens", str(STEP_TOKENS)]
            one = LoneEngine(model, kv_blocks=KV_BLOCKS, threads=threads, tiers=tiers, flags=flags)
            return stack.enter_context(one)

        sides = {"off": engine(None), "on": engine(tiers)}
        for each in sides.values():
            ask(each.url, each.model, random_tokens("warm-up", 1024), 8)
        for turn in range(windows):
            # Each side is first as often as the other, for what a machine does changes slowly.
            for side in ("off", "on") if turn % 2 == 0 else ("on", "off"):
                before = sides["on"].tier_counts()["stored_total", "disk"]
                seen[side].append(_window(sides[side], f"{turn} {side}"))
                if side == "on":
                    after = sides["on"].tier_counts()["stored_total", "disk"]
                    written.append((after - before) * BLOCK_BYTES / 1e6)
            say(
                f"ITL, window {turn + 1} of {windows}: p95 {seen['off'][-1].p95_s * 1e3:.1f} ms without "
                f"tiers, {seen['on'][-1].p95_s * 1e3:.1f} ms while they write {written[-1]:.0f} MB to disk"
            )
        counts = sides["on"].tier_counts()
    figures = []
    for side, ones in seen.items():
        for name in ("p50", "p95", "p99"):
            values = [getattr(one, f"{name}_s") * 1e3 for one in ones]
            figures.append(report.figure(f"ITL {name}: tiers {side}", values, "ms", cmd=cmd))
        prompts = [float(one.prefills) for one in ones]
        figures.append(report.figure(f"prompts prefilled in a window: tiers {side}", prompts, "", cmd=cmd))
    figures.append(report.figure("written to disk in a window", written, "MB", cmd=cmd))
    lost = counts["dropped_total", "host"] + counts["dropped_total", "disk"]
    figures.append(report.figure("blocks that the tiers did not take", [lost], "", cmd=cmd))
    for name, at_most in (("p50", None), ("p95", AT_MOST), ("p99", None)):
        pairs = list(zip(seen["on"], seen["off"], strict=True))
        ratios = [getattr(on, f"{name}_s") / getattr(off, f"{name}_s") for on, off in pairs]
        off_ms = statistics.median(getattr(off, f"{name}_s") for off in seen["off"]) * 1e3
        label = f"ITL {name}: tiers on / off"
        figures.append(report.figure(label, ratios, "x", at_most=at_most, baseline=off_ms, cmd=cmd))
    return figures, seen


def _window(engine: LoneEngine, name: str) -> Window:
    """Streams that begin together, and prompts that come one after the other until the last stream ends."""
    over = threading.Event()
    prefills = 0

    def prefill() -> None:
        nonlocal prefills
        while not over.is_set():
            ask(engine.url, engine.model, random_tokens(f"{name} prefill {prefills}", PREFILL_TOKENS), 1)
            prefills += 1

    def stream(number: int) -> list[float]:
        prompt = random_tokens(f"{name} stream {number}", STREAM_PROMPT)
        return ask(engine.url, engine.model, prompt, STREAM_TOKENS).gaps_s

    with ThreadPoolExecutor(STREAMS + 1) as pool:
        busy = pool.submit(prefill)
        try:
            gaps = [gap for each in pool.map(stream, range(STREAMS)) for gap in each]
        finally:
            over.set()
        busy.result()
    cuts = statistics.quantiles(gaps, n=100)
    return Window(statistics.median(gaps), cuts[94], cuts[98], prefills)

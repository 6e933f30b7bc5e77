"""Time to first token of 2,000 cached and 60 new tokens, by where the cached ones lie."""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.tiers.client import Answer, ask, random_tokens
from benchmarks.tiers.cold import drop

from sumibi.bench import report
from sumibi.demo.lone import LoneEngine

BLOCK_TOKENS = 32
CACHED = 2016
"""63 whole blocks."""
NEW = 60
KV_BLOCKS = 160
HOST_BYTES = 1 << 30
DISK_BYTES = 4 << 30
PLACES = ("recomputed", "host", "disk", "device")
AT_MOST = {"host": 0.12, "disk": 0.2}


def measure(
    model: Path, directory: Path, rounds: int, threads: int, cmd: str, say: Callable[[str], None]
) -> tuple[list[report.Figure], dict[str, list[float]]]:
    """Figures, and seconds by place and round."""
    disk = directory / "kv-places"
    times: dict[str, list[float]] = {place: [] for place in PLACES}
    warm = 0
    blocks = CACHED // BLOCK_TOKENS

    with ExitStack() as stack:

        def engine(tiers: dict[str, object] | None) -> LoneEngine:
            return stack.enter_context(LoneEngine(model, kv_blocks=KV_BLOCKS, threads=threads, tiers=tiers))

        bare = engine(None)
        below = {
            "host": engine({"host_bytes": HOST_BYTES}),
            "disk": engine({"disk": {"path": str(disk), "bytes": DISK_BYTES}}),
        }
        for turn in range(rounds + 1):
            prefix = random_tokens(f"prefix {turn}", CACHED)
            prompt = prefix + random_tokens(f"question {turn}", NEW)
            for place, each in below.items():
                stored = int(each.tier_counts()["stored_total", place])
                ask(each.url, each.model, prefix, 1)
                each.wait_written(stored + blocks, place)
                each.forget_device()
            answers = {"recomputed": ask(bare.url, bare.model, prompt, 1)}
            answers["host"] = ask(below["host"].url, below["host"].model, prompt, 1)
            warm += drop(disk.rglob("*.kv"))
            answers["disk"] = ask(below["disk"].url, below["disk"].model, prompt, 1)
            other = prefix + random_tokens(f"another question {turn}", NEW)
            answers["device"] = ask(bare.url, bare.model, other, 1)
            for place, answer in answers.items():
                _check(place, answer)
                if turn:  # the first is a warm-up
                    times[place].append(answer.ttft_s)
            say("TTFT, s: " + ", ".join(f"{place} {answer.ttft_s:.3f}" for place, answer in answers.items()))
    figures = [report.figure("pages of blocks still in the page cache", [warm], "", at_most=0, cmd=cmd)]
    for place in PLACES:
        figures.append(report.figure(f"TTFT: {place}", times[place], "s", cmd=cmd))
    recomputed_s = statistics.median(times["recomputed"])
    for place in ("host", "disk", "device"):
        ratios = [ours / base for ours, base in zip(times[place], times["recomputed"], strict=True)]
        name, most = f"TTFT: {place} / recomputed", AT_MOST.get(place)
        figures.append(report.figure(name, ratios, "x", at_most=most, baseline=recomputed_s, cmd=cmd))
    return figures, times


def _check(place: str, answer: Answer) -> None:
    """The cached tokens lay where they were meant to."""
    there = {tier: tokens for tier, tokens in answer.cached_by_tier.items() if tokens}
    wanted = {} if place == "recomputed" else {place: CACHED}
    if there != wanted:
        raise SystemExit(f"{place}: cached tokens were {there} where they should be {wanted}")

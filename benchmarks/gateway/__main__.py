"""`make bench-gateway`: the CPU of a request, beside the routers that people run now.

The load kit's engines and generator stand on one core, the router on the other; windows of ours and of a
peer alternate. CPU is that of all threads of the router, best window; ratios are those of the best windows.
Clients and engines acknowledge at once (TCP_QUICKACK): a peer that leaves Nagle's algorithm on would lose
40 ms a stream otherwise, which is stated apart.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contestant import parser
from benchmarks.gateway import streams
from benchmarks.gateway.kit import BLOCKS_EACH, SETS, WORKERS, Kit

from sumibi.bench import report
from sumibi.engine.fetch import DEFAULT_MODEL, ensure_model
from sumibi.prompts.tokenizer import Tokenizer
from sumibi.prompts.words import words_of

CPU, FIRST_BYTE = "CPU us/req", "TTFB p50 ms"
AT_MOST = {"small": 1.0, "mid": 1.1, "agent": 0.7}
"""Of sglang-router's CPU."""
OF_VLLM = 0.06
"""Of vllm-router's CPU, agents."""
FRESH = 1.15
"""A fresh tail may cost, over encoding it, so many times what a repeated body costs."""
REST_MB = 120
BUSIEST, OF_STICKY = 0.20, 0.95
ADDED_S = 0.005
KINDS = {"small": "200 B", "mid": "8 KB, 20 chunks", "agent": "64-128 KB, 20 chunks"}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    kit = Kit(
        directory=options.kit.resolve(),
        build=options.build.resolve(),
        package=options.package.resolve(),
        tokenizer=ensure_model(DEFAULT_MODEL),
        peers=options.peers.resolve(),
    )
    kit.prepare()
    figures = [
        report.machine(),
        report.statement("command", options.cmd),
        report.statement(
            "workload",
            f"{WORKERS} engines of the load kit, caches full ({WORKERS * BLOCKS_EACH:,} blocks of 16 tokens, "
            f"told by KV events); 16 connections for CPU, one for the time to the first byte; windows of "
            f"{options.dur:g} s, {options.rounds} of each kind",
        ),
        report.statement("sumibi", f"{_compiled(kit)}, policy cost, exact keys, tokenizer {DEFAULT_MODEL}"),
        report.statement("peers", "sglang-router 0.3.2 cache_aware; vllm-router 0.1.17 kv_aware"),
    ]
    window = ("--dur", str(options.dur), "--rounds", str(options.rounds))
    others: list[float] = []
    figures += _repeated(kit, window, options.cmd, others)
    figures += _fresh(kit, window, options.cmd, figures, others)
    figures += _spread(kit, options.cmd)
    if not options.no_streams:
        figures += _streams(kit, options.cmd)
    figures.append(
        report.statement("cores used by others, median of windows", ", ".join(f"{x:.0%}" for x in others))
    )
    sys.exit(report.finish(figures, options.json, options.results, "The gateway, lean"))


def _options() -> argparse.Namespace:
    known = parser("gateway", __doc__)
    known.add_argument("--kit", type=Path, default=Path("../shared/tools/loadkit"), help="the load kit")
    known.add_argument("--build", type=Path, default=Path("build/loadkit"), help="where it is built")
    known.add_argument(
        "--package", type=Path, default=Path("src"), help="ours: `make compiled`'s directory, or src"
    )
    known.add_argument("--peers", type=Path, default=Path(".peers"), help="made by `make peers`")
    known.add_argument("--dur", type=float, default=2.0, help="seconds of a window")
    known.add_argument(
        "--no-streams", action="store_true", help="leave out the 5,000 open streams (3 minutes)"
    )
    options = known.parse_args()
    options.cmd = "make bench-gateway"
    if (options.rounds, options.dur) != (known.get_default("rounds"), known.get_default("dur")):
        options.cmd += f" (with --rounds {options.rounds} --dur {options.dur:g})"
    return options


def _compiled(kit: Kit) -> str:
    found = list((kit.package / "sumibi" / "routing").glob("router.*.so"))
    return "compiled" if found else "not compiled"


def _repeated(kit: Kit, window: tuple[str, ...], cmd: str, others: list[float]) -> list[report.Figure]:
    """The same bodies again and again."""
    side = ("--side", kit.publisher(600))
    told = kit.measure(
        "ab", "--quickack", *window, *side, "-a", kit.ours(), "-b", kit.sglang(), "--sets", ",".join(SETS)
    )
    others.append(told["others"])
    figures = [report.figure("failed requests", [told["errors"]], "", at_most=0, cmd=cmd)]
    for name in SETS:
        cpu, first = told["sets"][name][CPU], told["sets"][name][FIRST_BYTE]
        figures += [
            report.figure(f"{KINDS[name]}: CPU a request", _each(told, name, "an", "cpu_us"), "µs", cmd=cmd),
            _ratio(f"{KINDS[name]}: CPU, ours / sglang-router", cpu, AT_MOST[name], cmd),
            _ratio(f"{KINDS[name]}: first byte p50, ours / sglang-router", first, 1.0, cmd),
        ]
    figures += _memory(kit, told["rss_mb"]["a"], cmd)
    slow = kit.measure("ab", *window, *side, "-a", kit.ours(), "-b", kit.sglang(), "--sets", "mid")
    ours_ms, theirs_ms = (
        min(one["first_event_ms"]["p50"] for one in slow["windows"]["mid"][label]) for label in ("a1", "b1")
    )
    figures.append(
        report.statement(
            "without quick ACKs",
            f"the first event of {KINDS['mid']} comes after {theirs_ms:.1f} ms by sglang-router (it leaves "
            f"Nagle's algorithm on), after {ours_ms:.2f} ms by ours",
        )
    )
    told = kit.measure(
        "ab", "--quickack", *window, *side, "-a", kit.ours(), "-b", kit.vllm(), "--sets", "agent"
    )
    others.append(told["others"])
    cpu = told["sets"]["agent"][CPU]
    figures.append(_ratio(f"{KINDS['agent']}: CPU, ours / vllm-router", cpu, OF_VLLM, cmd))
    return figures


def _fresh(
    kit: Kit, window: tuple[str, ...], cmd: str, before: list[report.Figure], others: list[float]
) -> list[report.Figure]:
    """Bodies whose last message ends with text that never came before."""
    arguments = ("--quickack", "--unique", *window, "--side", kit.publisher(600), "--sets", ",".join(SETS))
    told = kit.measure("ab", *arguments, "-a", kit.ours(), "-b", kit.sglang())
    others.append(told["others"])
    values = {each.name: each.value for each in before}
    figures = []
    for name in SETS:
        best = min(told["windows"][name]["an"], key=lambda one: one["cpu_us"])
        unique = best["unique"]
        encoding_us, library_us = _encoding_us(kit, unique)
        repeated = float(values[f"{KINDS[name]}: CPU a request"])
        kind = f"{KINDS[name]}, {unique['bytes']} B of it fresh"
        ratio = told["sets"][name][CPU]
        figures += [
            report.figure(f"{kind}: CPU a request", [best["cpu_us"]], "µs", cmd=cmd),
            report.figure(f"{kind}: of it, encoding the tail alone", [encoding_us], "µs", cmd=cmd),
            report.figure(
                f"{kind}: the rest / a repeated body",
                [(best["cpu_us"] - encoding_us) / repeated],
                "x",
                at_most=FRESH,
                baseline=repeated,
                cmd=cmd,
            ),
            report.figure(f"{kind}: the tail by the tokenizers library", [library_us], "µs", cmd=cmd),
            report.figure(
                f"{kind}: the rest beside that / a repeated body",
                [(best["cpu_us"] - library_us) / repeated],
                "x",
                baseline=repeated,
                cmd=cmd,
            ),
            report.figure(
                f"{kind}: CPU, ours / sglang-router", [ratio["ratio"]], "x", baseline=ratio["b"], cmd=cmd
            ),
        ]
    return figures


def _encoding_us(kit: Kit, unique: dict[str, Any]) -> tuple[float, float]:
    """CPU of encoding the texts of a window, each alone: as the gateway does it, by words that it met in
    texts of their kind before; and by the tokenizers library.
    """
    tokenizer = Tokenizer.load(kit.tokenizer)
    words = words_of(tokenizer.backend)
    texts = kit.tails(unique["bytes"], unique["seed"], unique["requests"])

    def encode(text: str) -> list[int]:
        ids = words.ids(text) if words is not None else None
        return tokenizer.encode(text, add_special_tokens=False) if ids is None else ids

    for text in kit.tails(unique["bytes"], unique["seed"] + 1_000_000, unique["requests"]):
        encode(text)
    taken = []
    for each in (encode, lambda text: tokenizer.encode(text, add_special_tokens=False)):
        begun = time.process_time()
        for text in texts:
            each(text)
        taken.append(1e6 * (time.process_time() - begun) / len(texts))
    return taken[0], taken[1]


def _memory(kit: Kit, loaded_mb: float, cmd: str) -> list[report.Figure]:
    """Of what is resident after the load: the index, the tokenizer, the rest. Each by leaving it out."""
    # Long enough for the index to be told whole.
    window = ("--dur", "4", "--rounds", "1", "--sets", "small", "--side", kit.publisher(120))
    bare, tokenizer, full = (
        kit.measure("run", *window, command=command)["rss_mb"][1]
        for command in (kit.ours(events=False, tokenizer=False), kit.ours(events=False), kit.ours())
    )
    index_mb, tokenizer_mb = full - tokenizer, tokenizer - bare
    return [
        report.figure("resident after the load", [loaded_mb], "MB", cmd=cmd),
        report.figure(f"of it, the index of {WORKERS * BLOCKS_EACH:,} blocks", [index_mb], "MB", cmd=cmd),
        report.figure("of it, the tokenizer", [tokenizer_mb], "MB", cmd=cmd),
        report.figure("the rest", [loaded_mb - index_mb - tokenizer_mb], "MB", at_most=REST_MB, cmd=cmd),
    ]


def _spread(kit: Kit, cmd: str) -> list[report.Figure]:
    """32 conversations with one system prompt, at once."""
    ours = kit.measure("herd", command=kit.ours(events=False))
    sticky = kit.measure(
        "herd", "--session-header", "X-Session-ID", command=kit.ours(events=False, policy="session-sticky")
    )
    return [
        report.figure(
            "herd: requests at the busiest worker", [ours["max_share"]], "", at_most=BUSIEST, cmd=cmd
        ),
        report.figure("herd: prompt tokens found cached", [ours["cached_share"]], "", cmd=cmd),
        report.figure(
            "herd: the same / of session-sticky",
            [ours["cached_share"] / sticky["cached_share"]],
            "x",
            at_least=OF_STICKY,
            baseline=sticky["cached_share"],
            cmd=cmd,
        ),
    ]


def _streams(kit: Kit, cmd: str) -> list[report.Figure]:
    through, direct = streams.run(kit, through=True), streams.run(kit, through=False)
    kind = f"{streams.STREAMS:,} streams, {streams.EVENTS_S} events/s each, {streams.SECONDS} s"
    return [
        report.figure(f"{kind}: answered whole", [through.answered], "", cmd=cmd),
        report.figure(f"{kind}: broken", [through.broken], "", at_most=0, cmd=cmd),
        report.figure(
            f"{kind}: added between two events, p50",
            [1e3 * (through.gap_p50_s - direct.gap_p50_s)],
            "ms",
            at_most=1e3 * ADDED_S,
            baseline=1e3 * direct.gap_p50_s,
            cmd=cmd,
        ),
        report.figure(
            f"{kind}: the same, p99", [1e3 * (through.gap_p99_s - direct.gap_p99_s)], "ms", cmd=cmd
        ),
        report.figure(f"{kind}: CPU, all open", [through.cpu_part], "cores", cmd=cmd),
    ]


def _each(told: dict[str, Any], name: str, label: str, key: str) -> list[float]:
    """The best window's value alone: noise only adds."""
    return [min(one[key] for one in told["windows"][name][label])]


def _ratio(name: str, pair: dict[str, float], at_most: float, cmd: str) -> report.Figure:
    return report.figure(name, [pair["ratio"]], "x", at_most=at_most, baseline=pair["b"], cmd=cmd)


if __name__ == "__main__":
    main()

"""`make bench-decide`: what a decision costs, and the index under it; against Dynamo's where that is given.

Each contestant lives in a process of its own, all pinned to one core; they take turns and wait while it is
not theirs. Results are medians over rounds. A decision is timed from the arrival of the request at the
router (its keys known) to its reservation, by the wall clock; rates and ratios are of CPU time.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from benchmarks.contestant import Process, parser
from benchmarks.decide import content
from benchmarks.decide.worker import Results
from benchmarks.prompts.__main__ import measure as measure_prompts

from sumibi.bench import report
from sumibi.engine.fetch import DEFAULT_MODEL, ensure_model


def started(name: str, *, python: str = sys.executable, package: Path | None = None) -> Process:
    """The process of `benchmarks.decide.NAME_worker`; `package`: the directory of its sumibi."""
    environment = None if package is None else {**os.environ, "PYTHONPATH": str(package.resolve())}
    return Process(name, [python, "-m", f"benchmarks.decide.{name}_worker"], environment)


def main() -> None:
    """Measure, print, write."""
    options = _options()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # and every child's
    figures = [
        report.machine(),
        report.statement("command", options.cmd),
        report.statement(
            "workload",
            f"{content.ENDPOINTS} endpoints, {content.BLOCKS:,} different blocks of {content.BLOCK_TOKENS} "
            f"tokens, seed {content.SEED}; prompts of {content.PROMPT_TOKENS:,} tokens (deciding) and "
            f"{content.MATCH_BLOCKS:,} blocks (matching); {options.rounds} rounds, contestants in turn, one "
            f"warm-up before, all on core {core}",
        ),
    ]
    figures += _decide(options)
    if options.compiled is not None:
        figures += _compiled(options)
    figures += _events(options)
    figures += [each for each in measure_prompts(ensure_model(DEFAULT_MODEL), options.cmd) if each.target]
    figures += _program(options)
    if options.dynamo_python is None:
        figures.append(report.statement("not measured", "Dynamo (no --dynamo-python was given)"))
    sys.exit(report.finish(figures, options.json, options.results, "The speed of deciding"))


def _options() -> argparse.Namespace:
    known = parser("decide", __doc__)
    known.add_argument("--dynamo-python", help="interpreter with ai-dynamo-runtime==1.6.1, to compare with")
    known.add_argument("--compiled", type=Path, help="what `make compiled` made, to measure it as well")
    options = known.parse_args()
    given = [
        name
        for name, value in (("DYNAMO_PYTHON", options.dynamo_python), ("COMPILED", options.compiled))
        if value
    ]
    options.cmd = "make bench-decide" + (f" (with {' and '.join(given)})" if given else "")
    return options


def _decide(options: argparse.Namespace) -> list[report.Figure]:
    """A decision; matching alone, beside Dynamo's."""
    tasks = ("decide", "decide without collector", "match usual", "match hot")
    ours: dict[str, list[Results]] = {task: [] for task in tasks}
    theirs: dict[str, list[Results]] = {"match usual": [], "match hot": []}
    figures = []
    with started("router") as router:
        figures.append(report.statement("sumibi", router.about))
        if options.dynamo_python:
            with started("dynamo", python=options.dynamo_python) as dynamo:
                figures.append(report.statement("dynamo", dynamo.about))
                assert router.ask(["reach", 0]) == dynamo.ask(["reach", 0]), (
                    "the contestants disagree on what is where"
                )
                _take_turns({"sumibi": (router, ours), "dynamo": (dynamo, theirs)}, options.rounds)
        else:
            _take_turns({"sumibi": (router, ours)}, options.rounds)
    for name, task, part, at_most in (
        ("a decision, p50", "decide", "p50_us", 120.0),
        ("a decision, p99", "decide", "p99_us", 1000.0),
        ("a decision, p50 of CPU time", "decide", "cpu_p50_us", None),
        ("a decision, p99 of CPU time", "decide", "cpu_p99_us", None),
        ("p99, garbage collected only between decisions", "decide without collector", "p99_us", None),
        ("the same, of CPU time", "decide without collector", "cpu_p99_us", None),
        ("what a decision leaves for after its answer, p50 of CPU time", "decide", "after_p50_us", None),
        ("the same, p99", "decide", "after_p99_us", None),
    ):
        values = [took[part] for took in ours[task]]
        figures.append(report.figure(name, values, "µs", at_most=at_most, cmd=options.cmd))
    for task, what in (
        ("match usual", "match of usual prompts"),
        ("match hot", "match of prompts that all have in part"),
    ):
        mine = [took["cpu_us"] for took in ours[task]]
        figures.append(report.figure(f"{what}, CPU time", mine, "µs", cmd=options.cmd))
        if theirs[task]:
            other = [took["cpu_us"] for took in theirs[task]]
            ratios = [a / b for a, b in zip(mine, other, strict=True)]
            baseline = statistics.median(other)
            figures.append(
                report.figure(
                    f"{what}: sumibi / dynamo", ratios, "x", at_most=1.0, baseline=baseline, cmd=options.cmd
                )
            )
    return figures


def _compiled(options: argparse.Namespace) -> list[report.Figure]:
    """The same decisions, by compiled code (docs/decisions/0029)."""
    taken: dict[str, list[Results]] = {"decide": [], "decide without collector": []}
    with started("router", package=options.compiled) as router:
        _take_turns({"compiled": (router, taken)}, options.rounds)
    return [
        report.figure(
            f"compiled: {name}",
            [took[part] for took in taken[task]],
            "µs",
            at_most=at_most,
            cmd=options.cmd,
        )
        for name, task, part, at_most in (
            ("a decision, p50", "decide", "p50_us", 120.0),
            ("a decision, p99", "decide", "p99_us", 1000.0),
            ("p99, garbage collected only between decisions", "decide without collector", "p99_us", None),
        )
    ]


def _take_turns(contestants: dict[str, tuple[Process, dict[str, list[Results]]]], rounds: int) -> None:
    for number in range(rounds + 1):
        for process, results in contestants.values():
            for task, taken in results.items():
                took = process.ask([task, number])
                if number:  # the first is a warm-up
                    taken.append(took)
        print(
            {
                name: {task: r[-1] for task, r in taken.items() if r}
                for name, (_, taken) in contestants.items()
            }
        )


def _events(options: argparse.Namespace) -> list[report.Figure]:
    """KV events from wire bytes, and what an entry takes."""
    figures = []
    rates = (
        ("events 16", "blocks a CPU second from wire bytes, 16 tokens", 250_000.0),
        ("events 64", "the same into routing blocks of 64 tokens", 250_000.0),
        ("events full", "the same, 16 tokens, as many removed one by one", None),
    )
    with started("events") as process:
        for task, name, at_least in rates:
            values = [process.ask([task, number])["blocks_per_cpu_s"] for number in range(options.rounds + 1)]
            figures.append(report.figure(name, values[1:], "blocks/s", at_least=at_least, cmd=options.cmd))
            print(name, [round(value) for value in values])
    sizes = (
        ("memory one", "an entry, all maps", 260.0),
        ("memory four", "the same, every block at four endpoints", 260.0),
        ("memory 64", "an entry of 64 tokens over four engine blocks, all maps", None),
    )
    for task, name, at_most in sizes:
        with started("events") as process:
            values = [process.ask([task, 0])["bytes"]]
        figures.append(report.figure(name, values, "bytes", at_most=at_most, cmd=options.cmd))
        print(name, values)
    return figures


def _program(options: argparse.Namespace) -> list[report.Figure]:
    """A late turn of a long program beside an early one."""
    with started("program") as process:
        runs = [process.ask(["program", number]) for number in range(3)]
    print("program", runs[-1])
    figures = []
    parts = (
        ("key_us", "key time", "µs"),
        ("index_bytes", "index bytes added", "bytes"),
        ("session_tips", "ends of conversations remembered", "of 50,000 at most"),
    )
    for part, name, unit in parts:
        early = statistics.median(run[f"early_{part}"] for run in runs)
        ratios = [run[f"late_{part}"] / run[f"early_{part}"] for run in runs]
        what = f"a turn of a program, {name}: around turn 3,000 / around turn 300 ({unit})"
        figures.append(report.figure(what, ratios, "x", at_most=1.5, baseline=early, cmd=options.cmd))
    return figures


if __name__ == "__main__":
    main()

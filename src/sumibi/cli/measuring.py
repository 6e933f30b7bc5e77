"""Verbs that measure and recompute, with no engine running: `replay`, `bench ...`, `decisions rerun`.

Heavy imports are inside the verbs (see the package).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sumibi.core.errors import ConfigError

Traces = Annotated[
    Path | None,
    typer.Option(
        help="Recorded traffic: weka/sessions.jsonl.xz, mooncake/synthetic_trace.jsonl.xz. Made-up agents"
        " stand in for what is not there. [default: ../shared/traces beside the checkout]",
        metavar="DIR",
    ),
]
Jobs = Annotated[int | None, typer.Option(help="Simulations at once. [default: cores]", min=1)]


@contextmanager
def _interruptible(said: str) -> Iterator[None]:
    """Ctrl-C ends with one line and 130, as shells have it."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"sumibi: stopped; {said}", file=sys.stderr)
        raise typer.Exit(130) from None


KEPT = "runs that were done are kept, and the same command goes on from there"


def replay(
    trace: Annotated[
        list[str],
        typer.Argument(
            help="Recorded traffic (files, plain, .gz or .xz), or made-up: agents, program, w1, w2, w3, w7,"
            " w8, w9, w12, w15, with options as in agents:sessions=200,users=64.",
            metavar="TRACE...",
        ),
    ],
    fleet: Annotated[Path, typer.Option(help="What it is played on, YAML (docs/replay.md).", metavar="FILE")],
    policy: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas; `all` for all.", metavar="A,B,C")
    ] = "cost,round-robin",
    users: Annotated[
        int | None,
        typer.Option(
            help="Sessions at once: whoever ends one begins the next. Replaces recorded times."
            " [default: recorded times, or 32 where a trace has none]"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Order of sessions, noise, wrong constants; equal seeds give equal results.")
    ] = 0,
    format: Annotated[
        str | None,
        typer.Option(
            help="weka, mooncake, bailian, access-log, recording or azure. [default: by content]",
            metavar="NAME",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write one object a run here.", metavar="FILE")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a picture: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
) -> None:
    """Play traffic on a simulated fleet, under several policies, and see what each would have given you.

    The router is the real one; engines are simulated: prefill in chunks, continuous batching, a cache of the
    size that the fleet file says. What any router could have reached at most is printed beside it.

    \b
    Yesterday's traffic of your gateway (sumibi serve --record DIR), on a fleet you think of buying:
      sumibi replay DIR/events.jsonl --fleet fleet.yaml --policy cost,llmd-precise
    Coding agents, made up, 64 at once:
      sumibi replay agents --fleet fleet.yaml --users 64 --plot replay.png
    \b
    A fleet file:
      name: four-h100-nodes
      groups:
        - {count: 4, latency: llama-3.1-70b/4xh100, kv_tokens: 461_376}
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi.bench import replay_report as reports
    from sumibi.bench.replay import policies_for, replay, workload_of
    from sumibi.sim.fleet import load

    reports.check_output(json, "--json")
    reports.check_plot(plot)
    reports.check_sources(trace)
    spec = load(fleet)
    names, left_out = policies_for(policy, spec)
    from sumibi import console

    with _interruptible("nothing was written"), console.progress() as report:
        report("traffic", ", ".join(trace), None)
        workload = workload_of(trace, format=format, seed=seed)
        report("traffic", ", ".join(trace), 1.0)
        replayed = replay(workload, spec, names, users=users, seed=seed, report=report)
    reports.print_table(replayed, left_out)
    if json is not None:
        reports.write_json(json, replayed)
    if plot is not None:
        reports.write_plot(plot, replayed)


def bench_routing(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer points, one seed, the strongest baselines: minutes.")
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            help="Rows: cache, serving, w2, others, decode, mooncake, uneven, faults, program.",
            metavar="NAME,...",
        ),
    ] = "",
    policies: Annotated[
        str, typer.Option(help="Baselines. [default: all; quick: the strongest]", metavar="NAME,...")
    ] = "",
    traces: Traces = None,
    json: Annotated[Path, typer.Option(help="The figures, as a list.", metavar="FILE")] = Path(
        "out/bench-routing.json"
    ),
    results: Annotated[
        Path | None,
        typer.Option(
            help="The page. [default: benchmarks/routing/RESULTS.md of the whole grid, else"
            " out/bench-routing.md]",
            metavar="FILE",
        ),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Play the grid under our router and every baseline, judge every target, write the results.

    Runs that are done are kept in the cache directory: a run that was broken off goes on where it was. The
    whole grid takes hours, `--quick` minutes. The exit code is 1 if a target was missed.
    """
    from sumibi import console
    from sumibi.bench import replay_report, routing
    from sumibi.bench.grid import repository
    from sumibi.bench.replay import policies as named
    from sumibi.bench.traffic import default_traces

    whole = not (quick or only or policies)
    root = repository()
    baselines = named(policies) if policies else []
    page = results or (root / "benchmarks/routing/RESULTS.md" if whole else Path("out/bench-routing.md"))
    replay_report.check_output(json, "--json", make_directory=True)
    replay_report.check_output(page, "--results", make_directory=True)
    with _interruptible(KEPT), console.progress() as report:
        judged = routing.bench_routing(
            quick=quick,
            only=[name.strip() for name in only.split(",") if name.strip()],
            policies=baselines,
            traces=traces or default_traces(root),
            jobs=jobs,
            json=json,
            page=page,
            report=report,
        )
    routing.show(judged)
    raise typer.Exit(1 if any(row.missed for row in judged) else 0)


def bench_claims(
    traces: Traces = None,
    json: Annotated[Path | None, typer.Option(help="The figures, as a list.", metavar="FILE")] = None,
    jobs: Jobs = None,
) -> None:
    """Put published figures for KV-aware routing to the test: what was simulated, what was possible, and
    where a claim does not hold. Takes some minutes; runs that are done are kept.
    """
    from sumibi import console
    from sumibi.bench import claims, replay_report
    from sumibi.bench.grid import repository
    from sumibi.bench.report import write_json
    from sumibi.bench.traffic import default_traces

    replay_report.check_output(json, "--json", make_directory=True)
    with _interruptible(KEPT), console.progress() as report:
        found = claims.bench_claims(traces=traces or default_traces(repository()), jobs=jobs, report=report)
    claims.show(found)
    if json is not None:
        write_json(claims.figures_of(found), json)


def rerun(
    file: Annotated[Path, typer.Argument(help="A decision log, as `sumibi serve --record DIR` writes it.")],
    policy: Annotated[
        str | None,
        typer.Option(help="Ask what this policy would have picked. [default: the one that was recorded]"),
    ] = None,
) -> None:
    """Recompute every pick of a decision log from its records alone, and compare.

    The exit code is 1 if a pick differs under its own policy (a bug); with --policy, differences are
    the answer and the code is 0.
    """
    from sumibi import console
    from sumibi.routing.decisions import read_decisions
    from sumibi.routing.policies import rerun as rerun_decisions

    try:
        lines = file.read_bytes().splitlines()
    except OSError as cause:
        raise ConfigError(f"cannot read the decision log {file}: {cause.strerror}") from cause
    reruns = list(rerun_decisions(read_decisions(lines), policy))
    console.print_reruns(reruns)
    raise typer.Exit(0 if policy or all(one.same for one in reruns) else 1)

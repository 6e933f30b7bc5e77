"""`sumibi bench routing`: the router against every baseline over the grid, its verdicts and its page."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from sumibi.bench import grid, plots, tables
from sumibi.bench.judging import Judge, gather, judge
from sumibi.bench.pool import Failed, Kept, default_cache, fingerprint, run
from sumibi.bench.program_figures import program_figures
from sumibi.bench.replay import Report
from sumibi.bench.report import Figure, machine, statement, write
from sumibi.bench.scenes import points
from sumibi.bench.traffic import available
from sumibi.bench.verdicts import OURS
from sumibi.core.errors import ConfigError
from sumibi.routing.policies import POLICIES

PROGRAM = "program"
NAMES = (*grid.ROWS, PROGRAM)
"""What `--only` takes."""
STANDARD = "agents:sessions=120"
"""In place of recorded agent sessions where there are none."""


def bench_routing(
    *,
    quick: bool,
    only: Sequence[str],
    policies: Sequence[str],
    traces: Path | None,
    jobs: int | None,
    json: Path,
    page: Path,
    report: Report,
    cache: Path | None = None,
) -> list[Judge]:
    """Play, judge, write. Equal code and arguments give equal figures.

    policies  baselines; empty: all, or in the quick run the strongest
    traces    directory with `weka` and `mooncake`; None or without them: made-up agents stand in
    json      the figures, as a list
    page      RESULTS.md; plots go beside it

    Raises ConfigError, EnvironmentProblem, TraceError.
    """
    names = list(only) or list(NAMES)
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--only: there is no {name!r}; there are {', '.join(NAMES)}")
    contestants = _contestants(policies, quick)
    agents = "weka" if available("weka", traces) else STANDARD
    chosen = grid.scenes([name for name in names if name != PROGRAM], quick=quick, agents=agents)
    scenes = [scene for scene in chosen if available(scene.traffic, traces)]
    done, failed = run(
        points(scenes, contestants),
        traces=traces,
        jobs=jobs or os.cpu_count() or 1,
        kept=Kept(cache or default_cache(), fingerprint(traces)),
        report=report,
    )
    gathered = gather(done)
    cmd = _command(quick, only, policies)
    figures = [machine(), statement("command", cmd), *_statements(agents, contestants, quick)]
    if len(scenes) < len(chosen):
        missing = sorted({scene.row for scene in chosen} - {scene.row for scene in scenes})
        figures.append(statement("left out", f"{', '.join(missing)}: the recorded traffic is not here"))
    judged = judge(gathered, cmd)
    if failed:
        judged.append(Judge("runs that failed", cmd, [_failure(each) for each in failed]))
    if PROGRAM in names:
        report(PROGRAM, "3,000 turns, text and all", None)
        judged.append(Judge(PROGRAM, cmd, program_figures(grid.repository(), cmd)))
        report(PROGRAM, "3,000 turns, text and all", 1.0)
    figures += [row.count() for row in judged if row.targets]
    figures += [each for row in judged for each in row.figures]
    pictures = plots.draw(gathered, page.parent)
    write(
        figures,
        json,
        page,
        "Routing: ours against every policy we know",
        details=[*_gallery(pictures), *_reading(), *tables.details(gathered)],
    )
    return judged


def _contestants(policies: Sequence[str], quick: bool) -> list[str]:
    """Ours, then the baselines."""
    chosen = policies or (grid.STRONG if quick else POLICIES)
    return [OURS, *(name for name in chosen if name != OURS)]


def _command(quick: bool, only: Sequence[str], policies: Sequence[str]) -> str:
    words = ["sumibi", "bench", "routing"]
    words += ["--quick"] if quick else []
    words += ["--only", ",".join(only)] if only else []
    words += ["--policies", ",".join(policies)] if policies else []
    return shlex.join(words)


def _statements(agents: str, contestants: Sequence[str], quick: bool) -> list[Figure]:
    said = [
        ("policies", ", ".join(contestants) + ". Baselines have the calibration that their authors document"
                     " for the fleet; all policies play the same requests"),
        ("conditions", "our router starts from speed constants that are wrong by a seeded factor between 1/3"
                       " and 3; engine steps take +-15 %; no policy sees how long answers will be, only"
                       " session-sticky sees session ids; metrics are scraped every 0.05 s unless a scene"
                       " says otherwise; KV events are 0.05 s late; no router refuses a request because"
                       " it waits"),
        ("ratios", "ours over the best baseline's, whoever it is in this figure at this point"),
        ("stand-ins", "W9 is played on GLM-5.2 (published: Qwen3-Coder-480B on TPU v7x) and W12 on Qwen3-32B"
                      " (published: gpt-oss-120b)"),
        ("not played", "prefill and decode on separate pools (sumibi bench claims does); the real engines"),
    ]  # fmt: skip
    if agents != "weka":
        said.append(("traffic", f"no recorded agent sessions here: made-up ones ({agents}) stand in"))
    if quick:
        said.append(("quick", "fewer points, one seed, the strongest baselines: an impression, no proof"))
    return [statement(name, text) for name, text in said]


def _failure(failed: Failed) -> Figure:
    scene = failed.point.scene
    name = f"failed: {scene.row}, {scene.name}, {failed.point.policy}, seed {failed.point.seed}"
    return replace(statement(name, failed.cause), held=False)


def _gallery(pictures: Sequence[Path]) -> list[str]:
    return [f"\n![{path.stem}]({path.name})" for path in pictures]


def _reading() -> list[str]:
    return [
        "\n## Every policy's figures\n",
        "Means over the seeds; bold is best. Bound of a TTFT: each request alone on the fastest replica, its"
        " whole past in the cache. Bound of busy time: a request is never on two replicas; *staying*: nor is"
        " a conversation within ten minutes. Spread evenly: about what it takes if users are evenly on all"
        " replicas at all times and nothing is computed twice. Pooled LRU: one cache as large as all"
        " replicas' together; a fleet can get above it where one cache would be flooded.\n",
    ]


SHOWN = 3
"""Missed targets of a row that are printed, the worst."""


def show(judged: Sequence[Judge]) -> None:
    """Print what a person wants to know first: every row, and the targets that it missed by most."""
    for row in judged:
        reached = f"{row.targets - len(row.missed)} of {row.targets} targets reached"
        print(f"{row.row}: {reached if row.targets else row.figures[0].value}")
        for each in sorted(row.missed, key=_lack, reverse=True)[:SHOWN]:
            if isinstance(each.value, str):
                print(f"  {each.name}: {each.value}")
                continue
            baseline = "" if each.baseline is None else f", baseline {each.baseline:g}"
            value = f"{each.value:g} {each.unit}".rstrip()
            print(f"  {each.name}: {value} (target {each.op} {each.target:g}{baseline})")
        if len(row.missed) > SHOWN:
            print(f"  and {len(row.missed) - SHOWN} more")


def _lack(each: Figure) -> float:
    """By what factor a target was missed."""
    if isinstance(each.value, str):
        return inf
    value, target = each.value, each.target or 0.0
    over, under = (value, target) if each.op == "<=" else (target, value)
    return over / under if under else over

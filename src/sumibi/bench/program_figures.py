"""A program of 3,000 turns with 40 forks and 5 resets: what a late turn costs beside an early one.

The program itself is `benchmarks.decide.program_worker`, text and tokenizer included, in its own process.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from sumibi.bench.report import Figure, figure, statement

REPEATS = 3
LIMIT_S = 300.0
PARTS = (
    ("key_us", "key time", "µs"),
    ("index_bytes", "index bytes added", "bytes"),
    ("session_tips", "ends of conversations remembered", "of 50,000 at most"),
)


def program_figures(root: Path, cmd: str) -> list[Figure]:
    """Late over early; a statement if it cannot be played here (it needs the embedded engine's model)."""
    asked = "".join(json.dumps(["program", number]) + "\n" for number in range(REPEATS))
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "benchmarks.decide.program_worker"],
            cwd=root,
            input=asked,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as problem:
        return [statement("not measured", f"the program of 3,000 turns: {problem}")]
    _, *runs = map(json.loads, answer.stdout.splitlines())
    figures = []
    for part, name, unit in PARTS:
        early = statistics.median(run[f"early_{part}"] for run in runs)
        ratios = [run[f"late_{part}"] / run[f"early_{part}"] for run in runs]
        what = f"program: {name} ({unit}), a turn around 3,000 / around 300"
        figures.append(figure(what, ratios, "x", at_most=1.5, baseline=early, cmd=cmd))
    return figures

"""The one shape of a benchmark's result: a JSON list of figures, and a page made from that list alone.

A figure with a target holds or does not; one without is for the reader. What a benchmark states beside
its numbers (machine, versions, workload, what was not measured) are figures too, with a text as value.
"""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a benchmark (or one statement, with unit `text`)."""

    name: str
    value: float | str
    unit: str
    target: float | None = None
    op: Literal[">=", "<="] | None = None
    held: bool | None = None
    """None without a target."""
    baseline: float | None = None
    """The peer's value, if `value` is a ratio: ours is their product."""
    n: int = 1
    """Repeats; `value` is their median, or mean where a benchmark says so."""
    spread: float | None = None
    """Interquartile range of the repeats, in `unit`."""
    cmd: str = ""
    commit: str = ""


def figure(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    baseline: float | None = None,
    cmd: str = "",
    of_mean: bool = False,
) -> Figure:
    """The median of `values` against its target. `of_mean`: their mean (seeds of a simulation)."""
    value = statistics.mean(values) if of_mean else statistics.median(values)
    target = at_least if at_least is not None else at_most
    held = None
    if target is not None:
        held = value >= target if at_least is not None else value <= target
    return Figure(
        name=name,
        value=round(value, 4),
        unit=unit,
        target=target,
        op=None if target is None else ">=" if at_least is not None else "<=",
        held=held,
        baseline=None if baseline is None else round(baseline, 4),
        n=len(values),
        spread=round(_interquartile_range(values), 4),
        cmd=cmd,
        commit=commit(),
    )


def statement(name: str, text: str) -> Figure:
    """Something to be read, not compared."""
    return Figure(name, text, "text", commit=commit())


def machine() -> Figure:
    """Processor, cores, memory and system of this machine."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.platform()}"
    return statement("machine", f"{text}, Python {platform.python_version()}")


@lru_cache
def commit() -> str:
    """The commit that is measured, with `+` if files differ from it; empty outside a repository."""
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+"],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.strip()


def write_json(figures: list[Figure], path: Path) -> None:
    """Write the list alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n")


def write(
    figures: list[Figure], json_path: Path, page_path: Path, title: str, *, details: Sequence[str] = ()
) -> None:
    """Write the list, read it back and make the page from what was read.

    `details`: sections in Markdown that follow on the page.
    """
    write_json(figures, json_path)
    made = page([Figure(**fields) for fields in json.loads(json_path.read_text())], title)
    page_path.parent.mkdir(parents=True, exist_ok=True)
    page_path.write_text("\n".join([made, *details]))


def finish(figures: list[Figure], json_path: Path, page_path: Path, title: str) -> int:
    """Write both files, print the page; the exit code is 1 if a target was missed."""
    write(figures, json_path, page_path, title)
    print(page_path.read_text())
    return 1 if any(each.held is False for each in figures) else 0


def page(figures: list[Figure], title: str) -> str:
    """Markdown: statements as a list, numbers as a table."""
    lines = [f"# {title}", "", "Made by the command below; do not edit.", ""]
    for each in figures:
        if isinstance(each.value, str):
            lines.append(f"- **{each.name}**: {each.value}")
    lines += [
        "",
        "| figure | value | target | held | baseline | repeats | spread |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in figures:
        if not isinstance(each.value, str):
            target = f"{each.op} {each.target:g}" if each.op else ""
            held = {True: "yes", False: "**no**", None: ""}[each.held]
            baseline = "" if each.baseline is None else f"{each.baseline:g}"
            value = f"{each.value:g} {each.unit}"
            lines.append(
                f"| {each.name} | {value} | {target} | {held} | {baseline} | {each.n} | {each.spread:g} |"
            )
    return "\n".join(lines) + "\n"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _interquartile_range(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low

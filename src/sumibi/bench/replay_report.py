"""What `sumibi replay` shows: a table, JSON, a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sumibi.bench import pictures
from sumibi.bench.replay import Replayed, share
from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.sim.results import Calls, busy_over_time, hit_rate_over_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = (".png", ".svg", ".pdf")
RECORDED_LOG = "events.jsonl"

_COLUMNS = (
    "hit\nrate",
    "of\nbound",
    "work\nshare",
    "TTFT s\nmean",
    "\np50",
    "\np90",
    "\np99",
    "ITL ms\np50",
    "\np99",
    "output\ntok/s",
    "\nrejected",
    "\nfailed",
)
_LEGEND = """\
hit rate: part of prompt tokens found in a cache.
work share: uncached tokens of the busiest replica over the mean.
pooled: one cache as large as all replicas' together; with hindsight: it evicts what is needed last (Belady).
Requests that no replica can hold are rejected and count nowhere else."""
_WINDOWS = 40
"""Points of a curve over time; half as many where there are many curves."""


def print_table(replayed: Sequence[Replayed], left_out: Sequence[str] = ()) -> None:
    """A row a policy, then the bounds (in the first policy's order of arrivals).

    `left_out`: policies that were not played because they make no pairs.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    first = replayed[0].run.summary
    users = f"{first.users} users" if first.users else "at recorded times"
    title = f"{first.workload} ({first.requests:,} requests, {users}) on {first.fleet}, seed {first.seed}"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="", padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for one in replayed:
        row = one.run.summary
        table.add_row(
            row.policy,
            f"{row.token_hit_rate:.4f}",
            _share(row.token_hit_rate, one.bounds.infinite),
            f"{row.work_share:.2f}",
            *(_seconds(value) for value in (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)),
            f"{1000 * row.itl_p50_s:.1f}",
            f"{1000 * row.itl_p99_s:.1f}",
            f"{row.output_tokens_per_s:,.0f}",
            str(row.rejected),
            str(row.failed),
        )
    table.add_section()
    bounds = replayed[0].bounds
    for name, rate in (
        ("infinite cache", bounds.infinite),
        ("pooled, with hindsight", bounds.pooled_belady),
        ("pooled LRU", bounds.pooled_lru),
    ):
        table.add_row(name, f"{rate:.4f}", _share(rate, bounds.infinite))
    # rather lines that a narrow terminal wraps than figures that are cut
    needed = Console(width=1_000).measure(table).maximum
    console = Console()
    console = Console(width=max(console.width, needed))
    console.print(table)
    console.print(_LEGEND, highlight=False, soft_wrap=True)
    if left_out:
        line = f"Left out, as they make no pairs of prefill and decode: {', '.join(left_out)}."
        console.print(line, highlight=False, soft_wrap=True)


def _share(rate: float, of: float) -> str:
    part = share(rate, of)
    return "-" if part is None else f"{part:.1%}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def write_json(path: Path, replayed: Sequence[Replayed]) -> None:
    """A list with one object a run."""
    records = msgspec.json.encode([one.record() for one in replayed])
    path.write_bytes(msgspec.json.format(records) + b"\n")


def check_output(
    path: Path | None, option: str, endings: Sequence[str] = (), *, make_directory: bool = False
) -> None:
    """Before minutes are spent: can this file be written? Leaves no file behind that was not there.

    `make_directory`: where its directory is missing it is made. Raises ConfigError.
    """
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{option} {path}: the name must end with one of {', '.join(endings)}")
    try:
        if make_directory:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no directory {path.parent}")
        there = path.exists()
        if there and not path.is_file() and not path.is_dir():
            return  # a pipe or a terminal: opened once only, by who writes
        # asking for permission is not enough: root may write everywhere, and /proc takes no files
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as cause:
        raise ConfigError(f"{option} {path}: cannot be written: {cause.strerror}") from cause


def check_sources(sources: Sequence[str]) -> None:
    """A directory that `sumibi serve --record` wrote has its log in it. Raises ConfigError."""
    for source in sources:
        log = Path(source) / RECORDED_LOG
        if log.is_file():
            raise ConfigError(f"{source} is the directory of a recording; its log is {log}")


def check_plot(path: Path | None) -> None:
    """Raises ConfigError or, without matplotlib, EnvironmentProblem."""
    check_output(path, "--plot", PICTURES)
    if path is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as cause:
            raise EnvironmentProblem(
                "--plot needs matplotlib: pip install 'sumibi[plot]' (or leave --plot out)"
            ) from cause


def write_plot(path: Path, replayed: Sequence[Replayed]) -> None:
    """Distributions of TTFT and ITL, hit rate over time, load of every replica over time."""
    columns = min(len(replayed), 3 if len(replayed) <= 6 else 4)
    rows = -(-len(replayed) // columns)
    height = 4.2 + rows * 2.4
    figure = pictures.pyplot().figure(figsize=(15, height), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(4.2, rows * 2.4))
    ttft, itl, hits = top.subplots(1, 3)
    for one in replayed:
        _cumulative(ttft, _quantiles(one.run.calls), one)
        _cumulative(itl, one.run.intervals.points(), one)
        _hit_rate(hits, one, _WINDOWS if len(replayed) <= 4 else _WINDOWS // 2)
    _label(ttft, "Time to first token")
    _label(itl, "Time between tokens")
    bound = replayed[0].bounds
    hits.axhline(bound.infinite, color="black", linestyle=":", label="infinite cache")
    hits.axhline(bound.pooled_lru, color="black", linestyle="--", linewidth=0.8, label="pooled LRU")
    pictures.panel(hits, "Token hit rate over time (legend: of the whole run)", x="virtual hours")
    hits.set_ylim(0, 1.02)
    hits.legend(fontsize=7, loc="lower right")
    _loads(bottom, replayed, rows, columns)
    first = replayed[0].run.summary
    pictures.finish(figure, path, f"{first.workload} on {first.fleet}")


def _quantiles(calls: Calls) -> list[tuple[float, float]]:
    """(seconds, part of the served requests that was not slower)."""
    values = sorted(calls.ttft_s(calls.done()))
    return [(value, (rank + 1) / len(values)) for rank, value in enumerate(values)]


def _cumulative(axes: "Axes", points: Sequence[tuple[float, float]], one: Replayed) -> None:
    if points:
        pictures.line(axes, points, one.run.summary.policy)


def _label(axes: "Axes", title: str) -> None:
    axes.set_xscale("log")
    pictures.panel(axes, f"{title}: part of all that was no longer", x="s")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=7, loc="lower right")


def _hit_rate(axes: "Axes", one: Replayed, windows: int) -> None:
    window_s = max(one.run.summary.virtual_s / windows, 1.0)
    points = hit_rate_over_time(one.run.calls, window_s)
    label = f"{one.run.summary.policy}: {one.run.summary.token_hit_rate:.3f}"
    middles = [((at + window_s / 2) / 3600, rate) for at, rate in points]
    pictures.line(axes, middles, one.run.summary.policy, label=label)


def _loads(figure: object, replayed: Sequence[Replayed], rows: int, columns: int) -> None:
    """A map a policy: replicas from top to bottom, time from left to right, dark where they worked."""
    grid = figure.subplots(rows, columns, squeeze=False)  # type: ignore[attr-defined]
    longest_s = max(one.run.summary.virtual_s for one in replayed)
    minutes = max(1, round(longest_s / 60 / (2 * _WINDOWS)))
    picture = None
    for axes, one in zip(grid.flat, replayed, strict=False):
        series = [dict(points) for points in busy_over_time(one.run.busy_s, minutes)]
        windows = int(longest_s // (60 * minutes)) + 1
        busy = [[row.get(60.0 * minutes * at, 0.0) for at in range(windows)] for row in series]
        extent = (0, windows * minutes / 60, len(busy) - 0.5, -0.5)
        picture = axes.imshow(
            busy, aspect="auto", cmap="YlOrRd", vmin=0, vmax=1, extent=extent, interpolation="none"
        )
        summary = one.run.summary
        title = f"{summary.policy}: work share {summary.work_share:.2f}"
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylabel("replica", fontsize=8)
        axes.set_yticks(range(0, len(busy), 1 + len(busy) // 12))
        axes.tick_params(labelsize=7)
    for axes in list(grid.flat)[len(replayed) :]:
        axes.axis("off")
    figure.colorbar(picture, ax=grid, label="part of the time that it worked", shrink=0.9)  # type: ignore[attr-defined]
    figure.supxlabel("virtual hours", fontsize=9)  # type: ignore[attr-defined]

"""What pictures of replays and of the grid have in common: colours of policies, panels, how a page ends.

matplotlib is imported here when a picture is drawn, and not before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sumibi.bench.verdicts import OURS
from sumibi.routing.policies import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#c0392b", "#7f8c8d", "#b0a090", "#566573", "#2f6690", "#e0a030", "#50a0a0", "#7a4f9a", "#3a7d44",
            "#a0b040", "#d080c0")  # fmt: skip
COLOUR = dict(zip(POLICIES, _COLOURS, strict=True))


def pyplot() -> Any:
    """matplotlib, drawing into files only; equal data give an equal file. Raises ImportError."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "sumibi"
    from matplotlib import pyplot as plt

    return plt


def panel(axes: "Axes", title: str, *, x: str = "", grid: str = "both") -> None:
    """Title and x label of one panel, with a faint grid along `grid` (`x`, `y` or `both`)."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.grid(axis=grid, alpha=0.3)  # type: ignore[arg-type]


def line(axes: "Axes", points: Sequence[tuple[float, float]], policy: str, **style: object) -> None:
    """A policy's curve: ours is thicker and before the others."""
    ours = policy == OURS
    usual = {
        "color": COLOUR[policy],
        "label": policy,
        "linewidth": 2.4 if ours else 1.1,
        "zorder": 3 if ours else 2,
    }
    axes.plot(*zip(*points, strict=True), **{**usual, **style})  # type: ignore[arg-type]


def legend(figure: "Figure", axes: "Axes", *, columns: int) -> None:
    """One legend below all panels, of what is in this one."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def finish(figure: "Figure", path: Path, title: str) -> Path:
    """Write the file; returns its path."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=100)
    pyplot().close(figure)
    return path

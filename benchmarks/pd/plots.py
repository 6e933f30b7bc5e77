"""The page's picture: p99 ITL by token budget, and goodput by load."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pd.figures import ITL_P95_S, TTFT_S, Curve, Loads, itl_p99_s

from sumibi.bench import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGGREGATED, APART, OURS = "#7f8c8d", "#2f6690", "#c0392b"


def draw(bursts: Curve, budgets: dict[int, str], apart: str, measured: Loads, path: Path) -> None:
    """Write the picture. `budgets`: token budget -> side. Raises ImportError without matplotlib."""
    figure, panels = pictures.pyplot().subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    _budgets(panels[0], budgets, apart, {s: 1e3 * v for s, v in bursts.medians(itl_p99_s).items()})
    pictures.panel(panels[0], "burst: p99 ITL of streams, ms", x="token budget of a step")
    panels[0].set_yscale("log")
    _budgets(panels[1], budgets, apart, bursts.medians(lambda window: window.prefill_tokens_per_s))
    pictures.panel(panels[1], "burst: prefill throughput, tok/s", x="token budget of a step")
    panels[1].set_ylim(0)
    rates = list(measured.windows)
    for side in measured.windows[rates[0]]:
        colour = OURS if "choice" in side else APART if side == apart else AGGREGATED
        values = [measured.goodput(rate, side) for rate in rates]
        panels[2].plot(rates, values, marker="o", color=colour, label=side)
    bounds = f"TTFT {TTFT_S['long']:g} s / {TTFT_S['stream']:g} s, ITL p95 {1e3 * ITL_P95_S:g} ms"
    pictures.panel(panels[2], f"goodput, part of the requests ({bounds})", x="long prompts a second")
    panels[2].set_ylim(0, 1.05)
    panels[2].legend(frameon=False, fontsize=8)
    pictures.finish(
        figure, path, "Two embedded engines, a core each: streams while 2,000-token prompts arrive"
    )


def _budgets(axes: "Axes", budgets: dict[int, str], apart: str, values: dict[str, float]) -> None:
    places = range(len(budgets))
    own = [values[side] for side in budgets.values()]
    axes.plot(places, own, marker="o", color=AGGREGATED, label="aggregated pair")
    axes.axhline(values[apart], color=APART, label=apart)
    for at, value in zip(places, own, strict=True):
        axes.annotate(f"{value:.0f}", (at, value), textcoords="offset points", xytext=(0, 6), ha="center")
    middle = statistics.mean(places)
    axes.annotate(
        f"{values[apart]:.0f}",
        (middle, values[apart]),
        textcoords="offset points",
        xytext=(0, 4),
        color=APART,
    )
    axes.set_xticks(list(places), [str(budget) for budget in budgets])
    axes.legend(frameon=False, fontsize=8)

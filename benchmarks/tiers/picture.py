"""The figures as one picture."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tiers.places import AT_MOST
from benchmarks.tiers.sets import Found
from benchmarks.tiers.writes import Window

from sumibi.bench import pictures

_WARM, _COLD, _GREY = "#c0392b", "#2f6690", "#9aa5ab"


def draw(
    path: Path,
    rates: Mapping[str, Sequence[float]],
    times: Mapping[str, Sequence[float]],
    found: Mapping[str, Found],
    windows: Mapping[str, Sequence[Window]],
) -> None:
    """Write the file. Raises ImportError without matplotlib."""
    figure, axes = pictures.pyplot().subplots(2, 2, figsize=(13, 8.5), layout="constrained")
    _places(axes[0][0], times)
    _rates(axes[0][1], rates)
    _found(axes[1][0], found)
    _windows(axes[1][1], windows)
    pictures.finish(figure, path, "KV tiers below the device, SmolLM2-135M on CPU")


def _places(axes: Any, times: Mapping[str, Sequence[float]]) -> None:
    colours = {"recomputed": _COLD}
    values = [median(each) for each in times.values()]
    bars = axes.bar(list(times), values, color=[colours.get(place, _WARM) for place in times], width=0.6)
    axes.bar_label(bars, fmt="%.2f")
    for at, (place, each) in enumerate(times.items()):
        axes.plot([at] * len(each), each, "k_", markersize=9, alpha=0.6)
        if place in AT_MOST:
            axes.plot([at - 0.4, at + 0.4], [AT_MOST[place] * values[0]] * 2, "k--", linewidth=1.2)
    axes.margins(y=0.12)
    pictures.panel(axes, "TTFT of 2,016 cached + 60 new tokens, s (dashed: target)", grid="y")


def _rates(axes: Any, rates: Mapping[str, Sequence[float]]) -> None:
    names = list(rates)[::-1]
    values = [median(rates[name]) for name in names]
    colours = [_GREY if name in ("memcpy", "dd, cold") else _WARM for name in names]
    bars = axes.barh(
        [name.replace(", cold, ", ", cold,\n") for name in names], values, color=colours, height=0.6
    )
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.margins(x=0.12)
    pictures.panel(axes, "restore of the same blocks, MB/s", grid="x")


def _found(axes: Any, found: Mapping[str, Found]) -> None:
    styles = {"tiers": (_WARM, "-", 3.0), "an engine that holds all": ("black", "--", 1.2)}
    for name, each in found.items():
        if name == "unbounded, by arithmetic":
            continue  # the same as the engine's
        colour, style, width = styles.get(name, (_COLD, "-", 1.2))
        pairs = zip(accumulate(each.cached), accumulate(each.prompts), strict=True)
        shares = [cached / prompt for cached, prompt in pairs]
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            style,
            color=colour,
            linewidth=width,
            zorder=5 - width,
            label=name,
        )
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize=9)
    pictures.panel(axes, "token hit rate so far; the conversations need 4.2 devices", x="requests")


def _windows(axes: Any, windows: Mapping[str, Sequence[Window]]) -> None:
    for side, colour in (("off", _COLD), ("on", _WARM)):
        ones = windows[side]
        numbers = range(1, len(ones) + 1)
        axes.plot(numbers, [one.p95_s * 1e3 for one in ones], "o-", color=colour, label=f"tiers {side}: p95")
        axes.plot(numbers, [one.p50_s * 1e3 for one in ones], ":", color=colour, label=f"tiers {side}: p50")
    axes.set_ylim(0, None)
    axes.set_xticks(list(numbers))
    axes.legend(frameon=False, fontsize=9)
    pictures.panel(axes, "time between tokens while tiers write, ms", x="window")

"""How the demonstration is shown: JSON for programs, tables for readers, a picture for lookers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sumibi.demo.claims import POLICIES, Claim, Pressure, StepResult, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

_COLOURS = ("#c8553d", "#2f6690")
"""Of the replicas, in the order of their ports."""


def write_json(path: Path, steps: Sequence[StepResult], claims: Sequence[Claim]) -> None:
    """`demo.json`: every step and every claim."""
    fields = ("phase", "step", "policy", "endpoint", "prompt_tokens", "cached_tokens", "ttft_s")
    rows = [{name: getattr(step, name) for name in fields} for step in steps]
    judged = [{name: getattr(c, name) for name in ("name", "value", "op", "target", "held")} for c in claims]
    path.write_text(json.dumps({"steps": rows, "claims": judged}, indent=1) + "\n")


def print_tables(steps: Sequence[StepResult], claims: Sequence[Claim]) -> None:
    """Every step, both policies side by side, the claims."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title="Phases 1-6: a prefix is computed once (prompt and cached in tokens)", title_justify="left"
    )
    for column in ("phase", "step", "endpoint"):
        table.add_column(column)
    for column in ("prompt", "cached", "TTFT s"):
        table.add_column(column, justify="right")
    for step in steps:
        if step.phase < 7:
            table.add_row(
                str(step.phase), step.step, short(step.endpoint), str(step.prompt_tokens),
                str(step.cached_tokens), f"{step.ttft_s:.3f}",
            )  # fmt: skip
    console.print(table)
    console.print(_pressure_table(steps))
    console.print(_comparison_table(steps))
    for claim in claims:
        word = "[green]held[/]" if claim.held else "[red]NOT HELD[/]"
        measured = "" if claim.op == "==" else f": {claim.value:.3g} ({claim.op} {claim.target:g})"
        console.print(f"{word}  {claim.name}{measured}", highlight=False, soft_wrap=True)


def _pressure_table(steps: Sequence[StepResult]) -> "Table":
    from rich.table import Table

    table = Table(
        title="Phase 7: eight conversations under cache pressure (conversation.turn)",
        title_justify="left",
    )
    table.add_column("turn")
    table.add_column("prompt", justify="right")
    for policy in POLICIES:
        for column in (policy, "cached", "TTFT s"):
            table.add_column(column, justify="right")
    for pair in zip(*(_of_policy(steps, policy) for policy in POLICIES), strict=True):
        cells = [_brief(pair[0].step), str(pair[0].prompt_tokens)]
        for step in pair:
            cells += [short(step.endpoint), str(step.cached_tokens), f"{step.ttft_s:.3f}"]
        table.add_row(*cells)
    return table


def _comparison_table(steps: Sequence[StepResult]) -> "Table":
    from rich.table import Table

    cost, turns = (Pressure.of(steps, policy) for policy in POLICIES)
    table = Table(title="Phase 7, side by side", title_justify="left")
    table.add_column("")
    for column in (*POLICIES, "ratio"):
        table.add_column(column, justify="right")
    table.add_row(
        "token hit rate",
        f"{cost.hit_rate:.3f}",
        f"{turns.hit_rate:.3f}",
        f"{ratio(cost.hit_rate, turns.hit_rate):.2f}x",
    )
    table.add_row(
        "median TTFT of turns >= 2", f"{cost.later_ttft_s:.3f} s", f"{turns.later_ttft_s:.3f} s",
        _change(cost, turns),
    )  # fmt: skip
    return table


def write_picture(path: Path, steps: Sequence[StepResult], claims: Sequence[Claim]) -> None:
    """`demo.png`: TTFT of every step coloured by endpoint, its cached share below, the policies compared."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(15, 11), layout="constrained")
    grid = figure.add_gridspec(3, 3, width_ratios=(3, 3, 1.6))
    early = [step for step in steps if step.phase < 7]
    colours = {name: _COLOURS[i % 2] for i, name in enumerate(sorted({s.endpoint for s in steps}))}
    axes = figure.add_subplot(grid[0, :])
    _bars(axes, early, colours, [f"{s.phase}: {s.step}" for s in early])
    axes.set_title("Phases 1-6: a prefix is computed once, then found", loc="left")
    longest = max(step.ttft_s for step in steps if step.phase == 7)
    cost, turns = (Pressure.of(steps, policy) for policy in POLICIES)
    for row, policy in enumerate(POLICIES, start=1):
        axes = figure.add_subplot(grid[row, :2])
        mine = _of_policy(steps, policy)
        _bars(axes, mine, colours, [_brief(s.step) for s in mine])
        axes.set_ylim(0, longest * 1.08)
        axes.set_title(
            f"Phase 7 under {policy}: eight conversations (number.turn), cache pressure", loc="left"
        )
    hits = _compare(figure.add_subplot(grid[1, 2]), steps, "hit_rate")
    times = ratio(cost.hit_rate, turns.hit_rate)
    hits.set_title(f"token hit rate\n{times:.2f}x (higher is better)", fontsize=11)
    waits = _compare(figure.add_subplot(grid[2, 2]), steps, "later_ttft_s")
    waits.set_title(f"median TTFT of turns >= 2, s\n{_change(cost, turns)} (lower is better)", fontsize=11)
    held = sum(claim.held for claim in claims)
    figure.suptitle(
        f"sumibi demonstration: {held} of {len(claims)} claims held", fontsize=15, x=0.01, ha="left"
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _bars(axes: "Axes", steps: Sequence[StepResult], colours: dict[str, str], labels: Sequence[str]) -> None:
    """A bar a step: its height is the TTFT, its colour the replica; a dot is the cached share."""
    axes.bar(
        range(len(steps)), [s.ttft_s for s in steps], color=[colours[s.endpoint] for s in steps], width=0.7
    )
    shares = axes.twinx()
    shares.plot(
        range(len(steps)), [100 * s.cached_tokens / s.prompt_tokens for s in steps],
        linestyle="none", marker="D", markersize=5, color="#222222", markerfacecolor="white", clip_on=False,
    )  # fmt: skip
    shares.set_ylim(0, 105)
    shares.set_ylabel("cached, % of prompt (diamonds)")
    axes.set_ylabel("TTFT, s (bars)")
    long = max(map(len, labels)) > 6
    axes.set_xticks(range(len(steps)), labels, fontsize=8)
    if long:
        axes.tick_params(axis="x", labelrotation=40)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    axes.set_xlim(-0.6, len(steps) - 0.4)
    handles = [
        axes.bar(0, 0, color=colour, label=f"replica {short(name)}") for name, colour in colours.items()
    ]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False)


def _compare(axes: "Axes", steps: Sequence[StepResult], field: str) -> "Axes":
    """A bar a policy."""
    values = [getattr(Pressure.of(steps, policy), field) for policy in POLICIES]
    bars = axes.bar(POLICIES, values, color=("#3a7d44", "#999999"), width=0.6)
    axes.bar_label(bars, fmt="%.2f")
    axes.margins(y=0.15)
    return axes


def _change(cost: Pressure, turns: Pressure) -> str:
    """`-87 %`: the median TTFT under cost, against that under round-robin."""
    return f"{100 * (cost.later_ttft_s / turns.later_ttft_s - 1):+.0f} %"


def _of_policy(steps: Sequence[StepResult], policy: str) -> list[StepResult]:
    return [step for step in steps if step.phase == 7 and step.policy == policy]


def _brief(step: str) -> str:
    """`3.2` for conversation 3, turn 2."""
    return step.removeprefix("conversation ").replace(", turn ", ".")


def short(endpoint: str) -> str:
    """`:8001` of `http://127.0.0.1:8001#0`: the demonstration runs on one host."""
    return ":" + endpoint.partition("#")[0].rpartition(":")[2]

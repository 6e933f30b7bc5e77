"""How `sumibi demo pd` is shown: JSON for programs, a table for readers, a picture for lookers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sumibi.demo.claims import Claim
from sumibi.demo.pd_results import Arrangement

_COLOURS = ("#c8553d", "#2f6690")


def write_json(path: Path, arrangements: Sequence[Arrangement], claims: Sequence[Claim]) -> None:
    """`demo-pd.json`: every gap, every long prompt, every claim."""
    data = {
        "arrangements": [asdict(each) for each in arrangements],
        "claims": [asdict(claim) for claim in claims],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def print_table(arrangements: Sequence[Arrangement], claims: Sequence[Claim]) -> None:
    """Both side by side, then the claims."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Streams while prompts of 2,000 tokens arrive", title_justify="left")
    table.add_column("")
    for column in ("p50 ms", "p99 ms", "longest ms", "TTFT of long prompts s", "tokens"):
        table.add_column(column, justify="right")
    for each in arrangements:
        times = (each.itl_p50_s, each.itl_p99_s, each.itl_most_s)
        ttft = "-" if each.ttft_s is None else f"{each.ttft_s:.2f}"
        table.add_row(each.name, *(f"{1e3 * time_s:.0f}" for time_s in times), ttft, str(len(each.gaps)))
    console.print(table)
    for claim in claims:
        word = "[green]held[/]" if claim.held else "[red]NOT HELD[/]"
        measured = f"{claim.value:.3g} ({claim.op} {claim.target:g})"
        console.print(f"{word}  {claim.name}: {measured}", highlight=False, soft_wrap=True)


def write_picture(path: Path, arrangements: Sequence[Arrangement], claims: Sequence[Claim]) -> None:
    """`demo-pd.png`: time between tokens over time, a panel an arrangement; where long prompts waited for
    their first token is shaded.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(arrangements), 1, figsize=(12, 8), sharex=True, sharey=True, layout="constrained"
    )
    ends_s = max(gap.at_s for each in arrangements for gap in each.gaps)
    for axes, each, colour in zip(panels, arrangements, _COLOURS, strict=True):
        for number, prompt in enumerate(each.prompts):
            label = "a 2,000-token prompt waits for its first token" if number == 0 else None
            last_s = ends_s if prompt.first_s is None else prompt.first_s
            axes.axvspan(prompt.asked_s, last_s, color="#bbbbbb", alpha=0.4, linewidth=0, label=label)
        axes.scatter(
            [gap.at_s for gap in each.gaps], [1e3 * gap.gap_s for gap in each.gaps],
            s=7, color=colour, label="a token of a stream", zorder=2,
        )  # fmt: skip
        axes.axhline(1e3 * each.itl_p99_s, color=colour, linestyle="--", linewidth=1, label="p99")
        axes.set_yscale("log")
        axes.set_ylabel("ms since the token before")
        ttft = "-" if each.ttft_s is None else f"{each.ttft_s:.1f} s"
        axes.set_title(
            f"{each.name}: p50 {1e3 * each.itl_p50_s:.0f} ms, p99 {1e3 * each.itl_p99_s:.0f} ms,"
            f" TTFT of long prompts {ttft}",
            loc="left",
        )
        axes.grid(axis="y", alpha=0.3)
        axes.legend(loc="upper right", frameon=False, ncols=3, fontsize=9)
    panels[-1].set_xlabel("s")
    panels[-1].set_xlim(0, ends_s)
    low, high = panels[0].get_ylim()
    # Room for the legend above; below lie tokens that came at once, after one that was late.
    panels[0].set_ylim(max(low, 1.0), 2.5 * high)
    held = sum(claim.held for claim in claims)
    figure.suptitle(
        f"sumibi demo pd: {held} of {len(claims)} claims held, p99 {claims[0].value:.1f} times lower",
        fontsize=14, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(path, dpi=100)
    plt.close(figure)

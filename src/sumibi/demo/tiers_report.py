"""How the demonstration of KV tiers is shown: JSON for programs, a table, a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sumibi.demo.claims import Claim
from sumibi.demo.tiers_script import TTFT_AT_MOST, Played, computed_s

_COLOURS = {"computed": "#2f6690", "device": "#c8553d", "host": "#e0a030", "disk": "#7a4f9a"}
_NAMES = {"computed": "computed", "device": "device", "host": "host memory", "disk": "disk"}


def write_json(path: Path, played: Sequence[Played], claims: Sequence[Claim]) -> None:
    """Every turn and every claim."""
    rows = {"steps": [asdict(turn) for turn in played], "claims": [asdict(claim) for claim in claims]}
    path.write_text(json.dumps(rows, indent=1) + "\n")


def said(turn: Played) -> str:
    """Where its prompt came from, like `2048 tokens: 1984 from host memory, 64 computed`."""
    parts = [f"{tokens} from {_NAMES.get(tier, tier)}" for tier, tokens in turn.cached_by_tier.items()]
    computed = turn.prompt_tokens - sum(turn.cached_by_tier.values())
    parts.append(f"{computed if parts else 'all'} computed")
    return f"{turn.prompt_tokens} tokens: {', '.join(parts)}"


def print_tables(played: Sequence[Played], claims: Sequence[Claim]) -> None:
    """Every turn, then the claims."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Five conversations on a device that holds one (tokens)", title_justify="left")
    for column in ("tiers", "turn"):
        table.add_column(column)
    for column in ("prompt", "device", "host memory", "disk", "computed", "TTFT s"):
        table.add_column(column, justify="right")
    for turn in played:
        if turn.killed_before:
            table.add_row("", "kill -9, start", *[""] * 6)
        cells = [turn.cached_by_tier.get(tier, 0) for tier in ("device", "host", "disk")]
        computed = turn.prompt_tokens - sum(cells)
        table.add_row(
            turn.side, turn.label, str(turn.prompt_tokens), *(str(cell or "") for cell in cells),
            str(computed), f"{turn.ttft_s:.3f}",
        )  # fmt: skip
    console.print(table)
    for claim in claims:
        word = "[green]held[/]" if claim.held else "[red]NOT HELD[/]"
        console.print(
            f"{word}  {claim.name}: {claim.value:.3g} ({claim.op} {claim.target:g})",
            highlight=False,
            soft_wrap=True,
        )


def write_picture(path: Path, played: Sequence[Played], claims: Sequence[Claim]) -> None:
    """TTFT of every turn, coloured by where its prompt was; what the claims allow; the claims."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(13, 6.5), layout="constrained")
    # A gap between the two sides, and one where the engine was killed.
    places: list[float] = []
    at = 0.0
    for before, turn in zip([None, *played], played, strict=False):
        at += 1.0 if before is None or before.side == turn.side else 1.8
        if turn.killed_before:
            at += 1.2
            axes.axvline(at - 1.1, color="#444444", linestyle=":", linewidth=1.4)
            axes.annotate(
                "kill -9,\nstarted again", (at - 1.1, 0.62), xycoords=("data", "axes fraction"), ha="center",
                fontsize=9, bbox={"facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
        places.append(at)
    axes.bar(places, [turn.ttft_s for turn in played], color=[_COLOURS[turn.place] for turn in played])
    for place, turn in zip(places, played, strict=True):
        top_s = turn.ttft_s
        if turn.wanted in TTFT_AT_MOST:
            most_s = TTFT_AT_MOST[turn.wanted] * computed_s(played)
            axes.plot([place - 0.45, place + 0.45], [most_s, most_s], "k--", linewidth=1.2)
            top_s = max(top_s, most_s)
        # Above the dashed line, too, which would strike it through.
        axes.annotate(
            f"{turn.ttft_s:.2f}", (place, top_s), xytext=(0, 3), textcoords="offset points", ha="center",
            va="bottom", fontsize=8,
        )  # fmt: skip
    axes.set_xticks(places, [turn.label.replace(", turn ", ".") for turn in played])
    axes.set_ylabel("TTFT, s (dashed: what is claimed)")
    axes.margins(y=0.1)
    for side, title in (("off", "device cache only"), ("on", "host memory and disk below it")):
        mine = [place for place, turn in zip(places, played, strict=True) if turn.side == side]
        middle = (mine[0] + mine[-1]) / 2
        axes.annotate(title, (middle, 0.97), xycoords=("data", "axes fraction"), ha="center", fontsize=11)
    handles = [axes.bar(0, 0, color=colour, label=_NAMES[name]) for name, colour in _COLOURS.items()]
    axes.set_xlim(places[0] - 0.8, places[-1] + 0.8)
    figure.legend(
        handles=handles, title="prompt mostly from", loc="outside lower center", ncols=4, frameon=False
    )
    held = sum(claim.held for claim in claims)
    figure.suptitle(
        f"A conversation of 2,000 tokens comes back (conversation.turn): {held} of {len(claims)} claims held",
        x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(path, dpi=100)
    plt.close(figure)

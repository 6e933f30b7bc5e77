"""Pictures of the page: what a table hides."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sumibi.bench import pictures
from sumibi.bench.judging import Runs, hit_rate, mean_ttft_s
from sumibi.bench.published import AFFINE, BLIND
from sumibi.bench.scenes import Caches, Outcome
from sumibi.bench.verdicts import OURS
from sumibi.routing.policies import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(scenes: Sequence[Runs], directory: Path) -> list[Path]:
    """The pictures that these runs allow; none without matplotlib."""
    try:
        pictures.pyplot()
    except ImportError:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, row, picture in (
        ("serving", "serving grid", _serving),
        ("w2", "W2", _w2),
        ("caches", "cache grid", _caches),
    ):
        mine = [runs for runs in scenes if runs.scene.row == row and runs.scene.part is None]
        if mine:
            drawn.append(picture(mine, directory / f"{name}.png"))
    return drawn


def _serving(scenes: Sequence[Runs], path: Path) -> Path:
    """TTFT by policy at every point: mean, and p99 of warm turns."""
    figure, panels = pictures.pyplot().subplots(
        1, 2, figsize=(14, 1.6 + 0.42 * len(scenes)), sharey=True, layout="constrained"
    )
    for axes, title, get, bound in (
        (panels[0], "mean TTFT, s", mean_ttft_s, lambda one: one.least_ttft_mean_s),
        (panels[1], "p99 TTFT of warm turns, s", _warm, lambda one: one.least_warm_ttft_p99_s),
    ):
        _dots(axes, scenes, get, bound)
        pictures.panel(axes, title, grid="x")
        axes.set_xscale("log")
    panels[0].set_yticks(range(len(scenes)), [runs.scene.name for runs in scenes], fontsize=8)
    panels[0].invert_yaxis()
    pictures.legend(figure, panels[0], columns=6)
    return pictures.finish(figure, path, "Agent sessions on 8 GLM-5.2 replicas")


def _warm(one: Outcome) -> float:
    return one.warm_ttft_p99_s


def _dots(
    axes: "Axes",
    scenes: Sequence[Runs],
    get: Callable[[Outcome], float],
    bound: Callable[[Outcome], float],
) -> None:
    for policy in _policies(scenes):
        points = [
            (_mean(get(one) for one in runs.played[policy]), at)
            for at, runs in enumerate(scenes)
            if policy in runs.played
        ]
        ours = policy == OURS
        pictures.line(
            axes,
            points,
            policy,
            linestyle="",
            marker="D" if ours else "o",
            markersize=8 if ours else 5,
            alpha=1.0 if ours else 0.75,
        )
    least = [
        (_mean(bound(one) for runs_ in runs.played.values() for one in runs_), at)
        for at, runs in enumerate(scenes)
    ]
    axes.plot(
        *zip(*least, strict=True), linestyle="", marker="|", markersize=14, color="black", label="bound"
    )


def _w2(scenes: Sequence[Runs], path: Path) -> Path:
    """The ladder: output and TTFT by rate, with the published points."""
    runs = scenes[0]
    figure, panels = pictures.pyplot().subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    stages = [(at, rate) for at, rate in enumerate(runs.scene.rates) if at]
    for which, (axes, title) in enumerate(
        zip(panels, ("output tokens/s", "mean TTFT, s", "p90 TTFT, s"), strict=True)
    ):
        for policy in _policies(scenes):
            values = [
                _mean(
                    (
                        one.stages[at].output_tokens_per_s,
                        one.stages[at].ttft_mean_s,
                        one.stages[at].ttft_p90_s,
                    )[which]
                    for one in runs.played[policy]
                )
                for at, _ in stages
            ]
            pictures.line(axes, [(rate, y) for (_, rate), y in zip(stages, values, strict=True)], policy)
        for rows, marker, label in (
            (BLIND, "x", "published: blind"),
            (AFFINE, "+", "published: approximate index"),
        ):
            axes.plot(
                list(rows),
                [row[which] for row in rows.values()],
                linestyle="",
                marker=marker,
                markersize=8,
                color="black",
                label=label,
            )
        pictures.panel(axes, title, x="requests/s")
        if which:
            axes.set_yscale("log")
    pictures.legend(figure, panels[0], columns=7)
    return pictures.finish(figure, path, "W2: llm-d's ladder on 8 x Qwen3-32B, 2 x H100 each")


def _caches(scenes: Sequence[Runs], path: Path) -> Path:
    """Hit rate against capacity, with what one pooled LRU cache gives."""
    users = sorted({runs.scene.users or 0 for runs in scenes})
    figure, panels = pictures.pyplot().subplots(
        1, len(users), figsize=(5 * len(users), 4.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, number in zip(panels[0], users, strict=True):
        mine = [runs for runs in scenes if runs.scene.users == number]
        sizes = [_tokens_m(runs) for runs in mine]
        for policy in _policies(mine):
            points = [
                (size, _mean(hit_rate(one) for one in runs.played[policy]))
                for size, runs in zip(sizes, mine, strict=True)
                if policy in runs.played
            ]
            pictures.line(axes, points, policy, marker="D" if policy == OURS else ".", markersize=6)
        some = [next(one for runs_ in runs.played.values() for one in runs_) for runs in mine]
        axes.plot(sizes, [one.pooled_lru_hit_rate for one in some], "k_--", linewidth=1.2, label="pooled LRU")
        axes.axhline(
            some[0].bound_hit_rate, color="black", linestyle=":", linewidth=1.2, label="endless cache"
        )
        pictures.panel(axes, f"{number} users", x="M tokens a replica")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:.2f}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(0, 1)
    panels[0][0].set_ylabel("token hit rate")
    pictures.legend(figure, panels[0][0], columns=7)
    return pictures.finish(figure, path, "Agent sessions on 8 replicas, cache arithmetic")


def _tokens_m(runs: Runs) -> float:
    assert isinstance(runs.scene.fleet, Caches)
    return runs.scene.fleet.blocks * 64 / 1e6


def _policies(scenes: Sequence[Runs]) -> list[str]:
    """Those that played, in the usual order."""
    played = {policy for runs in scenes for policy in runs.played}
    return [policy for policy in POLICIES if policy in played]


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)

"""Every policy's figures, for a reader: Markdown tables of points by policies, the bound beside them."""

from collections.abc import Callable, Mapping, Sequence
from math import isnan

from sumibi.bench.judging import Runs, at_priority, at_stage, hit_rate, mean_ttft_s, of
from sumibi.bench.scenes import Outcome, Part
from sumibi.bench.verdicts import Better

Format = Callable[[float], str]
Line = tuple[str, Mapping[str, Sequence[float]], float | None]
"""Of a table: its name, values by policy and seed, the bound."""


def matrix(title: str, lines: Sequence[Line], better: Better | None, form: Format, bound: str = "") -> str:
    """Means over the seeds; the best of a line is bold. Bound: the last column, if it has a name."""
    policies = list(dict.fromkeys(policy for _, values, _ in lines for policy in values))
    head = ["", *policies, *([bound] if bound else [])]
    rows = [f"**{title}**", "", _row(head), "|" + "---|" * len(head)]
    for name, values, limit in lines:
        means = {policy: _mean(values.get(policy, ())) for policy in policies}
        known = [value for value in means.values() if not isnan(value)]
        best = None if better is None or not known else min(known) if better == "lower" else max(known)
        cells = [
            "" if isnan(value) else f"**{form(value)}**" if value == best else form(value)
            for value in means.values()
        ]
        if bound:
            cells.append("" if limit is None or isnan(limit) else form(limit))
        rows.append(_row([name, *cells]))
    return "\n".join([*rows, ""])


def details(scenes: Sequence[Runs]) -> list[str]:
    """A section a row."""
    sections = []
    for row in dict.fromkeys(runs.scene.row for runs in scenes):
        mine = [runs for runs in scenes if runs.scene.row == row]
        sections += [f"\n## {row}\n", *_TABLES.get(row, _plain)(mine)]
    return sections


def rate(value: float) -> str:
    """A part of one."""
    return f"{value:.4f}"


def ratio(value: float) -> str:
    """A ratio near one."""
    return f"{value:.2f}"


def seconds(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def whole(value: float) -> str:
    """A count or a rate of tokens."""
    return f"{value:,.0f}"


def _lines(
    scenes: Sequence[Runs],
    get: Callable[[Outcome], float],
    bound: Callable[[Outcome], float] | None = None,
) -> list[Line]:
    return [(runs.scene.name, runs.by_policy(get), _bound(runs, bound) if bound else None) for runs in scenes]


def _bound(runs: Runs, get: Callable[[Outcome], float]) -> float | None:
    """Of our runs, else of anybody's."""
    known = runs.ours(get) or next(iter(runs.by_policy(get).values()), [])
    return _mean(known)


def _caches(scenes: Sequence[Runs]) -> list[str]:
    pooled = _lines(scenes, hit_rate, lambda one: one.pooled_lru_hit_rate)
    return [
        matrix("token hit rate", pooled, "higher", rate, "pooled LRU"),
        matrix(
            "token hit rate as part of an endless cache's",
            _lines(
                scenes, lambda one: one.whole.hit_rate / one.bound_hit_rate, lambda one: one.bound_hit_rate
            ),
            "higher",
            rate,
            "endless cache",
        ),
        matrix("work share", _lines(scenes, lambda one: one.work_share), "lower", ratio),
    ]


def _serving(scenes: Sequence[Runs]) -> list[str]:
    return [
        matrix(
            "mean TTFT, s",
            _lines(scenes, mean_ttft_s, lambda one: one.least_ttft_mean_s),
            "lower",
            seconds,
            "bound",
        ),
        matrix(
            "median TTFT, s",
            _lines(scenes, lambda one: one.ttft_p50_s, lambda one: one.least_ttft_p50_s),
            "lower",
            seconds,
            "bound",
        ),
        matrix(
            "p99 TTFT of warm turns, s",
            _lines(scenes, lambda one: one.warm_ttft_p99_s, lambda one: one.least_warm_ttft_p99_s),
            "lower",
            seconds,
            "bound",
        ),
        matrix(
            "token hit rate",
            _lines(scenes, hit_rate, lambda one: one.pooled_lru_hit_rate),
            "higher",
            rate,
            "pooled LRU",
        ),
        matrix("work share", _lines(scenes, lambda one: one.work_share), "lower", ratio),
        matrix(
            "busy time of the busiest replica over the mean, p95 of 10-minute windows",
            _lines(scenes, lambda one: one.busy_spread_p95),
            "lower",
            ratio,
        ),
        matrix("the least it could be for our requests and our mean", _least_spreads(scenes), None, ratio),
        matrix("requests not served", _lines(scenes, _not_served), None, whole),
        *(
            [
                matrix(
                    "p99 TTFT of requests that came from a fault to 5 min later, s",
                    _lines(scenes, lambda one: one.windows.ttft_p99_s if one.windows else float("nan")),
                    "lower",
                    seconds,
                )
            ]
            if any(runs.scene.windows_s for runs in scenes)
            else []
        ),
    ]


def _least_spreads(scenes: Sequence[Runs]) -> list[Line]:
    return [
        (
            runs.scene.name,
            {
                "bound": runs.ours(lambda one: one.least_busy_spread_p95),
                "staying": runs.ours(lambda one: one.staying_busy_spread_p95),
            },
            None,
        )
        for runs in scenes
    ]


def _not_served(one: Outcome) -> float:
    return float(one.whole.requests - one.whole.served)


def _stages(scenes: Sequence[Runs]) -> list[str]:
    tables = []
    figures: Sequence[tuple[str, Callable[[Part], float], Better, Format]] = (
        ("output tokens/s", lambda part: part.output_tokens_per_s, "higher", whole),
        ("mean TTFT, s", lambda part: part.ttft_mean_s, "lower", seconds),
        ("p90 TTFT, s", lambda part: part.ttft_p90_s, "lower", seconds),
        ("token hit rate", lambda part: part.hit_rate, "higher", rate),
    )
    for runs in scenes:
        for title, get, better, form in figures:
            lines: list[Line] = [
                (f"{per_s} /s", runs.by_policy(of(at_stage(at), get)), None)
                for at, per_s in enumerate(runs.scene.rates)
                if at
            ]
            tables.append(matrix(f"{runs.scene.name}: {title}", lines, better, form))
        first = next((one for each in runs.played.values() for one in each), None)
        if first is not None and first.priorities:
            lines = [
                (
                    f"priority {level}",
                    runs.by_policy(of(at_priority(level), lambda part: part.ttft_mean_s)),
                    None,
                )
                for level in sorted(first.priorities, reverse=True)
            ]
            tables.append(matrix(f"{runs.scene.name}: mean TTFT by priority, s", lines, "lower", seconds))
    return [*tables, matrix("requests not served", _lines(scenes, _not_served), None, whole)]


def _plain(scenes: Sequence[Runs]) -> list[str]:
    return [
        matrix("output tokens/s", _lines(scenes, lambda one: one.whole.output_tokens_per_s), "higher", whole),
        matrix(
            "mean E2E, s",
            _lines(scenes, lambda one: one.e2e_mean_s, lambda one: one.even_e2e_mean_s),
            "lower",
            seconds,
            "spread evenly",
        ),
        matrix(
            "mean TTFT, s",
            _lines(scenes, mean_ttft_s, lambda one: one.least_ttft_mean_s),
            "lower",
            seconds,
            "bound",
        ),
        matrix("p90 TTFT, s", _lines(scenes, lambda one: one.whole.ttft_p90_s), "lower", seconds),
        matrix(
            "token hit rate",
            _lines(scenes, hit_rate, lambda one: one.bound_hit_rate),
            "higher",
            rate,
            "endless cache",
        ),
        matrix("requests not served", _lines(scenes, _not_served), None, whole),
    ]


_TABLES: dict[str, Callable[[Sequence[Runs]], list[str]]] = {
    "cache grid": _caches,
    "Mooncake": _caches,
    "serving grid": _serving,
    "uneven": _serving,
    "faults": _serving,
    "W2": _stages,
    "W1": _stages,
    "W3": _stages,
    "W15": _stages,
}


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")

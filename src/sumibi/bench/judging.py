"""The table of targets, row by row, applied to what was played."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan

from sumibi.bench.grid import UNDISTURBED
from sumibi.bench.report import Figure, figure, statement
from sumibi.bench.scenes import Outcome, Part, Point, Scene
from sumibi.bench.verdicts import OURS, Better, Ratio, against_best, clear_lead, part_better, worst

Played = dict[str, list[Outcome]]
"""By policy: a run for each seed."""
ByPolicy = Mapping[str, Sequence[float]]
WITHIN = 1.02


@dataclass(frozen=True, slots=True)
class Runs:
    """A scene and all its runs."""

    scene: Scene
    played: Played

    def by_policy(self, get: Callable[[Outcome], float]) -> dict[str, list[float]]:
        """One figure of every run."""
        return {policy: [get(one) for one in runs] for policy, runs in self.played.items()}

    def ours(self, get: Callable[[Outcome], float]) -> list[float]:
        """One figure of our runs."""
        return [get(one) for one in self.played.get(OURS, [])]


def gather(done: Sequence[tuple[Point, Outcome]]) -> list[Runs]:
    """Runs by scene, in order; policies that lack a seed of a scene are left out there."""
    scenes: dict[tuple[str, str], Runs] = {}
    for point, outcome in done:
        key = (point.scene.row, point.scene.name)
        runs = scenes.setdefault(key, Runs(point.scene, {}))
        runs.played.setdefault(point.policy, []).append(outcome)
    for runs in scenes.values():
        for policy in [name for name, each in runs.played.items() if len(each) < runs.scene.seeds]:
            del runs.played[policy]
    return list(scenes.values())


def at_stage(at: int) -> Callable[[Outcome], Part]:
    """Looks at one stage of a run."""
    return lambda one: one.stages[at]


def at_priority(priority: int) -> Callable[[Outcome], Part]:
    """Looks at the requests of one priority."""
    return lambda one: one.priorities[priority]


def of(part: Callable[[Outcome], Part], get: Callable[[Part], float]) -> Callable[[Outcome], float]:
    """A figure of a part."""
    return lambda one: get(part(one))


def hit_rate(one: Outcome) -> float:
    """Of the whole run."""
    return one.whole.hit_rate


def mean_ttft_s(one: Outcome) -> float:
    """Of the whole run."""
    return one.whole.ttft_mean_s


@dataclass(slots=True)
class Judge:
    """Writes the figures of a row."""

    row: str
    cmd: str
    figures: list[Figure] = field(default_factory=list)

    @property
    def missed(self) -> list[Figure]:
        """Targets that were not reached."""
        return [each for each in self.figures if each.held is False]

    @property
    def targets(self) -> int:
        """Reached or not."""
        return sum(each.held is not None for each in self.figures)

    def value(
        self,
        name: str,
        values: Sequence[float],
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        baseline: float | None = None,
    ) -> None:
        """A figure; the mean of the values decides. A target without a number is missed."""
        if not values:
            return
        if any(map(isnan, values)):
            held = None if at_least is None and at_most is None else False
            self.figures.append(replace(statement(name, "no number: nothing was served"), held=held))
            return
        made = figure(
            name,
            values,
            unit,
            at_least=at_least,
            at_most=at_most,
            baseline=baseline,
            cmd=self.cmd,
            of_mean=True,
        )
        self.figures.append(made)

    def ratio(
        self,
        name: str,
        by_policy: ByPolicy,
        better: Better,
        limit: float | None,
    ) -> Ratio | None:
        """Ours over the best baseline's."""
        ratio = against_best(by_policy, better)
        if ratio is not None:
            self.value(
                f"{name} / {ratio.best}'s",
                ratio.values,
                "x",
                at_most=limit if better == "lower" else None,
                at_least=limit if better == "higher" else None,
                baseline=ratio.baseline,
            )
        elif any(map(isnan, by_policy.get(OURS, ()))):
            limits = {"at_most" if better == "lower" else "at_least": limit}
            self.value(name, by_policy[OURS], "x", **limits)
        return ratio

    def served(self, scenes: Sequence[Runs]) -> None:
        """Nobody looks good by serving less."""
        worst_lack, where = 0.0, ""
        for runs in scenes:
            served = runs.by_policy(lambda one: float(one.whole.served))
            ratio = against_best(served, "higher")
            if ratio is None:
                continue
            lack = ratio.baseline - sum(served[OURS]) / len(served[OURS])
            if not where or lack > worst_lack:
                worst_lack, where = lack, f" ({runs.scene.name}, {ratio.best})"
        if where:
            name = f"{self.row}: requests that a baseline served and ours did not{where}"
            # who was on a replica when it died is chance, not choice
            chance = any(runs.scene.row == "faults" for runs in scenes)
            self.value(name, [worst_lack], "requests", at_most=None if chance else 0.0)

    def count(self) -> Figure:
        """How many of its targets were reached; all should be."""
        reached = self.targets - len(self.missed)
        name = f"{self.row}: targets reached, of {self.targets}"
        return figure(name, [float(reached)], "", at_least=float(self.targets), cmd=self.cmd)


def judge(scenes: Sequence[Runs], cmd: str) -> list[Judge]:
    """Every row that was played, judged."""
    judged = []
    for row, how in _ROWS.items():
        mine = [runs for runs in scenes if runs.scene.row == row]
        if mine:
            judged.append(Judge(row, cmd))
            how(judged[-1], mine)
            judged[-1].served(mine)
    return [each for each in judged if each.figures]


def _cache(judge: Judge, scenes: Sequence[Runs]) -> None:
    for runs in scenes:
        name = f"cache grid, {runs.scene.name}"
        judge.ratio(f"{name}: hit rate", runs.by_policy(hit_rate), "higher", 1.0)
        fits = all(one.fits for one in runs.played.get(OURS, []))
        share = runs.ours(lambda one: one.whole.hit_rate / one.pooled_lru_hit_rate)
        pooled = runs.ours(lambda one: one.pooled_lru_hit_rate)
        at_least = 0.98 if fits else 0.90
        label = f"{name}: hit rate / pooled LRU's ({'fits' if fits else 'does not fit'})"
        judge.value(label, share, "x", at_least=at_least, baseline=_mean(pooled))
        at_most = 1.15 if (runs.scene.users or 0) >= 32 else 1.3
        judge.value(f"{name}: work share", runs.ours(lambda one: one.work_share), "", at_most=at_most)


def _serving(judge: Judge, scenes: Sequence[Runs]) -> None:
    for label, get in (
        ("mean TTFT", mean_ttft_s),
        ("p99 TTFT of warm turns", lambda one: one.warm_ttft_p99_s),
    ):
        ratios = [
            ratio
            for runs in scenes
            if (
                ratio := judge.ratio(
                    f"serving grid, {runs.scene.name}: {label}", runs.by_policy(get), "lower", WITHIN
                )
            )
        ]
        if ratios:
            name = f"serving grid: part of the points at which our {label} is below every baseline's"
            judge.value(name, [part_better(ratios, "lower")], "", at_least=2 / 3)
            last = worst(ratios, "lower")
            name = f"serving grid: {label}, worst point / {last.best}'s"
            judge.value(name, [last.mean], "x", baseline=last.baseline)
    for runs in scenes:
        name = f"serving grid, {runs.scene.name}: busy time of the busiest replica over the mean, p95"
        judge.value(name, runs.ours(lambda one: one.busy_spread_p95), "", at_most=1.3)


def _stages(judge: Judge, scenes: Sequence[Runs]) -> None:
    """Throughput, mean and p90 TTFT at every rate."""
    for runs in scenes:
        for at, rate in enumerate(runs.scene.rates):
            if at == 0:
                continue
            name = f"{runs.scene.name}, {rate} requests/s"
            _throughput_and_ttft(judge, name, runs, at_stage(at))
            if runs.scene.row == "W2" and rate >= 50:
                hits = runs.ours(of(at_stage(at), lambda part: part.hit_rate))
                judge.value(f"{name}: hit rate", hits, "", at_least=0.96)


def _whole(judge: Judge, scenes: Sequence[Runs]) -> None:
    """The same over whole runs."""
    for runs in scenes:
        _throughput_and_ttft(judge, runs.scene.name, runs, lambda one: one.whole)


def _throughput_and_ttft(judge: Judge, name: str, runs: Runs, part: Callable[[Outcome], Part]) -> None:
    output = runs.by_policy(of(part, lambda part: part.output_tokens_per_s))
    judge.ratio(f"{name}: output tokens/s", output, "higher", 1 / WITHIN)
    mean_s = runs.by_policy(of(part, lambda part: part.ttft_mean_s))
    judge.ratio(f"{name}: mean TTFT", mean_s, "lower", WITHIN)
    p90_s = runs.by_policy(of(part, lambda part: part.ttft_p90_s))
    judge.ratio(f"{name}: p90 TTFT", p90_s, "lower", WITHIN)


def _priorities(judge: Judge, scenes: Sequence[Runs]) -> None:
    _stages(judge, scenes)
    for runs in scenes:
        known = sorted(
            {priority for runs_ in runs.played.values() for one in runs_ for priority in one.priorities}
        )
        for priority in reversed(known):
            mean_s = runs.by_policy(of(at_priority(priority), lambda part: part.ttft_mean_s))
            judge.ratio(f"{runs.scene.name}, priority {priority}: mean TTFT", mean_s, "lower", WITHIN)


def _decode(judge: Judge, scenes: Sequence[Runs]) -> None:
    for runs in scenes:
        name = runs.scene.name
        output = judge.ratio(
            f"{name}: output tokens/s",
            runs.by_policy(lambda one: one.whole.output_tokens_per_s),
            "higher",
            None,
        )
        e2e = judge.ratio(f"{name}: mean E2E", runs.by_policy(lambda one: one.e2e_mean_s), "lower", None)
        if output is not None and e2e is not None:
            label = f"{name}: clear lead (output +5 % or mean E2E -10 % over the second: 1)"
            judge.value(label, [clear_lead(output, e2e)], "", at_least=1.0)


def _mooncake(judge: Judge, scenes: Sequence[Runs]) -> None:
    for runs in scenes:
        name = f"Mooncake, {runs.scene.name}"
        share = runs.ours(lambda one: one.whole.hit_rate / one.pooled_lru_hit_rate)
        pooled = _mean(runs.ours(lambda one: one.pooled_lru_hit_rate))
        judge.value(f"{name}: hit rate / pooled LRU's", share, "x", at_least=0.995, baseline=pooled)
        judge.value(f"{name}: work share", runs.ours(lambda one: one.work_share), "", at_most=1.05)
        judge.ratio(f"{name}: hit rate", runs.by_policy(hit_rate), "higher", None)


def _uneven(judge: Judge, scenes: Sequence[Runs]) -> None:
    for runs in scenes:
        judge.ratio(f"{runs.scene.name}: mean TTFT", runs.by_policy(mean_ttft_s), "lower", 1.0)
        warm_s = runs.by_policy(lambda one: one.warm_ttft_p99_s)
        judge.ratio(f"{runs.scene.name}: p99 TTFT of warm turns", warm_s, "lower", None)


def _faults(judge: Judge, scenes: Sequence[Runs]) -> None:
    calm = next((runs for runs in scenes if runs.scene.name == UNDISTURBED), None)
    for runs in scenes:
        if runs is calm:
            continue
        name = f"faults, {runs.scene.name}"
        judge.ratio(f"{name}: mean TTFT", runs.by_policy(mean_ttft_s), "lower", 1.0)
        if calm is None:
            continue
        ratios = [
            _window_p99_s(one) / _window_p99_s(before)
            for one, before in zip(runs.played.get(OURS, []), calm.played.get(OURS, []), strict=True)
        ]
        before_s = _mean(calm.ours(_window_p99_s))
        label = f"{name}: p99 TTFT from fault to +5 min / undisturbed"
        judge.value(label, ratios, "x", at_most=1.5, baseline=before_s)
        judge.ratio(f"{name}: the same p99 TTFT", runs.by_policy(_window_p99_s), "lower", None)


def _window_p99_s(one: Outcome) -> float:
    return one.windows.ttft_p99_s if one.windows is not None else float("nan")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


_ROWS: dict[str, Callable[[Judge, Sequence[Runs]], None]] = {
    "cache grid": _cache,
    "serving grid": _serving,
    "W2": _stages,
    "W1": _stages,
    "W3": _stages,
    "W9": _whole,
    "W12": _whole,
    "W15": _priorities,
    "W7": _decode,
    "W8": _decode,
    "Mooncake": _mooncake,
    "uneven": _uneven,
    "faults": _faults,
}

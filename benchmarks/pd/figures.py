"""From windows to figures: percentiles, goodput under the bounds below, targets.

The bounds were written down before any goodput was measured and are not tuned: three times what a request
takes alone on one core of the machine that this was written on (3.5 s to the first token of 2,000, 25 ms a
token), and for the short prompts of streams the time of a few steps.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isnan

from benchmarks.pd.load import LONG, STREAM, Window

from sumibi.bench import report
from sumibi.bench.report import Figure
from sumibi.demo.streams import Heard

TTFT_S = {LONG.name: 10.0, STREAM.name: 1.5}
ITL_P95_S = 0.075
"""Of one request's gaps between tokens."""
KEEPS = 0.9
"""Part of the best prefill throughput that a token budget has to keep to count."""
LOWER = 5.0
"""The best budget's p99 ITL over that of prefill + decode."""
NEAR = 0.98
"""The router's goodput over the better fixed mode's."""


def percentile(values: Iterable[float], part: float) -> float:
    """The smallest value that `part` of all are not above. NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)] if ordered else float("nan")


def good(one: Heard) -> bool:
    """Whether a request kept its bounds and was answered whole."""
    if not one.whole or one.ttft_s > TTFT_S[one.kind.name]:
        return False
    return percentile(one.gaps_s, 0.95) <= ITL_P95_S


def goodput(window: Window) -> float:
    """Part of the requests that were sent."""
    return sum(map(good, window.heard)) / len(window.heard) if window.heard else 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Bursts on each side, by side, a window a round."""

    windows: dict[str, list[Window]]

    def all(self) -> list[Window]:
        """Every window."""
        return [window for windows in self.windows.values() for window in windows]

    def medians(self, of: Callable[[Window], float]) -> dict[str, float]:
        """One figure of every side."""
        return {side: statistics.median(map(of, windows)) for side, windows in self.windows.items()}

    def best(self, sides: Sequence[str]) -> str:
        """Of these the one with the least p99 ITL that keeps the prefill throughput."""
        throughput = self.medians(lambda window: window.prefill_tokens_per_s)
        most = max(throughput[side] for side in sides)
        itl_s = self.medians(itl_p99_s)
        near = [side for side in sides if throughput[side] >= KEEPS * most]
        return min(near, key=lambda side: inf if isnan(itl_s[side]) else itl_s[side])


def itl_p99_s(window: Window) -> float:
    """Of all streams' gaps."""
    return percentile(window.gaps_s(STREAM), 0.99)


def _median_ttft_s(window: Window) -> float:
    return percentile(window.ttfts_s(LONG), 0.5)


def curve(bursts: Curve, budgets: Sequence[str], apart: str, cmd: str) -> list[Figure]:
    """Every side's figures, and the target."""
    figures = []
    for side, windows in bursts.windows.items():
        rows: list[tuple[str, str, Callable[[Window], float]]] = [
            ("ITL p50", "ms", lambda w: 1e3 * percentile(w.gaps_s(STREAM), 0.5)),
            ("ITL p99", "ms", lambda w: 1e3 * itl_p99_s(w)),
            ("ITL, longest", "ms", lambda w: 1e3 * max(w.gaps_s(STREAM), default=float("nan"))),
            ("TTFT p50 of long prompts", "s", _median_ttft_s),
            ("prefill throughput", "tok/s", lambda w: w.prefill_tokens_per_s),
            ("output throughput", "tok/s", lambda w: w.output_tokens / w.lasted_s),
            ("CPU time of both engines", "cores", lambda w: _cores(w, "engine")),
            ("CPU time of the gateway", "cores", lambda w: _cores(w, "gateway")),
        ]
        figures += [
            report.figure(f"burst, {side}: {name}", [of(window) for window in windows], unit, cmd=cmd)
            for name, unit, of in rows
        ]
    best = bursts.best(budgets)
    ratios = [
        itl_p99_s(whole) / itl_p99_s(pair)
        for whole, pair in zip(bursts.windows[best], bursts.windows[apart], strict=True)
    ]
    figures.append(
        report.statement(
            "best budget",
            f"{best}: the least p99 ITL of those with {KEEPS:.0%} of the best prefill throughput",
        )
    )
    base_ms = 1e3 * bursts.medians(itl_p99_s)[apart]
    name = f"burst: p99 ITL, {best} / {apart}"
    figures.append(report.figure(name, ratios, "x", at_least=LOWER, baseline=base_ms, cmd=cmd))
    prefill = bursts.medians(lambda window: window.prefill_tokens_per_s)
    part = [prefill[apart] / prefill[best]]
    name = f"burst: prefill throughput, {apart} / {best}"
    figures.append(report.figure(name, part, "x", baseline=prefill[best], cmd=cmd))
    return figures


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads on each side: by rate of long prompts, by side, a window a round."""

    windows: dict[float, dict[str, list[Window]]]

    def all(self) -> list[Window]:
        """Every window."""
        return [w for sides in self.windows.values() for windows in sides.values() for w in windows]

    def goodput(self, rate: float, side: str) -> float:
        """Over all rounds: requests are few, and they are the same on every side."""
        heard = [one for window in self.windows[rate][side] for one in window.heard]
        return sum(map(good, heard)) / len(heard)


def loads(measured: Loads, fixed: Sequence[str], ours: str, cmd: str) -> list[Figure]:
    """Every side at every load, and the targets: `ours` against the better of the `fixed`."""
    figures = []
    for rate, sides in measured.windows.items():
        for side, windows in sides.items():
            name = f"{rate:g} long prompts/s, {side}"
            rows: list[tuple[str, str, Callable[[Window], float]]] = [
                ("goodput, part of the requests", "", goodput),
                ("TTFT p50 of long prompts", "s", lambda w: _ttft_s(w, LONG.name, 0.5)),
                ("TTFT p99 of long prompts", "s", lambda w: _ttft_s(w, LONG.name, 0.99)),
                ("TTFT p99 of streams", "s", lambda w: _ttft_s(w, STREAM.name, 0.99)),
                ("ITL p50 of streams", "ms", lambda w: 1e3 * percentile(w.gaps_s(STREAM), 0.5)),
                ("ITL p99 of streams", "ms", lambda w: 1e3 * itl_p99_s(w)),
                ("output throughput", "tok/s", lambda w: w.output_tokens / w.lasted_s),
            ]
            figures += [
                report.figure(f"{name}: {what}", [of(window) for window in windows], unit, cmd=cmd)
                for what, unit, of in rows
            ]
            paired = sum(window.decisions.get("prefill-decode", 0.0) for window in windows)
            if side == ours:
                asked = sum(len(window.heard) for window in windows)
                figures.append(report.figure(f"{name}: pairs, part of the requests", [paired / asked], ""))
    above = 0
    for rate in measured.windows:
        best = max(fixed, key=lambda side: measured.goodput(rate, side))
        theirs, own = measured.goodput(rate, best), measured.goodput(rate, ours)
        above += own > theirs
        name = f"{rate:g} long prompts/s: goodput, {ours} / {best}"
        # Where nothing was good anywhere, nothing was shown.
        ratio = own / theirs if theirs else inf if own else 0.0
        figures.append(report.figure(name, [ratio], "x", at_least=NEAR, baseline=theirs, cmd=cmd))
    name = "loads at which the router's choice is above both fixed modes"
    figures.append(report.figure(name, [float(above)], "", at_least=1.0, cmd=cmd))
    return figures


def quiet(windows: Sequence[Window], cmd: str) -> list[Figure]:
    """How much others used of the machine meanwhile: with more than a little nothing here says much."""
    return [report.figure("cores used by others", [w.others_cores for w in windows], "cores", cmd=cmd)]


def losses(bursts: Curve, measured: Loads, apart: str, *, best: str) -> list[Figure]:
    """Where prefill + decode is worse than the aggregated pair, in words."""
    prefill = bursts.medians(lambda window: window.prefill_tokens_per_s)
    lost = []
    if prefill[apart] < prefill[best]:
        lost.append(f"bursts: {prefill[apart]:.0f} prompt tok/s, aggregated {prefill[best]:.0f}")
    for rate, sides in measured.windows.items():
        theirs, ours = measured.goodput(rate, best), measured.goodput(rate, apart)
        if ours < theirs:
            lost.append(f"{rate:g} long prompts/s: goodput {ours:.2f}, aggregated {theirs:.2f}")
        for kind, part in ((LONG.name, 0.5), (LONG.name, 0.99), (STREAM.name, 0.99)):
            both = [
                statistics.median(_ttft_s(window, kind, part) for window in sides[side])
                for side in (apart, best)
            ]
            if both[0] > both[1]:
                what = f"TTFT p{100 * part:g} ({kind})"
                lost.append(f"{rate:g} long prompts/s: {what} {both[0]:.2f} s, aggregated {both[1]:.2f} s")
    return [report.statement(f"where {apart} loses to {best}", "; ".join(lost) or "nowhere")]


def _ttft_s(window: Window, kind: str, part: float) -> float:
    """Of those sent; who got no token in time counts with the time that it was waited for at least."""
    end_s = window.begun_s + window.lasted_s
    waits = [min(one.ttft_s, end_s - one.asked_s) for one in window.heard if one.kind.name == kind]
    return percentile(waits, part)


def _cores(window: Window, kind: str) -> float:
    return sum(cpu_s for name, cpu_s in window.cpu_s.items() if name.startswith(kind)) / window.lasted_s

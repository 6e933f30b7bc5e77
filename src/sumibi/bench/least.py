"""Bounds of one run: what no router could have got under, for the requests that were served.

Every request alone on the fastest kind of replica, with its whole past in the cache. Engines' noise aside.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from sumibi.sim.fleet import FleetSpec
from sumibi.sim.results import NAN, WARM_TOKENS, Calls, Run, mean, percentile

WINDOW_S = 600.0
LEAST_BUSY_S = 60.0
"""Of a replica in a window, on average; windows of less say nothing (as in `sim.results.busy_spread`)."""


@dataclass(slots=True)
class Least:
    """Seconds of each served request (`rows`)."""

    rows: list[int]
    ttft_s: list[float] = field(default_factory=list)
    service_s: list[float] = field(default_factory=list)
    """On the engine, prefill and decode."""


def least_of(calls: Calls, fleet: FleetSpec) -> Least:
    """Of all requests that were served."""
    least = Least(calls.done())
    kinds = [(group.times(), group.chunk_tokens) for group in fleet.groups]
    for i in least.rows:
        new = calls.unavoidable_tokens[i]
        prompt, output = calls.prompt_tokens[i], calls.output_tokens[i]
        prefill_s = min(times.alone_s(new, prompt - new, chunk_tokens=chunk) for times, chunk in kinds)
        step_s = min(times.decode_line(1, prompt)[0] for times, _ in kinds)
        least.ttft_s.append(fleet.overhead_s + prefill_s)
        least.service_s.append(prefill_s + max(0, output - 1) * step_s)
    return least


def warm(calls: Calls, least: Least) -> list[float]:
    """Least times to first token of warm turns."""
    return [
        ttft_s
        for i, ttft_s in zip(least.rows, least.ttft_s, strict=True)
        if calls.unavoidable_tokens[i] <= WARM_TOKENS
    ]


def least_busy_spread(run: Run, least: Least, unit: Callable[[int], Hashable]) -> float:
    """What `busy_spread_p95` could have been at least, given when requests came and ended, how much the
    replicas worked together, and that the requests of a `unit` (of a row) are on one replica in a window.

    Of a request's service, what does not fit into its time outside a window was done within it: in that
    window some replica worked at least as long as the unit with the most of it.
    """
    calls, minutes = run.calls, round(WINDOW_S / 60)
    together: dict[int, float] = {}
    for replica in run.busy_s:
        for minute, seconds in replica.items():
            together[minute // minutes] = together.get(minute // minutes, 0.0) + seconds
    units: dict[int, dict[Hashable, float]] = {}
    for i, service_s in zip(least.rows, least.service_s, strict=True):
        begin_s, end_s = calls.arrival_s[i], calls.end_s[i]
        for window in range(int(begin_s // WINDOW_S), int(end_s // WINDOW_S) + 1):
            inside_s = min(end_s, (window + 1) * WINDOW_S) - max(begin_s, window * WINDOW_S)
            surely_s = service_s - (end_s - begin_s - inside_s)
            if surely_s > 0:
                row = units.setdefault(window, {})
                row[unit(i)] = row.get(unit(i), 0.0) + surely_s
    spreads = []
    for window, total_s in together.items():
        even_s = total_s / len(run.busy_s)
        if even_s >= LEAST_BUSY_S:
            longest_s = max(units.get(window, {}).values(), default=0.0)
            spreads.append(max(even_s, longest_s) / even_s)
    return percentile(spreads, 0.95)


def even_e2e_s(run: Run, fleet: FleetSpec, ttft_s: Sequence[float]) -> float:
    """See `Outcome.even_e2e_mean_s`: first tokens as if alone, then steps of users / replicas sequences."""
    users, calls, rows = run.summary.users, run.calls, run.calls.done()
    output = sum(calls.output_tokens[i] for i in rows)
    if not users or len(fleet.groups) > 1 or not output:
        return NAN
    # a step's context: long answers are in more of them
    held = sum(calls.output_tokens[i] * (calls.prompt_tokens[i] + calls.output_tokens[i] / 2) for i in rows)
    sequences = max(1, round(users / fleet.replicas))
    step_s, _ = fleet.groups[0].times().decode_line(sequences, round(sequences * held / output))
    return mean(ttft_s) + step_s * output / len(rows)

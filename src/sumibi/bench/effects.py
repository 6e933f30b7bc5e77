"""What a published effect is, beside ours: rows of `bench.directions`, and how their figures are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from sumibi.bench.grid import SCRAPE_S
from sumibi.bench.playing import PATIENT
from sumibi.bench.report import Figure, figure
from sumibi.sim.calibration import calibrated
from sumibi.sim.fleet import FleetSpec, Group, Store
from sumibi.sim.results import Run, Summary
from sumibi.sim.simulate import simulate
from sumibi.sim.workload import Workload

CMD = "python -m benchmarks.directions"
BLIND, OURS = "round-robin", "cost"


@dataclass(frozen=True, slots=True)
class Row:
    """One published effect and ours, before -> after."""

    group: str
    what: str
    better: bool
    """Published direction: True: `after` is better; False: it is not (a negative control)."""
    lower_is_better: bool
    before: float
    after: float
    unit: str
    published: str

    @property
    def agrees(self) -> bool:
        """Whether the direction comes out."""
        improved = self.after < self.before if self.lower_is_better else self.after > self.before
        return improved if self.better else not improved


def run_of(played: Workload, spec: FleetSpec, policy: str, users: int | None = None) -> Run:
    """One simulation; nobody is refused what could be served."""
    return simulate(played, spec, policy=policy, users=users, config=calibrated(spec, PATIENT))


def play(played: Workload, spec: FleetSpec, policy: str, users: int | None = None) -> Summary:
    """Its figures."""
    return run_of(played, spec, policy, users).summary


def scraped(name: str, *groups: Group, store: Store | None = None) -> FleetSpec:
    """A fleet whose metrics are read as often as llm-d's router does."""
    return FleetSpec(name=name, groups=list(groups), scrape_interval_s=SCRAPE_S, store=store)


Reading = Callable[[Summary], float]


def ttft(one: Summary) -> float:
    """Mean, in seconds."""
    return one.ttft_mean_s


def median_ttft(one: Summary) -> float:
    """In seconds."""
    return one.ttft_p50_s


def e2e(one: Summary) -> float:
    """Mean, in seconds."""
    return one.e2e_mean_s


def output_rate(one: Summary) -> float:
    """Output tokens a second."""
    return one.output_tokens_per_s


def row(
    group: str,
    what: str,
    read: Reading,
    before: Summary,
    after: Summary,
    published: str,
    *,
    better: bool = True,
) -> Row:
    """One effect of two runs, read in the same way."""
    unit = "tok/s" if read is output_rate else "s"
    return Row(group, what, better, read is not output_rate, read(before), read(after), unit, published)


def figures_of(rows: list[Row]) -> list[Figure]:
    """One figure a row: after as part of before, with the direction as its target."""
    figures = []
    for row in rows:
        ratio = row.after / row.before if row.before else float("inf")
        lower = row.lower_is_better is row.better
        made = figure(
            f"{row.group}. {row.what}: {row.before:.4g} -> {row.after:.4g} {row.unit}".rstrip()
            + f" (published: {row.published})",
            [ratio],
            "x",
            at_most=1.0 if lower else None,
            at_least=None if lower else 1.0,
            baseline=row.before,
            cmd=CMD,
        )
        # From the unrounded figures.
        figures.append(replace(made, held=row.agrees))
    return figures

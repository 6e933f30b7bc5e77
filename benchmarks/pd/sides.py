"""The sides that are compared: two engines on a core each behind a gateway, in processes of their own.

A side is what `sumibi up` would start, by its own plan and supervisor; added are the token budget of a step
and the gateway's core. The gateway and the load share the first engine's core: that of the one that
prefills, where roles are apart. The same for every side.
"""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulator.stack import running_stack

from sumibi.admin import metrics
from sumibi.demo.run import free_ports
from sumibi.demo.streams import Target
from sumibi.local.plan import plan_stack
from sumibi.stack import KeyPath, load_stack

_PORTS = 5  # two engines, a side channel, gateway, admin door


@dataclass(frozen=True, slots=True)
class Side:
    """One arrangement."""

    name: str
    whole: int
    """Engines that do whole runs."""
    prefill: int
    decode: int
    policy: str
    budgets: tuple[int, int]
    """Tokens of a step, of each engine."""


def aggregated(budget: int) -> Side:
    """Two engines alike, requests in turn."""
    return Side(f"aggregated, budget {budget}", 2, 0, 0, "round-robin", (budget, budget))


def apart(budgets: tuple[int, int]) -> Side:
    """One engine prefills, one decodes: every request is a pair."""
    return Side("prefill + decode", 0, 1, 1, "round-robin", budgets)


def chosen(budgets: tuple[int, int]) -> Side:
    """The same engines; the router chooses for each request: a pair, or a whole run where it decodes."""
    return Side("router's choice", 0, 1, 1, "cost", budgets)


@dataclass(slots=True)
class Running:
    """A side that is up."""

    side: Side
    target: Target
    engines: list[str]
    """URLs."""
    pids: dict[str, int]
    """Of engines and gateway, by name."""
    admin_url: str

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process so far, user and system."""
        return {name: _cpu_s(pid) for name, pid in self.pids.items()}

    def busy(self) -> bool:
        """Whether any engine still runs or holds a request."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return any(
            sample.value > 0
            for url in self.engines
            for sample in metrics(f"{url}/metrics")
            if sample.name in names
        )

    def decisions(self) -> dict[str, float]:
        """Requests so far that were run whole, or as a pair, where both were possible."""
        counted: dict[str, float] = {}
        for sample in metrics(f"{self.target.url}/metrics"):
            if sample.name == "sumibi_disagg_decision_total":
                kind = sample.labels.get("decision_type", "?")
                counted[kind] = counted.get(kind, 0.0) + sample.value
        return counted


@contextmanager
def running(side: Side, model_dir: Path, home: Path, *, kv_blocks: int) -> Iterator[Running]:
    """The side, ready; gone at the end of the block. `home` is a short path. Raises EnvironmentProblem."""
    first = free_ports(_PORTS)
    flags: dict[KeyPath, object] = {
        ("engines", "first_port"): first,
        ("engines", "count"): side.whole,
        ("engines", "prefill"): side.prefill,
        ("engines", "decode"): side.decode,
        ("engines", "kv_blocks"): kv_blocks,
        ("gateway", "port"): first + 3,
        ("gateway", "admin_port"): first + 4,
        ("gateway", "policy"): side.policy,
    }
    stack = load_stack(None, flags)
    cores = two_cores()
    state_dir = home / "sumibi"
    plan = plan_stack(stack, model_dir=str(model_dir), state_dir=state_dir, cores=cores)
    *engines, gateway = plan.children
    engines = [
        dataclasses.replace(child, argv=[*child.argv, "--max-num-batched-tokens", str(budget)])
        for child, budget in zip(engines, side.budgets, strict=True)
    ]
    gateway = dataclasses.replace(gateway, cores=(cores[0],))
    plan = dataclasses.replace(plan, children=[*engines, gateway])
    with running_stack(plan, state_dir) as record:
        yield Running(
            side,
            Target(record.url, record.model),
            [f"http://127.0.0.1:{port}" for port in stack.engine_ports],
            {child.name: child.pid for child in record.children if child.pid is not None},
            plan.admin_url,
        )


def step_tokens(url: str) -> float:
    """Tokens that an engine has computed in steps so far: of prompts, and one for each sampled."""
    return sum(s.value for s in metrics(f"{url}/metrics") if s.name == "vllm:iteration_tokens_total_sum")


def two_cores() -> list[int]:
    """The cores that everything runs on."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores")
    return cores[:2]


@contextmanager
def on_first_core() -> Iterator[None]:
    """Run the block on the core that gateways have, as all loads do."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {two_cores()[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def busy_s() -> float:
    """CPU seconds of the whole machine so far that were not idle, waiting or stolen."""
    user, nice, system, _idle, _wait, irq, softirq = Path("/proc/stat").read_text().split()[1:8]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def tree_cpu_s() -> float:
    """CPU seconds so far of this process and of all that descend from it and live."""
    parents, ticks = {}, {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                fields = _stat(int(directory.name))
            except OSError:  # it ended meanwhile
                continue
            parents[int(directory.name)] = int(fields[1])
            ticks[int(directory.name)] = int(fields[11]) + int(fields[12])
    own = os.getpid()

    def below(pid: int) -> bool:
        while pid not in (own, 0):
            pid = parents.get(pid, 0)
        return pid == own

    return sum(spent for pid, spent in ticks.items() if below(pid)) / os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

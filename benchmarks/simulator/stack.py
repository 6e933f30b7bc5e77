"""Two embedded engines behind a gateway that records, on free ports and in a directory of their own.

They are what `sumibi up` starts, by its own plan and supervisor; only the gateway's `--record` is added. The
supervisor ends with this process, and everything with the supervisor.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from sumibi.admin import Admin, wait_for_fleet
from sumibi.core.errors import EnvironmentProblem
from sumibi.local.plan import StackPlan, plan_stack
from sumibi.local.runfile import PLAN_FILE, RunRecord, read_run, take_lock
from sumibi.stack import KeyPath, load_stack

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@contextmanager
def recorded_stack(
    model_dir: Path,
    state_dir: Path,
    record: Path,
    *,
    kv_blocks: int,
    policy: str,
    ports: Callable[[int], int],
) -> Iterator[RunRecord]:
    """A stack that is ready; gone, its record complete, at the end of the block.

    `state_dir` must be named `sumibi`. `ports` gives the first of so many free ports in a row. Raises
    EnvironmentProblem if it does not come up.
    """
    first = ports(4)
    flags: dict[KeyPath, object] = {
        ("engines", "first_port"): first,
        ("engines", "kv_blocks"): kv_blocks,
        ("gateway", "port"): first + 2,
        ("gateway", "admin_port"): first + 3,
        ("gateway", "policy"): policy,
    }
    stack = load_stack(None, flags)
    cores = sorted(os.sched_getaffinity(0))
    plan = plan_stack(stack, model_dir=str(model_dir), state_dir=state_dir, cores=cores)
    *engines, gateway = plan.children
    gateway = dataclasses.replace(gateway, argv=[*gateway.argv, "--record", str(record)])
    plan = dataclasses.replace(plan, children=[*engines, gateway])
    with running_stack(plan, state_dir) as running:
        yield running


@contextmanager
def running_stack(plan: StackPlan, state_dir: Path) -> Iterator[RunRecord]:
    """What `plan` says, ready and known to its gateway; gone at the end of the block.

    Raises EnvironmentProblem if it does not come up.
    """
    with ExitStack() as ending:
        supervisor = _supervise(plan, state_dir)
        ending.callback(_stop, supervisor)
        running = _wait_ready(supervisor, state_dir)
        wait_for_fleet(Admin.of(state_dir, plan.admin_url), len(plan.children) - 1)
        yield running


def _supervise(plan: StackPlan, state_dir: Path) -> "subprocess.Popen[bytes]":
    lock = take_lock(state_dir)
    if lock is None:
        raise EnvironmentProblem(f"something else runs in {state_dir}")
    try:
        (state_dir / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
        argv = [sys.executable, "-m", "sumibi.local", str(state_dir), str(lock), str(os.getpid())]
        with (state_dir / "supervisor.log").open("wb") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,))
    finally:
        os.close(lock)


def _wait_ready(supervisor: "subprocess.Popen[bytes]", state_dir: Path) -> RunRecord:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        alive = supervisor.poll() is None
        record = read_run(state_dir)
        if record is not None and record.failure:
            raise EnvironmentProblem(record.failure)
        if record is not None and record.ready and alive:
            return record
        if not alive:
            raise EnvironmentProblem((state_dir / "supervisor.log").read_text(errors="replace"))
        time.sleep(0.1)
    raise EnvironmentProblem(f"engines and gateway were not ready after {START_TIMEOUT_S:.0f} s")


def _stop(supervisor: "subprocess.Popen[bytes]") -> None:
    supervisor.terminate()
    try:
        supervisor.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()  # the kernel ends its children with it
        supervisor.wait(STOP_TIMEOUT_S)


def engines_of(running: RunRecord) -> dict[str, int]:
    """Process ids of the engines by the name that the router has for them."""
    return {
        child.health_url.removesuffix("/health") + "#0": child.pid
        for child in running.children
        if child.name.startswith("engine-") and child.pid is not None
    }

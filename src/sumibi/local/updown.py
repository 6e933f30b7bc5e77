"""Start a stack in the background and follow it until it is ready; stop it again.

`up` takes the lock, looks for taken ports and makes the model *before* it starts anything, then hands
the lock to a supervisor process that outlives it. A second `up` finds the lock held and follows the
first one's run file, so two of them end with one stack and the same answer, unless the second one asks
for settings that the first one does not have.
"""

import difflib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from sumibi.admin import Admin, wait_for_fleet
from sumibi.core.errors import ConfigError, EnvironmentProblem, ModelError, SumibiError
from sumibi.engine.manifest import MANIFEST
from sumibi.engine.options import TINY
from sumibi.gateway.epp import endpoints
from sumibi.local.plan import StackPlan, plan_stack
from sumibi.local.runfile import (
    ENDPOINTS_FILE,
    PLAN_FILE,
    STACK_FILE,
    ChildState,
    RunRecord,
    is_running,
    read_run,
    remove_run,
    take_lock,
)
from sumibi.local.supervisor import Supervisor
from sumibi.stack import DEFAULT_MODEL, Stack, known_keys

Report = Callable[[str, str, float | None], None]
"""Called with who (`model`, `engine-0`, ...), what, and the fraction done if it is known."""

CONFIG_FILE = "config.json"
SUPERVISOR_LOG = "supervisor.log"
_POLL_S = 0.1
_STOP_MARGIN_S = 5.0
"""Beyond what the supervisor may need to stop its children."""
_SAID_AFTER_S = 1.0
"""A stop without running requests takes less."""


class StartFailed(SumibiError):
    """The stack did not become ready; the message holds the end of the log that says why."""

    code = "start_failed"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Running:
    """A stack that is ready."""

    record: RunRecord
    started: bool
    """False: it was running already."""
    supervisor: "subprocess.Popen[bytes] | None" = None
    """Set if this process started it (and should reap it, if it lives on)."""


def up(stack: Stack, state_dir: Path, report: Report, *, tied: bool = False) -> Running:
    """Bring `stack` up in the background; returns when it is ready.

    `tied`: the supervisor stops when this process ends. Raises EnvironmentProblem (port taken, disk),
    ModelError, StartFailed, ConfigError (a stack with other settings is running).
    """
    check_model(stack.model)
    lock = take_lock(state_dir)
    if lock is None:
        record = _follow(state_dir, report, lambda: is_running(state_dir))
        _refuse_other_settings(stack, state_dir, record)
        return Running(record, started=False)
    try:
        plan = _prepare(stack, state_dir, report)
        supervisor = _spawn(plan, state_dir, lock, tied=tied)
    finally:
        os.close(lock)
    try:
        record = _follow(state_dir, report, lambda: supervisor.poll() is None)
        wait_for_fleet(
            Admin.of(state_dir, record.admin_url),
            len(stack.engine_ports),
            lambda known: report("gateway", f"knows {known} of {len(stack.engine_ports)} replicas", None),
        )
    except BaseException:
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait(plan.stop_within_s + _STOP_MARGIN_S)
        raise
    return Running(record, started=True, supervisor=supervisor)


def up_in_foreground(stack: Stack, state_dir: Path, report: Report) -> int:
    """Run the supervisor in this process until it is told to stop; the exit code is its own."""
    check_model(stack.model)
    lock = take_lock(state_dir)
    if lock is None:
        raise EnvironmentProblem("a stack is already running: `sumibi down` stops it")
    try:
        plan = _prepare(stack, state_dir, report)
        seen: dict[str, str] = {}
        code = Supervisor(plan, state_dir).run(lambda record: _report_changes(record, seen, report))
        failed = read_run(state_dir)
        if code and failed is not None:
            raise StartFailed(_with_key(failed.failure), code)
        return code
    finally:
        os.close(lock)


def down(state_dir: Path, waiting: Callable[[RunRecord], None] = lambda record: None) -> bool:
    """Stop the stack and wait until nothing of it is left. False if none was running.

    Running requests get the stack's drain time; `waiting` is called once if that takes a while.
    """
    if not is_running(state_dir):
        return False
    record = read_run(state_dir)
    if record is None:
        raise EnvironmentProblem(
            "a stack is being prepared (its model is being fetched): interrupt that `sumibi up` instead"
        )
    say_at_s = time.monotonic() + _SAID_AFTER_S

    def is_gone() -> bool:
        nonlocal say_at_s
        if not is_running(state_dir):
            return True
        if time.monotonic() > say_at_s and _gateway_stops(state_dir):
            say_at_s = float("inf")
            waiting(record)
        return False

    for number in (signal.SIGTERM, signal.SIGKILL):  # killed, the kernel ends its children with it
        try:
            os.kill(record.pid, number)
        except ProcessLookupError:
            break
        if _wait_until(is_gone, record.stop_within_s + _STOP_MARGIN_S):
            break
    remove_run(state_dir)
    return True


def _gateway_stops(state_dir: Path) -> bool:
    record = read_run(state_dir)
    return record is not None and record.children[-1].state is ChildState.STOPPING


def taken_ports(stack: Stack) -> list[str]:
    """A sentence for every port of `stack` that somebody else listens on, with the key to change."""
    gateway = stack.gateway
    wanted = [(gateway.host, gateway.port, "gateway.port", "--port")]
    wanted.append(("127.0.0.1", gateway.admin_port, "gateway.admin_port", "--admin-port"))
    of_engines = (*stack.engine_ports, *stack.side_ports)
    wanted += [("127.0.0.1", port, "engines.first_port", "--engine-port") for port in of_engines]
    sentences = []
    for host, port, key, flag in wanted:
        problem = _bind_problem(host, port)
        if problem:
            sentences.append(f"cannot listen on {host}:{port} ({problem}): change {key} (or {flag})")
    return sentences


def _bind_problem(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as cause:
            return cause.strerror or str(cause)
    return ""


def check_model(name: str) -> None:
    """A quick look before anything is started. Raises ModelError: no such model, or no checkpoint."""
    directory = Path(name).expanduser()
    if name in (TINY, DEFAULT_MODEL):
        return
    if not directory.is_dir():
        near = difflib.get_close_matches(name, (DEFAULT_MODEL, TINY), n=1)
        hint = f"did you mean {near[0]}?" if near else f"the built-in model is {DEFAULT_MODEL!r}"
        raise ModelError(f"there is no model directory {directory}; {hint}")
    if not (directory / CONFIG_FILE).is_file() and not (directory / MANIFEST).exists():
        raise ModelError(f"{directory} is no checkpoint directory: it has no {CONFIG_FILE}")


def _refuse_other_settings(wanted: Stack, state_dir: Path, record: RunRecord) -> None:
    """Raise ConfigError if `wanted` says something (by flag or file) that the running stack has not.

    What it leaves to the defaults is not compared: a bare `sumibi up` asks for nothing in particular.
    """
    try:
        running = Stack.model_validate_json((state_dir / STACK_FILE).read_bytes())
    except (OSError, ValueError):
        return  # left by another version: nothing to compare with
    # Each has a queue for every priority; those are compared that either has one of its own for.
    priorities = {*running.gateway.bands, *wanted.gateway.bands}
    if "bands" not in wanted.gateway.model_fields_set:
        priorities = set()
    has = dict(_settings(_with_bands(running, priorities), said_only=False))
    said = _settings(_with_bands(_as_meant(wanted), priorities), said_only=True)
    other = [f"{key} {_shown(has[key])} (not {_shown(value)})" for key, value in said if has[key] != value]
    if other:
        raise ConfigError(
            f"a stack with other settings is running at {record.url}/v1: {', '.join(other)};"
            " `sumibi down` stops it"
        )


def _settings(part: BaseModel, path: str = "", *, said_only: bool) -> Iterator[tuple[str, object]]:
    """Dotted key and value of everything in `part`, without defaults if `said_only`."""
    for name in type(part).model_fields:
        if said_only and name not in part.model_fields_set:
            continue
        value = getattr(part, name)
        key = f"{path}{name}"
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{key}.", said_only=said_only)
        elif key == "gateway.bands":
            for priority, band in value.items():
                yield from _settings(band, f"{key}.{priority}.", said_only=said_only)
        else:
            yield key, value


def _shown(value: object) -> object:
    return "''" if value == "" else value


def _with_bands(stack: Stack, priorities: Iterable[int]) -> Stack:
    """The same stack, which says the queues of these priorities in full, and no others."""
    bands = {priority: stack.gateway.band(priority) for priority in sorted(priorities)}
    return stack.model_copy(update={"gateway": stack.gateway.model_copy(update={"bands": bands})})


def _as_meant(stack: Stack) -> Stack:
    """The same stack, its files and directories named so that they can be compared from elsewhere."""
    meant: dict[str, Any] = {}
    if stack.model not in (TINY, DEFAULT_MODEL):
        meant["model"] = str(Path(stack.model).expanduser().resolve())
    if "engines" in stack.model_fields_set:
        meant["engines"] = stack.engines.absolute()
    return stack.model_copy(update=meant)


def _prepare(stack: Stack, state_dir: Path, report: Report) -> StackPlan:
    """Everything that can fail without a process started; the lock is held."""
    remove_run(state_dir)
    (state_dir / SUPERVISOR_LOG).unlink(missing_ok=True)
    try:
        meant = _with_bands(_as_meant(stack), stack.gateway.bands)
        (state_dir / STACK_FILE).write_text(meant.model_dump_json())
        endpoints.write(state_dir / ENDPOINTS_FILE, _listed(stack))
    except OSError as cause:
        raise EnvironmentProblem(f"cannot write to the state directory {state_dir}: {cause}") from cause
    taken = taken_ports(stack)
    if taken:
        raise EnvironmentProblem("\n".join(taken))
    _check_secret(stack)
    model_dir = stack.model if stack.model == TINY else str(model_directory(stack.model, report))
    plan = plan_stack(stack, model_dir=model_dir, state_dir=state_dir, cores=sorted(os.sched_getaffinity(0)))
    for note in plan.notes:
        report("note", note, None)
    return plan


def _check_secret(stack: Stack) -> None:
    """Engines would say it later, by their own flag."""
    if stack.engines.secret_file:
        try:
            with Path(stack.engines.secret_file).expanduser().open("rb"):
                pass
        except OSError as cause:
            raise ConfigError(
                f"engines.secret_file: cannot read {stack.engines.secret_file!r}: {cause.strerror}"
            ) from cause


def model_directory(name: str, report: Report) -> Path:
    """The checkpoint directory of a model, fetched and converted if need be."""
    try:
        from sumibi.engine.fetch import ensure_model
    except ImportError as cause:
        raise EnvironmentProblem(
            f"the embedded engine is not installed ({cause}): `pip install 'sumibi[engine]'`"
        ) from cause
    directory = ensure_model(name, lambda what, done: report("model", what, done)).resolve()
    report("model", f"found in {directory}", 1.0)
    return directory


def _listed(stack: Stack) -> list[endpoints.Listed]:
    """The stack's engines as llm-d's file discovery names them."""
    return [
        endpoints.Listed(
            name=f"engine-{number}",
            address="127.0.0.1",
            port=str(port),
            labels={} if role == "both" else {endpoints.ROLE_LABEL: role},
        )
        for number, (port, role) in enumerate(zip(stack.engine_ports, stack.engines.roles, strict=True))
    ]


def _spawn(plan: StackPlan, state_dir: Path, lock: int, *, tied: bool) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", "sumibi.local", str(state_dir), str(lock), str(os.getpid() if tied else 0)]
    try:
        (state_dir / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
        with (state_dir / SUPERVISOR_LOG).open("wb") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
                start_new_session=True,
            )
    except OSError as cause:
        raise EnvironmentProblem(f"cannot start the supervisor in {state_dir}: {cause}") from cause


def _follow(state_dir: Path, report: Report, alive: Callable[[], bool]) -> RunRecord:
    """Report what the run file says until everything is ready.

    Bounded by the limits of whoever holds the lock (download, start), or by its life.
    """
    seen: dict[str, str] = {}
    while True:
        still_alive = alive()  # asked first: what it wrote before its end is read below
        record = read_run(state_dir)
        if record is not None:
            _report_changes(record, seen, report)
            if record.failure:
                raise StartFailed(_with_key(record.failure), record.failure_exit_code)
            if record.ready and still_alive:
                return record
        if not still_alive:
            log = state_dir / SUPERVISOR_LOG
            text = log.read_text(errors="replace").strip() if log.exists() else ""
            raise StartFailed(f"the start ended before the stack was ready; {log}:\n{text}", 1)
        time.sleep(_POLL_S)


def _with_key(failure: str) -> str:
    """A failure of the start with the stack's word for what an engine says of its tiers."""
    said = re.search(r"kv tiers: ([a-z_.]+)", failure)
    key = f"engines.tiers.{said[1]}" if said else ""
    return f"{failure}\n(in the stack: {key})" if key in known_keys() else failure


def _report_changes(record: RunRecord, seen: dict[str, str], report: Report) -> None:
    for child in record.children:
        text = child.state.value
        if child.exit and child.state is not ChildState.READY:
            text += f" ({child.exit})"
        if seen.get(child.name) != text:
            seen[child.name] = text
            report(child.name, text, 1.0 if child.state is ChildState.READY else None)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S / 2)
    return True

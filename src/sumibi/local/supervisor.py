"""Keeps a plan's children alive and writes down how they fare, until it is told to stop.

One thread, no callbacks: the signals that matter are blocked and waited for, so a child's end, a stop
and the passing of time all arrive at one place. Each child is a small machine:

    starting -> ready -> (ends) -> waiting -> starting ...        -> failed after too many in a row

A child that ends before everything was ready once makes the whole start fail at once: its log says why
(missing weights, say), and trying again would say the same. Afterwards a child that ends is started
again after a pause that doubles; the others are left alone.

Every child is reaped here. It is killed by the kernel if this process dies (PR_SET_PDEATHSIG), so no
engine is left behind holding a port and a gigabyte.
"""

import contextlib
import ctypes
import functools
import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sumibi.core.errors import EnvironmentProblem
from sumibi.local.plan import ChildPlan, StackPlan
from sumibi.local.runfile import ChildRecord, ChildState, RunRecord, write_run

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_WAITED_SIGNALS = {signal.SIGCHLD, *_STOP_SIGNALS}
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the supervisor, in one place."""

    start_timeout_s: float = 180.0
    """A child that has not answered its health check by then is ended."""
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    tries_in_a_row: int = 10
    """Ends in a row after which a child is given up."""
    stable_after_s: float = 60.0
    """Ready for this long, a child's earlier ends are forgotten."""
    log_bytes: int = 8 << 20
    """A longer log is moved to `NAME.log.1`, which is overwritten."""
    tick_s: float = 0.1
    health_timeout_s: float = 1.0


def pause_s(ends_in_a_row: int, limits: Limits) -> float:
    """Seconds to wait before a child is started again: 0.5, 1, 2, ... up to the longest."""
    return min(limits.first_pause_s * 2.0 ** (ends_in_a_row - 1), limits.longest_pause_s)


class Child:
    """One process, its state and its log."""

    def __init__(self, plan: ChildPlan, logs: Path, limits: Limits) -> None:
        self.plan = plan
        self.state = ChildState.STOPPED
        self.restarts = 0
        self.exit = ""
        self.exit_code: int | None = None
        self.log = logs / f"{plan.name}.log"
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._since = 0.0
        self._ends_in_a_row = 0
        self._log_start = 0

    def start(self, now: float) -> None:
        """Start the process on its cores, with its own log, tied to this process's life.

        A machine that cannot (no memory, a full disk) counts as an end, so it is tried again.
        """
        try:
            with self.log.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    self.plan.argv,
                    env=os.environ | self.plan.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # a Ctrl-C in the terminal reaches the supervisor only
                    # Safe: this process has one thread.
                    preexec_fn=functools.partial(_in_child, os.getpid(), self.plan.cores),  # noqa: PLW1509
                )
        except (OSError, subprocess.SubprocessError) as cause:
            self._ended(EnvironmentProblem.exit_code, f"cannot be started: {cause}", now)
        else:
            self.state, self._since = ChildState.STARTING, now

    def step(self, now: float) -> None:
        """Reap, restart, ask for health: whatever is due."""
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._ended(code, how, now)
        elif self.state is ChildState.STARTING:
            if is_healthy(self.plan.health_url, self._limits.health_timeout_s):
                self.state, self._since = ChildState.READY, now
            elif now - self._since > self._limits.start_timeout_s:
                self.signal(signal.SIGKILL)
        elif self.state is ChildState.READY and now - self._since > self._limits.stable_after_s:
            self._ends_in_a_row = 0
        elif self.state is ChildState.WAITING and now >= self._since:
            self.restarts += 1
            self.start(now)

    def _ended(self, code: int, how: str, now: float) -> None:
        self._process = None
        self.exit_code, self.exit = code, how
        self._ends_in_a_row += 1
        if self._ends_in_a_row >= self._limits.tries_in_a_row:
            self.state = ChildState.FAILED
        else:
            self.state, self._since = ChildState.WAITING, now + pause_s(self._ends_in_a_row, self._limits)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Ask the process to end."""
        self.signal(signal.SIGTERM)
        self.state = ChildState.STOPPING

    def stopped(self, until: float) -> bool:
        """Whether it has ended, and is reaped; it is killed once the monotonic time `until` is over."""
        if self._process is not None and self._process.poll() is None:
            if time.monotonic() < until:
                return False
            self._process.kill()
            self._process.wait()
        self._process = None
        self.state = ChildState.STOPPED
        return True

    def bound_log(self) -> None:
        """Keep the log within its limit. Lines written while it is copied are lost, nothing else."""
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > self._limits.log_bytes:
                shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
                os.truncate(self.log, 0)  # the child appends, so it goes on at the start
                self._log_start = 0

    def last_words(self, lines: int = 12) -> str:
        """The end of what this start of the process wrote."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 8192))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as cause:
            return f"(no log: {cause.strerror})"

    def record(self) -> ChildRecord:
        """For the run file."""
        return ChildRecord(
            name=self.plan.name,
            state=self.state,
            pid=self._process.pid if self._process else None,
            restarts=self.restarts,
            health_url=self.plan.health_url,
            cores=self.plan.cores,
            log=str(self.log),
            exit=self.exit,
        )


class Supervisor:
    """Runs one plan. `run()` returns when it was told to stop or the start failed."""

    def __init__(self, plan: StackPlan, state_dir: Path, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.children = [Child(child, state_dir, self.limits) for child in plan.children]
        self._state_dir = state_dir
        self._record = RunRecord(
            pid=os.getpid(),
            model=plan.model,
            url=plan.url,
            admin_url=plan.admin_url,
            children=[],
            drain_timeout_s=plan.drain_timeout_s,
            stop_within_s=plan.stop_within_s,
        )
        self._noted = (False, False)
        """`ready` and whether there is a failure, as last written."""

    def run(self, on_change: Callable[[RunRecord], None] = lambda record: None) -> int:
        """Start every child and keep them running until SIGTERM, SIGINT or SIGHUP.

        `on_change` sees every change of the record, as the run file does. Returns the exit code: 0 after
        a stop on request, else what the failed start asks for.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_SIGNALS)
        try:
            for child in self.children:
                child.start(time.monotonic())
            self._note_change(on_change)
            while not self._record.failure:
                received = signal.sigtimedwait(_WAITED_SIGNALS, self.limits.tick_s)
                if received is not None and received.si_signo in _STOP_SIGNALS:
                    break
                self._step(time.monotonic())
                self._note_change(on_change)
        finally:
            self._stop(on_change)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._record.failure_exit_code if self._record.failure else 0

    def _step(self, now: float) -> None:
        for child in self.children:
            child.step(now)
            child.bound_log()
        if self._record.ready:
            return
        self._record.ready = all(child.state is ChildState.READY for child in self.children)
        ended = next((child for child in self.children if child.exit_code is not None), None)
        if ended is not None:
            self._record.failure = (
                f"{ended.plan.name} ended ({ended.exit}) before it was ready; the end of {ended.log}:\n"
                f"{ended.last_words()}"
            )
            # A child's own code (bad model, port in use) says more than a general 1.
            self._record.failure_exit_code = max(1, ended.exit_code or 0)

    def _note_change(self, on_change: Callable[[RunRecord], None]) -> None:
        children = [child.record() for child in self.children]
        marks = (self._record.ready, bool(self._record.failure))
        if children == self._record.children and marks == self._noted:
            return
        self._record.children, self._noted = children, marks
        try:
            write_run(self._state_dir, self._record)
        except OSError as cause:  # a full disk: `status` is out of date, the stack runs on
            print(f"cannot write the run file: {cause}", file=sys.stderr, flush=True)
        on_change(self._record)

    def _stop(self, on_change: Callable[[RunRecord], None]) -> None:
        """The gateway (last in the plan) drains before its engines go. Who asks once more is in a hurry: the
        gateway is told so.
        """
        *engines, door = self.children
        for group in ([door], engines):
            for child in group:
                child.stop()
            start_s = time.monotonic()
            while not all(child.stopped(start_s + child.plan.grace_s) for child in group):
                self._note_change(on_change)
                received = signal.sigtimedwait(_WAITED_SIGNALS, self.limits.tick_s)
                if received is not None and received.si_signo in _STOP_SIGNALS:
                    door.signal(signal.SIGTERM)
            self._note_change(on_change)


def is_healthy(url: str, timeout_s: float) -> bool:
    """True if GET `url` answers 200 within the time."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def stop_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent, process `parent`, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _in_child(parent: int, cores: tuple[int, ...]) -> None:
    """Between fork and exec (the supervisor has one thread, so this is safe)."""
    stop_with_parent(parent, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_SIGNALS)
    if cores:
        os.sched_setaffinity(0, cores)

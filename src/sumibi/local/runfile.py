"""What is known of a running stack, on disk: a lock that says *whether*, a file that says *what*.

The lock is a `flock` held by the supervisor for its whole life. The kernel frees it when the process
ends, however it ends, so a run file that was left behind is never mistaken for a running stack. The
file is replaced whole, so a reader sees one state or the next.
"""

import fcntl
import os
import time
from enum import StrEnum
from pathlib import Path

import msgspec

from sumibi.core.errors import EnvironmentProblem

RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
STACK_FILE = "stack.json"
ENDPOINTS_FILE = "endpoints.yaml"
"""Its engines, for other programs that route: llm-d's picker, or `sumibi epp --endpoints-file`."""
LOCK_FILE = "lock"


STATE_DIR_NAME = "sumibi"


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/sumibi` (`~/.local/state/sumibi`): logs, run files, the admin key, the usage log."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The specification asks to ignore a relative path.
    return (given if given.is_absolute() else Path.home() / ".local/state") / STATE_DIR_NAME


class ChildState(StrEnum):
    """Where a child process stands."""

    STARTING = "starting"
    """Running, has not answered its health check yet."""
    READY = "ready"
    """Answered its health check once since it was started."""
    WAITING = "waiting"
    """It ended; the pause before its next start has not passed."""
    FAILED = "failed"
    """It ended too often in a row and is not started again."""
    STOPPING = "stopping"
    """Asked to end; the gateway lets running requests finish first."""
    STOPPED = "stopped"
    """Ended on request."""


class ChildRecord(msgspec.Struct, kw_only=True):
    """One child as the supervisor last saw it."""

    name: str
    state: ChildState
    pid: int | None
    restarts: int
    health_url: str
    cores: tuple[int, ...]
    log: str
    exit: str = ""
    """How it ended the last time, empty if it never did."""


class RunRecord(msgspec.Struct, kw_only=True):
    """A stack as its supervisor last saw it."""

    pid: int
    """Of the supervisor."""
    model: str
    url: str
    admin_url: str
    children: list[ChildRecord]
    ready: bool = False
    """Every child has been ready since the start."""
    failure: str = ""
    """Why the start failed; the supervisor stops everything and exits."""
    failure_exit_code: int = 1
    drain_timeout_s: float = 0.0
    """What running requests get to finish after a stop was asked for."""
    stop_within_s: float = 30.0
    """From that to the end of everything; the supervisor is given up after it."""


def take_lock(state_dir: Path) -> int | None:
    """The open lock file if nobody holds it, else None. Raises EnvironmentProblem (not writable).

    The descriptor can be handed to a child process: the lock lives until the last copy is closed.
    Tried for a moment, because `is_running` takes the lock to look at it.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(state_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as cause:
        raise EnvironmentProblem(f"cannot write to the state directory {state_dir}: {cause}") from cause
    for _ in range(10):
        if _try_lock(descriptor):
            return descriptor
        time.sleep(0.02)
    os.close(descriptor)
    return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_running(state_dir: Path) -> bool:
    """True if a supervisor (or the `sumibi up` that is starting one) holds the lock."""
    try:
        descriptor = os.open(state_dir / LOCK_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def write_run(state_dir: Path, record: RunRecord) -> None:
    """Replace the run file."""
    temporary = state_dir / f"{RUN_FILE}.tmp"
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.replace(state_dir / RUN_FILE)


def read_run(state_dir: Path) -> RunRecord | None:
    """The last written record, running or not; None if there is none that can be read."""
    try:
        return msgspec.json.decode((state_dir / RUN_FILE).read_bytes(), type=RunRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def remove_run(state_dir: Path) -> None:
    """Forget the record (a fresh start, or a clean stop)."""
    (state_dir / RUN_FILE).unlink(missing_ok=True)

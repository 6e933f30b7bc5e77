"""What runs on this machine: the supervisor's view of processes beside the gateway's view of endpoints.

A gateway that was started by hand (`sumibi serve`) has no run file; it is asked at the admin door's
usual port, with the key that it keeps in the same state directory.
"""

from pathlib import Path

import msgspec

from sumibi.admin import ADMIN_KEY_FILE, Admin, Fleet
from sumibi.core.errors import SumibiError
from sumibi.local.runfile import ChildState, RunRecord, is_running, read_run

ADMIN_PORT = 8080
"""Where `sumibi serve` opens its admin door by default."""


class Status(msgspec.Struct, kw_only=True):
    """`sumibi status --json` prints this as it is."""

    running: bool
    """A supervisor is there."""
    by_hand: str = ""
    """The admin door of a gateway that was not started by `sumibi up`, or empty."""
    ready: bool
    """Every process is ready and the gateway takes every endpoint for up."""
    problem: str
    """Why there is no more to say, or empty."""
    stack: RunRecord | None
    fleet: Fleet | None


def read_status(state_dir: Path, admin_port: int = ADMIN_PORT) -> Status:
    """Look at the run file and ask the gateway; what cannot be had is said in `problem`.

    `admin_port`: where to look for a gateway that was started by hand, if no stack runs.
    """
    if not is_running(state_dir):
        return _by_hand(state_dir, f"http://127.0.0.1:{admin_port}")
    record = read_run(state_dir)
    if record is None:
        problem = "a stack is being prepared (its model is being fetched)"
        return Status(running=True, ready=False, problem=problem, stack=None, fleet=None)
    fleet, problem = None, ""
    try:
        fleet = Admin.of(state_dir, record.admin_url).fleet()
    except SumibiError as cause:
        problem = str(cause)
    ready = (
        fleet is not None
        and all(child.state is ChildState.READY for child in record.children)
        and all(endpoint.up for endpoint in fleet.endpoints)
    )
    return Status(running=True, ready=ready, problem=problem, stack=record, fleet=fleet)


def _by_hand(state_dir: Path, admin_url: str) -> Status:
    try:
        fleet = Admin.of(state_dir, admin_url).fleet()
    except SumibiError:  # usually nobody listens there
        key = state_dir / ADMIN_KEY_FILE
        problem = f"no stack is running, and no gateway at {admin_url} takes the key in {key}"
        return Status(running=False, ready=False, problem=problem, stack=None, fleet=None)
    ready = all(endpoint.up for endpoint in fleet.endpoints)
    return Status(running=False, ready=ready, problem="", stack=None, fleet=fleet, by_hand=admin_url)

"""What runs on this machine: the supervisor's view of processes beside the gateway's view of endpoints."""

from pathlib import Path

import msgspec

from sumibi.admin import Admin, Fleet
from sumibi.core.errors import SumibiError
from sumibi.local.runfile import ChildState, RunRecord, is_running, read_run


class Status(msgspec.Struct, kw_only=True):
    """`sumibi status --json` prints this as it is."""

    running: bool
    """A supervisor is there."""
    ready: bool
    """Every process is ready and the gateway takes every endpoint for up."""
    problem: str
    """Why there is no more to say, or empty."""
    stack: RunRecord | None
    fleet: Fleet | None


def read_status(state_dir: Path) -> Status:
    """Look at the run file and ask the gateway; what cannot be had is said in `problem`."""
    if not is_running(state_dir):
        return Status(running=False, ready=False, problem="no stack is running", stack=None, fleet=None)
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

"""The supervisor process: `python -m sumibi.local STATE_DIR LOCK_FD TIED_TO_PID` (started by `updown`).

It inherits the locked file descriptor, and so holds the lock for as long as it lives. TIED_TO_PID is 0,
or the process whose end it must not outlive.
"""

import os
import sys
from pathlib import Path

import msgspec

from sumibi.local.plan import StackPlan
from sumibi.local.runfile import PLAN_FILE
from sumibi.local.supervisor import Supervisor, stop_with_parent


def main() -> int:
    """Read the plan and run it."""
    state_dir, lock, tied_to = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(lock, False)
    if tied_to:
        stop_with_parent(tied_to)
    plan = msgspec.json.decode((state_dir / PLAN_FILE).read_bytes(), type=StackPlan)
    return Supervisor(plan, state_dir).run()


if __name__ == "__main__":
    sys.exit(main())

"""Where the gateway keeps what outlives it: `$XDG_STATE_HOME/sumibi`, by default `~/.local/state/sumibi`."""

import os
from pathlib import Path


def state_directory() -> Path:
    """The state directory; not made here."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "sumibi"

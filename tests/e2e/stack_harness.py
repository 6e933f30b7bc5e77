"""A whole stack in its own processes and directories, driven by the command line."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        with ExitStack() as probes:
            try:
                first = 0
                for offset in range(count):
                    probe = probes.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", first + offset if first else 0))
                    first = first or probe.getsockname()[1]
            except (OSError, OverflowError):
                continue
            return first


def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.05)


class Sumibi:
    """The command line in an environment of its own."""

    def __init__(self, home: Path) -> None:
        self.state = home / "state" / "sumibi"
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "NO_COLOR": "1",
        }
        self.home = home

    def __call__(self, *words: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.argv(*words),
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "sumibi", *words]

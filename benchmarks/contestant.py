"""A contestant of a benchmark in a process of its own, seen from both ends; one JSON line each way a task.

Contestants of one benchmark take turns on the same core and wait while it is not theirs. Standard library
only: a worker may run in an environment that has nothing of ours.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ANSWER_S = 300.0
"""For one task, or to start: a million blocks, or a model, are loaded in seconds."""


class Process:
    """A worker's process, as a context manager."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._command = shlex.join(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            self.about: str = self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, task: object) -> Any:
        """Have a task done. Ends the benchmark if the process does not answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        alarm = signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, ANSWER_S)
        try:
            line = self._process.stdout.readline()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
        if not line:
            raise SystemExit(f"the {self.name} process ended; run it by hand: {self._command}")
        return json.loads(line)

    def _late(self, *signal_details: object) -> None:
        raise SystemExit(f"the {self.name} process gave no answer within {ANSWER_S:.0f} s")


def serve(make: Callable[[], tuple[Callable[[Any], Any], str]]) -> None:
    """The worker's end: answer until stdin ends. `make` returns what does a task, and a line about versions.

    Anything that a library prints goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, about = make()
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that every such benchmark has."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    page = Path(__file__).parent / name / "RESULTS.md"
    figures = Path(f"out/bench-{name}.json")
    made.add_argument("--json", type=Path, default=figures, help="figures, as a list")
    made.add_argument("--results", type=Path, default=page, help="the page made from them")
    made.add_argument("--rounds", type=int, default=7, help="rounds [default: 7]")
    return made

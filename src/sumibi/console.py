"""What a person sees: progress while things start, and what is printed at the end.

On a terminal rich draws progress bars; elsewhere (a pipe, CI) the same steps are plain lines. rich
honours NO_COLOR by itself. Everything that a program may want to read goes to stdout, progress to stderr.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sumibi.local.updown import Report, Running

if TYPE_CHECKING:
    from rich.progress import TaskID


@contextmanager
def progress() -> Iterator[Report]:
    """A `Report` that shows steps as they happen."""
    if sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield _lines()


def _lines() -> Report:
    """One line when somebody does something new or is done; no line for each per cent."""
    began = time.monotonic()
    last: dict[str, tuple[str, bool]] = {}

    def report(who: str, what: str, done: float | None) -> None:
        mark = (what, done == 1.0)
        if last.get(who) != mark:
            last[who] = mark
            print(f"[{time.monotonic() - began:5.1f} s] {who}: {what}", file=sys.stderr, flush=True)

    return report


@contextmanager
def _bars() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="*"),
        TextColumn("{task.fields[who]:<10}"),
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(who: str, what: str, done: float | None) -> None:
            if who not in tasks:
                tasks[who] = bars.add_task(what, total=None, who=who)
            bars.update(
                tasks[who], description=what, total=None if done is None else 1.0, completed=done or 0
            )

        yield report


def print_running(running: Running) -> None:
    """After `sumibi up`: the URL, a line to try, how to stop."""
    record = running.record
    print("ready" if running.started else "already running", f"at {record.url}/v1 (model {record.model})")
    print(
        "\ntry it:\n"
        f"  curl {record.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{record.model}", "max_tokens": 32,'
        ' "messages": [{"role": "user", "content": "What is charcoal?"}]}\'\n'
        "\nlook at it:  sumibi status\nstop it:     sumibi down"
    )

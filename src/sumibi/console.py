"""What a person sees: progress while things start, and what is printed at the end.

On a terminal rich draws progress bars; elsewhere (a pipe, CI) the same steps are plain lines. rich
honours NO_COLOR by itself. Everything that a program may want to read goes to stdout, progress to stderr.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sumibi.admin import Fleet
from sumibi.doctor import Check, Verdict
from sumibi.local.runfile import RunRecord
from sumibi.local.updown import Report, Running
from sumibi.routing.decisions import Rerun
from sumibi.status import Status

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table


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
    command = _own_command()
    print(
        "\ntry it:\n"
        f"  curl {record.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{record.model}", "max_tokens": 32,'
        ' "messages": [{"role": "user", "content": "What is charcoal?"}]}\'\n'
        f"\nlook at it:  {command} status\nstop it:     {command} down"
    )


def _own_command() -> str:
    """How to call this very installation from here: by name if the shell would find it."""
    own = Path(sys.prefix) / "bin" / "sumibi"
    if shutil.which("sumibi") == str(own):
        return "sumibi"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)


def print_status(status: Status, *, json: bool) -> None:
    """Processes, then endpoints, as tables; or everything as JSON."""
    if json:
        print(msgspec.json.format(msgspec.json.encode(status)).decode())
        return
    from rich.console import Console

    console = Console()
    if status.stack is not None:
        console.print(f"{status.stack.url}/v1 serves {status.stack.model}", highlight=False)
        console.print(_processes(status.stack))
        for child in status.stack.children:
            if child.exit:
                console.print(f"{child.name}: last end: {child.exit}", highlight=False, markup=False)
    if status.by_hand:
        said = f"gateway with its admin door at {status.by_hand}, not started by `sumibi up`"
        console.print(said, highlight=False, soft_wrap=True)
    if status.fleet is not None:
        console.print(_endpoints(status.fleet))
        for one in status.fleet.endpoints:
            if one.suspect is not None:
                console.print(f"{_short(one.endpoint)}: {one.suspect}", highlight=False, markup=False)
    if status.problem:
        console.print(status.problem, highlight=False, markup=False)


def _processes(stack: RunRecord) -> "Table":
    table = _table("process", "state", "pid", "cores", "restarts")
    for child in stack.children:
        cores = ",".join(map(str, child.cores)) or "any"
        table.add_row(child.name, child.state, str(child.pid or ""), cores, str(child.restarts))
    return table


def _endpoints(fleet: Fleet) -> "Table":
    """The caches: how well they are known, how full they are."""
    table = _table("endpoint", "role", "up", "cache is known", "tokens cached", "requests", "wait s")
    for one in fleet.endpoints:
        table.add_row(
            _short(one.endpoint),
            one.role + (f" ({one.revision})" if one.revision else ""),
            "yes" if one.up else "no",
            one.grade,
            f"{one.blocks * one.block_tokens} of {one.kv_tokens or '?'}",
            str(one.inflight),
            f"{one.wait_s:.2f}",
        )
    return table


def _short(endpoint: str) -> str:
    return endpoint.removeprefix("http://").removesuffix("#0")


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    first, *others = columns
    table.add_column(first, no_wrap=True)  # a name cut off names nobody; where it is narrow, others wrap
    for column in others:
        table.add_column(column)
    return table


def print_checks(checks: list[Check], *, json: bool) -> None:
    """One line a check, its fix below it."""
    if json:
        print(msgspec.json.format(msgspec.json.encode(checks)).decode())
        return
    from rich.console import Console
    from rich.markup import escape

    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "red"}
    console = Console()
    for check in checks:
        word = f"[{colours[check.verdict]}]{check.verdict:<8}[/]"
        console.print(f"{word} {escape(check.name)}: {escape(check.found)}", highlight=False, soft_wrap=True)
        if check.fix:
            console.print(f"         fix: {escape(check.fix)}", highlight=False, soft_wrap=True)


def print_reruns(reruns: list[Rerun]) -> None:
    """Every pick that differs, then the count."""
    for one in reruns:
        if not one.same:
            print(f"{one.decision} ({one.request}): was {one.recorded}, {one.policy} picks {one.rerun}")
    print(f"{len(reruns)} decisions, {sum(one.same for one in reruns)} picked the same endpoint")

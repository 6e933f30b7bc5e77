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
from sumibi.status import Status, TierStatus

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from sumibi.keycheck.checking import KeyCheck


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
        _print_table(console, _processes(status.stack))
        for child in status.stack.children:
            if child.exit:
                console.print(f"{child.name}: last end: {child.exit}", highlight=False, markup=False)
    if status.by_hand:
        said = f"gateway with its admin door at {status.by_hand}, not started by `sumibi up`"
        console.print(said, highlight=False, soft_wrap=True)
    if status.fleet is not None:
        _print_table(console, _endpoints(status.fleet))
        for one in status.fleet.endpoints:
            if one.suspect is not None:
                console.print(f"{_short(one.endpoint)}: {one.suspect}", highlight=False, markup=False)
    if status.kv_tiers:
        _print_table(console, _tiers(status.kv_tiers))
    if status.problem:
        console.print(status.problem, highlight=False, markup=False)


Rows = list[dict[str, str]]
"""A table: each row's cells by their columns' names, the same in all rows."""


def _processes(stack: RunRecord) -> Rows:
    return [
        {
            "process": child.name,
            "state": child.state,
            "pid": str(child.pid or ""),
            "cores": ",".join(map(str, child.cores)) or "any",
            "restarts": str(child.restarts),
        }
        for child in stack.children
    ]


def _endpoints(fleet: Fleet) -> Rows:
    """The caches: how well they are known, how full they are."""
    return [
        {
            "endpoint": _short(one.endpoint),
            "role": one.role + (f" ({one.revision})" if one.revision else ""),
            "up": "yes" if one.up else "no",
            "cache known": one.grade,
            "tokens cached": f"{one.blocks * one.block_tokens}/{one.kv_tokens or '?'}",
            "requests": str(one.inflight),
            "wait s": f"{one.wait_s:.2f}",
        }
        for one in fleet.endpoints
    ]


def _tiers(engines: dict[str, list[TierStatus]]) -> Rows:
    """What lies below the devices, and of how many prompt tokens the KV came from there."""
    return [
        {
            "engine": _short(url),
            "KV tier": one.tier,
            "holds": f"{_size(one.bytes)} of {_size(one.limit_bytes)}",
            "blocks": str(one.blocks),
            "of prompts": f"{one.prompt_share:.1%}",
        }
        for url, tiers in engines.items()
        for one in tiers
    ]


def _short(endpoint: str) -> str:
    return endpoint.removeprefix("http://").removesuffix("#0")


def _size(size_bytes: int) -> str:
    """Three digits and the unit that they need."""
    size, units = float(size_bytes), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def _print_table(console: "Console", rows: Rows) -> None:
    """As a table; where a line has no room for a row, each row as a sentence."""
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement
    from rich.table import Table

    if not rows:
        return
    table = Table(*rows[0], box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    if Measurement.get(console, console.options.update(max_width=1000), table).maximum <= console.width:
        console.print(table)
        return
    for row in rows:
        (_, name), *others = row.items()
        said = ", ".join(f"{column} {cell}" for column, cell in others)
        console.print(f"{name}: {said}", highlight=False, markup=False)


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


def print_key_check(found: "KeyCheck", *, json: bool) -> None:
    """Counts by habit, then what differs, one example a cause, and the whole in one sentence last."""
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    from rich.console import Console

    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    say(f"{found.model} at {found.url}{found.route}")
    say(f"here: tokenizer {found.tokenizer}, template {found.template}")
    _print_table(
        console,
        [
            {
                "habit": one.habit,
                "requests": str(one.requests),
                "same": str(one.same),
                "refused": str(one.refused),
                "too long": str(one.too_long),
                "different": str(one.different),
            }
            for one in found.habits
        ],
    )
    for cause in dict.fromkeys(one.cause for one in found.differences):
        alike = [one for one in found.differences if one.cause == cause]
        first = alike[0]
        where = "refused by one side" if first.token is None else f"from token {first.token} on"
        say(f"{', '.join(one.habit for one in alike)}: likely {cause}")
        say(f"  for example {first.habit}, a request of {first.messages} messages, {where}:")
        say(f"    here    {first.here!r}")
        say(f"    engine  {first.engine!r}")
    if found.not_tried:
        say(f"not tried: {', '.join(found.not_tried)}; ask for more --conversations")
    if found.ok:
        say(f"exact: {found.compared} requests have the same tokens here and at the engine")
    elif not found.differences:
        say("nothing was compared: every request was refused, or is longer than the engine's context")
    else:
        different = sum(one.different for one in found.habits)
        say(f"NOT exact: {different} of {found.requests} requests are read differently (seed {found.seed})")


def print_reruns(reruns: list[Rerun]) -> None:
    """Every pick that differs, then the count."""
    for one in reruns:
        if not one.same:
            print(f"{one.decision} ({one.request}): was {one.recorded}, {one.policy} picks {one.rerun}")
    print(f"{len(reruns)} decisions, {sum(one.same for one in reruns)} picked the same endpoint")

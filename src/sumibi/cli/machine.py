"""Verbs for what runs on this machine: `up`, `down`, `demo`, `status`, `doctor`, `models fetch`.

Heavy imports are inside the verbs (see the package).
"""

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from sumibi.local.runfile import RunRecord
    from sumibi.local.updown import Report
    from sumibi.stack import Stack

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
AdminPort = Annotated[
    int, typer.Option(help="Where to look for a gateway that `sumibi up` did not start: its admin door.")
]
Policy = Annotated[
    str | None,
    typer.Option(help="How a replica is chosen; docs/policies.md lists the names. [default: cost]"),
]


def up(
    stack: Annotated[
        Path | None,
        typer.Option(
            help="Stack file (docs/stack-file.md). [default: ./stack.yaml if there is one]", metavar="FILE"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A checkpoint directory, `smollm2-135m-instruct` (fetched once, 93 MB), or `tiny` (random"
            " weights, for trying things out). [default: smollm2-135m-instruct]"
        ),
    ] = None,
    engines: Annotated[int | None, typer.Option(help="Engine replicas. [default: 2]")] = None,
    port: Annotated[int | None, typer.Option(help="The gateway's port. [default: 8000]")] = None,
    admin_port: Annotated[int | None, typer.Option(help="The admin door's port. [default: 8080]")] = None,
    engine_port: Annotated[
        int | None,
        typer.Option(help="The first replica's port, the others follow it. [default: 8001]"),
    ] = None,
    policy: Policy = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; Ctrl-C stops the stack.")
    ] = False,
) -> None:
    """Start a stack on this machine: a gateway and two engines, one CPU core each.

    Returns when everything is ready (a few seconds; the first time the model is fetched and converted)
    and prints the URL. A stack that already runs is left as it is; asking for other settings than it has
    is an error (exit code 2).

    \b
    Examples:
      sumibi up
      sumibi up --port 9000 --policy round-robin
      sumibi up --stack stack.yaml --foreground
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi import console
    from sumibi.local import updown

    wanted = _load_stack(
        stack,
        {
            ("model",): model,
            ("engines", "count"): engines,
            ("engines", "first_port"): engine_port,
            ("gateway", "port"): port,
            ("gateway", "admin_port"): admin_port,
            ("gateway", "policy"): policy,
        },
    )
    state_dir = _state_dir()
    with console.progress() as report:
        if foreground:
            raise typer.Exit(updown.up_in_foreground(wanted, state_dir, report))
        running = updown.up(wanted, state_dir, report)
    console.print_running(running)


def down() -> None:
    """Stop the stack that `sumibi up` started; returns when nothing of it is left.

    No new requests are taken. Running ones get 30 s to finish, or what gateway.drain_timeout_s says in the
    stack file; what is left then ends with an error event (a stream) or a 503, and the usage log says
    `shutdown`. A second `sumibi down` meanwhile ends them at once.
    """
    from sumibi.local import updown

    def waiting(record: "RunRecord") -> None:
        typer.echo(
            f"running requests get up to {record.drain_timeout_s:g} s to finish;"
            " once more `sumibi down` ends them now",
            err=True,
        )

    print("stopped" if updown.down(_state_dir(), waiting) else "no stack is running")


class Demo(StrEnum):
    """What `sumibi demo` can show."""

    AGENTS = "agents"
    PD = "pd"
    TIERS = "tiers"


def demo(
    what: Annotated[
        Demo,
        typer.Argument(
            help="agents: KV-aware routing, a few minutes. pd: prefill and decode apart, a minute."
            " tiers: KV below the device, a minute.",
            show_default=False,
        ),
    ] = Demo.AGENTS,
    out: Annotated[
        Path, typer.Option(help="Directory for the JSON file and the picture.", metavar="DIR")
    ] = Path("out"),
    model: Annotated[str, typer.Option(help="As for `sumibi up`.")] = "smollm2-135m-instruct",
    json: Json = False,
) -> None:
    """Show what KV-aware routing is worth: bring a stack up, play a script, compare, tear it down.

    \b
      sumibi demo       a few minutes; writes demo.json and demo.png
      sumibi demo pd    a minute; writes demo-pd.json and demo-pd.png
      sumibi demo tiers a minute; writes demo-tiers.json and demo-tiers.png

    agents: six short phases show prefixes being computed once and found again; a seventh puts eight
    conversations under cache pressure, once under the `cost` policy and once under `round-robin`.

    pd: four answers stream while long prompts arrive, on two engines that do both, then on one that prefills
    and one that decodes; the picture shows the time between tokens.

    tiers: one engine whose device holds one of five conversations. One comes back after the others pushed it
    off: without tiers it is computed again; with them it comes from host memory, and from disk after the
    engine was killed and started again.

    Uses free ports of its own, so a running stack is not disturbed (but it takes CPU time from the
    measurement). The exit code is 0 only if every claim held.
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi import console

    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    with console.progress() as report:
        shown = _SHOWS[what](model, out, report)
    if json:
        print(shown.files[0].read_text(), end="")
    else:
        shown.print_tables()
    typer.echo(f"written: {', '.join(map(str, shown.files))}", err=json)
    if not shown.held and load > cores / 4:
        busy = f"the machine was busy before it began (load average {load:.1f}, {cores} cores)"
        typer.echo(f"{busy}: waiting times are only right on a quiet one", err=True)
    raise typer.Exit(0 if shown.held else 1)


class _Shown(NamedTuple):
    """A demonstration that is over."""

    held: bool
    files: list[Path]
    """What was written, the JSON first."""
    print_tables: Callable[[], None]


def _show_agents(model: str, out: Path, report: "Report") -> _Shown:
    from sumibi.demo.report import print_tables
    from sumibi.demo.run import run_demo

    done = run_demo(model, out, report)
    return _Shown(
        done.held, _files(out, "demo.json", "demo.png"), lambda: print_tables(done.steps, done.claims)
    )


def _show_pd(model: str, out: Path, report: "Report") -> _Shown:
    from sumibi.demo.pd import run_pd
    from sumibi.demo.pd_report import print_table

    done = run_pd(model, out, report)
    return _Shown(
        done.held, _files(out, "demo-pd.json", "demo-pd.png"), lambda: print_table(done.steps, done.claims)
    )


def _show_tiers(model: str, out: Path, report: "Report") -> _Shown:
    from sumibi.demo.tiers_report import print_tables
    from sumibi.demo.tiers_run import run_demo

    done = run_demo(model, out, report)
    files = _files(out, "demo-tiers.json", "demo-tiers.png", "demo-tiers.log")
    return _Shown(done.held, files, lambda: print_tables(done.steps, done.claims))


def _files(out: Path, *names: str) -> list[Path]:
    return [out / name for name in names]


_SHOWS = {Demo.AGENTS: _show_agents, Demo.PD: _show_pd, Demo.TIERS: _show_tiers}


def status(json: Json = False, admin_port: AdminPort = 8080) -> None:
    """What runs on this machine: processes, endpoints, how well their caches are known, KV below devices.

    Without a stack of `sumibi up`, a gateway of `sumibi serve` is looked for at the admin port.

    The exit code is 0 if everything is ready, 1 if not (or nothing runs).
    """
    from sumibi import console
    from sumibi.status import read_status, read_tiers

    found = read_status(_state_dir(), admin_port)
    if found.fleet is not None:
        found.kv_tiers = read_tiers(found.fleet)
    console.print_status(found, json=json)
    raise typer.Exit(0 if found.ready else 1)


def doctor(json: Json = False, admin_port: AdminPort = 8080) -> None:
    """Check this machine and what runs on it; every problem is printed with its fix.

    The exit code is 1 if there is a problem (a warning is none).
    """
    from sumibi import console
    from sumibi.doctor import Verdict, examine

    checks = examine(_state_dir(), admin_port)
    console.print_checks(checks, json=json)
    raise typer.Exit(1 if any(check.verdict is Verdict.PROBLEM for check in checks) else 0)


def fetch(
    name: Annotated[str, typer.Argument(help="The built-in model's name, or a directory to check.")] = (
        "smollm2-135m-instruct"
    ),
) -> None:
    """Fetch a model and convert it into a checkpoint directory, once; check it if it is there.

    Files go to $XDG_CACHE_HOME/sumibi/models (~/.cache/sumibi/models). Safe to interrupt.
    """
    from sumibi import console
    from sumibi.local.updown import model_directory

    with console.progress() as report:
        model_directory(name, report)


def _load_stack(file: Path | None, flags: dict[tuple[str, ...], Any]) -> "Stack":
    from sumibi.stack import DEFAULT_FILE, load_stack

    if file is None and DEFAULT_FILE.is_file():
        file = DEFAULT_FILE
    return load_stack(file, {path: value for path, value in flags.items() if value is not None})


def _state_dir() -> Path:
    from sumibi.local.runfile import default_state_dir

    return default_state_dir()

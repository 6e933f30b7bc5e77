"""The front door: `sumibi VERB`, with help that a person can learn from.

Knows which verbs there are and how errors become messages and exit codes. How words become options stands
with the verbs, in a file for each group of them; everything else is imported inside the verb that needs it,
so that help answers at once. typer without rich markup starts in well under 0.1 s (docs/decisions/0006).

Exit codes: 0 done; 1 something failed; 2 wrong flag or configuration; 3 the model; 4 the machine (a
port in use, disk full).
"""

import os
import sys
from typing import Annotated

import typer

from sumibi import __version__
from sumibi.cli import machine, measuring, picking, prompts, serving
from sumibi.core.errors import SumibiError

app = typer.Typer(
    name="sumibi",
    help=(
        "Keep the KV cache warm: an OpenAI-compatible gateway that sends each request to the replica"
        " where its prompt is already computed and the wait is short.\n\n"
        "\b\n"
        "Start here:\n"
        "  sumibi up         a gateway and two engines on this machine, in the background\n"
        "  sumibi status     what runs, and how warm it is\n"
        "  sumibi demo       see what KV-aware routing is worth (takes a few minutes)\n"
        "  sumibi down       stop it\n"
        "In front of your own vLLM servers:\n"
        "  sumibi serve --engine http://host:8001 --engine http://host:8002"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
decisions = typer.Typer(help="Look into recorded routing decisions.", no_args_is_help=True)
models = typer.Typer(help="Model checkpoints on this machine.", no_args_is_help=True)
keys = typer.Typer(help="Prompt keys: is a prompt read here as engines read it?", no_args_is_help=True)
bench = typer.Typer(help="Measure the router against others (simulated fleets).", no_args_is_help=True)

# In the order in which help lists them.
app.command(short_help="Start a stack on this machine, in the background.")(machine.up)
app.command(short_help="Stop it.")(machine.down)
app.command(short_help="See what KV-aware routing is worth.")(machine.demo)
app.command(short_help="Put the gateway in front of engines that already run.")(serving.serve)
app.command(short_help="Pick endpoints for Envoy and the Gateway API.")(picking.epp)
app.command(short_help="Prefill and decode apart, beside a decode engine.")(serving.sidecar)
app.command(short_help="Run one embedded engine in the foreground.")(serving.engine)
app.command(short_help="What runs, and how warm it is.")(machine.status)
app.command(short_help="Check this machine and what runs on it.")(machine.doctor)
app.command(short_help="Play traffic on a simulated fleet, under several policies.")(measuring.replay)
app.add_typer(decisions, name="decisions")
decisions.command(short_help="Recompute every pick of a decision log.")(measuring.rerun)
app.add_typer(models, name="models")
models.command(short_help="Fetch the built-in model, or check a directory.")(machine.fetch)
app.add_typer(keys, name="keys")
keys.command(short_help="Compare with a running engine, token by token.")(prompts.check)
app.add_typer(bench, name="bench")
bench.command(name="routing", short_help="Our router against every policy we know, over the whole grid.")(
    measuring.bench_routing
)
bench.command(name="claims", short_help="What others claim for KV-aware serving, claim by claim.")(
    measuring.bench_claims
)


@app.callback(invoke_without_command=True)
def _common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"sumibi {__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    try:
        app(args=arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except SumibiError as problem:
        print(f"sumibi: {problem}", file=sys.stderr)
        if os.environ.get("SUMIBI_DEBUG") == "1":
            raise
        return problem.exit_code
    except Exception as problem:
        if os.environ.get("SUMIBI_DEBUG") == "1":
            raise
        print(
            f"sumibi: unexpected {type(problem).__name__}: {problem}\n"
            "This is a bug. SUMIBI_DEBUG=1 shows where it came from.",
            file=sys.stderr,
        )
        return 1
    return 0

"""The front door: `sumibi VERB`, with help that a person can learn from.

Knows how words become options and how errors become messages and exit codes; everything else is
imported inside the verb that needs it, so that help answers at once. typer without rich markup starts
in well under 0.1 s (docs/decisions/0006).

Exit codes: 0 done; 1 something failed; 2 wrong flag or configuration; 3 the model; 4 the machine (a
port in use, disk full).
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sumibi import __version__
from sumibi.core.errors import ConfigError, SumibiError

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
app.add_typer(decisions, name="decisions")
app.add_typer(models, name="models")
bench = typer.Typer(help="Measure the router against others (simulated fleets).", no_args_is_help=True)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
AdminPort = Annotated[
    int, typer.Option(help="Where to look for a gateway that `sumibi up` did not start: its admin door.")
]
Policy = Annotated[
    str | None,
    typer.Option(help="How a replica is chosen; docs/policies.md lists the names. [default: cost]"),
]


@app.callback(invoke_without_command=True)
def _common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"sumibi {__version__}")
        raise typer.Exit


@app.command(short_help="Start a stack on this machine, in the background.")
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


@app.command(short_help="Stop it.")
def down() -> None:
    """Stop the stack that `sumibi up` started; returns when nothing of it is left."""
    from sumibi.local import updown

    print("stopped" if updown.down(_state_dir()) else "no stack is running")


@app.command(short_help="See what KV-aware routing is worth.")
def demo(
    out: Annotated[Path, typer.Option(help="Directory for demo.json and demo.png.", metavar="DIR")] = Path(
        "out"
    ),
    model: Annotated[str, typer.Option(help="As for `sumibi up`.")] = "smollm2-135m-instruct",
) -> None:
    """Show what KV-aware routing is worth: bring a stack up, play a script, compare, tear it down.

    Takes a few minutes.

    Six short phases show prefixes being computed once and found again; a seventh puts eight
    conversations under cache pressure, once under the `cost` policy and once under `round-robin`.
    Uses free ports of its own, so a running stack is not disturbed (but it takes CPU time from the
    measurement). The exit code is 0 only if every claim held.
    """
    from sumibi import console
    from sumibi.demo.report import print_tables
    from sumibi.demo.run import run_demo

    with console.progress() as report:
        demonstration = run_demo(model, out, report)
    print_tables(demonstration.steps, demonstration.claims)
    raise typer.Exit(0 if demonstration.held else 1)


@app.command(short_help="Put the gateway in front of engines that already run.")
def serve(
    engine: Annotated[
        list[str],
        typer.Option(help="An engine's URL; repeat it, or separate several by commas.", metavar="URL"),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the OpenAI-compatible door.")] = 8000,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory with the model's tokenizer.json and chat template. Without it an engine is"
            " asked to render and tokenise, which costs a round trip a request.",
            metavar="DIR",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="How an engine is chosen; docs/policies.md lists the names.")
    ] = "cost",
    objective: Annotated[
        list[str] | None,
        typer.Option(
            help="Priority of requests whose x-llm-d-inference-objective header has this word: NAME=PRIORITY,"
            " higher is more urgent, others have 0. Repeat it for several.",
            metavar="OBJECTIVE",
        ),
    ] = None,
    kv_events: Annotated[
        list[str] | None,
        typer.Option(
            help="Where an engine publishes KV events: ENGINE_URL=tcp://HOST:PORT[,replay=tcp://HOST:PORT]."
            " Without it the engine is asked.",
            metavar="SOURCE",
        ),
    ] = None,
    admin_host: Annotated[str, typer.Option(help="Address of the admin door.")] = "127.0.0.1",
    admin_port: Annotated[int, typer.Option(help="Port of the admin door; 0 for none.")] = 8080,
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="The admin key, better given as the variable than on a command line that others can see.",
            envvar="SUMIBI_ADMIN_KEY",
            metavar="KEY",
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the admin key. [default: a generated one in the state directory]", metavar="FILE"
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(help="YAML or JSON: SHA-256 (hex) of an API key -> tenant id.", metavar="FILE"),
    ] = None,
    usage_log: Annotated[
        Path | None,
        typer.Option(help="Usage records, JSON lines. [default: in the state directory]", metavar="FILE"),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record arrivals, keys (never text) and decisions here, for `sumibi decisions rerun`.",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Put the gateway in front of engines that already run (vLLM's HTTP API), with no stack file.

    \b
    Example:
      sumibi serve --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000 --tokenizer ./my-model
    Then use http://127.0.0.1:8000/v1 as you would use one of the engines.
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi.gateway.options import GatewayOptions, engine_options
    from sumibi.gateway.terms import objectives_of

    options = GatewayOptions(
        engines=engine_options(engine, kv_events or ()),
        host=host,
        port=port,
        tokenizer=tokenizer,
        policy=policy,
        objectives=objectives_of(objective or ()),
        admin_host=admin_host,
        admin_port=admin_port or None,
        admin_key=admin_key,
        admin_key_file=admin_key_file,
        api_keys=api_keys,
        usage_log=usage_log,
        record=record,
    )
    from sumibi.gateway.main import main as run_gateway

    raise typer.Exit(run_gateway(options))


@app.command(short_help="Run one embedded engine in the foreground.")
def engine(
    model: Annotated[
        str, typer.Option(help="Checkpoint directory, the built-in model's name, or `tiny` (random weights).")
    ],
    served_model_name: Annotated[
        str, typer.Option(help="As clients name it. [default: the directory's name]")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and prints it.")] = 8001,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (cuda if there is one), cpu or cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. [default: OMP_NUM_THREADS, else the cores allowed]")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt + output of one request. [default: the checkpoint's]"),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences computed at once; more wait.")] = 64,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Token budget of a step. [default: 256 on a CPU, 2,048 on CUDA]"),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 32,
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-gpu-blocks-override",
            "--kv-blocks",
            help="KV blocks in all (on a CPU too). [default: sized to the device]",
        ),
    ] = None,
    kv_events_config: Annotated[
        str, typer.Option(help="Where to publish KV events: JSON, with vLLM's fields.", metavar="JSON")
    ] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of requests that bring none.")] = 0,
    enable_dev_mode: Annotated[
        bool, typer.Option("--enable-dev-mode", help="Routes for operators: /reset_prefix_cache.")
    ] = False,
    shutdown_grace: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish after SIGTERM.")
    ] = 30.0,
) -> None:
    """Run one embedded engine in the foreground. Flags follow `vllm serve`.

    \b
    Examples:
      sumibi engine --model tiny --port 8001
      sumibi engine --model smollm2-135m-instruct --kv-blocks 1024 --threads 4
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi.engine.options import EngineOptions, dev_mode_from_environment, parse_kv_events

    options = EngineOptions(
        model=model,
        served_model_name=served_model_name,
        host=host,
        port=port,
        dtype=dtype,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_gpu_blocks_override=kv_blocks,
        kv_events=parse_kv_events(kv_events_config),
        seed=seed,
        enable_dev_mode=enable_dev_mode or dev_mode_from_environment(),
        shutdown_grace_s=shutdown_grace,
    )
    from sumibi.engine.server import main as run_engine

    raise typer.Exit(run_engine(options))


@app.command(short_help="What runs, and how warm it is.")
def status(json: Json = False, admin_port: AdminPort = 8080) -> None:
    """What runs on this machine: processes, endpoints, how well their caches are known.

    Without a stack of `sumibi up`, a gateway of `sumibi serve` is looked for at the admin port.

    The exit code is 0 if everything is ready, 1 if not (or nothing runs).
    """
    from sumibi import console
    from sumibi.status import read_status

    found = read_status(_state_dir(), admin_port)
    console.print_status(found, json=json)
    raise typer.Exit(0 if found.ready else 1)


@app.command(short_help="Check this machine and what runs on it.")
def doctor(json: Json = False, admin_port: AdminPort = 8080) -> None:
    """Check this machine and what runs on it; every problem is printed with its fix.

    The exit code is 1 if there is a problem (a warning is none).
    """
    from sumibi import console
    from sumibi.doctor import Verdict, examine

    checks = examine(_state_dir(), admin_port)
    console.print_checks(checks, json=json)
    raise typer.Exit(1 if any(check.verdict is Verdict.PROBLEM for check in checks) else 0)


@app.command(short_help="Play traffic on a simulated fleet, under several policies.")
def replay(
    trace: Annotated[
        list[str],
        typer.Argument(
            help="Recorded traffic (files, plain, .gz or .xz), or made-up: agents, program, w1, w2, w3, w7,"
            " w8, w9, w12, w15, with options as in agents:sessions=200,users=64.",
            metavar="TRACE...",
        ),
    ],
    fleet: Annotated[Path, typer.Option(help="What it is played on, YAML (docs/replay.md).", metavar="FILE")],
    policy: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas; `all` for all.", metavar="A,B,C")
    ] = "cost,round-robin",
    users: Annotated[
        int | None,
        typer.Option(
            help="Sessions at once: whoever ends one begins the next. Replaces recorded times."
            " [default: recorded times, or 32 where a trace has none]"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Order of sessions, noise, wrong constants; equal seeds give equal results.")
    ] = 0,
    format: Annotated[
        str | None,
        typer.Option(
            help="weka, mooncake, bailian, access-log, recording or azure. [default: by content]",
            metavar="NAME",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write one object a run here.", metavar="FILE")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a picture: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
) -> None:
    """Play traffic on a simulated fleet, under several policies, and see what each would have given you.

    The router is the real one; engines are simulated: prefill in chunks, continuous batching, a cache of the
    size that the fleet file says. What any router could have reached at most is printed beside it.

    \b
    Yesterday's traffic of your gateway (sumibi serve --record DIR), on a fleet you think of buying:
      sumibi replay DIR/events.jsonl --fleet fleet.yaml --policy cost,llmd-precise
    Coding agents, made up, 64 at once:
      sumibi replay agents --fleet fleet.yaml --users 64 --plot replay.png
    \b
    A fleet file:
      name: four-h100-nodes
      groups:
        - {count: 4, latency: llama-3.1-70b/4xh100, kv_tokens: 461_376}
    """  # noqa: D301 (\b keeps the lines of the example as they are)
    from sumibi.bench import replay_report as reports
    from sumibi.bench.replay import policies, replay, workload_of
    from sumibi.sim.fleet import load

    reports.check_output(json, "--json")
    reports.check_plot(plot)
    names, spec = policies(policy), load(fleet)
    from sumibi import console

    with console.progress() as report:
        report("traffic", ", ".join(trace), None)
        workload = workload_of(trace, format=format, seed=seed)
        report("traffic", ", ".join(trace), 1.0)
        replayed = replay(workload, spec, names, users=users, seed=seed, report=report)
    reports.print_table(replayed)
    if json is not None:
        reports.write_json(json, replayed)
    if plot is not None:
        reports.write_plot(plot, replayed)


Traces = Annotated[
    Path | None,
    typer.Option(
        help="Recorded traffic: weka/sessions.jsonl.xz, mooncake/synthetic_trace.jsonl.xz. Made-up agents"
        " stand in for what is not there. [default: ../shared/traces beside the checkout]",
        metavar="DIR",
    ),
]
Jobs = Annotated[int | None, typer.Option(help="Simulations at once. [default: cores]", min=1)]


@bench.command(name="routing", short_help="Our router against every policy we know, over the whole grid.")
def bench_routing(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer points, one seed, the strongest baselines: minutes.")
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            help="Rows: cache, serving, w2, others, decode, mooncake, uneven, faults, program.",
            metavar="NAME,...",
        ),
    ] = "",
    policies: Annotated[
        str, typer.Option(help="Baselines. [default: all; quick: the strongest]", metavar="NAME,...")
    ] = "",
    traces: Traces = None,
    json: Annotated[Path, typer.Option(help="The figures, as a list.", metavar="FILE")] = Path(
        "out/bench-routing.json"
    ),
    results: Annotated[
        Path | None,
        typer.Option(
            help="The page. [default: benchmarks/routing/RESULTS.md of the whole grid, else"
            " out/bench-routing.md]",
            metavar="FILE",
        ),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Play the grid under our router and every baseline, judge every target, write the results.

    Runs that are done are kept in the cache directory: a run that was broken off goes on where it was. The
    whole grid takes hours, `--quick` minutes. The exit code is 1 if a target was missed.
    """
    from sumibi import console
    from sumibi.bench import routing
    from sumibi.bench.grid import repository
    from sumibi.bench.replay import policies as named
    from sumibi.bench.traffic import default_traces

    whole = not (quick or only or policies)
    root = repository()
    with console.progress() as report:
        judged = routing.bench_routing(
            quick=quick,
            only=[name.strip() for name in only.split(",") if name.strip()],
            policies=named(policies) if policies else [],
            traces=traces or default_traces(root),
            jobs=jobs,
            json=json,
            page=results
            or (root / "benchmarks/routing/RESULTS.md" if whole else Path("out/bench-routing.md")),
            report=report,
        )
    routing.show(judged)
    raise typer.Exit(1 if any(row.missed for row in judged) else 0)


@bench.command(name="claims", short_help="What others claim for KV-aware serving, claim by claim.")
def bench_claims(
    traces: Traces = None,
    json: Annotated[Path | None, typer.Option(help="The figures, as a list.", metavar="FILE")] = None,
    jobs: Jobs = None,
) -> None:
    """Put published figures for KV-aware routing to the test: what was simulated, what was possible, and
    where a claim does not hold. Takes some minutes; runs that are done are kept.
    """
    from sumibi import console
    from sumibi.bench import claims
    from sumibi.bench.grid import repository
    from sumibi.bench.report import write_json
    from sumibi.bench.traffic import default_traces

    with console.progress() as report:
        found = claims.bench_claims(traces=traces or default_traces(repository()), jobs=jobs, report=report)
    claims.show(found)
    if json is not None:
        write_json(claims.figures_of(found), json)


@decisions.command(short_help="Recompute every pick of a decision log.")
def rerun(
    file: Annotated[Path, typer.Argument(help="A decision log, as `sumibi serve --record DIR` writes it.")],
    policy: Annotated[
        str | None,
        typer.Option(help="Ask what this policy would have picked. [default: the one that was recorded]"),
    ] = None,
) -> None:
    """Recompute every pick of a decision log from its records alone, and compare.

    The exit code is 1 if a pick differs under its own policy (a bug); with --policy, differences are
    the answer and the code is 0.
    """
    from sumibi import console
    from sumibi.routing.decisions import read_decisions
    from sumibi.routing.policies import rerun as rerun_decisions

    try:
        lines = file.read_bytes().splitlines()
    except OSError as cause:
        raise ConfigError(f"cannot read the decision log {file}: {cause.strerror}") from cause
    reruns = list(rerun_decisions(read_decisions(lines), policy))
    console.print_reruns(reruns)
    raise typer.Exit(0 if policy or all(one.same for one in reruns) else 1)


@models.command(short_help="Fetch the built-in model, or check a directory.")
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


def _load_stack(file: Path | None, flags: dict[tuple[str, ...], Any]) -> Any:
    from sumibi.stack import DEFAULT_FILE, load_stack

    if file is None and DEFAULT_FILE.is_file():
        file = DEFAULT_FILE
    return load_stack(file, {path: value for path, value in flags.items() if value is not None})


def _state_dir() -> Path:
    from sumibi.local.runfile import default_state_dir

    return default_state_dir()

"""Does the simulator foretell a live run: two embedded engines under load, recorded, replayed, predicted.

The first third of the recording calibrates (`sumibi.bench.recorded`); time to first token and hit rate are
compared over the rest. The log is replayed too: every decision must come out bit-equal.

Others may use the machine meanwhile, and not evenly: how long engines waited for a processor is watched
(`waits`), and makes simulated engines slower by as much. It is said what came out without that, too.

    python -m benchmarks.simulator.live                  play, then predict
    python -m benchmarks.simulator.live --recording DIR  predict an earlier run's recording
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from benchmarks.simulator.load import ANSWER_TOKENS, CONTEXT_TOKENS, KV_BLOCKS, TURNS, USERS, play
from benchmarks.simulator.stack import engines_of, recorded_stack
from benchmarks.simulator.waits import Watch, Window, slowdown

from sumibi.bench import report
from sumibi.bench.recorded import (
    Fared,
    Recording,
    differing,
    fleet,
    simulated,
    token_hit_rate,
    ttft_p50_s,
)
from sumibi.bench.traces import read
from sumibi.demo.run import free_ports
from sumibi.demo.texts import Texts
from sumibi.local.updown import model_directory
from sumibi.prompts.tokenizer import Tokenizer
from sumibi.routing.events import Arrived
from sumibi.routing.views import EndpointView
from sumibi.sim import simulate
from sumibi.sim.fleet import Fault, FleetSpec
from sumibi.stack import DEFAULT_MODEL

HERE = Path(__file__).parent
STEP_TOKENS = 256
MAX_SEQUENCES = 64
"""Of the embedded engine on a CPU, unless it is told otherwise."""
CALIBRATING = 1 / 3
"""Part of the requests."""
WAITS_FILE = "waits.json"
"""Beside the recording: how long engines waited for a processor."""
WITHIN = 0.25


def record(directory: Path, lasts_s: float, seed: int) -> None:
    """Play the load on a stack of its own; `directory` then has the gateway's recording."""

    def say(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    model_dir = model_directory(DEFAULT_MODEL, lambda who, what, done: None)
    tokenizer = Tokenizer.load(model_dir)
    texts = Texts(lambda text: len(tokenizer.encode(text, add_special_tokens=False)), seed)
    # Sockets are in it: the path must be short.
    with tempfile.TemporaryDirectory(prefix="sumibi-live-") as home:
        state_dir = Path(home) / "sumibi"
        say("starting two engines and a gateway")
        with (
            recorded_stack(
                model_dir, state_dir, directory, kv_blocks=KV_BLOCKS, policy="cost", ports=free_ports
            ) as stack,
            Watch(engines_of(stack)) as watch,
        ):
            played = play(stack.url, stack.model, texts, lasts_s, seed, say)
    if played.failures:
        raise SystemExit("; ".join(played.failures))
    (directory / WAITS_FILE).write_bytes(msgspec.json.encode(watch.windows))


def disturbed(fleet: FleetSpec, learnt: list[EndpointView], windows: list[Window], cut_s: float) -> FleetSpec:
    """The fleet, each engine slower or faster than it was on average before `cut_s` as it waited more or less
    for a processor. Windows are on the recording's clock from its first arrival on.
    """
    faults = []
    for name, endpoint in enumerate(learnt):
        own = [window for window in windows if window.endpoint == endpoint.endpoint]
        usual = slowdown([window for window in own if window.end_s <= cut_s])
        faults += [
            Fault(
                at_s=max(0.0, window.start_s),
                endpoint=f"engine-{name}-0",
                kind="slow",
                factor=window.slowdown / usual,
            )
            for window in own
            if window.end_s > 0
        ]
    return msgspec.structs.replace(fleet, faults=faults)


def predict(directory: Path, cmd: str) -> list[report.Figure]:
    """Figures of one recording."""
    recording = Recording.read((directory / "events.jsonl").read_bytes().splitlines())
    recorded = (directory / "decisions.jsonl").read_bytes().splitlines()
    decided, differ = differing(recording.decisions(), recorded)
    then = recording.fared()
    first = round(len(then) * CALIBRATING)
    learnt, windows = recording.learnt(first), waits(directory, recording)
    engines = fleet(learnt, chunk_tokens=STEP_TOKENS, max_sequences=MAX_SEQUENCES)
    cut_s = then[first].arrival_s
    steady = rest(directory, recording, engines, first)
    now = rest(directory, recording, disturbed(engines, learnt, windows, cut_s), first)

    def compared(name: str, unit: str, of: Callable[[list[Fared]], float]) -> list[report.Figure]:
        live, ours, even = of(then[first:]), of(now), of(steady)
        return [
            report.figure(f"{name}, live", [live], unit, cmd=cmd),
            report.figure(f"{name}, simulated", [ours], unit, cmd=cmd),
            report.figure(f"{name}: off by", [abs(ours / live - 1)], "", at_most=WITHIN, cmd=cmd),
            report.figure(f"{name}, simulated as if engines had waited evenly", [even], unit, cmd=cmd),
        ]

    model = learnt[0].latency
    return [
        report.statement(
            "calibration",
            f"the first {first} of {len(then)} requests; learnt: {msgspec.json.encode(model).decode()} and "
            f"{learnt[0].overhead_s:.3f} s a request ({learnt[0].endpoint})",
        ),
        report.figure("decisions recorded", [decided], "", cmd=cmd),
        report.figure("decisions that a replay of the log makes otherwise", [differ], "", at_most=0, cmd=cmd),
        report.figure(
            "engines slower by waiting for a processor, calibration",
            [slowdown([window for window in windows if window.end_s <= cut_s])],
            "x",
            cmd=cmd,
        ),
        report.figure(
            "engines slower by waiting for a processor, then",
            [slowdown([window for window in windows if window.end_s > cut_s])],
            "x",
            cmd=cmd,
        ),
        *compared("median TTFT", "s", ttft_p50_s),
        *compared("token hit rate", "", token_hit_rate),
    ]


def waits(directory: Path, recording: Recording) -> list[Window]:
    """On the recording's clock; none if nobody watched."""
    file = directory / WAITS_FILE
    if not file.exists():
        return []
    zero_s = next(event.t for event in recording.events if isinstance(event, Arrived))
    return [
        msgspec.structs.replace(window, start_s=window.start_s - zero_s, end_s=window.end_s - zero_s)
        for window in msgspec.json.decode(file.read_bytes(), type=list[Window])
    ]


def rest(directory: Path, recording: Recording, engines: FleetSpec, first: int) -> list[Fared]:
    """How requests after the first so many fare in a simulation of all of them."""
    workload, config = read(directory / "events.jsonl"), recording.config
    run = simulate(workload, engines, policy=config.policy, config=config, wrong_constants=False, noise=0.0)
    return simulated(workload, run)[first:]


def main() -> int:
    """Record (unless told where a recording is), predict, write; exit code 0 if every target held."""
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator.live",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    arguments.add_argument("--json", type=Path, default=Path("out/bench-simulator-live.json"))
    arguments.add_argument(
        "--recording", type=Path, help="of an earlier run; by another version, its decisions may differ"
    )
    arguments.add_argument("--seconds", type=float, default=150.0, help="of load")
    arguments.add_argument("--seed", type=int, default=1, help="of texts and pauses")
    chosen = arguments.parse_args()
    directory = chosen.recording
    if directory is None:
        directory = chosen.json.parent / "bench-simulator-live"
        shutil.rmtree(directory, ignore_errors=True)
        record(directory.absolute(), chosen.seconds, chosen.seed)
    cmd = f"python -m benchmarks.simulator.live --seconds {chosen.seconds:g} --seed {chosen.seed}"
    figures = [
        report.machine(),
        report.statement("command", cmd),
        report.statement(
            "workload",
            f"{USERS} users at once on two embedded engines (135M model, a core each, {KV_BLOCKS} blocks of "
            f"32 tokens): conversations of {TURNS} turns that begin with {CONTEXT_TOKENS} tokens and are "
            f"answered with {ANSWER_TOKENS}; gateway, clients and whatever else runs share the machine",
        ),
        *predict(directory, cmd),
    ]
    return report.finish(figures, chosen.json, HERE / "LIVE.md", "The simulator and a live run")


if __name__ == "__main__":
    sys.exit(main())

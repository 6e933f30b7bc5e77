"""Does the simulator foretell a live run: two embedded engines under load, recorded, replayed, predicted.

The first third of the recording calibrates (`sumibi.bench.recorded`); time to first token and hit rate are
compared over the rest. The log is replayed too: every decision must come out bit-equal.

    python -m benchmarks.simulator.live                  play, then predict
    python -m benchmarks.simulator.live --recording DIR  predict an earlier run's recording
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
from benchmarks import report
from benchmarks.simulator.load import ANSWER_TOKENS, CONTEXT_TOKENS, KV_BLOCKS, TURNS, USERS, play
from benchmarks.simulator.stack import recorded_stack

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
from sumibi.sim import simulate
from sumibi.stack import DEFAULT_MODEL

HERE = Path(__file__).parent
STEP_TOKENS = 256
MAX_SEQUENCES = 64
"""Of the embedded engine on a CPU, unless it is told otherwise."""
CALIBRATING = 1 / 3
"""Part of the requests."""
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
        with recorded_stack(
            model_dir, state_dir, directory, kv_blocks=KV_BLOCKS, policy="cost", ports=free_ports
        ) as plan:
            played = play(plan.url, plan.model, texts, lasts_s, seed, say)
    if played.failures:
        raise SystemExit("; ".join(played.failures))


def predict(directory: Path, cmd: str) -> list[report.Figure]:
    """Figures of one recording."""
    lines = (directory / "events.jsonl").read_bytes().splitlines()
    recording = Recording.read(lines)
    decided, differ = differing(
        recording.decisions(), (directory / "decisions.jsonl").read_bytes().splitlines()
    )
    arrivals_s = recording.arrivals_s()
    first = round(len(arrivals_s) * CALIBRATING)
    workload = read(directory / "events.jsonl")
    learnt = recording.learnt(first)
    engines = fleet(learnt, chunk_tokens=STEP_TOKENS, max_sequences=MAX_SEQUENCES)
    run = simulate(
        workload, engines, policy=recording.config.policy, config=recording.config, wrong_constants=False,
        noise=0.0,
    )  # fmt: skip
    then, now = recording.fared(), simulated(workload, run)

    def ratio(name: str, unit: str, of_run: float, of_simulation: float) -> list[report.Figure]:
        found = of_simulation / of_run
        return [
            report.figure(f"{name}, live", [of_run], unit, cmd=cmd),
            report.figure(f"{name}, simulated", [of_simulation], unit, cmd=cmd),
            report.figure(f"{name}: off by", [abs(found - 1)], "", at_most=WITHIN, cmd=cmd),
        ]

    def rest(requests: list[Fared]) -> list[Fared]:
        return requests[first:]

    model = learnt[0].latency
    return [
        report.statement(
            "calibration",
            f"the first {first} of {len(then)} requests; learnt: {msgspec.json.encode(model).decode()} and "
            f"{learnt[0].overhead_s:.3f} s a request ({learnt[0].endpoint})",
        ),
        report.figure("decisions recorded", [decided], "", cmd=cmd),
        report.figure("decisions that a replay of the log makes otherwise", [differ], "", at_most=0, cmd=cmd),
        *ratio("median TTFT", "s", ttft_p50_s(rest(then)), ttft_p50_s(rest(now))),
        *ratio("token hit rate", "", token_hit_rate(rest(then)), token_hit_rate(rest(now))),
    ]


def main() -> int:
    """Record (unless told where a recording is), predict, write; exit code 0 if every target held."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--json", type=Path, default=Path("out/bench-simulator-live.json"))
    arguments.add_argument("--recording", type=Path, help="a gateway's --record directory")
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
            f"answered with {ANSWER_TOKENS}; gateway, engines and clients share the machine",
        ),
        *predict(directory, cmd),
    ]
    report.write(figures, chosen.json, HERE / "LIVE.md", "The simulator and a live run")
    print((HERE / "LIVE.md").read_text())
    return 0 if all(each.held is not False for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-pd`: prefill and decode apart against two engines that do both, on two cores.

Real engines behind a real gateway, each side in processes of its own; windows alternate between sides, idle
ones wait. First bursts, for what long prompts do to those who read a stream at every token budget; then
loads, for goodput under bounds that were fixed in advance (`figures`).
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.contestant import parser
from benchmarks.pd import figures as judged
from benchmarks.pd import plots
from benchmarks.pd.load import (
    LONG,
    PROMPTS,
    SETTLE_S,
    STREAM,
    STREAM_RATE,
    STREAMS,
    Window,
    burst,
    loaded,
)
from benchmarks.pd.sides import (
    Running,
    Side,
    aggregated,
    apart,
    chosen,
    on_first_core,
    running,
    two_cores,
)

from sumibi.bench import report
from sumibi.local.updown import model_directory
from sumibi.stack import DEFAULT_MODEL

HERE = Path(__file__).parent
BUDGETS = (64, 128, 256, 512, 2048)
USUAL_BUDGET = 256
"""The embedded engine's on a CPU: of the side that prefills for another, and of the one that decodes."""
RATES = (0.08, 0.2, 0.3, 0.45)
"""Long prompts a second. One core computes 0.26 of them, two cores that do nothing else 0.52."""
LATE_S = judged.TTFT_S[LONG.name] + 3.0
"""After a load's last request: what comes later has missed its bounds."""
BURST_KV_BLOCKS, LOAD_KV_BLOCKS = 512, 1024
"""Of 32 tokens. A long prompt and its answer take 64: the prompts of a burst, and all that can queue up in a
load, have room on one engine. Twelve engines are up at once for the bursts."""
BUSY_CORES = 0.1
"""Used by others: more is said."""
WARM_S = 3.0
"""Of a burst before the first one that counts."""
WARM_RATE, WARM_LOAD_S = 0.25, 14.0
"""Of a load before the first one that counts."""


def main() -> int:
    """Measure, judge, write; the exit code is 1 if a target was missed."""
    options = _options()
    model_dir = Path(model_directory(DEFAULT_MODEL, lambda who, what, done: None))
    cores = two_cores()
    begun_s = time.monotonic()
    bursts = _bursts(options, model_dir)
    budgets = {budget: aggregated(budget).name for budget in options.budgets}
    best = next(b for b, name in budgets.items() if name == bursts.best(list(budgets.values())))
    sides = [aggregated(best), _apart(), chosen((USUAL_BUDGET, USUAL_BUDGET))]
    measured = _loads(options, model_dir, sides)
    _say(f"all windows took {time.monotonic() - begun_s:.0f} s")
    ours = sides[-1].name
    figures = [
        report.machine(),
        report.statement("command", options.cmd),
        *_statements(options, cores),
        *judged.curve(bursts, list(budgets.values()), _apart().name, options.cmd),
        *judged.loads(measured, [side.name for side in sides[:-1]], ours, options.cmd),
        *judged.quiet([*bursts.all(), *measured.all()], options.cmd),
        *judged.losses(bursts, measured, _apart().name, best=sides[0].name),
    ]
    try:
        plots.draw(bursts, budgets, _apart().name, measured, options.results.parent / "pd.png")
    except ImportError:
        figures.append(report.statement("not drawn", "matplotlib is not there"))
    return report.finish(figures, options.json, options.results, "Prefill and decode apart, on two cores")


def _options() -> argparse.Namespace:
    known = parser("pd", __doc__)
    known.set_defaults(rounds=2)
    known.add_argument(
        "--quick", action="store_true", help="one round, three budgets, two loads: some 6 minutes"
    )
    known.add_argument("--burst-seconds", type=float, default=12.0, help="measured of a burst [default: 12]")
    known.add_argument("--load-seconds", type=float, default=24.0, help="of a load [default: 24]")
    options = known.parse_args()
    options.budgets, options.rates, options.cmd = BUDGETS, RATES, "make bench-pd"
    if options.quick:
        options.budgets, options.rates, options.rounds = (64, 128, 2048), (0.2, 0.45), 1
        options.cmd += " (python -m benchmarks.pd --quick)"
        if options.results == HERE / "RESULTS.md":
            options.results = Path("out/bench-pd.md")
    return options


def _apart() -> Side:
    return apart((USUAL_BUDGET, USUAL_BUDGET))


def _statements(options: argparse.Namespace, cores: list[int]) -> list[report.Figure]:
    bounds = ", ".join(f"{seconds:g} s ({kind})" for kind, seconds in judged.TTFT_S.items())
    return [
        report.statement(
            "workload",
            f"streams of {STREAM.prompt_tokens} prompt tokens and {STREAM.output_tokens} of an answer; long "
            f"prompts of {LONG.prompt_tokens} tokens, answered with {LONG.output_tokens}; random token ids, "
            f"nothing is found in a cache; {DEFAULT_MODEL}, bf16, greedy",
        ),
        report.statement(
            "bursts",
            f"{STREAMS} streams at all times, {PROMPTS} long prompts waiting for their first token at all "
            f"times; {options.burst_seconds:g} s measured after {SETTLE_S:g} s, {options.rounds} rounds, a "
            "window a side in turn",
        ),
        report.statement(
            "loads",
            f"{STREAM_RATE:g} streams/s and long prompts at the rate that is said, sent at given times "
            f"for {options.load_seconds:g} s, {options.rounds} rounds, the same on every side, in turn",
        ),
        report.statement(
            "goodput",
            f"part of the requests whose TTFT is at most {bounds} and whose 95th percentile of gaps between "
            f"tokens is at most {1e3 * judged.ITL_P95_S:g} ms; fixed before the first run",
        ),
        report.statement(
            "sides",
            f"an engine on core {cores[0]} and one on core {cores[1]}; the gateway and the load share core "
            f"{cores[0]}, with the engine that prefills where roles are apart. aggregated: both alike, "
            "requests in turn. prefill + decode: one of each, every request a pair, KV over `stream`, steps "
            f"of {USUAL_BUDGET} tokens. router's choice: the same under `cost`: pairs, or whole runs where "
            "answers are decoded",
        ),
    ]


def _bursts(options: argparse.Namespace, model_dir: Path) -> judged.Curve:
    sides = [*(aggregated(budget) for budget in options.budgets), _apart()]
    windows: dict[str, list[Window]] = {side.name: [] for side in sides}
    with ExitStack() as stack:
        ups = _up(stack, sides, model_dir, BURST_KV_BLOCKS)
        for up in ups:
            with on_first_core():
                burst(up, WARM_S, "warm")
        for turn in range(options.rounds):
            for up in ups:
                with on_first_core():
                    window = burst(up, options.burst_seconds, f"burst/{turn}")
                windows[up.side.name].append(window)
                _say(
                    f"burst {turn + 1}: {up.side.name}: p99 ITL {1e3 * judged.itl_p99_s(window):.0f} ms, "
                    f"{window.prefill_tokens_per_s:.0f} prompt tok/s{_troubles(window)}"
                )
    return judged.Curve(windows)


def _loads(options: argparse.Namespace, model_dir: Path, sides: list[Side]) -> judged.Loads:
    windows: dict[float, dict[str, list[Window]]] = {
        rate: {side.name: [] for side in sides} for rate in options.rates
    }
    with ExitStack() as stack:
        ups = _up(stack, sides, model_dir, LOAD_KV_BLOCKS)
        for up in ups:  # routers have learnt by then how long prompts and steps take here
            with on_first_core():
                loaded(up, WARM_RATE, WARM_LOAD_S, LATE_S, "warm")
        for turn in range(options.rounds):
            for rate in options.rates:
                for up in ups:
                    seed = f"load/{turn}/{rate:g}"
                    with on_first_core():
                        window = loaded(up, rate, options.load_seconds, LATE_S, seed)
                    windows[rate][up.side.name].append(window)
                    _say(
                        f"load {turn + 1}, {rate:g}/s: {up.side.name}: goodput {judged.goodput(window):.2f} "
                        f"of {len(window.heard)}{_troubles(window)}"
                    )
    return judged.Loads(windows)


def _up(stack: ExitStack, sides: list[Side], model_dir: Path, kv_blocks: int) -> list[Running]:
    """All sides, one after the other."""
    ups = []
    for side in sides:
        _say(f"starting: {side.name}")
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="sumibi-pd-"))  # sockets: a short path
        ups.append(stack.enter_context(running(side, model_dir, Path(home), kv_blocks=kv_blocks)))
    return ups


def _troubles(window: Window) -> str:
    """What else should be known of a window."""
    others = f" (others use {window.others_cores:.1f} cores)" if window.others_cores > BUSY_CORES else ""
    errors = sorted({one.error for one in window.heard if one.error})
    return others + (f" ERRORS: {'; '.join(errors)}" if errors else "")


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

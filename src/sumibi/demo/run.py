"""The whole demonstration: stacks of its own come up, are played on and go; files are written.

Every stack is tied to this process, so whatever ends it ends them too.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from sumibi.admin import Admin
from sumibi.core.errors import EnvironmentProblem
from sumibi.demo.claims import POLICIES, Demonstration, StepResult, judge
from sumibi.demo.play import Door, play
from sumibi.demo.report import write_json, write_picture
from sumibi.demo.script import PRESSURE_KV_BLOCKS, SEED, busy_request, prefix_phases, pressure_phase
from sumibi.demo.texts import Texts
from sumibi.local.runfile import STATE_DIR_NAME, default_state_dir
from sumibi.local.updown import Report, down, model_directory, up
from sumibi.prompts.tokenizer import Tokenizer
from sumibi.stack import KeyPath, load_stack

AMPLE_KV_BLOCKS = 512
_PORTS = 4  # two engines, gateway, admin door


def make_directory(path: Path) -> None:
    """For what a demonstration writes. Raises EnvironmentProblem."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise EnvironmentProblem(f"cannot write to {path}: {cause}") from cause


def run_demo(model: str, out: Path, report: Report) -> Demonstration[StepResult]:
    """Play everything and write `demo.json` and `demo.png` into `out`.

    Raises what `up` raises, EngineUnavailable if a request fails, EnvironmentProblem if `out` cannot be
    written.
    """
    make_directory(out)
    tokenizer = Tokenizer.load(model_directory(model, report))
    texts = Texts(lambda text: len(tokenizer.encode(text, add_special_tokens=False)), SEED)
    busy = busy_request(texts)
    port = free_ports(_PORTS)
    early, pressure = prefix_phases(texts), pressure_phase(texts)
    count_steps = counting(report, len(early) + len(POLICIES) * len(pressure))
    steps: list[StepResult] = []
    with _stack(model, "cost", AMPLE_KV_BLOCKS, port, report) as door:
        steps += play(door, early, "cost", busy, count_steps)
    for policy in POLICIES:
        with _stack(model, policy, PRESSURE_KV_BLOCKS, port, report) as door:
            steps += play(door, pressure, policy, busy, count_steps)
    claims = judge(steps)
    write_json(out / "demo.json", steps, claims)
    write_picture(out / "demo.png", steps, claims)
    return Demonstration(steps, claims)


def counting(report: Report, steps: int) -> Report:
    """`report` for `play`, which calls it once a step: says how many there are still to come."""
    numbers = count(1)

    def counted(who: str, what: str, done: float | None) -> None:
        report(who, f"step {next(numbers)} of {steps}: {what}", done)

    return counted


@contextmanager
def _stack(model: str, policy: str, kv_blocks: int, first_port: int, report: Report) -> Iterator[Door]:
    """A stack with everything anew, gone at the end of the block."""
    flags: dict[KeyPath, object] = {
        ("model",): model,
        ("engines", "first_port"): first_port,
        ("engines", "kv_blocks"): kv_blocks,
        ("gateway", "port"): first_port + 2,
        ("gateway", "admin_port"): first_port + 3,
        ("gateway", "policy"): policy,
    }
    with stack_of(flags, report) as door:
        yield door


@contextmanager
def stack_of(flags: dict[KeyPath, object], report: Report) -> Iterator[Door]:
    """What `flags` say of a stack file's keys, running; gone at the end of the block."""
    stack = load_stack(None, flags)
    state_dir = default_state_dir() / "demo" / STATE_DIR_NAME
    running = up(stack, state_dir, report, tied=True)
    if running.supervisor is None:
        raise EnvironmentProblem("another demonstration is running")
    try:
        admin = Admin.of(state_dir, running.record.admin_url)
        yield Door(running.record.url, running.record.model, admin)
    finally:
        down(state_dir)
        running.supervisor.wait()


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    for _ in range(100):
        with ExitStack() as probes:
            try:
                first = _bound(probes, 0)
                for port in range(first + 1, first + count):
                    _bound(probes, port)
            except (OSError, OverflowError):
                continue
            return first
    raise EnvironmentProblem(f"found no {count} free ports in a row on 127.0.0.1")


def _bound(probes: ExitStack, port: int) -> int:
    probe = probes.enter_context(socket.socket())
    probe.bind(("127.0.0.1", port))
    return int(probe.getsockname()[1])

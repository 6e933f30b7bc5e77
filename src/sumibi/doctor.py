"""What is wrong on this machine, and what to do about it.

Each check is a small function that looks at one thing and returns one `Check`: what was found, and the fix
if it is not well. A warning is something that works worse than it could; only a problem makes the command
fail. Nothing is changed, nothing is started (torch is asked in a process of its own).
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sumibi.admin import metrics
from sumibi.core.errors import SumibiError
from sumibi.core.memory import available_memory_bytes
from sumibi.local.runfile import ChildState
from sumibi.local.updown import taken_ports
from sumibi.pools import findings
from sumibi.routing.events import Grade, Role
from sumibi.stack import DEFAULT_FILE, DEFAULT_MODEL, load_stack
from sumibi.status import ADMIN_PORT, Status, read_status
from sumibi.troubles import troubles

_ENGINE_MEMORY_BYTES = 1_200_000_000
"""Resident memory of one replica of the built-in model with 512 KV blocks."""
_MODEL_DISK_BYTES = 500_000_000
"""The wheel, the file out of it and the converted model, at once."""
_TORCH_TIMEOUT_S = 60


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `fix` is empty if all is well."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def examine(state_dir: Path, admin_port: int = ADMIN_PORT) -> list[Check]:
    """Every check, in the order in which one would fix things. `admin_port`: as for `read_status`."""
    status = read_status(state_dir, admin_port)
    alone = bool(status.by_hand) and importlib.util.find_spec("torch") is None
    machine = [
        check_python(),
        *([] if alone else [check_cores(), check_memory(status), check_torch()]),
        check_zmq(),
        *(
            [_ok("engine", "none is installed here; a gateway needs none")]
            if alone
            else [check_model(), check_disk()]
        ),
        check_writable("state directory", state_dir, "XDG_STATE_HOME"),
        check_writable("cache directory", _cache_directory(), "XDG_CACHE_HOME"),
    ]
    if status.by_hand:  # the usual ports are its own, or its engines'
        found = f"admin door at {status.by_hand}, not started by `sumibi up`"
        return [
            *machine,
            _ok("gateway", found),
            *check_caches(status),
            *check_pools(status),
            *check_kv(status),
        ]
    if not status.running:
        return [*machine, check_ports()]
    processes = check_processes(status)
    return [
        *machine,
        *processes,
        *check_caches(status),
        *check_pools(status),
        *check_kv(status),
        *check_fallbacks(status),
    ]


def _ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def check_python() -> Check:
    """Which interpreter runs."""
    return _ok("python", f"{sys.version.split()[0]} in {sys.prefix}")


def check_cores() -> Check:
    """A core for each replica."""
    cores = len(os.sched_getaffinity(0))
    if cores >= load_stack().engines.count:
        return _ok("cores", f"{cores} for this process")
    return Check(
        "cores",
        Verdict.WARNING,
        f"{cores} for this process",
        "two replicas share it: allow more cores, or set engines.count: 1",
    )


def check_memory(status: Status) -> Check:
    """Room for two replicas, unless they run already."""
    available = available_memory_bytes() or 0
    found = f"{available / 1e9:.1f} GB available"
    if status.running or available >= 2 * _ENGINE_MEMORY_BYTES:
        return _ok("memory", found)
    needed = 2 * _ENGINE_MEMORY_BYTES / 1e9
    fix = f"two replicas take about {needed:.1f} GB: free some, or lower engines.kv_blocks"
    return Check("memory", Verdict.WARNING, found, fix)


_TORCH_QUESTION = """
import torch
from sumibi.engine.linear import packing_works
print(torch.__version__, packing_works(torch.bfloat16))
"""


def check_torch() -> Check:
    """The fast path on a CPU is a product from packed bfloat16 weights, which the engine probes itself."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _TORCH_QUESTION],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(
            "torch", Verdict.PROBLEM, f"did not import within {_TORCH_TIMEOUT_S} s", "is the disk very slow?"
        )
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(
            "torch",
            Verdict.PROBLEM,
            f"cannot be imported: {why}",
            "pip install 'sumibi[engine]' (or `make setup`)",
        )
    version, bf16 = asked.stdout.split()
    if bf16 == "True":
        return _ok("torch", f"{version}, packed bfloat16 products work")
    why = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
    fix = "the engine runs on a CPU, but slower: use a CPU with AVX512-BF16 or AMX"
    return Check("torch", Verdict.WARNING, f"{version}: {why}", fix)


def check_zmq() -> Check:
    """KV events travel over Unix sockets."""
    import zmq

    if zmq.has("ipc"):
        return _ok("zmq", f"{zmq.zmq_version()}")
    return Check("zmq", Verdict.PROBLEM, "has no ipc transport", "install pyzmq from a wheel")


def check_model() -> Check:
    """The built-in model is there and whole."""
    try:
        from sumibi.engine.fetch import models_directory
        from sumibi.engine.manifest import check
    except ImportError as cause:
        return Check("model", Verdict.PROBLEM, f"cannot look: {cause}", "pip install 'sumibi[engine]'")
    directory = models_directory() / DEFAULT_MODEL
    if not directory.exists():
        return Check(
            "model",
            Verdict.WARNING,
            f"{DEFAULT_MODEL} is not there yet",
            "`sumibi up` or `make setup` fetches it",
        )
    try:
        check(directory, contents=True)
    except SumibiError as cause:
        return Check("model", Verdict.PROBLEM, str(cause), "`make setup` makes it anew")
    return _ok("model", str(directory))


def check_disk() -> Check:
    """Room to fetch and convert a model."""
    existing = _existing(_cache_directory())
    free = shutil.disk_usage(existing).free
    found = f"{free / 1e9:.1f} GB free in {existing}"
    if free >= _MODEL_DISK_BYTES:
        return _ok("disk", found)
    return Check("disk", Verdict.WARNING, found, f"fetching a model takes {_MODEL_DISK_BYTES / 1e9:.1f} GB")


def check_writable(name: str, directory: Path, variable: str) -> Check:
    """Files can be made in `directory`, or it can be made itself."""
    existing = _existing(directory)
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return _ok(name, f"{directory} can be written")
    fix = f"make {existing} a directory that you can write, or set {variable} to one"
    return Check(name, Verdict.PROBLEM, f"{directory} cannot be written", fix)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sumibi"


def _existing(path: Path) -> Path:
    """`path` or the nearest directory above it that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if os.path.exists(one))


def check_ports() -> Check:
    """Nobody else listens on the stack's ports."""
    try:
        stack = load_stack(DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    except SumibiError as cause:
        return Check("stack file", Verdict.PROBLEM, str(cause), "correct it (docs/stack-file.md)")
    taken = taken_ports(stack)
    ports = (stack.gateway.port, stack.gateway.admin_port, *stack.engine_ports, *stack.side_ports)
    if not taken:
        return _ok("ports", f"free: {', '.join(map(str, ports))}")
    return Check("ports", Verdict.PROBLEM, "; ".join(taken), "stop what listens there, or change the key")


def check_processes(status: Status) -> list[Check]:
    """Every process of the running stack is ready and has not died."""
    if status.stack is None:
        return [Check("stack", Verdict.WARNING, status.problem, "wait for `sumibi up`")]
    checks = []
    for child in status.stack.children:
        found = f"{child.state}, {child.restarts} restarts"
        if child.state is not ChildState.READY:
            found += f" ({child.exit})" if child.exit else ""
            checks.append(Check(child.name, Verdict.PROBLEM, found, f"its log says why: {child.log}"))
        elif child.restarts:
            checks.append(
                Check(child.name, Verdict.WARNING, f"{found}, last {child.exit}", f"see {child.log}")
            )
        else:
            checks.append(_ok(child.name, found))
    return checks


def check_caches(status: Status) -> list[Check]:
    """How well the gateway knows each endpoint's cache."""
    if status.fleet is None:
        return [Check("gateway", Verdict.PROBLEM, status.problem, "see gateway.log in the state directory")]
    checks = []
    for endpoint in status.fleet.endpoints:
        name = f"cache of {endpoint.endpoint}"
        if not endpoint.up:
            checks.append(Check(name, Verdict.PROBLEM, "down", "see the engine's log"))
        elif endpoint.grade is Grade.EXACT:
            checks.append(_ok(name, f"exact, {endpoint.blocks} blocks known"))
        else:
            why = endpoint.suspect or ("no KV events" if not endpoint.has_events else "events have a gap")
            fix = "give the engine --kv-events-config with a replay_endpoint (docs/serve-your-engines.md)"
            if status.stack is not None:  # our own engines have one
                fix = "see gateway.log in the state directory"
            checks.append(Check(name, Verdict.WARNING, f"{endpoint.grade}: {why}", fix))
    return checks


def check_pools(status: Status) -> list[Check]:
    """Prefill and decode engines fit together."""
    fleet = status.fleet
    if fleet is None or all(endpoint.role is Role.BOTH for endpoint in fleet.endpoints):
        return []
    checks = [
        Check(each.about, Verdict.WARNING if each.works else Verdict.PROBLEM, each.found, each.fix)
        for each in findings(fleet)
    ]
    return checks or [_ok("pools", "prefill and decode engines fit together")]


def check_kv(status: Status) -> list[Check]:
    """What engines lost of KV, between them and in tiers. Those that do not answer are told of elsewhere."""
    if status.fleet is None:
        return []
    checks = []
    for url in dict.fromkeys(endpoint.endpoint.partition("#")[0] for endpoint in status.fleet.endpoints):
        try:
            found = troubles(metrics(f"{url}/metrics"))
        except SumibiError:
            continue
        checks += [Check(f"{each.about} of {url}", Verdict.WARNING, each.found, each.fix) for each in found]
    return checks


_REPLAYS_FAILED = "sumibi_kv_event_replays_failed_total"
_FALLBACKS = {
    "sumibi_prompt_fallbacks_total": "prompts got approximate keys: see gateway.log",
    "sumibi_prompt_mismatches_total": "the fast reading of prompts was wrong and is off: please report it",
    "sumibi_cached_tokens_disagree": "cached tokens are not as predicted: see gateway.log",
    "sumibi_index_refused_blocks_total": "the index is full: fewer endpoints a gateway",
    "sumibi_kv_event_malformed_total": "KV events do not decode: is the engine's version known?",
    _REPLAYS_FAILED: "missed KV events could not be replayed: set replay_endpoint",
    "sumibi_usage_records_dropped_total": "usage records were lost: is the disk full or slow?",
}
"""Counters of the gateway that are 0 while nothing falls back, with what to do about them."""


def check_fallbacks(status: Status) -> list[Check]:
    """What the gateway had to do in a lesser way."""
    if status.stack is None or status.fleet is None:
        return []
    try:
        samples = metrics(f"{status.stack.url}/metrics")
    except SumibiError as cause:
        return [Check("gateway", Verdict.PROBLEM, str(cause), "see gateway.log in the state directory")]
    checks = []
    exact = all(endpoint.grade is Grade.EXACT for endpoint in status.fleet.endpoints)
    for name, fix in _FALLBACKS.items():
        count = sum(sample.value for sample in samples if sample.name == name)
        if count and name == _REPLAYS_FAILED and exact:
            checks.append(_ok(name, f"{count:g} so far; every cache is known exactly again"))
        elif count:
            checks.append(Check(name, Verdict.WARNING, f"{count:g}", fix))
    for sample in samples:
        if sample.name == "sumibi_prompt_source" and sample.labels["source"] != "local":
            found = f"tokens of {sample.labels['model']} come from: {sample.labels['source']}"
            checks.append(Check("tokenizer", Verdict.WARNING, found, "give the gateway --tokenizer DIR"))
    return checks or [_ok("fallbacks", "none")]

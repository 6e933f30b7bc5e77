"""The local supervisor, on real processes: tiny HTTP servers stand for engines and gateway."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
import pytest

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.engine.transfer.config import parse_kv_transfer
from sumibi.gateway.epp import endpoints
from sumibi.gateway.main import ABORT_S
from sumibi.gateway.options import engine_options
from sumibi.local import runfile, updown
from sumibi.local.plan import ChildPlan, StackPlan, plan_stack, share_cores
from sumibi.local.runfile import ChildState, RunRecord
from sumibi.local.supervisor import Child, Limits, is_healthy, pause_s
from sumibi.local.updown import StartFailed, down, taken_ports, up
from sumibi.stack import load_stack

SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
asked = []
def busy(*_):
    asked.append(1)
    print("asked to stop", flush=True)
    if len(asked) == 2: os._exit(0)
if "busy" in sys.argv: signal.signal(signal.SIGTERM, busy)  # until it is asked twice
print("cores", sorted(os.sched_getaffinity(0)), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

STATE = Path("/run/user/1000/sumibi")
"""For plans, which write nothing: sockets must fit however long the way to a test's own directory is."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server(name: str, *words: str, cores: tuple[int, ...] = (), grace_s: float = 10.0) -> ChildPlan:
    port = free_port()
    argv = [sys.executable, "-c", SERVER, str(port), *words]
    url = f"http://127.0.0.1:{port}/"
    return ChildPlan(name=name, argv=argv, health_url=url, cores=cores, grace_s=grace_s)


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """True if the process ended (a zombie that its new parent has not reaped yet has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Stack:
    """A supervisor process over stand-in children, and what it wrote down."""

    def __init__(self, state_dir: Path, children: list[ChildPlan]) -> None:
        self.dir = state_dir
        plan = StackPlan(children=children, url="http://u", admin_url="http://a", model="m", notes=[])
        lock = runfile.take_lock(state_dir)
        assert lock is not None
        (state_dir / runfile.PLAN_FILE).write_bytes(msgspec.json.encode(plan))
        argv = [sys.executable, "-m", "sumibi.local", str(state_dir), str(lock), str(os.getpid())]
        self.process = subprocess.Popen(argv, pass_fds=(lock,))
        os.close(lock)

    @property
    def record(self) -> RunRecord:
        record = runfile.read_run(self.dir)
        assert record is not None
        return record

    def wait_ready(self) -> RunRecord:
        eventually(lambda: (r := runfile.read_run(self.dir)) is not None and (r.ready or r.failure))
        return self.record

    def pids(self) -> list[int]:
        return [child.pid for child in self.record.children if child.pid]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def begin(*children: ChildPlan) -> Stack:
        stacks.append(Stack(tmp_path / "state", list(children)))
        return stacks[-1]

    yield begin
    for stack in stacks:
        stack.end()


def test_a_stack_starts_and_stops_without_leaving_a_process(start):
    core = min(os.sched_getaffinity(0))
    stack = start(server("engine-0", cores=(core,)), server("gateway"))
    record = stack.wait_ready()
    assert [child.state for child in record.children] == [ChildState.READY, ChildState.READY]
    assert f"cores [{core}]" in Path(record.children[0].log).read_text()
    pids = stack.pids()
    assert runfile.is_running(stack.dir)
    reaper = threading.Thread(target=stack.process.wait)
    reaper.start()
    assert down(stack.dir)
    reaper.join()
    assert not runfile.is_running(stack.dir)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert stack.process.returncode == 0
    assert not down(stack.dir)


def test_a_killed_child_is_started_again_and_the_others_are_left_alone(start):
    stack = start(server("engine-0"), server("gateway"))
    stack.wait_ready()
    engine, door = stack.pids()
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: stack.record.children[0].restarts == 1 and stack.record.children[0].state == "ready")
    assert stack.pids()[0] != engine
    assert stack.pids()[1] == door
    assert stack.record.children[0].exit == "signal SIGKILL"


def test_children_do_not_outlive_a_supervisor_that_was_killed(start):
    stack = start(server("engine-0"), server("gateway"))
    stack.wait_ready()
    pids = stack.pids()
    stack.end()
    eventually(lambda: all(is_gone(pid) for pid in pids))
    assert runfile.read_run(stack.dir) is not None
    assert not runfile.is_running(stack.dir)


def test_a_child_that_ends_before_it_was_ready_fails_the_start_with_its_last_words(start):
    argv = [sys.executable, "-c", "import sys; print('no weights here'); sys.exit(3)"]
    stack = start(ChildPlan(name="engine-0", argv=argv, health_url="http://127.0.0.1:9/"), server("gateway"))
    record = stack.wait_ready()
    assert "engine-0 ended (exit code 3)" in record.failure
    assert "no weights here" in record.failure
    assert stack.process.wait(20) == 3


@pytest.fixture
def child(tmp_path) -> Iterator[Callable[..., Child]]:
    """Makes started children that this process itself owns."""
    children: list[Child] = []

    def begin(plan: ChildPlan, **limits: float) -> Child:
        children.append(Child(plan, tmp_path, Limits(**limits)))  # type: ignore[arg-type]
        children[-1].start(now=0.0)
        return children[-1]

    yield begin
    for one in children:
        one.stopped(until=0.0)


def test_a_child_that_ignores_a_request_to_stop_is_killed(child):
    stubborn = child(server("x", "stubborn"))
    eventually(lambda: stubborn.step(0.0) or stubborn.state is ChildState.READY)
    pid = stubborn.record().pid
    stubborn.stop()
    assert not stubborn.stopped(until=time.monotonic() + 10)
    assert stubborn.record().state is ChildState.STOPPING
    assert stubborn.stopped(until=time.monotonic())
    assert not psutil.pid_exists(pid)


def test_engines_are_there_until_the_gateway_has_drained_and_who_asks_twice_is_in_a_hurry(start):
    stack = start(server("engine-0"), server("gateway", "busy", grace_s=60.0))
    record = stack.wait_ready()
    assert record.stop_within_s == 60.0 + 10.0
    stack.process.send_signal(signal.SIGTERM)
    eventually(lambda: [child.state for child in stack.record.children] == ["ready", "stopping"])
    assert is_healthy(record.children[0].health_url, 1.0)
    told: list[RunRecord] = []
    reaper = threading.Thread(target=stack.process.wait)
    reaper.start()
    assert down(stack.dir, told.append)
    reaper.join()
    assert stack.process.returncode == 0
    assert Path(record.children[1].log).read_text().count("asked to stop") == 2


def test_a_gateway_that_drains_for_too_long_is_killed_and_down_says_what_it_waits_for(start):
    stack = start(server("engine-0"), server("gateway", "busy", grace_s=2.0))
    stack.wait_ready()
    pids = stack.pids()
    told: list[RunRecord] = []
    reaper = threading.Thread(target=stack.process.wait)
    reaper.start()
    assert down(stack.dir, told.append)
    reaper.join()
    assert len(told) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_supervisor_waits_for_longer_than_the_gateway_drains():
    stack = load_stack(None, {("gateway", "drain_timeout_s"): 45.0})
    plan = plan_stack(stack, model_dir="tiny", state_dir=STATE, cores=[0, 1])
    *engines, door = plan.children
    assert door.argv[door.argv.index("--drain-timeout") + 1] == "45.0"
    assert door.grace_s > 45.0 + ABORT_S
    assert plan.stop_within_s == door.grace_s + engines[0].grace_s
    assert plan.drain_timeout_s == 45.0
    for engine in engines:
        assert float(engine.argv[engine.argv.index("--shutdown-grace") + 1]) < engine.grace_s


def test_a_child_that_ends_again_and_again_is_given_up(child):
    broken = child(
        ChildPlan(name="x", argv=[sys.executable, "-c", ""], health_url="http://127.0.0.1:9/"),
        tries_in_a_row=2,
    )
    now = iter(range(0, 10**6, 100))
    eventually(lambda: broken.step(next(now)) or broken.state is ChildState.FAILED)
    assert broken.record().restarts == 1


def test_a_child_that_cannot_be_started_waits_for_its_next_try(child):
    missing = child(ChildPlan(name="x", argv=["/nowhere/program"], health_url="http://127.0.0.1:9/"))
    assert missing.state is ChildState.WAITING
    assert "cannot be started" in missing.exit


def test_a_child_that_is_not_ready_in_time_is_ended(child):
    asleep = ChildPlan(name="x", argv=["sleep", "60"], health_url="http://127.0.0.1:9/")
    late = child(asleep, start_timeout_s=5.0)
    late.step(now=6.0)
    eventually(lambda: late.step(now=6.0) or late.exit == "signal SIGKILL")


def test_a_long_log_is_moved_aside_and_the_child_writes_on(child):
    argv = [sys.executable, "-uc", "import time\nwhile True: print('x' * 99); time.sleep(0.001)"]
    chatty = child(ChildPlan(name="x", argv=argv, health_url="http://127.0.0.1:9/"), log_bytes=1000)
    eventually(lambda: chatty.log.stat().st_size > 1000)
    chatty.bound_log()
    assert chatty.log.with_suffix(".log.1").stat().st_size >= 1000
    eventually(lambda: chatty.log.stat().st_size > 0)


def test_pauses_between_starts_double_up_to_the_longest():
    limits = Limits(first_pause_s=0.5, longest_pause_s=3.0)
    assert [pause_s(n, limits) for n in (1, 2, 3, 4, 50)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("replicas", "each", "cores", "shares"),
    [
        (2, 1, [0, 1], [(0,), (1,)]),
        (2, 1, [4, 5, 6], [(4,), (5,)]),
        (2, 2, [0, 1, 2, 3], [(0, 1), (2, 3)]),
        (2, 1, [3], [(3,), (3,)]),
        (3, 1, [0, 1], [(0,), (1,), (0,)]),
        (2, 4, [0, 1], [(0, 1), (0, 1)]),
    ],
)
def test_each_replica_has_cores_of_its_own_while_there_are_enough(replicas, each, cores, shares):
    found, notes = share_cores(replicas, each, cores)
    assert found == shares
    assert bool(notes) == (replicas * each > len(cores))


def test_the_plan_runs_the_commands_a_user_would_type():
    gateway = {"policy": "round-robin", "objectives": {"critical": 100, "batch": -10}}
    stack = load_stack(None, {("engines", "kv_blocks"): 225, ("gateway",): gateway})
    plan = plan_stack(stack, model_dir="/models/smollm2", state_dir=STATE, cores=[0, 1])
    engine, _, door = plan.children
    assert engine.argv[1:4] == ["-m", "sumibi", "engine"]
    assert engine.argv[engine.argv.index("--kv-blocks") + 1] == "225"
    assert engine.env["OMP_NUM_THREADS"] == "1"
    events = json.loads(engine.argv[engine.argv.index("--kv-events-config") + 1])
    assert events["endpoint"] == f"ipc://{STATE}/kv-0.sock"
    assert door.argv.count("--engine") == 2
    assert door.argv[door.argv.index("--policy") + 1] == "round-robin"
    at = door.argv.index("--objective")
    assert door.argv[at : at + 4] == ["--objective", "critical=100", "--objective", "batch=-10"]
    assert (plan.model, plan.url) == ("smollm2", "http://127.0.0.1:8000")


def test_tiers_reach_the_engines_each_with_a_directory_of_its_own_on_disk(tmp_path):
    tiers = {
        "host_bytes": "1GiB",
        "disk": {"path": str(tmp_path), "bytes": "2GiB"},
        "store": {"url": "s3://b/kv"},
    }
    stack = load_stack(None, {("engines", "tiers"): tiers})
    plan = plan_stack(stack, model_dir="tiny", state_dir=STATE, cores=[0, 1])
    told = [
        json.loads(child.argv[child.argv.index("--kv-tiers") + 1])
        for child in plan.children
        if "--kv-tiers" in child.argv
    ]
    assert told == [
        {
            "host_bytes": "1GiB",
            "disk": {"path": f"{tmp_path}/engine-{replica}", "bytes": "2GiB"},
            "store": {"url": "s3://b/kv", "bytes": "100GiB", "timeout_s": 5.0},
        }
        for replica in range(2)
    ]
    without = plan_stack(load_stack(), model_dir="tiny", state_dir=STATE, cores=[0])
    assert "--kv-tiers" not in without.children[0].argv


@pytest.mark.parametrize(("connector", "kv_connector"), [("stream", "stream"), ("nixlv2", "NixlConnector")])
def test_roles_and_side_channels_reach_gateway_and_engines(connector, kv_connector):
    engines = {"count": 1, "prefill": 1, "decode": 1, "connector": connector}
    plan = plan_stack(
        load_stack(None, {("engines",): engines}), model_dir="tiny", state_dir=STATE, cores=[0, 1, 2]
    )
    *replicas, door = plan.children
    told = [parse_kv_transfer(child.argv[child.argv.index("--kv-transfer-config") + 1]) for child in replicas]
    assert {one.kv_connector for one in told} == {kv_connector}
    assert [one.kv_role for one in told] == ["kv_both", "kv_producer", "kv_consumer"]
    extras = [one.kv_connector_extra_config for one in told]
    assert [(extra.host, extra.port) for extra in extras] == [
        ("127.0.0.1", 8004),
        ("127.0.0.1", 8005),
        ("127.0.0.1", 0),
    ]
    words = [word for before, word in pairwise(door.argv) if before == "--engine"]
    assert [(one.url[-4:], one.role, one.connector, one.kv_port) for one in engine_options(words)] == [
        ("8001", "both", connector, 8004),
        ("8002", "prefill", connector, 8005),
        ("8003", "decode", connector, None),
    ]


def test_the_secret_of_side_channels_goes_by_a_file(tmp_path):
    engines = {"prefill": 1, "decode": 1, "secret_file": str(tmp_path / "secret")}
    plan = plan_stack(load_stack(None, {("engines",): engines}), model_dir="tiny", state_dir=STATE, cores=[0])
    *replicas, _ = plan.children
    told = [parse_kv_transfer(child.argv[child.argv.index("--kv-transfer-config") + 1]) for child in replicas]
    assert {one.kv_connector_extra_config.secret_file for one in told} == {str(tmp_path / "secret")}


def test_without_pools_nobody_hears_of_roles():
    plan = plan_stack(load_stack(), model_dir="tiny", state_dir=STATE, cores=[0, 1])
    words = " ".join(word for child in plan.children for word in child.argv)
    assert "--kv-transfer-config" not in words
    assert "role=" not in words


def test_other_pickers_find_the_engines_in_a_file(tmp_path):
    path = tmp_path / "endpoints.yaml"
    pools = {"count": 0, "prefill": 1, "decode": 1, "first_port": 8001}
    endpoints.write(path, updown._listed(load_stack(None, {("engines",): pools})))
    first, second = endpoints.read(path.read_bytes(), endpoints.EventPorts())
    assert (first.url, first.role) == ("http://127.0.0.1:8001", "prefill")
    assert (second.url, second.role) == ("http://127.0.0.1:8002", "decode")
    endpoints.write(path, updown._listed(load_stack()))
    assert {engine.role for engine in endpoints.read(path.read_bytes(), endpoints.EventPorts())} == {None}


def test_a_side_channel_s_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engines = {"count": 0, "prefill": 1, "decode": 1, "first_port": port - 2}
        said = taken_ports(load_stack(None, {("engines",): engines}))
    assert f"127.0.0.1:{port} (Address already in use): change engines.first_port" in " ".join(said)


def test_a_state_directory_too_deep_for_sockets_is_refused():
    with pytest.raises(EnvironmentProblem, match="XDG_STATE_HOME"):
        plan_stack(load_stack(), model_dir="tiny", state_dir=Path("/" + "x" * 120), cores=[0])


def test_a_port_in_use_is_named_with_the_key_that_changes_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        stack = load_stack(None, {("gateway", "port"): port})
        said = [line for line in taken_ports(stack) if f":{port} " in line]
    assert said == [
        f"cannot listen on 127.0.0.1:{port} (Address already in use): change gateway.port (or --port)"
    ]


RUNNING = RunRecord(pid=1, model="tiny", url="http://u", admin_url="http://a", children=[], ready=True)


def tiny(parts: dict) -> dict:
    return {("model",): "tiny"} | {(name,): part for name, part in parts.items()}


def up_again(tmp_path: Path, monkeypatch, running: dict, wanted: dict) -> str:
    """What a second `up`, of `wanted` and in another directory, is told; "" if nothing."""
    state = tmp_path / "state"
    lock = runfile.take_lock(state)
    assert lock is not None
    monkeypatch.setattr(updown, "taken_ports", lambda stack: [])  # nothing listens, nothing is started
    (tmp_path / "elsewhere").mkdir()
    try:
        monkeypatch.chdir(tmp_path)
        updown._prepare(load_stack(None, tiny(running)), state, lambda *_: None)
        runfile.write_run(state, RUNNING)
        monkeypatch.chdir(tmp_path / "elsewhere")
        found = up(load_stack(None, tiny(wanted)), state, lambda *_: None)
    except ConfigError as refused:
        return str(refused)
    finally:
        os.close(lock)
    assert not found.started
    return ""


@pytest.mark.parametrize(
    ("running", "wanted"),
    [
        ({"engines": {"tiers": {"host_bytes": "64MiB"}}}, {"engines": {"tiers": {"host_bytes": "64MiB"}}}),
        ({"engines": {"tiers": {"host_bytes": "64MiB"}}}, {"engines": {"tiers": {"host_bytes": 67108864}}}),
        ({"engines": {"tiers": {"host_bytes": "64MiB"}}}, {"engines": {"tiers": {}}}),
        (
            {"engines": {"tiers": {"disk": {"path": "kv"}, "store": {"url": "s"}}}},
            {"engines": {"tiers": {"disk": {"path": "../kv"}, "store": {"url": "../s"}}}},
        ),
        (
            {"engines": {"tiers": {"store": {"url": "s3://b"}}}},
            {"engines": {"tiers": {"store": {"url": "s3://b", "bytes": "100GiB", "timeout_s": 5}}}},
        ),
        ({"gateway": {"bands": {1: {"ttl_s": 5}}}}, {"gateway": {"bands": {1: {"ttl_s": 5}}}}),
        ({"gateway": {"bands": {1: {"ttl_s": 5}}}}, {"gateway": {"hold_above_s": 1}}),
        # What a queue does not say it takes from `other_bands`, whether that is written or not.
        (
            {"gateway": {"other_bands": {"ttl_s": 7}, "bands": {1: {"max_requests": 5}}}},
            {"gateway": {"bands": {1: {"max_requests": 5, "ttl_s": 7}, 2: {"ttl_s": 7}}}},
        ),
    ],
)  # fmt: skip
def test_a_second_up_that_means_what_runs_finds_it(tmp_path, monkeypatch, running, wanted):
    assert up_again(tmp_path, monkeypatch, running, wanted) == ""


@pytest.mark.parametrize(
    ("running", "wanted", "said"),
    [
        (
            {"engines": {"tiers": {"host_bytes": "64MiB"}}},
            {"engines": {"tiers": {"host_bytes": "128MiB"}}},
            "at http://u/v1: engines.tiers.host_bytes 64MiB (not 128MiB); `sumibi down`",
        ),
        (
            {"engines": {"tiers": {"host_bytes": "64MiB"}}},
            {"engines": {"tiers": {"host_bytes": "64MiB", "store": {"url": "s3://b"}}}},
            ": engines.tiers.store.url '' (not s3://b);",
        ),
        (
            {"engines": {"tiers": {"disk": {"path": "kv"}}}},
            {"engines": {"tiers": {"disk": {"path": "kv"}}}},  # from another directory
            "/elsewhere/kv);",
        ),
        (
            {"gateway": {"bands": {1: {"ttl_s": 5}}}},
            {"gateway": {"bands": {1: {"ttl_s": 5}, 2: {"ttl_s": 6}}}},
            ": gateway.bands.2.ttl_s 300.0 (not 6.0);",
        ),
        (
            {"gateway": {"objectives": {"a": 1, "b": 2}}},
            {"gateway": {"objectives": {"a": 1}}},
            ": gateway.objectives {'a': 1, 'b': 2} (not {'a': 1});",
        ),
    ],
)
def test_a_second_up_with_other_settings_names_what_differs(tmp_path, monkeypatch, running, wanted, said):
    assert said in up_again(tmp_path, monkeypatch, running, wanted)


def test_what_an_engine_says_of_its_tiers_is_told_with_the_stack_s_key(tmp_path):
    state = tmp_path / "state"
    lock = runfile.take_lock(state)
    assert lock is not None
    words = "sumibi engine: kv tiers: host_bytes 1024 holds no block of 737280 bytes"
    for failure, last in (
        (words, "(in the stack: engines.tiers.host_bytes)"),
        ("out of luck", "out of luck"),
    ):
        failed = msgspec.structs.replace(RUNNING, ready=False, failure=failure, failure_exit_code=2)
        runfile.write_run(state, failed)
        with pytest.raises(StartFailed) as caught:
            up(load_stack(None, {("model",): "tiny"}), state, lambda *_: None)
        assert str(caught.value).splitlines()[-1] == last
        assert failure in str(caught.value)
    os.close(lock)


def test_a_run_file_left_behind_is_no_running_stack(tmp_path):
    record = RunRecord(pid=1, model="m", url="u", admin_url="a", children=[])
    runfile.write_run(tmp_path, record)
    assert not runfile.is_running(tmp_path)
    assert not down(tmp_path)


def test_only_one_holds_the_lock(tmp_path):
    first = runfile.take_lock(tmp_path)
    assert first is not None
    assert runfile.take_lock(tmp_path) is None
    assert runfile.is_running(tmp_path)
    os.close(first)
    assert not runfile.is_running(tmp_path)

"""What can go wrong before a stack runs: each is said, with the code of whose fault it was."""

import signal
import socket
import subprocess

import httpx
import pytest


def test_a_port_in_use_is_named_before_anything_is_started(sumibi, free_ports):
    first = free_ports(4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        ports = ["--engine-port", str(first), "--port", str(first + 2), "--admin-port", str(first + 3)]
        failed = sumibi("up", "--model", "tiny", *ports)
    assert failed.returncode == 4
    assert f"127.0.0.1:{first + 1} (Address already in use): change engines.first_port" in failed.stderr
    assert not list(sumibi.state.glob("engine-*.log"))


def test_a_secret_that_cannot_be_read_is_named_by_its_key(sumibi, free_ports):
    first = free_ports(5)
    stack = sumibi.home / "pools.yaml"
    stack.write_text(
        "model: tiny\n"
        f"engines: {{count: 0, prefill: 1, decode: 1, first_port: {first}, secret_file: /nope}}\n"
        f"gateway: {{port: {first + 3}, admin_port: {first + 4}}}\n"
    )
    failed = sumibi("up", "--stack", str(stack))
    assert "engines.secret_file: cannot read '/nope'" in failed.stderr
    assert failed.returncode == 2
    assert not list(sumibi.state.glob("engine-*.log"))


def test_a_directory_without_weights_fails_the_start_with_its_reason(sumibi, free_ports):
    empty = sumibi.home / "empty-model"
    empty.mkdir()
    first = free_ports(4)
    ports = ["--engine-port", str(first), "--port", str(first + 2), "--admin-port", str(first + 3)]
    failed = sumibi("up", "--model", str(empty), *ports)
    assert failed.returncode == 3
    assert "empty-model" in failed.stderr
    assert sumibi("status").returncode == 1


def test_a_half_converted_model_is_refused_by_name(sumibi, free_ports):
    half = sumibi.home / "half"
    half.mkdir()
    (half / "sumibi-manifest.json").write_text('{"complete": false}')
    first = free_ports(4)
    ports = ["--engine-port", str(first), "--port", str(first + 2), "--admin-port", str(first + 3)]
    failed = sumibi("up", "--model", str(half), *ports)
    assert failed.returncode == 3
    assert f"the conversion into {half} did not finish" in failed.stderr


@pytest.fixture
def spawn(sumibi):
    """Starts long-running commands; they are ended by pid."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> "subprocess.Popen[bytes]":
        log = (sumibi.home / f"spawned-{len(processes)}.log").open("wb")
        with log:
            processes.append(
                subprocess.Popen(sumibi.argv(*words), env=sumibi.environment, stdout=log, stderr=log)
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def health(url: str) -> int:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code
    except httpx.TransportError:
        return 0


def test_an_engine_that_comes_later_is_found_and_decisions_can_be_rerun(
    sumibi, spawn, free_ports, eventually
):
    first = free_ports(3)
    engine, url = f"http://127.0.0.1:{first}", f"http://127.0.0.1:{first + 1}"
    record = sumibi.home / "record"
    gateway = spawn(
        "serve",
        "--engine",
        engine,
        "--port",
        str(first + 1),
        "--admin-port",
        str(first + 2),
        "--record",
        str(record),
    )
    eventually(lambda: health(url) == 503)
    spawn("engine", "--model", "tiny", "--port", str(first))
    eventually(lambda: health(url) == 200)
    sent = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    admin_port = ["--admin-port", str(first + 2)]
    shown = sumibi("status", *admin_port)
    assert shown.returncode == 0
    assert f"http://127.0.0.1:{first + 2}, not started by `sumibi up`" in shown.stdout
    assert f"127.0.0.1:{first} " in shown.stdout
    examined = sumibi("doctor", *admin_port).stdout
    assert "not started by `sumibi up`" in examined
    assert "ports:" not in examined
    for _ in range(3):
        assert httpx.post(f"{url}/v1/chat/completions", json=sent, timeout=30).status_code == 200
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(20) == 0
    rerun = sumibi("decisions", "rerun", str(record / "decisions.jsonl"))
    assert rerun.stdout == "3 decisions, 3 picked the same endpoint\n"
    assert rerun.returncode == 0
    assert "hello" not in "".join(file.read_text() for file in record.iterdir())

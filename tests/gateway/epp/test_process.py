"""`sumibi epp` as a process: flags, ports, TLS as it is by default, signals."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import grpc
import pytest
from faking import FakeEngine

from sumibi.gateway.epp.wire import HealthAnswer, HealthQuestion


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def command(*words):
    return [sys.executable, "-m", "sumibi", "epp", *words]


def ended(words, state):
    """The process, which ends by itself."""
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    return subprocess.run(
        command(*words), capture_output=True, text=True, env=environment, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "none is given"),
        (["--engine", "http://10.0.0.1:1", "--pool-name", "p"], 2, "--engine and --pool-name are given"),
        (["--engine", "http://vllm:8000"], 2, "IP address"),
        (["--endpoint-selector", "app=vllm"], 2, "--endpoint-target-ports"),
        (["--pool-name", "p"], 4, "KUBERNETES_SERVICE_HOST"),
        (["--engine", "http://10.0.0.1:1", "--response-phase", "on"], 2, "auto or off"),
        (["--engine", "http://10.0.0.1:1", "--cert-path", "/nowhere"], 2, "tls.crt and tls.key"),
    ],
)
def test_what_is_wrong_is_said_with_its_exit_code(words, code, said, tmp_path):
    done = ended(words, tmp_path)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


async def test_it_serves_with_tls_says_that_it_drains_and_ends(tmp_path, behaviours):
    engine = await FakeEngine().start()
    ports = free_ports(3)
    flags = ("--grpc-port", "--grpc-health-port", "--metrics-port")
    words = [word for pair in zip(flags, ports, strict=True) for word in pair]
    words += ["--engine", engine.url, "--host", "127.0.0.1", "--drain-timeout", "1"]
    process = await asyncio.create_subprocess_exec(
        *command(*words), env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, stderr=subprocess.PIPE
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthQuestion.SerializeToString,
            response_deserializer=HealthAnswer.FromString,
        )
        answer = await check(HealthQuestion(service="readiness"), wait_for_ready=True, timeout=20)
        assert answer.status == 1
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            while (await check(HealthQuestion())).status != 2:
                await asyncio.sleep(0.01)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, b"(TLS)" in stderr, b"Traceback" in stderr) == (0, True, False), stderr
    await engine.stop()


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["--engine", "http://127.0.0.1:1", "--host", "127.0.0.1", "--grpc-port", port]
        done = ended(words, tmp_path)
    assert (done.returncode, "--grpc-port" in done.stderr, "Traceback" in done.stderr) == (4, True, False)

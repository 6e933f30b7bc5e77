"""The engine as a process: how it starts, refuses to start, and ends."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest


def start(*flags):
    return subprocess.Popen(
        [sys.executable, "-m", "sumibi", "engine", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def engine():
    """A ready engine process with the tiny model, and its URL."""
    process = start("--model", "tiny", "--port", "0", "--threads", "1", "--shutdown-grace", "0.5")
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_running_requests_finish_within_the_grace_time_and_exits_with_0(engine):
    process, url = engine
    body = {"model": "tiny", "prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"abort"' in rest[-2]
    assert process.wait(20) == 0
    assert process.stderr.read().count("Traceback") == 0


def test_sigterm_while_the_model_is_loaded_ends_it_there(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    os.mkfifo(directory / "config.json")  # whoever reads it waits for a writer
    process = start("--model", str(directory), "--port", "0")
    try:
        writer = None
        while writer is None and process.poll() is None:
            with contextlib.suppress(OSError):  # nobody reads yet
                writer = os.open(directory / "config.json", os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=20)
        os.close(writer)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, output) == (0, "")
    assert "Traceback" not in errors


def test_a_port_in_use_is_told_at_once_with_its_flag():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        process = start("--model", "tiny", "--port", port)
        _, message = process.communicate(timeout=60)
    assert process.returncode == 4
    assert f"--port {port}" in message
    assert "Traceback" not in message

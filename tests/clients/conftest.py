"""Real clients before a real stack: a gateway and two embedded engines, started once as `sumibi up` does.

Each client is a script that runs once in the environment that `make clients` builds; tests look at what it
saw. Nothing is skipped: without the environment every test here is an error that says so.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack_harness import Sumibi, eventually, free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def clients() -> Path:
    """The directory of the clients' commands."""
    found = Path(os.environ.get("CLIENTS_VENV", REPOSITORY / ".clients")).resolve() / "bin"
    assert (found / "aiperf").exists(), f"there are no clients in {found}: run `make clients`"
    return found


@dataclass(frozen=True)
class Stack:
    """A gateway before two engines."""

    url: str
    engines: tuple[str, ...]
    model: str
    directory: Path
    """The model's."""
    usage_log: Path

    def ask(self, path: str, **body: Any) -> Any:
        """What an engine itself answers, without a client and without a gateway."""
        reply = httpx.post(self.engines[0] + path, json={"model": self.model, **body}, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def records(self) -> list[dict[str, Any]]:
        """Usage records so far."""
        if not self.usage_log.exists():
            return []
        return [json.loads(line) for line in self.usage_log.read_text().splitlines()]

    def record(self, request: str) -> dict[str, Any]:
        """The usage record of a request; it is written a moment after the answer."""
        eventually(lambda: any(one["request"] == request for one in self.records()))
        (found,) = [one for one in self.records() if one["request"] == request]
        return found

    def requests(self) -> int:
        """That the gateway has taken."""
        page = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(int(float(line.split()[-1])) for line in page if line.startswith("sumibi_requests_total"))

    def running(self) -> int:
        """Sequences in the steps of both engines."""
        pages = [httpx.get(f"{url}/metrics").text.splitlines() for url in self.engines]
        name = "vllm:num_requests_running"
        return sum(int(float(line.split()[-1])) for page in pages for line in page if line.startswith(name))


@pytest.fixture(scope="session")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """In float32, in which a cached prefix changes no token."""
    assert (smollm2 / "model.safetensors").exists(), f"there is no model in {smollm2}: run `make setup`"
    sumibi = Sumibi(tmp_path_factory.mktemp("clients"))
    first = free_ports(4)
    (sumibi.home / "stack.yaml").write_text(
        "engines: {dtype: float32}\ngateway: {drain_timeout_s: 2}\n", encoding="utf-8"
    )
    flags = ["--model", str(smollm2), "--engine-port", str(first), "--port", str(first + 2)]
    started = sumibi("up", *flags, "--admin-port", str(first + 3), timeout_s=180)
    try:
        assert started.returncode == 0, started.stderr
        engines = tuple(f"http://127.0.0.1:{first + number}" for number in (0, 1))
        log = sumibi.state / "usage.jsonl"
        yield Stack(f"http://127.0.0.1:{first + 2}", engines, smollm2.name, smollm2, log)
    finally:
        sumibi("down")


Seen = dict[str, Any]


@pytest.fixture(scope="session")
def run_script(clients: Path, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Seen]:
    """Run a client's script against the stack, or another gateway; returns what it saw."""
    out = tmp_path_factory.mktemp("seen")

    def run(script: str, url: str = stack.url, **more: str) -> Seen:
        ended = subprocess.run(
            [clients / "python", SCRIPTS / f"{script}.py", out / f"{script}.json"],
            env={
                **os.environ,
                "HOME": str(out),  # what they would read or keep of somebody's settings
                "CLIENTS_GATEWAY_URL": url,
                "CLIENTS_MODEL": stack.model,
                "HF_HUB_OFFLINE": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                **more,
            },
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        told: Seen = json.loads((out / f"{script}.json").read_text())
        return told

    return run


@pytest.fixture(scope="session")
def seen(run_script: Callable[..., Seen], stack: Stack) -> Callable[[str], Seen]:
    """What the script of a client saw; it runs when it is first asked for."""

    @cache
    def run(script: str) -> Seen:
        told = run_script(script)
        # A client that leaves is noticed a moment after it did.
        until = time.monotonic() + 10
        while stack.running() and time.monotonic() < until:
            time.sleep(0.05)
        told["still_running"] = stack.running()
        return told

    return run

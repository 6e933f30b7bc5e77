"""Real processes, each with an owner that ends it: engines that break, gateways before them."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

KEY = "trouble-admin-key-0123456789"
_START_S = 30.0


class EngineProcess:
    """`benchmarks.soak.engine`, told what to do over its stdin."""

    def __init__(self, *, events: bool = False) -> None:
        command = [sys.executable, "-m", "benchmarks.soak.engine", "0", *(["events"] if events else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._read()["port"])

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        """As gateways name it."""
        return f"{self.url}#0"

    def tell(self, do: str, **how: Any) -> dict[str, Any]:
        """Have something done; what it counts."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))


class GatewayProcess:
    """A gateway: `sumibi serve`, or the same with short limits (`benchmarks.soak.gateway`)."""

    def __init__(
        self,
        engines: list[EngineProcess],
        directory: Path,
        *,
        timeouts: dict[str, float] | None = None,
        jumps: bool = False,
        port: int | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if port is None else port
        self.admin_port = free_port()
        self.log = directory / "gateway.log"
        urls = [engine.url for engine in engines]
        if timeouts is None:
            command = [sys.executable, "-m", "sumibi", "serve", "--port", str(self.port)]
            command += ["--admin-port", str(self.admin_port), "--usage-log", str(directory / "usage.jsonl")]
            command += [word for url in urls for word in ("--engine", url)]
        else:
            start = {
                "engines": urls,
                "port": self.port,
                "admin_port": self.admin_port,
                "usage_log": str(directory / "usage.jsonl"),
                "timeouts": timeouts,
                "jumps": jumps,
            }
            command = [sys.executable, "-m", "benchmarks.soak.gateway", json.dumps(start)]
        environment = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "SUMIBI_ADMIN_KEY": KEY}
        if timeouts is not None:
            # `sumibi serve` reads the variable itself.
            (directory / "state" / "sumibi").mkdir(parents=True, exist_ok=True)
            (directory / "state" / "sumibi" / "admin.key").write_text(KEY + "\n")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._seen = psutil.Process(self.process.pid)
        until(lambda: self._all_up(len(engines)), "the gateway and its engines are up", _START_S)

    def fleet(self) -> dict[str, Any]:
        """What the admin door shows of endpoints and counters."""
        return dict(json.loads(self._get(self.admin_port, "/fleet")))

    def metrics(self) -> dict[str, float]:
        """Series -> value, by the name with its labels."""
        page = self._get(self.port, "/metrics").decode()
        lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def metric(self, name: str, *labels: str) -> float:
        """Sum of the series of a name whose labels hold all these texts."""
        return sum(
            value
            for series, value in self.metrics().items()
            if re.match(rf"{name}(\{{|$)", series) and all(label in series for label in labels)
        )

    def held(self) -> dict[str, float]:
        """What is held of requests: all of it is zero when nobody is served."""
        fleet, metrics = self.fleet(), self.metrics()
        parts = ("inflight", "prefilling", "decoding", "prefill_tokens", "coming")
        held = {part: float(sum(each[part] for each in fleet["endpoints"])) for part in parts}
        counters = fleet["counters"]
        held |= {"requests": counters["requests_now"], "waiting": counters["waiting_now"]}
        held["queued"] = sum(each["requests"] for each in counters["held_now"])
        for name in ("sumibi_request_bytes_held", "sumibi_requests_in_flight"):
            held[name] = sum(value for series, value in metrics.items() if series.startswith(name))
        # The connection that asks is one.
        held["connections"] = metrics["sumibi_client_connections"] - 1
        return held

    def assert_nothing_is_held(self, within_s: float = 10.0) -> None:
        """All of `held` is zero, soon."""
        until(lambda: not any(self.held().values()), lambda: f"held: {self.held()}", within_s)

    def rss_bytes(self) -> int:
        """Memory in use."""
        return int(self._seen.memory_info().rss)

    def fds(self) -> int:
        """Open files, sockets among them."""
        return int(self._seen.num_fds())

    def said(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """End it, in order if it can; its exit code."""
        for end in (self.process.terminate, self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                end()
                try:
                    self.process.wait(3.0)
                except subprocess.TimeoutExpired:
                    continue
        return self.process.wait()

    def _all_up(self, engines: int) -> bool:
        if self.process.poll() is not None:
            raise SystemExit(f"the gateway ended: {self.said()}")
        try:
            return sum(each["up"] for each in self.fleet()["endpoints"]) == engines
        except OSError:
            return False

    def _get(self, port: int, path: str) -> bytes:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"x-admin-key": KEY})
        with urllib.request.urlopen(asked, timeout=10.0) as answer:
            return bytes(answer.read())


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool], what: str | Callable[[], str], within_s: float = 10.0) -> None:
    """Wait until it is so; else fail, saying what was waited for."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)

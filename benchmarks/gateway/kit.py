"""The load kit as this benchmark uses it: engines and load in C, routers started by a command line each."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASE_PORT, EVENTS_PORT, REPLAY_PORT = 9001, 6101, 6201
WORKERS = 8
SETS = ("small", "mid", "agent")
BLOCKS_EACH = 65_536
"""Blocks of 16 tokens that fill each worker's cache: a million tokens of KV."""


@dataclass(frozen=True, slots=True)
class Kit:
    """Where everything is."""

    directory: Path
    """The load kit: bench.py, bodies.py and what `make` builds of it."""
    build: Path
    """A writable directory for its binaries and bodies."""
    package: Path
    """The directory that holds our package: compiled, or `src`."""
    tokenizer: Path
    peers: Path
    """Environments of the peers: `sglang` and `vllm-router` below it."""

    def prepare(self) -> None:
        """Build the kit and write its request sets."""
        environment = {**os.environ, "LOADKIT_BUILD": str(self.build)}
        subprocess.run(["make", "-s", "-C", self.directory, f"BUILD={self.build}"], check=True)
        subprocess.run([sys.executable, self.directory / "bodies.py"], check=True, env=environment)

    def bodies(self, name: str) -> Path:
        """A request set."""
        return self.build / "bodies" / f"{name}.jsonl"

    def ours(self, *, events: bool = True, tokenizer: bool = True, policy: str = "cost") -> str:
        """The command that starts our gateway."""
        words = ["env", f"PYTHONPATH={self.package}", f"XDG_STATE_HOME={self.build / 'state'}"]
        words += [sys.executable, "-m", "sumibi", "serve", "--engine", "@WORKERS_CSV@", "--port", "@PORT@"]
        words += ["--admin-port", "0", "--policy", policy]
        if tokenizer:
            words += ["--tokenizer", str(self.tokenizer)]
        for number in range(WORKERS if events else 0):
            source = (
                f"http://127.0.0.1:{BASE_PORT + number}=tcp://127.0.0.1:{EVENTS_PORT + number}"
                f",replay=tcp://127.0.0.1:{REPLAY_PORT + number}"
            )
            words += ["--kv-events", source]
        return shlex.join(words)

    def sglang(self) -> str:
        """The command that starts SGLang's router."""
        return (
            f"{self.peers / 'sglang/bin/python'} -m sglang_router.launch_router --host 127.0.0.1 "
            "--port @PORT@ --prometheus-host 127.0.0.1 --prometheus-port @METRICS_PORT@ --log-level error "
            "--policy cache_aware --worker-urls @WORKERS@"
        )

    def vllm(self) -> str:
        """The command that starts vLLM's router, with exact knowledge as ours has it."""
        sources = " ".join(
            f"--kv-event-source http://127.0.0.1:{BASE_PORT + n}=tcp://127.0.0.1:{EVENTS_PORT + n}"
            for n in range(WORKERS)
        )
        return (
            f"{self.peers / 'vllm-router/bin/vllm-router'} --host 127.0.0.1 --port @PORT@ "
            "--prometheus-port @METRICS_PORT@ --log-level error --policy kv_aware "
            f"--kv-event-block-size 16 --kv-event-model fake-model {sources} --worker-urls @WORKERS@"
        )

    def publisher(self, seconds: float) -> str:
        """The command that publishes KV events beside the kit's engines."""
        words = ["env", f"PYTHONPATH={ROOT / 'src'}", sys.executable, str(HERE / "publisher.py")]
        words += ["--bodies", *(str(self.bodies(name)) for name in SETS), "--tokenizer", str(self.tokenizer)]
        words += ["--workers", str(WORKERS), "--blocks-each", str(BLOCKS_EACH), "--seconds", str(seconds)]
        words += ["--ports", str(EVENTS_PORT), str(REPLAY_PORT)]
        return shlex.join(words)

    def tails(self, size_bytes: int, seed: int, count: int) -> list[str]:
        """Texts that the load generator puts at the end of bodies."""
        words = [str(self.build / "lg"), "--tails", "--unique", str(size_bytes), "--seed", str(seed)]
        made = subprocess.run([*words, "-n", str(count)], capture_output=True, check=True).stdout
        return [json.loads(line) for line in made.splitlines()]

    def measure(self, mode: str, *arguments: str, command: str | None = None) -> dict[str, Any]:
        """One run of the kit; its result with every window. Ends the benchmark if the kit could not run."""
        with tempfile.TemporaryDirectory() as scratch:
            told = Path(scratch) / "result.json"
            words = [sys.executable, str(self.directory / "bench.py"), mode, "--workers", str(WORKERS)]
            words += ["--base-port", str(BASE_PORT), "--ready", "120", "--json", str(told), *arguments]
            words += ["--", *shlex.split(command)] if command else []
            done = subprocess.run(
                words,
                env={**os.environ, "LOADKIT_BUILD": str(self.build)},
                capture_output=True,
                text=True,
                check=False,
            )
            if not told.exists():
                raise SystemExit(f"the load kit could not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
            result: dict[str, Any] = json.loads(told.read_text().splitlines()[-1])
            return result

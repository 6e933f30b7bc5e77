"""One engine in a process of its own, without a gateway: started, killed, started again."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sumibi.core.errors import EngineUnavailable
from sumibi.local.supervisor import stop_with_parent

_READY_S = 300.0
_STOP_S = 30.0


class LoneEngine:
    """`sumibi engine` on a free port with the operators' routes, as a context manager: gone at its end."""

    def __init__(
        self,
        model: Path,
        *,
        kv_blocks: int,
        threads: int,
        tiers: Mapping[str, Any] | None = None,
        flags: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        """`tiers`: what `--kv-tiers` is told. `log`: where each start's command and what the engine says are
        appended; None: nowhere.
        """
        self._command = [sys.executable, "-m", "sumibi", "engine", "--model", str(model), "--port", "0"]
        self._command += ["--kv-blocks", str(kv_blocks), "--threads", str(threads), "--enable-dev-mode"]
        if tiers is not None:
            self._command += ["--kv-tiers", json.dumps(tiers)]
        self._command += flags
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self.model = model.name
        self.url = ""

    def __enter__(self) -> "LoneEngine":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Start it; seconds until it takes requests. Raises EngineUnavailable if it does not."""
        begun_s = time.perf_counter()
        with open(self._log or os.devnull, "a") as said:
            said.write(f"$ {shlex.join(self._command)}\n")
            said.flush()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                process_group=0,  # a Ctrl-C in the terminal reaches this process, which then ends it
                # One system call and no lock: safe beside threads too.
                preexec_fn=partial(stop_with_parent, os.getpid(), signal.SIGKILL),  # noqa: PLW1509
            )
            assert self._process.stdout is not None
            alarm = threading.Timer(_READY_S, self._process.kill)
            alarm.start()
            line = self._process.stdout.readline()
            alarm.cancel()
            said.write(line)
        found = re.search(r"http://\S+", line)
        if found is None:
            self.kill()
            where = f", see {self._log}" if self._log else ""
            raise EngineUnavailable(f"the engine did not start{where}: {' '.join(self._command)}")
        self.url = found[0]
        return time.perf_counter() - begun_s

    def kill(self) -> None:
        """Kill -9; nothing if it does not run."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Let it write what waits and go; killed if that takes too long."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def forget_device(self) -> None:
        """Empty the device's cache; what lies below stays. Raises OSError, EngineUnavailable."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", b"", method="POST")
        for _ in range(50):
            with urllib.request.urlopen(request, timeout=_STOP_S) as answer:
                if json.load(answer)["success"]:
                    return
            time.sleep(0.05)  # blocks of the last request are held for a moment
        raise EngineUnavailable(f"{self.url} does not forget: blocks stay in use")

    def tier_counts(self) -> dict[tuple[str, str], float]:
        """The metrics of the tiers: (name after `kv_tier_`, tier) to value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=_STOP_S) as answer:
            page = answer.read().decode()
        found = re.findall(r'^sumibi:kv_tier_(\w+)\{[^}]*tier="(\w+)"[^}]*\} (\S+)$', page, re.MULTILINE)
        return {(name, tier): float(value) for name, tier, value in found}

    def wait_written(self, blocks: int, tier: str) -> None:
        """Until `tier` holds so many blocks and none waits for it. Raises EngineUnavailable after 30 s."""
        until_s = time.monotonic() + _STOP_S
        while time.monotonic() < until_s:
            counts = self.tier_counts()
            if counts["blocks", tier] >= blocks and not counts["queue_blocks", tier]:
                return
            time.sleep(0.05)
        raise EngineUnavailable(f"{self.url}: {tier} does not come to hold {blocks} blocks: {counts}")


def cores(count: int) -> set[int]:
    """The last `count` cores that this process may use, or all if there are fewer."""
    return set(sorted(os.sched_getaffinity(0))[-count:])

"""A small part of a kubelet: runs a manifest's containers on this machine, each pod at an address of its own.

As on a node, a container's process is nobody in particular (the pod's `runAsUser`), without capabilities, its
root read-only, where this process may arrange that (`confined`); its state directory stands for an emptyDir.
Names of pods are replaced by their addresses, which a cluster's DNS would do.
"""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from manifests import Pod, Thing, arguments, environment, pods

_CONFINE = """
mount --bind "$2" "$2" && mount -o remount,ro,bind / && exec setpriv --reuid="$1" --regid="$1" \
    --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all -- "$0" "${@:3}"
"""
_PROBE = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import sumibi.cli'])"


def confined(user: int, volume: Path) -> list[str]:
    """Words to put before a command, which may then write to `volume` only, and is `user` or, where that one
    may not read this code, this one without its powers. Empty where that cannot be arranged.
    """
    if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("setpriv"):
        for number in (user, 0):
            words = ["unshare", "--mount", "bash", "-c", _CONFINE, sys.executable, str(number), str(volume)]
            probe = [*words, "-c", _PROBE]
            if not subprocess.run(
                probe, env=_base(), cwd="/", capture_output=True, timeout=60, check=False
            ).returncode:
                return words
    return []


def _base() -> dict[str, str]:
    """What an image sets, and where the code under test is."""
    code = str(Path(__import__("sumibi").__file__).parents[1])
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": code,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Running:
    """One pod's only container, running."""

    def __init__(self, node: "Node", pod: Pod, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.pod = pod
        (self.container,) = pod.containers
        self._node = node
        self._state = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self._state.chmod(0o777)  # as an emptyDir is
        self._log = (self._state / "log").open("wb")
        words = [node.localized(word, self) for word in arguments(self.container, node.things)]
        words += node.more.get(words[0], [])
        self.environment = {
            **_base(),
            "HOME": str(self._state),
            "XDG_STATE_HOME": str(self._state),
            "TMPDIR": str(self._state),
            **{k: v for k, v in environment(self.container, node.things).items() if v != "(secret)"},
            **node.secrets.get(self.container["name"], {}),
        }
        self._before = confined(pod.spec["securityContext"]["runAsUser"], self._state)
        self.process = subprocess.Popen(
            self._argv(words), env=self.environment, cwd="/", stdout=self._log, stderr=subprocess.STDOUT
        )

    def _argv(self, words: list[str]) -> list[str]:
        return [*(self._before or [sys.executable]), "-m", "sumibi", *words]

    @property
    def confinement(self) -> str:
        return " ".join(self._before[-2:-1]) or "none"

    def execute(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """As `kubectl exec` does: another process in the same place."""
        return subprocess.run(
            self._argv([*words]),
            env=self.environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def ask(self, path: str, body: Thing | None = None, port: int = 8000) -> tuple[int, bytes]:
        """(status, body); (0, b"") if nobody listens."""
        connection = http.client.HTTPConnection(self.address, port, timeout=60)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        except ConnectionRefusedError:
            return 0, b""
        finally:
            connection.close()

    def probe(self, name: str) -> bool:
        """Whether `readinessProbe` and its like succeed now."""
        asked = self.container[name]["httpGet"]
        status, _ = self.ask(asked["path"], port=self.pod.ports[asked["port"]])
        return 200 <= status < 400

    def terminate(self) -> int:
        """SIGTERM, and after the grace time without mercy; the exit code."""
        before = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(self.pod.spec["terminationGracePeriodSeconds"] - before)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)

    def log(self) -> str:
        return (self._state / "log").read_text(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._log.close()
        shutil.rmtree(self._state)


class Node:
    """Where the pods of one manifest run."""

    def __init__(self, things, more: dict[str, list[str]], secrets: dict[str, dict[str, str]]) -> None:
        """`more`: for each command of ours, arguments that it has only here, the last of their name;
        `secrets`: for each container, variables that come from Secrets.
        """
        self.things = things
        self.secrets = secrets
        self.more = more
        self.running: dict[str, Running] = {}
        block = f"127.{64 + os.getpid() // 250 % 128}.{1 + os.getpid() % 250}"
        names = [name for pod in pods(things) for name in _names(pod)]
        self._addresses = {name: f"{block}.{number}" for number, name in enumerate(names, 1)}

    def start(self, name: str) -> Running:
        (pod,) = [pod for pod in pods(self.things) if name in _names(pod)]
        self.running[name] = Running(self, pod, name, self._addresses[name])
        return self.running[name]

    def localized(self, word: str, at: Running) -> str:
        """An argument as it is here."""
        word = word.replace("0.0.0.0", at.address)
        for name, address in self._addresses.items():
            word = re.sub(rf"\b{re.escape(name)}\.[a-z-]+(?=:\d)", address, word)
        return word

    def close(self) -> None:
        for one in self.running.values():
            one.close()


def _names(pod: Pod) -> list[str]:
    return (
        pod.names if pod.kind == "StatefulSet" else [f"{pod.name}-{number}" for number in range(pod.replicas)]
    )


def eventually(condition, node: Node, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        logs = "\n".join(f"--- {one.name}\n{one.log()}" for one in node.running.values())
        ended = [one.name for one in node.running.values() if one.process.poll() is not None]
        assert not ended, logs
        assert time.monotonic() < until, logs
        time.sleep(0.05)

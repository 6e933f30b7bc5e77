"""A small part of a kubelet: runs a manifest's containers on this machine, each pod at an address of its own.
Where an image is vLLM's, the embedded engine plays it.

As on a node, a container's process is nobody in particular (the pod's `runAsUser`), without capabilities, its
root read-only, where this process may arrange that (`confined`); its state directory stands for an emptyDir.
Names of pods are replaced by their addresses, which a cluster's DNS would do.
"""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from manifests import Pod, Thing, arguments, environment, flag, is_ours, kind, matches, pods

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


class Process:
    """One container, running."""

    def __init__(self, container: Thing, argv: list[str], variables: dict[str, str], log: Path) -> None:
        self.name = container["name"]
        self.container = container
        self.argv = argv
        self.variables = variables
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                argv, env=variables, cwd="/", stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, seconds: float) -> int:
        """The exit code; after so long it is ended without mercy."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(10)


class Running:
    """One pod, running."""

    def __init__(self, node: "Node", pod: Pod, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.pod = pod
        self._volume = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self._volume.chmod(0o777)  # as an emptyDir is
        self._before = confined(pod.spec["securityContext"]["runAsUser"], self._volume)
        self.processes = [self._start(node, container) for container in pod.containers]

    def _start(self, node: "Node", container: Thing) -> Process:
        words = node.played(container, arguments(container, node.things))
        words = [node.localized(word, self.address) for word in [*words, *node.more.get(words[0], [])]]
        found = environment(container, node.things) if is_ours(container) else {}
        variables = {
            **_base(),
            **dict.fromkeys(("HOME", "XDG_STATE_HOME", "TMPDIR"), str(self._volume)),
            **{name: value for name, value in found.items() if not value.startswith("(")},
            **node.variables.get(container["name"], {}),
        }
        return Process(container, self._argv(node.program, words), variables, self._volume / "log")

    def _argv(self, program: list[str], words: list[str]) -> list[str]:
        return [*(self._before or [sys.executable]), *program, *words]

    @property
    def confinement(self) -> str:
        return " ".join(self._before[-2:-1]) or "none"

    @property
    def ended(self) -> bool:
        """One of its processes ended by itself."""
        return any(process.ended for process in self.processes)

    def execute(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """As `kubectl exec` does: another process in the same place as the first one."""
        return subprocess.run(
            self._argv(["-m", "sumibi"], [*words]),
            env=self.processes[0].variables,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def ask(self, path: str, body: Thing | None = None, port: int = 8000) -> tuple[int, bytes]:
        """(status, body); (0, b"") if nobody listens."""
        return ask(self.address, port, path, body)

    def probe(self, name: str) -> bool:
        """Whether `readinessProbe` and its like succeed now, of all containers that have one."""
        return all(self._succeeds(p.container[name]) for p in self.processes if name in p.container)

    def _succeeds(self, probe: Thing) -> bool:
        if "grpc" in probe:
            return _serving(f"{self.address}:{probe['grpc']['port']}", probe["grpc"]["service"])
        status, _ = self.ask(probe["httpGet"]["path"], port=self.pod.ports[probe["httpGet"]["port"]])
        return 200 <= status < 400

    def terminate(self) -> list[int]:
        """SIGTERM, to sidecars when the others have ended; the exit codes."""
        grace_s = self.pod.spec["terminationGracePeriodSeconds"]
        first = [p for p in self.processes if p.container.get("restartPolicy") != "Always"]
        codes = []
        for group in (first, [p for p in self.processes if p not in first]):
            for process in group:
                before = process.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
                grace_s -= before.get("seconds", 0)
                process.terminate()
            codes += [process.wait(grace_s) for process in group]
        return codes

    def log(self) -> str:
        return (self._volume / "log").read_text(errors="replace")

    def close(self) -> None:
        for process in self.processes:
            if not process.ended:
                process.wait(0)
        shutil.rmtree(self._volume)


class Node:
    """Where the pods of one manifest run."""

    def __init__(self, things, more: dict[str, list[str]], variables: dict[str, dict[str, str]]) -> None:
        """`more`: for each command of ours, arguments that it has only here, the last of their name;
        `variables`: for each container, what a Secret or the cluster would set.
        """
        self.things = things
        self.variables = variables
        self.more = more
        self.program = ["-m", "sumibi"]
        """What an image's entry point is, for Python."""
        self.running: dict[str, Running] = {}
        block = f"127.{64 + os.getpid() // 250 % 128}.{1 + os.getpid() % 250}"
        names = [name for pod in pods(things) for name in _names(pod)]
        self.addresses = {name: f"{block}.{number}" for number, name in enumerate(names, 1)}

    def start(self, name: str) -> Running:
        (pod,) = [pod for pod in pods(self.things) if name in _names(pod)]
        self.running[name] = Running(self, pod, name, self.addresses[name])
        return self.running[name]

    def played(self, container: Thing, words: list[str]) -> list[str]:
        """What runs here: vLLM is played by the embedded engine, with what they have in common."""
        if is_ours(container):
            return words
        kept = [f"--{name}={value}" for name in _PLAYED if (value := flag(words, name)) is not None]
        return ["engine", "--host=0.0.0.0", "--threads=1", "--kv-blocks=256", *kept]

    def localized(self, word: str, address: str) -> str:
        """An argument as it is for the pod at `address`."""
        if word.startswith("--kv-transfer-config="):
            config = {**json.loads(word.partition("=")[2]), "kv_connector_extra_config": {"host": address}}
            word = f"--kv-transfer-config={json.dumps(config)}"
        word = word.replace("(metadata.namespace)", NAMESPACE)
        word = word.replace("0.0.0.0", address).replace("//127.0.0.1:", f"//{address}:")
        for name, there in self.addresses.items():
            word = re.sub(rf"\b{re.escape(name)}\.[a-z-]+(?=:\d)", there, word)
        for service in kind(self.things, "Service"):  # one that stands for a single pod
            behind = [
                p
                for p in pods(self.things)
                if matches({"matchLabels": service["spec"]["selector"]}, p.labels)
            ]
            if len(behind) == 1 and behind[0].replicas == 1:
                there = self.addresses[_names(behind[0])[0]]
                word = re.sub(rf"\b{re.escape(service['metadata']['name'])}(?=:\d)", there, word)
        return word

    def close(self) -> None:
        for one in self.running.values():
            one.close()


NAMESPACE = "sumibi"
_PLAYED = ("port", "kv-events-config", "kv-transfer-config")


def ask(host: str, port: int, path: str, body: Thing | None = None) -> tuple[int, bytes]:
    """(status, body) of a GET, or a POST of JSON; (0, b"") if nobody listens."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
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


def _serving(address: str, service: str) -> bool:
    """By gRPC's health protocol; a message of one text field, answered by one of one number."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return check(b"\x0a" + bytes([len(service)]) + service.encode(), timeout=3) == b"\x08\x01"
        except grpc.RpcError:
            return False


def _names(pod: Pod) -> list[str]:
    return (
        pod.names if pod.kind == "StatefulSet" else [f"{pod.name}-{number}" for number in range(pod.replicas)]
    )


def eventually(condition, node: Node, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        logs = "\n".join(f"--- {one.name}\n{one.log()}" for one in node.running.values())
        assert not any(one.ended for one in node.running.values()), logs
        assert time.monotonic() < until, logs
        time.sleep(0.05)

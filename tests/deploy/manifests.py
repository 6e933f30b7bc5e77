"""What `kubectl kustomize` makes of deploy/, and questions about it."""

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.parent.name for path in DEPLOY.glob("overlays/*/kustomization.yaml"))
KUBECTL = Path(sys.executable).with_name("kubectl")
_WORKLOADS = ("Deployment", "StatefulSet")

Thing = dict[str, Any]


def build(directory: Path) -> str:
    """The manifest of one kustomization. Raises with kubectl's own words."""
    done = subprocess.run(
        [KUBECTL, "kustomize", directory], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"{directory}: {done.stderr}"  # such as: a field is deprecated
    return done.stdout


@functools.cache
def overlay(name: str) -> tuple[Thing, ...]:
    """The objects of one overlay; not to be changed."""
    return tuple(yaml.safe_load_all(build(DEPLOY / "overlays" / name)))


@dataclass(frozen=True)
class Pod:
    """What a workload makes."""

    name: str
    """Of its workload."""
    kind: str
    replicas: int
    labels: dict[str, str]
    spec: Thing

    @property
    def containers(self) -> list[Thing]:
        """Those that start with it and stay (sidecars among them)."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for c in self.containers for p in c.get("ports", [])}

    @property
    def names(self) -> list[str]:
        """Of each pod of a StatefulSet, as others in the namespace reach it."""
        assert self.kind == "StatefulSet"
        return [f"{self.name}-{number}" for number in range(self.replicas)]


def kind(things, *kinds: str) -> list[Thing]:
    return [thing for thing in things if thing["kind"] in kinds]


def pods(things) -> list[Pod]:
    return [
        Pod(
            name=thing["metadata"]["name"],
            kind=thing["kind"],
            replicas=thing["spec"].get("replicas", 1),
            labels=thing["spec"]["template"]["metadata"]["labels"],
            spec=thing["spec"]["template"]["spec"],
        )
        for thing in kind(things, *_WORKLOADS)
    ]


def matches(selector: Thing, labels: dict[str, str]) -> bool:
    """A label selector with matchLabels only; an empty one matches everything."""
    assert set(selector) <= {"matchLabels"}, selector
    return selector.get("matchLabels", {}).items() <= labels.items()


def environment(container: Thing, things) -> dict[str, str]:
    """Its variables; what only a cluster or a Secret knows is a word in brackets."""
    found = {}
    for variable in container.get("env", []):
        found[variable["name"]] = variable["value"] if "value" in variable else _source(variable, things)
    return found


def _source(variable: Thing, things) -> str:
    ((source, where),) = variable["valueFrom"].items()
    match source:
        case "configMapKeyRef":
            (found,) = [m for m in kind(things, "ConfigMap") if m["metadata"]["name"] == where["name"]]
            return found["data"][where["key"]]
        case "secretKeyRef":
            assert where.get("optional"), f"{variable['name']}: a Secret that has to be there"
            return "(secret)"
        case "fieldRef":
            return f"({where['fieldPath']})"
    raise AssertionError(variable)


def arguments(container: Thing, things) -> list[str]:
    """Its arguments as the process gets them: `$(NAME)` replaced, as a kubelet does."""
    known = environment(container, things)

    def value(match: re.Match[str]) -> str:
        assert match[1] in known, f"{container['name']}: nobody sets {match[1]}"
        return known[match[1]]

    return [re.sub(r"\$\(([A-Za-z_]\w*)\)", value, argument) for argument in container.get("args", [])]


def flag(words: list[str], name: str) -> str | None:
    """The value of `--name=value`."""
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), None)


def every_container(things) -> Iterator[tuple[Pod, Thing, list[str]]]:
    for pod in pods(things):
        for container in pod.containers:
            yield pod, container, arguments(container, things)


def is_ours(container: Thing) -> bool:
    return re.search(r"/sumibi(-\w+)?:", container["image"]) is not None


def is_vllm(container: Thing) -> bool:
    return container["image"].startswith("vllm/vllm-openai:")

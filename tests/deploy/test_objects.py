"""Every object is one that an API server takes; checked by schemas, and that the check can fail."""

import copy

import pytest
import yaml
from manifests import DEPLOY, OVERLAYS, build, kind, overlay, pods
from podmonitor import PODMONITOR

from sumibi.cluster.objects import all_problems, object_problems
from sumibi.cluster.schemas import Definitions

CRDS = DEPLOY.parent.parent / "shared" / "crds"
CLUSTER_WIDE = {"Namespace", "ClusterRole", "ClusterRoleBinding", "GatewayClass"}


@pytest.fixture(scope="module")
def definitions() -> Definitions:
    if not CRDS.is_dir():
        pytest.skip(f"needs the definitions of custom resources in {CRDS}")
    loaded = Definitions.load(CRDS)
    whole = {name: loaded.schema(*name) for name in loaded}
    return Definitions({**whole, ("monitoring.coreos.com/v1", "PodMonitor"): PODMONITOR})


def test_an_api_server_would_take_all_of_it(things, definitions):
    assert all_problems(things, definitions) == []


@pytest.mark.parametrize("beside", ["monitoring", "gateway"])
def test_also_what_is_beside_the_overlays(beside, definitions):
    assert all_problems(yaml.safe_load_all(build(DEPLOY / beside)), definitions) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_same_bytes_each_time(name):
    assert build(DEPLOY / "overlays" / name) == build(DEPLOY / "overlays" / name)


def test_no_object_twice_and_each_in_its_place(things):
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in things]
    assert len(names) == len(set(names))
    for thing in things:
        namespace = thing["metadata"].get("namespace")
        assert namespace == (None if thing["kind"] in CLUSTER_WIDE else "sumibi"), thing["metadata"]


def test_usual_labels(things):
    for pod in pods(things):
        for label in ("name", "component", "part-of"):
            assert f"app.kubernetes.io/{label}" in pod.labels, pod.name


def misspelled(thing):
    """Every object that differs from `thing` by one misspelled name of a field below spec."""

    def spoil(node, path):
        if isinstance(node, dict):
            for name in list(node):
                if isinstance(name, str) and name.isalpha():
                    yield (*path, name)
                yield from spoil(node[name], (*path, name))
        elif isinstance(node, list):
            for number, inner in enumerate(node):
                yield from spoil(inner, (*path, number))

    for path in spoil(thing["spec"], ("spec",)):
        changed = copy.deepcopy(thing)
        node = changed
        for step in path[:-1]:
            node = node[step]
        node[f"{path[-1]}x"] = node.pop(path[-1])
        yield path, changed


FREE = {"matchLabels", "labels", "selector", "limits", "requests", "annotations"}
"""Below these any name may stand."""


@pytest.mark.parametrize(
    "wanted", ["Deployment", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"]
)
def test_a_misspelled_field_would_be_seen(wanted, definitions):
    """Of one object of each kind, every field in turn."""
    thing = kind(overlay("standalone"), wanted)[0]
    seen = 0
    for path, changed in misspelled(thing):
        if FREE.isdisjoint(path[:-1]):
            assert object_problems(changed, definitions), path
            seen += 1
    assert seen >= 2


def test_also_in_custom_objects(definitions):
    monitor = next(yaml.safe_load_all(build(DEPLOY / "monitoring")))
    assert all(
        object_problems(changed, definitions)
        for path, changed in misspelled(monitor)
        if FREE.isdisjoint(path)
    )

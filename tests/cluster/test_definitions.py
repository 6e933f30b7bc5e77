"""Real definitions: every rule is evaluated, what their authors forbid is refused."""

from collections.abc import Iterator

import pytest

from sumibi.cluster.objects import all_problems, object_problems
from sumibi.cluster.rules import compiled, only_on_update
from sumibi.cluster.schemas import validator

LWS = "disaggregatedset.x-k8s.io/v1"
INFERENCE = "inference.networking.k8s.io/v1"


def rules_in(schema) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["rule"]
    inner = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    inner += [one for word in ("allOf", "anyOf", "oneOf") for one in schema.get(word, ())] + [
        schema.get("not")
    ]
    for below in inner:
        if isinstance(below, dict):
            yield from rules_in(below)


def test_no_rule_and_no_schema_is_left_out(definitions):
    rules = [rule for name in definitions for rule in rules_in(definitions.schema(*name))]
    for rule in rules:
        compiled(rule)
    for name in definitions:
        validator(definitions.schema(*name))
    assert len(list(definitions)) == 59  # counted with another tool
    assert len(rules) == 377
    assert sum(map(only_on_update, rules)) == 34


def pool(**spec):
    whole = {"selector": {"matchLabels": {"app": "a"}}, "targetPorts": [{"number": 8000}], **spec}
    return {"apiVersion": INFERENCE, "kind": "InferencePool", "metadata": {"name": "p"}, "spec": whole}


def set_of(*replicas: int, **spec):
    template = {"spec": {"containers": [{"name": "c", "image": "i"}]}}
    roles = [
        {
            "name": f"role-{number}",
            "spec": {"replicas": count, "leaderWorkerTemplate": {"workerTemplate": template, "size": 1}},
        }
        for number, count in enumerate(replicas)
    ]
    return {
        "apiVersion": LWS,
        "kind": "DisaggregatedSet",
        "metadata": {"name": "d"},
        "spec": {"roles": roles, **spec},
    }


def queue(**quota):
    flavors = [{"name": "default", "resources": [{"name": "cpu", "nominalQuota": 1, **quota}]}]
    spec = {"resourceGroups": [{"coveredResources": ["cpu"], "flavors": flavors}]}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ClusterQueue",
        "metadata": {"name": "q"},
        "spec": spec,
    }


def route(*parents, **rule):
    spec = {"parentRefs": list(parents), "rules": [rule]}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "r"},
        "spec": spec,
    }


GOOD = {
    "pool": pool(endpointPickerRef={"name": "epp", "port": {"number": 9002}}),
    "pool without a picker": pool(),
    "set": set_of(2, 3),
    "set at rest": set_of(0, 0),
    "queue": queue(),
    "route": route({"name": "g"}),
    "route to one gateway in two namespaces": route({"name": "g"}, {"name": "g", "namespace": "other"}),
}
BAD = {
    "misspelled": (pool(targetPort=[{"number": 1}]), "'targetPort' was unexpected"),
    "a picker's port is missing, its kind a default": (
        pool(endpointPickerRef={"name": "e"}),
        "port is required",
    ),
    "twice the same port": (pool(targetPorts=[{"number": 1}, {"number": 1}]), "must be unique"),
    "too many slices": (set_of(1, 1, slices=101), "101"),
    "a role at rest beside one that is not": (set_of(0, 1), "zero for all non-External roles"),
    "borrowing without a cohort": (queue(borrowingLimit=1), "borrowingLimit must be nil"),
    "one gateway twice without sections": (route({"name": "g"}, {"name": "g"}), "sectionName"),
    "a method that is none": (route({"name": "g"}, matches=[{"method": "FETCH"}]), "FETCH"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_ones_pass(name, definitions):
    assert object_problems(GOOD[name], definitions) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_ones_are_refused(name, definitions):
    thing, message = BAD[name]
    told = object_problems(thing, definitions)
    assert told
    assert any(message in problem.message for problem in told), told


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"port": []}},
            "'port' was unexp",
        ),
        ({"apiVersion": "v1", "kind": "Servant", "metadata": {"name": "s"}}, "Servant is not known"),
        ({"kind": "Service"}, "apiVersion"),
        ([], "want a mapping"),
    ],
)
def test_kinds_of_kubernetes_own(thing, message, definitions):
    (told,) = all_problems([thing], definitions)
    assert message in told

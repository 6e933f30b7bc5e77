"""A pool, its picker, its route: that they mean each other, and what they say is what runs."""

import pytest
import yaml
from manifests import DEPLOY, OVERLAYS, Pod, build, every_container, flag, kind, matches, overlay, pods

PICKED = [name for name in OVERLAYS if kind(overlay(name), "InferencePool")]


@pytest.fixture(params=PICKED)
def picked(request):
    return overlay(request.param)


def pool_of(things):
    (pool,) = kind(things, "InferencePool")
    return pool


def test_there_are_such_overlays():
    assert "gateway-mode" in PICKED


def members(things) -> list[Pod]:
    return [pod for pod in pods(things) if matches(pool_of(things)["spec"]["selector"], pod.labels)]


def test_the_pool_has_every_engine_at_the_port_that_takes_requests(picked):
    engines = [pod for pod in pods(picked) if pod.labels["app.kubernetes.io/component"] == "engine"]
    assert members(picked) == engines
    assert engines
    (target,) = pool_of(picked)["spec"]["targetPorts"]
    assert {pod.ports["http"] for pod in engines} == {target["number"]}


def test_the_pool_s_picker_is_ours_and_fails_closed(picked):
    reference = pool_of(picked)["spec"]["endpointPickerRef"]
    (service,) = [s for s in kind(picked, "Service") if s["metadata"]["name"] == reference["name"]]
    (picker,) = [
        pod for pod in pods(picked) if matches({"matchLabels": service["spec"]["selector"]}, pod.labels)
    ]
    (port,) = [p for p in service["spec"]["ports"] if p["port"] == reference["port"]["number"]]
    assert picker.ports[port["targetPort"]] == 9002
    assert reference["failureMode"] == "FailClose"
    (words,) = [words for pod, _, words in every_container(picked) if pod == picker]
    assert words[0] == "epp"
    assert flag(words, "grpc-port") == "9002"
    assert flag(words, "pool-name") == pool_of(picked)["metadata"]["name"]
    assert flag(words, "pool-namespace") == "(metadata.namespace)"


def test_the_picker_may_read_what_it_watches_and_no_more(picked):
    (role,) = kind(picked, "Role")
    (binding,) = kind(picked, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    allowed = {
        (group, what, verb)
        for r in role["rules"]
        for group in r["apiGroups"]
        for what in r["resources"]
        for verb in r["verbs"]
    }
    wanted = (("", "pods"), ("inference.networking.k8s.io", "inferencepools"))
    assert allowed == {(*what, verb) for what in wanted for verb in ("get", "list", "watch")}
    assert kind(picked, "ClusterRole", "ClusterRoleBinding") == []


def test_the_route_ends_at_the_pool_and_begins_at_the_example_s_gateway(picked):
    (route,) = kind(picked, "HTTPRoute")
    (parent,) = route["spec"]["parentRefs"]
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    pool = pool_of(picked)
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(f"{backend['group']}/")
    example = list(yaml.safe_load_all(build(DEPLOY / "gateway")))
    (gateway,) = kind(example, "Gateway")
    assert (parent["name"], parent["namespace"]) == (
        gateway["metadata"]["name"],
        gateway["metadata"]["namespace"],
    )
    (listener,) = gateway["spec"]["listeners"]
    allowed = listener["allowedRoutes"]["namespaces"]["selector"]
    assert matches(allowed, {"kubernetes.io/metadata.name": route["metadata"]["namespace"]})


def test_objectives_are_those_that_the_picker_is_told(picked):
    objects = {o["metadata"]["name"]: o["spec"]["priority"] for o in kind(picked, "InferenceObjective")}
    assert objects
    for objective in kind(picked, "InferenceObjective"):
        assert objective["spec"]["poolRef"]["name"] == pool_of(picked)["metadata"]["name"]
    (words,) = [words for _, _, words in every_container(picked) if words[0] == "epp"]
    told = [word.removeprefix("--objective=").split("=") for word in words if word.startswith("--objective=")]
    assert {name: int(priority) for name, priority in told} == objects


def test_sidecars_stand_before_their_engine_and_know_every_prefill_server(picked):
    roles = {pod.labels.get("llm-d.ai/role") for pod in members(picked)}
    sidecars = [(pod, box, words) for pod, box, words in every_container(picked) if words[0] == "sidecar"]
    assert bool(sidecars) is ("decode" in roles)
    for pod, box, words in sidecars:
        assert pod.labels["llm-d.ai/role"] == "decode"
        assert box["restartPolicy"] == "Always"
        (engine,) = [
            words for other, inner, words in every_container(picked) if other == pod and inner is not box
        ]
        assert flag(words, "decode") == f"http://127.0.0.1:{flag(engine, 'port')}"
        name, port = flag(words, "allow-prefiller").split(":")
        (service,) = [s for s in kind(picked, "Service") if s["metadata"]["name"] == name]
        behind = [p for p in pods(picked) if matches({"matchLabels": service["spec"]["selector"]}, p.labels)]
        assert [p for p in pods(picked) if p.labels.get("llm-d.ai/role") == "prefill"] == behind
        assert {p.ports["http"] for p in behind} == {int(port)}

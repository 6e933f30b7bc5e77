"""Pods: what they may do, what they may write, how they come and go, and that names meet."""

import json

import yaml
from manifests import DEPLOY, build, every_container, flag, is_ours, is_vllm, kind, matches, pods

from sumibi.gateway.main import ABORT_S
from sumibi.gateway.options import Timeouts

STATE = {"/var/lib/sumibi", "/tmp"}
WRITTEN = {"serve": STATE, "epp": STATE, "sidecar": set(), "engine": {"/tmp"}}
"""Our commands: everything that they write to, with the variables that deploy/Containerfile sets."""
DNS_CACHE_S = 30
"""That CoreDNS keeps an answer, as clusters usually have it."""
FLUSH_S = 5.0
"""That the embedded engine takes after its grace time (`engine/server.py`)."""


def test_the_restricted_profile_and_more(things):
    for pod in pods(things):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True, pod.name
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        for volume in pod.spec.get("volumes", []):
            (source,) = volume.keys() - {"name"}
            assert source in ("emptyDir", "secret", "configMap", "persistentVolumeClaim")
            assert source != "emptyDir" or "sizeLimit" in volume["emptyDir"]
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_namespaces_ask_for_that_profile(things):
    for namespace in kind(things, "Namespace"):
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_only_who_asks_the_api_server_has_a_token(things):
    bound = {
        subject["name"]
        for binding in kind(things, "RoleBinding", "ClusterRoleBinding")
        for subject in binding["subjects"]
    }
    accounts = {account["metadata"]["name"]: account for account in kind(things, "ServiceAccount")}
    for pod in pods(things):
        name = pod.spec["serviceAccountName"]
        assert accounts[name]["automountServiceAccountToken"] is False  # each pod says it for itself
        assert pod.spec["automountServiceAccountToken"] is (name in bound), pod.name


def test_what_is_written_can_be(things):
    templates = {
        s["metadata"]["name"]: s["spec"].get("volumeClaimTemplates", []) for s in kind(things, "StatefulSet")
    }
    for pod, container, words in every_container(things):
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in templates.get(pod.name, [])}
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        assert set(mounts.values()) <= volumes
        if is_ours(container):
            wanted = WRITTEN[words[0]]
        else:
            variables = {v["name"]: v.get("value") for v in container["env"]}
            wanted = {variables["HOME"], variables["HF_HOME"], "/tmp", "/dev/shm"}
        assert wanted <= mounts.keys(), pod.name


def test_no_variables_for_services(things):
    """Kubernetes' own would be taken for vLLM's (VLLM_PORT) or ours."""
    for pod in pods(things):
        assert pod.spec["enableServiceLinks"] is False


def test_resources_are_asked_for_and_memory_is_bounded(things):
    for _, container, _ in every_container(things):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]


def test_time_to_end_is_what_the_process_takes_and_more(things):
    for pod, container, words in every_container(things):
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if is_vllm(container):
            takes = float(flag(words, "shutdown-timeout"))
            assert before >= DNS_CACHE_S + 10  # it says that it is well to the end: see its manifest
        elif words[0] == "engine":
            takes = float(flag(words, "shutdown-grace")) + FLUSH_S
        else:
            takes = float(flag(words, "drain-timeout") or Timeouts().drain_s) + ABORT_S
        assert pod.spec["terminationGracePeriodSeconds"] >= before + takes + 5, pod.name
        if (
            words[0] == "serve"
        ):  # others send to it until they have heard that it goes; a picker waits by itself
            assert before >= 5


OTHERS = {"--kv-events-port", "--kv-replay-port"}
"""Flags of ours that name ports of engines."""


def ports_in(container, words) -> set[int]:
    """The ports that its process listens on, by its arguments and variables."""
    config = json.loads(flag(words, "kv-events-config") or "{}")
    found = {config[field].rpartition(":")[2] for field in ("endpoint", "replay_endpoint") if field in config}
    given = [word.partition("=")[::2] for word in words]
    found |= {value for name, value in given if name.endswith("port") and name not in OTHERS}
    found |= {v["value"] for v in container.get("env", []) if v["name"].endswith("_PORT")}
    return set(map(int, found))


def test_declared_ports_are_those_that_are_listened_on(things):
    for pod, container, words in every_container(things):
        declared = {port["containerPort"] for port in container["ports"]}
        assert declared == ports_in(container, words), pod.name


def test_no_two_containers_of_a_pod_have_the_same_port_or_name(things):
    for pod in pods(things):
        ports = [p for c in pod.containers for p in c["ports"]]
        assert len({p["containerPort"] for p in ports}) == len({p["name"] for p in ports}) == len(ports)


PROBED = {
    "serve": {"/health", "/v1/models"},
    "engine": {"/health"},
    "sidecar": {"/health", "/sidecar/legs"},
    "epp": {"/metrics"},
}
"""Our commands: GET routes that answer at the port probed."""


def test_probes_ask_what_there_is(things):
    for pod, container, words in every_container(things):
        probes = {name: container[name] for name in container if name.endswith("Probe")}
        assert {"readinessProbe", "livenessProbe"} <= probes.keys(), pod.name
        ports = {port["name"] for port in container["ports"]} | {
            p["containerPort"] for p in container["ports"]
        }
        for probe in probes.values():
            asked = probe.get("httpGet") or probe["grpc"]
            assert asked["port"] in ports
            if "grpc" in probe:
                assert asked["port"] == int(flag(words, "grpc-health-port"))
                assert asked["service"] == "readiness"
            if "httpGet" in probe:
                assert asked["path"] in (PROBED[words[0]] if is_ours(container) else {"/health"})


def test_services_and_budgets_and_spreads_meet_their_pods(things):
    for service in kind(things, "Service"):
        behind = [
            pod for pod in pods(things) if matches({"matchLabels": service["spec"]["selector"]}, pod.labels)
        ]
        assert len(behind) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in behind[0].ports or target in behind[0].ports.values()
    for budget in kind(things, "PodDisruptionBudget"):
        behind = [pod for pod in pods(things) if matches(budget["spec"]["selector"], pod.labels)]
        assert len(behind) == 1
        assert budget["spec"]["maxUnavailable"] == 1
    for pod in pods(things):
        assert (
            sum(matches(b["spec"]["selector"], pod.labels) for b in kind(things, "PodDisruptionBudget")) == 1
        )
        for spread in pod.spec.get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"], pod.labels)


def test_workloads_select_their_own_pods_only(things):
    for thing in kind(things, "Deployment", "StatefulSet"):
        selected = [pod for pod in pods(things) if matches(thing["spec"]["selector"], pod.labels)]
        assert [pod.name for pod in selected] == [thing["metadata"]["name"]]


def test_names_of_stateful_sets_exist(things):
    services = {s["metadata"]["name"]: s for s in kind(things, "Service")}
    for thing in kind(things, "StatefulSet"):
        service = services[thing["spec"]["serviceName"]]
        assert service["spec"]["clusterIP"] == "None"
        assert "publishNotReadyAddresses" not in service["spec"]  # who is going has to lose its name
        assert service["spec"]["selector"].items() <= thing["spec"]["template"]["metadata"]["labels"].items()


def test_each_pod_is_scraped_once_at_a_port_that_it_has(things):
    monitors = list(yaml.safe_load_all(build(DEPLOY / "monitoring")))
    for pod in pods(things):
        (monitor,) = [m for m in monitors if matches(m["spec"]["selector"], pod.labels)]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in pod.ports, pod.name
        assert endpoint["path"] == "/metrics"

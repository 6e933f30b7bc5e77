"""Network policies: who reaches whom, worked out as Kubernetes does, against what each needs."""

import ipaddress
from dataclasses import dataclass, field

from manifests import Pod, kind, matches, pods

HERE = {"kubernetes.io/metadata.name": "sumibi"}


@dataclass(frozen=True)
class Party:
    """One end of a connection: a pod, or an address somewhere."""

    labels: dict[str, str] | None = None
    namespace: dict[str, str] = field(default_factory=lambda: HERE)
    address: str = "10.9.9.9"


CLIENT = Party(labels={"app": "client"}, namespace={"kubernetes.io/metadata.name": "other"})
PROMETHEUS = Party(labels={"app": "prometheus"}, namespace={"kubernetes.io/metadata.name": "monitoring"})
DNS = Party(labels={"k8s-app": "kube-dns"}, namespace={"kubernetes.io/metadata.name": "kube-system"})
INTERNET = Party(labels=None, namespace={}, address="93.184.216.34")
PROXIES = [
    Party(labels={"app": "proxy"}, namespace={"kubernetes.io/metadata.name": name})
    for name in ("inference-gateway", "envoy-gateway-system")
]
NEIGHBOUR = Party(labels=None, namespace={}, address="192.168.1.1")
"""A machine of the same network that is no pod."""


def party(pod: Pod) -> Party:
    return Party(labels=pod.labels)


def allowed(things, source: Party, target: Party, port: int, protocol: str = "TCP") -> bool:
    """True if both ends' policies let the connection pass."""
    return _passes(things, source, target, "egress", port, protocol) and _passes(
        things, target, source, "ingress", port, protocol
    )


def _passes(things, here: Party, there: Party, direction: str, port: int, protocol: str) -> bool:
    """Whether `here` may have this connection with `there`."""
    if here.namespace != HERE or here.labels is None:
        return True  # no policy of ours
    about = [
        policy["spec"]
        for policy in kind(things, "NetworkPolicy")
        if direction.capitalize() in policy["spec"]["policyTypes"]
        and matches(policy["spec"]["podSelector"], here.labels)
    ]
    ends = {"ingress": "from", "egress": "to"}[direction]
    return not about or any(
        _rule(rule, ends, there, port, protocol) for spec in about for rule in spec.get(direction, [])
    )


def _rule(rule, ends: str, there: Party, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if ports is not None and (protocol, port) not in {(p["protocol"], p["port"]) for p in ports}:
        return False
    return ends not in rule or any(_peer(peer, there) for peer in rule[ends])


def _peer(peer, there: Party) -> bool:
    if "ipBlock" in peer:
        address = ipaddress.ip_address(there.address)
        inside = address in ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return inside and not any(
            address in ipaddress.ip_network(n) for n in peer["ipBlock"].get("except", [])
        )
    if there.labels is None:
        return False
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], there.namespace):
            return False
    elif there.namespace != HERE:
        return False
    return matches(peer.get("podSelector", {}), there.labels)


def of(things, component: str) -> list[Pod]:
    return [pod for pod in pods(things) if pod.labels["app.kubernetes.io/component"] == component]


ALL_PORTS = (22, 53, 443, 5557, 5600, 5657, 6443, 8000, 8080, 8200, 9002, 9003, 9090, 40_000)


API_PORTS = {443, 6443}
"""Of API servers, which may be anywhere."""


def doors(things) -> list[Pod]:
    return [*of(things, "gateway"), *of(things, "epp")]


def reached(things, source: Party, target: Party) -> set[int]:
    return {port for port in ALL_PORTS if allowed(things, source, target, port)}


def test_doors_reach_engines_where_they_listen_and_nowhere_else(things):
    assert doors(things)
    for door in doors(things):
        for engine in of(things, "engine"):
            assert reached(things, party(door), party(engine)) == {8000, 5557, 5657}


def test_clients_reach_the_gateway_and_nothing_else(things):
    for pod in pods(things):
        gateway = pod in of(things, "gateway")
        assert reached(things, CLIENT, party(pod)) == ({8000} if gateway else set())


def test_engines_reach_no_door_but_as_any_client(things):
    for engine in of(things, "engine"):
        for door in doors(things):
            assert reached(things, party(engine), party(door)) == set()


def test_proxies_reach_the_picker_and_the_engines(things):
    pickers = of(things, "epp")
    for proxy in PROXIES:
        for picker in pickers:
            assert reached(things, proxy, party(picker)) == {9002}
        for engine in of(things, "engine"):
            assert reached(things, proxy, party(engine)) == ({8000} if pickers else set())


def test_prometheus_reads_metrics_and_no_kv_events(things):
    for pod in pods(things):
        assert reached(things, PROMETHEUS, party(pod)) == ({9090} if pod in of(things, "epp") else {8000})


def beyond(things, pod: Pod) -> set[int]:
    """Ports that it reaches wherever they are: a picker's API server."""
    return API_PORTS if pod in of(things, "epp") else set()


def test_everybody_asks_for_names(things):
    for pod in pods(things):
        assert allowed(things, party(pod), DNS, 53, "UDP")
        assert reached(things, party(pod), DNS) == {53} | beyond(things, pod)


def test_only_vllm_fetches_models_and_from_nowhere_near(things):
    for pod in pods(things):
        fetches = {443} if pod.labels["app.kubernetes.io/name"] == "vllm" else set()
        assert reached(things, party(pod), INTERNET) == fetches | beyond(things, pod)
        assert reached(things, party(pod), NEIGHBOUR) == beyond(things, pod)


def test_engines_reach_each_other_only_to_hand_kv_over(things):
    engines = of(things, "engine")
    apart = any("llm-d.ai/role" in engine.labels for engine in engines)
    for one in engines:
        for other in engines:
            assert {allowed(things, party(one), party(other), p) for p in ALL_PORTS} == {apart}


def test_named_ports_are_listened_on(things):
    for policy in kind(things, "NetworkPolicy"):
        spec = policy["spec"]
        selected = [pod for pod in pods(things) if matches(spec["podSelector"], pod.labels)]
        assert selected, policy["metadata"]["name"]  # a policy about nobody is a mistake
        there = {port for pod in selected for port in pod.ports.values()}
        for rule in spec.get("ingress", []):
            assert {p["port"] for p in rule.get("ports", [])} <= there, policy["metadata"]["name"]


def test_a_policy_that_is_missing_would_be_seen():
    rest = [{"kind": "NetworkPolicy", "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}]
    assert not allowed(rest, CLIENT, Party(labels={}), 8000)
    assert allowed([], CLIENT, Party(labels={}), 8000)

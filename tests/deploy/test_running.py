"""The processes of a manifest, run here as a kubelet would: probes, names, KV events, the way out."""

import json
import re
import socket
import threading

import pytest
from kubelet import Node, eventually
from manifests import overlay

TEXT = "A prompt that is longer than a few blocks of the cache, said at some length. " * 4


@pytest.fixture(scope="module")
def node():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    there = Node(
        overlay("try-cpu"),
        more={"engine": ["--model=tiny"], "serve": [f"--admin-port={port}", "--drain-timeout=20"]},
        variables={"gateway": {"SUMIBI_ADMIN_KEY": "a-key-of-my-own-for-this"}},
    )
    yield there
    there.close()


def chat(gateway, text: str = TEXT, **more):
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
    status, answer = gateway.ask("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def test_from_nothing_to_routed_requests_and_back(node, record_property):
    gateway = node.start("sumibi-gateway-0")
    record_property("runs as", gateway.confinement)
    eventually(lambda: gateway.probe("livenessProbe"), node)
    assert not gateway.probe("readinessProbe")  # no engine yet: a Service sends nobody here

    engines = [node.start("sumibi-engine-0"), node.start("sumibi-engine-1")]
    for engine in engines:
        eventually(lambda engine=engine: engine.probe("startupProbe"), node)
        assert engine.probe("readinessProbe")
        assert engine.probe("livenessProbe")
    eventually(lambda: gateway.probe("readinessProbe"), node)
    eventually(lambda: grades(gateway) == ["exact", "exact"], node)  # KV events come over the pods' network

    chat(gateway)
    usage = json.loads(chat(gateway))["usage"]  # the second goes where the first is
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"] - 32

    seen = gateway.execute("status", flag_of(gateway, "--admin-port"))  # by `kubectl exec`, with its key
    assert seen.returncode == 0, seen.stdout + seen.stderr
    assert seen.stdout.count("exact") >= 2

    ending = threading.Timer(0.2, gateway.processes[0].terminate)
    ending.start()
    streamed = chat(gateway, stream=True, max_tokens=400, ignore_eos=True)
    ending.join()
    assert streamed.endswith(b"data: [DONE]\n\n")  # SIGTERM in the middle: it goes on to its end
    assert gateway.terminate() == [0]
    for engine in engines:
        assert engine.terminate() == [0]


def flag_of(pod, name: str) -> str:
    return next(word for word in pod.processes[0].argv if word.startswith(f"{name}="))


def grades(gateway) -> list[str]:
    _, page = gateway.ask("/metrics")
    return re.findall(
        r'^sumibi_endpoint_grade\{[^}]*grade="(\w+)"[^}]*\} 1(?:\.0)?$', page.decode(), re.MULTILINE
    )

"""`deploy/overlays` behind a Gateway, run here: picker, engines and sidecars as a kubelet would start them,
an API server that knows their pods, and the real Envoy for the Gateway's proxy.

The embedded engine plays vLLM; everything else is what the manifests say.
"""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest
from api_server import ApiServer
from envoy_lab import Envoy
from kubelet import Node, ask, eventually
from manifests import kind, overlay

TEXT = "A prompt that is longer than a few blocks of the cache, said at some length. " * 6


class Cluster:
    """One overlay, running."""

    def __init__(self, directory: Path, name: str, *more: str) -> None:
        self.directory = directory
        self.node = Node(
            overlay(name),
            more={"engine": ["--model=tiny"], "epp": ["--host=0.0.0.0", "--drain-timeout=1", *more]},
            variables={},
        )
        self.api = ApiServer(directory, self.node)
        self.node.variables["epp"] = self.api.variables
        self.envoy: Envoy

    async def start(self) -> None:
        node = self.node
        node.program = [str(Path(__file__).with_name("in_pod.py")), str(self.api.account)]
        engines = [node.start(name) for name in node.addresses if "vllm" in name]
        self.picker = node.start("sumibi-epp-0")
        for engine in engines:
            await asyncio.to_thread(eventually, lambda engine=engine: engine.probe("readinessProbe"), node)
        self.api.look()
        await asyncio.to_thread(eventually, lambda: self.picker.probe("readinessProbe"), node)
        assert self.picker.probe("livenessProbe")
        await asyncio.to_thread(eventually, lambda: self.grades() == ["exact"] * len(engines), node)
        (pool,) = kind(node.things, "InferencePool")
        (port,) = [target["number"] for target in pool["spec"]["targetPorts"]]
        self.envoy = Envoy(
            self.directory,
            picker_port=f"{self.picker.address}:{pool['spec']['endpointPickerRef']['port']['number']}",
            engine_ports=[f"{engine.address}:{port}" for engine in engines],
            tls=True,
        )
        await self.envoy.start()
        await self.envoy.picker_is_healthy(True)

    def grades(self) -> list[str]:
        _, page = self.picker.ask("/metrics", port=9090)
        return re.findall(r'^sumibi_endpoint_grade\{[^}]*grade="(\w+)"[^}]*\} 1', page.decode(), re.MULTILINE)

    async def chat(self) -> dict:
        body = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
        status, answer = await asyncio.to_thread(
            ask, "127.0.0.1", self.envoy.port, "/v1/chat/completions", body
        )
        assert status == 200, answer + self.picker.log().encode()
        return json.loads(answer)

    async def stop(self) -> None:
        if hasattr(self, "envoy"):
            await self.envoy.stop()
        self.node.close()
        self.api.close()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    @contextlib.asynccontextmanager
    async def make(name, *more):
        it = Cluster(tmp_path, name, *more)
        try:
            await it.start()
            yield it
        finally:
            await it.stop()

    return make


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_gateway_mode(cluster):
    async with cluster("gateway-mode") as it:
        await it.chat()
        again = await it.chat()
        assert cached(again) > again["usage"]["prompt_tokens"] - 32  # where the first one was
        roles = {
            (group, what)
            for rule in kind(it.node.things, "Role")[0]["rules"]
            for group in rule["apiGroups"]
            for what in rule["resources"]
        }
        assert it.api.asked == roles  # it asks for what its role allows, and all of that
        assert it.picker.terminate() == [0]


async def test_prefill_and_decode_apart(cluster):
    async with cluster("pd", "--policy=round-robin") as it:  # which makes a pair of every request
        answer = await it.chat()
        assert answer["usage"]["completion_tokens"] == 8
        outcomes: dict[str, int] = {}
        for name in ("sumibi-vllm-decode-0", "sumibi-vllm-decode-1"):
            _, counts = it.node.running[name].ask("/sidecar/legs")
            outcomes |= json.loads(counts)
        assert outcomes == {"nixlv2/ok": 1}
        assert "ERROR" not in it.picker.log()

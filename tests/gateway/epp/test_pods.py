"""Endpoints by Kubernetes, against a small API server that lists and watches as the real one does."""

import asyncio
import contextlib
import json
import ssl
from urllib.parse import parse_qs, urlsplit

import pytest

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.gateway.epp.endpoints import EventPorts
from sumibi.gateway.epp.kubeapi import Api, ApiError, in_cluster, own_namespace
from sumibi.gateway.epp.pods import PodDiscovery, PoolDiscovery, Selection, selected_by, selection_of, serves
from sumibi.gateway.epp.tls import self_signed

PODS = "/api/v1/namespaces/ns/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools"


def pod(name, address, *, ready=True, labels=None, going=False):
    metadata = {"name": name, "labels": {"app": "vllm", **(labels or {})}}
    if going:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": metadata, "status": {"podIP": address, "conditions": conditions}}


def pool(name="pool", app="vllm", ports=(8000,)):
    spec = {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": port} for port in ports]}
    return {"metadata": {"name": name}, "spec": spec}


class ApiServer:
    """Lists and watches, label and field selectors included; forgets old versions when it is told to."""

    def __init__(self):
        self.objects = {PODS: {}, POOLS: {}}
        self.version = 100
        self.events = []
        """(version, path, event)"""
        self.oldest = 0
        self.asked = []
        self.status = 200
        self.changed = asyncio.Event()
        self.watches = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.api = Api(f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}")
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.drop_watches()

    def drop_watches(self):
        for writer in list(self.watches):
            writer.transport.abort()

    def put(self, path, item):
        name = item["metadata"]["name"]
        self._event(path, "MODIFIED" if name in self.objects[path] else "ADDED", item)
        self.objects[path][name] = item

    def delete(self, path, name):
        self._event(path, "DELETED", self.objects[path].pop(name))

    def _event(self, path, kind, item):
        self.version += 1
        self.events.append((self.version, path, {"type": kind, "object": item}))
        self.changed.set()

    def _selected(self, query, item):
        labels = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
        fields = [pair.split("=") for pair in query.get("fieldSelector", "").split(",") if pair]
        has = item["metadata"].get("labels", {})
        return all(has.get(k) == v for k, v in labels) and all(
            k == "metadata.name" and item["metadata"]["name"] == v for k, v in fields
        )

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            target = urlsplit(head.split(" ")[1])
            query = {name: values[0] for name, values in parse_qs(target.query).items()}
            self.asked.append((target.path, query, head))
            if self.status != 200:
                await self._whole(writer, self.status, {"message": "no"})
            elif query.get("watch") == "1":
                await self._watch(writer, target.path, query)
            else:
                items = [i for i in self.objects[target.path].values() if self._selected(query, i)]
                page = {"metadata": {"resourceVersion": str(self.version)}, "items": items}
                await self._whole(writer, 200, page)
        writer.close()

    async def _whole(self, writer, status, body):
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data))
        await writer.drain()

    async def _watch(self, writer, path, query):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.watches.add(writer)
        seen = int(query["resourceVersion"])
        try:
            while True:
                if seen < self.oldest:
                    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
                    self._line(writer, gone)
                    writer.write(b"0\r\n\r\n")
                    return
                self.changed.clear()
                for version, where, event in self.events:
                    if version > seen and where == path and self._selected(query, event["object"]):
                        self._line(writer, event)
                    seen = max(seen, version)
                self._line(
                    writer, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(seen)}}}
                )
                await writer.drain()
                await self.changed.wait()
        finally:
            self.watches.discard(writer)

    def _line(self, writer, event):
        """In two pieces: a line may be cut anywhere."""
        data = json.dumps(event).encode() + b"\n"
        for piece in (data[:7], data[7:]):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class Found:
    """What a discovery found, newest last."""

    def __init__(self):
        self.engines = []
        self.times = 0

    async def __call__(self, engines):
        self.engines = engines
        self.times += 1

    @property
    def urls(self):
        return [engine.url.removeprefix("http://") for engine in self.engines]

    async def become(self, *urls):
        async with asyncio.timeout(5):
            while self.urls != list(urls):
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(discovery):
    task = asyncio.create_task(discovery.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def pods_of(server, found, labels="app=vllm", ports=(8000,), event_ports=EventPorts()):  # noqa: B008
    return PodDiscovery(server.api, "ns", Selection(labels, ports), event_ports, found)


async def test_ready_pods_are_endpoints_and_come_and_go():
    found = Found()
    async with ApiServer() as server:
        server.put(PODS, pod("a", "10.0.0.1", labels={"llm-d.ai/role": "decode"}))
        server.put(PODS, pod("b", "10.0.0.2", ready=False))
        server.put(PODS, pod("c", "10.0.0.3", labels={"app": "other"}))
        async with running(pods_of(server, found, event_ports=EventPorts(5557))):
            await found.become("10.0.0.1:8000")
            (one,) = found.engines
            assert (one.role, one.kv_events) == ("decode", "tcp://10.0.0.1:5557")
            server.put(PODS, pod("b", "10.0.0.2"))
            await found.become("10.0.0.1:8000", "10.0.0.2:8000")
            server.put(PODS, pod("a", "10.0.0.1", going=True))
            await found.become("10.0.0.2:8000")
            times = found.times
            server.delete(PODS, "a")
            server.put(PODS, pod("b", "10.0.0.2", labels={"more": "1"}))
            server.put(PODS, pod("d", "10.0.0.4"))
            await found.become("10.0.0.2:8000", "10.0.0.4:8000")
            assert found.times == times + 1  # what does not matter is not told


async def test_every_target_port_is_an_endpoint():
    found = Found()
    async with ApiServer() as server:
        server.put(PODS, pod("a", "10.0.0.1"))
        async with running(pods_of(server, found, ports=(8000, 8001))):
            await found.become("10.0.0.1:8000", "10.0.0.1:8001")


@pytest.mark.parametrize("why", ["the version is forgotten", "the watch breaks", "the server is away"])
async def test_a_list_makes_good_for_what_a_watch_missed(why):
    found = Found()
    async with ApiServer() as server:
        server.put(PODS, pod("a", "10.0.0.1"))
        async with running(pods_of(server, found)):
            await found.become("10.0.0.1:8000")
            if why == "the version is forgotten":
                server.objects[PODS]["b"] = pod("b", "10.0.0.2")
                server.version += 10
                server.oldest = server.version
                server.changed.set()
            else:
                server.status = 503 if why == "the server is away" else 200
                server.objects[PODS]["b"] = pod("b", "10.0.0.2")
                server.drop_watches()
                await asyncio.sleep(0.05)
                server.status = 200
            await found.become("10.0.0.1:8000", "10.0.0.2:8000")


async def test_a_pool_says_which_pods_and_ports_and_may_change_its_mind():
    found = Found()
    async with ApiServer() as server:
        server.put(PODS, pod("a", "10.0.0.1"))
        server.put(PODS, pod("b", "10.0.0.2", labels={"app": "sglang"}))
        server.put(POOLS, pool("another", "sglang"))
        discovery = PoolDiscovery(
            server.api, "ns", "pool", "inference.networking.k8s.io", EventPorts(), found
        )
        async with running(discovery):
            await asyncio.sleep(0.05)
            assert found.times == 0  # there is no such pool yet
            server.put(POOLS, pool())
            await found.become("10.0.0.1:8000")
            server.put(POOLS, pool(app="sglang", ports=(30000,)))
            await found.become("10.0.0.2:30000")
            server.delete(POOLS, "pool")
            await found.become()
            server.put(POOLS, pool())
            await found.become("10.0.0.1:8000")


async def test_the_token_is_sent_and_read_anew(tmp_path):
    token = tmp_path / "token"
    async with ApiServer() as server:
        api = Api(server.api.url, token)
        for word in ("one", "two"):
            token.write_text(word + "\n")
            await api.get(PODS)
            assert f"authorization: Bearer {word}\r\n" in server.asked[-1][2]


def test_only_ready_pods_with_an_address_serve():
    assert serves(pod("a", "10.0.0.1"))
    assert not serves(pod("a", ""))
    assert not serves(pod("a", "10.0.0.1", ready=False))
    assert not serves(pod("a", "10.0.0.1", going=True))
    assert not serves({"metadata": {"name": "a"}, "status": {}})


def test_what_a_pool_selects():
    assert selected_by(pool(ports=(1, 2))) == Selection("app=vllm", (1, 2))
    assert selected_by({"metadata": {}, "spec": {}}) is None
    two = {"spec": {"selector": {"matchLabels": {"b": "2", "a": "1"}}, "targetPorts": [{"number": 1}]}}
    assert selected_by(two) == Selection("a=1,b=2", (1,))


def test_words_of_a_selection():
    assert selection_of("app=vllm", ["8000,8001", "8002"]) == Selection("app=vllm", (8000, 8001, 8002))
    for labels, ports in (("app=vllm", []), ("app=vllm", ["x"]), ("app=vllm", ["0"]), (" ", ["1"])):
        with pytest.raises(ConfigError, match="--endpoint-"):
            selection_of(labels, ports)
    with pytest.raises(ConfigError, match="1 to 8 ports"):
        selection_of("app=vllm", [str(port) for port in range(1, 10)])


def test_outside_of_a_cluster_that_is_said(tmp_path):
    with pytest.raises(EnvironmentProblem, match="KUBERNETES_SERVICE_HOST"):
        in_cluster({}, tmp_path)
    with pytest.raises(EnvironmentProblem, match="--pool-namespace"):
        own_namespace(tmp_path)
    (tmp_path / "namespace").write_text("ns\n")
    assert own_namespace(tmp_path) == "ns"


async def test_in_a_pod_the_server_is_known_by_its_authority(tmp_path):
    key, certificate = self_signed()
    for name, data in (
        ("key", key),
        ("ca.crt", certificate),
        ("token", b"t"),
        ("other.crt", self_signed()[1]),
    ):
        (tmp_path / name).write_bytes(data)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{"a": "b"}')
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "localhost", 0, ssl=context)
    port = str(server.sockets[0].getsockname()[1])
    environment = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": port}
    assert await in_cluster(environment, tmp_path).get(PODS) == {"a": "b"}
    (tmp_path / "ca.crt").write_bytes((tmp_path / "other.crt").read_bytes())
    with pytest.raises(ApiError, match="certificate"):
        await in_cluster(environment, tmp_path).get(PODS)
    server.close()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"nothing of the kind\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n[1]",
        b"HTTP/1.1 200 OK\r\n\r\n{\xff",
    ],
)
async def test_garbage_is_an_error_like_others(said):
    """Which a watcher gets over; any other exception would be its end, and nobody would know."""

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        with pytest.raises(ApiError):
            await Api(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").get(PODS)
    finally:
        server.close()

"""A picker before fake engines, and a client that plays Envoy towards it."""

import asyncio
import contextlib
import json

import grpc
import pytest
from faking import CHAT, Client, FakeEngine, chat

from sumibi.gateway.epp.main import PickerServer
from sumibi.gateway.epp.options import EppOptions, ResponsePhase
from sumibi.gateway.epp.stream import FULL_DUPLEX, NO_BODY
from sumibi.gateway.epp.wire import (
    SERVICE,
    HealthAnswer,
    HealthQuestion,
    ProcessingRequest,
    ProcessingResponse,
)
from sumibi.gateway.options import GatewayOptions, engine_options

DESTINATION = "x-gateway-destination-endpoint"


class Call:
    """One HTTP request as Envoy tells of it."""

    def __init__(self, stream):
        self._stream = stream
        self.headers = {}
        """Set by the picker."""
        self.removed = []

    async def send(self, **message):
        await self._stream.write(ProcessingRequest(**message))

    async def read(self):
        """The next message; None at the end."""
        got = await self._stream.read()
        return None if got is grpc.aio.EOF else got

    async def ask(self, *arguments, **named):
        """A whole request; where it is to go, or the status that it is answered with."""
        await self.send_request(*arguments, **named)
        return await self.placed()

    async def send_request(self, body=None, headers=None, *, mode=FULL_DUPLEX, path=CHAT, subset=None):
        pairs = {":method": "POST", ":path": path, **(headers or {})}
        listed = [{"key": key, "raw_value": value.encode()} for key, value in pairs.items()]
        metadata = {}
        if subset is not None:
            fields = {f"{DESTINATION}-subset": {"string_value": subset}}
            metadata = {"filter_metadata": {"envoy.lb.subset_hint": {"fields": fields}}}
        await self.send(
            request_headers={"headers": {"headers": listed}},
            protocol_config={"request_body_mode": FULL_DUPLEX, "response_body_mode": mode},
            metadata_context=metadata,
        )
        data = json.dumps(chat() if body is None else body).encode()
        await self.send(request_body={"body": data, "end_of_stream": True})

    async def placed(self):
        head = await self.read()
        if head is None or head.HasField("immediate_response"):
            self.immediate = head.immediate_response if head is not None else None
            return self.immediate.status.code
        mutation = head.request_headers.response.header_mutation
        self.headers = {o.header.key: o.header.raw_value.decode() for o in mutation.set_headers}
        self.removed = list(mutation.remove_headers)
        rest = await self.read()
        assert rest.request_body.response.body_mutation.streamed_response.end_of_stream
        return self.headers[DESTINATION]

    async def answer(self, *pieces, status="200", headers=None, served=None, end=True):
        """An engine's answer, whole."""
        pairs = {":status": status, "content-type": "application/json", **(headers or {})}
        listed = [{"key": key, "raw_value": value.encode()} for key, value in pairs.items()]
        message = {"response_headers": {"headers": {"headers": listed}}}
        if served is not None:
            fields = {f"{DESTINATION}-served": {"string_value": served}}
            message["metadata_context"] = {"filter_metadata": {"envoy.lb": {"fields": fields}}}
        await self.send(**message)
        await self.read()
        for number, piece in enumerate(pieces):
            last = end and number == len(pieces) - 1
            await self.send(response_body={"body": piece, "end_of_stream": last})
            await self.read()

    async def leave(self):
        """As Envoy does when its client is gone."""
        await self._stream.done_writing()
        while await self.read() is not None:
            pass


class EppLab:
    def __init__(self, directory):
        self.directory = directory
        self.engines = []
        self.server: PickerServer
        self._channel = None

    async def engine(self):
        engine = await FakeEngine().start()
        self.engines.append(engine)
        return engine

    async def start(self, *, wait=True, words="", **options):
        """A picker; `words` follow the URL of each engine."""
        epp = {
            name: options.pop(name)
            for name in ("response_phase", "fallbacks", "endpoints_file")
            if name in options
        }
        if "endpoints_file" not in epp:
            options.setdefault("engines", engine_options([engine.url + words for engine in self.engines]))
        options.setdefault("engines", ())
        options.setdefault("scrape_interval_s", 0.05)
        shared = GatewayOptions(
            host="127.0.0.1", admin_port=None, usage_log=self.directory / "usage.jsonl", **options
        )
        self.server = PickerServer(
            EppOptions(gateway=shared, grpc_port=0, health_port=0, metrics_port=0, secure=False, **epp)
        )
        await self.server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.grpc_port}")
        if wait:
            await self.until(lambda: self.server.watches and all(watch.up for watch in self.server.watches))

    def call(self):
        method = self._channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        return Call(method())

    async def health(self, port, service=""):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthQuestion.SerializeToString,
                response_deserializer=HealthAnswer.FromString,
            )
            return (await check(HealthQuestion(service=service))).status

    async def metrics(self):
        async with Client(self.server.metrics_port) as client:
            return (await client.ask("/metrics")).body.decode()

    @staticmethod
    async def until(condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    def view(self, engine):
        return next(v for v in self.server.router.fleet_view() if v.endpoint == engine.endpoint)

    def records(self):
        self.server.usage_log.flush()
        path = self.directory / "usage.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def nothing_is_held(self):
        server = self.server
        await self.until(lambda: not server.shell.completions and not server.picker.visits)
        server.router.check_integrity()
        assert server.router.counters().requests_now == 0
        assert all(view.inflight == 0 for view in server.router.fleet_view())

    async def stop(self):
        if self._channel is not None:
            await self._channel.close()
        if hasattr(self, "server") and not self.server.draining:
            await self.server.stop(0.0)
        for engine in self.engines:
            await engine.stop()


@pytest.fixture
def epp(tmp_path, monkeypatch):
    """`async with epp(engines) as it:` gives a fresh `EppLab`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    @contextlib.asynccontextmanager
    async def make(engines=2):
        it = EppLab(tmp_path)
        try:
            for _ in range(engines):
                await it.engine()
            yield it
        finally:
            await it.stop()

    return make


__all__ = ["NO_BODY", "ResponsePhase"]

"""Engines to break things with (`faking`) and a gateway around them.

Coroutine tests run on uvloop, as the gateway does, each with a time limit of its own.
"""

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop
import zmq.asyncio
from faking import (
    CHAT,
    Answer,
    Behaviours,
    Client,
    FakeEngine,
    FakePublisher,
)

from sumibi.gateway.main import Gateway
from sumibi.gateway.options import GatewayOptions, Timeouts, engine_options


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def limited():
        async with asyncio.timeout(30):
            await pyfuncitem.obj(**arguments)

    uvloop.run(limited())
    return True


class Lab:
    """Engines and a gateway in this loop, on ports of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines: list[FakeEngine] = []
        self.gateway: Gateway
        self._context = zmq.asyncio.Context()
        self._publishers: list[FakePublisher] = []

    def publisher(self, **options) -> FakePublisher:
        publisher = FakePublisher(self._context, **options)
        self._publishers.append(publisher)
        return publisher

    async def engine(self) -> FakeEngine:
        engine = await FakeEngine().start()
        self.engines.append(engine)
        return engine

    async def start(self, **options) -> Gateway:
        """A gateway before the engines made so far; waits until all are up."""
        gateway = await self.start_only(**options)
        await self.until(lambda: all(watch.up for watch in gateway.watches))
        return gateway

    async def start_only(self, **options) -> Gateway:
        options.setdefault("timeouts", Timeouts(connect_s=2.0))
        options.setdefault("scrape_interval_s", 0.05)
        options.setdefault("engines", engine_options([engine.url for engine in self.engines]))
        options.setdefault("admin_key", "test-admin-key-0123456789")
        settings = GatewayOptions(port=0, admin_port=0, usage_log=self.directory / "usage.jsonl", **options)
        self.gateway = Gateway(settings)
        await self.gateway.start()
        return self.gateway

    def client(self) -> Client:
        return Client(self.gateway.server.port)

    def admin(self) -> Client:
        assert self.gateway.admin_server is not None
        return Client(self.gateway.admin_server.port)

    async def ask(self, path: str = CHAT, body=None, headers=None, method=None) -> Answer:
        async with self.client() as client:
            return await client.ask(path, body, headers, method)

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds (the test's time limit ends a wait in vain)."""
        while not condition():
            await asyncio.sleep(0.005)

    def usage_records(self):
        self.gateway.usage_log.flush()
        path = self.directory / "usage.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def assert_nothing_is_held(self) -> None:
        """No request, reservation or byte is left of what went through."""
        gateway = self.gateway
        assert gateway.shell.completions == {}
        assert gateway.server.buffered_bytes == 0
        gateway.router.check_integrity()
        counters = gateway.router.counters()
        assert (counters.requests_now, counters.waiting_now) == (0, 0)
        for view in gateway.router.fleet_view():
            assert (view.inflight, view.prefilling, view.decoding, view.prefill_tokens) == (0, 0, 0, 0)

    async def stop(self) -> None:
        if hasattr(self, "gateway"):
            await self.gateway.stop(0.0)
        for engine in self.engines:
            await engine.stop()
        for publisher in self._publishers:
            publisher.close()
        self._context.destroy(linger=0)


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Callable[[], contextlib.AbstractAsyncContextManager[Lab]]:
    """`async with lab() as it:` gives a fresh `Lab` that is torn down at the end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Lab]:
        it = Lab(tmp_path)
        try:
            yield it
        finally:
            await it.stop()

    return make


@pytest.fixture
def behaviours() -> type[Behaviours]:
    return Behaviours


@pytest.fixture
def client_of() -> type[Client]:
    """`async with client_of(port) as client:` speaks to any server."""
    return Client

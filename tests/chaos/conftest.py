"""Two engines that break on demand and a gateway before them: real processes, short limits.

Trouble is made on purpose; after each test nothing may be held of it.
"""

import asyncio

import pytest
from benchmarks.soak.processes import EngineProcess, GatewayProcess

LIMITS = {
    "request_head_s": 2.0,
    "request_body_s": 2.0,
    "keep_alive_s": 4.0,
    "client_write_s": 2.0,
    "connect_s": 2.0,
    "first_byte_s": 3.0,
    "between_bytes_s": 3.0,
    "drain_s": 10.0,
}


class Site:
    """What the tests of a module share."""

    def __init__(self, directory):
        self.directory = directory
        self.engines = []
        try:
            self.engines = [EngineProcess(events=True), EngineProcess()]
            self.gateway = GatewayProcess(self.engines, directory / "first", timeouts=LIMITS)
        except BaseException:
            self.stop()
            raise

    def another(self, name, **how):
        """One more gateway before the same engines; the caller stops it."""
        return GatewayProcess(self.engines, self.directory / name, **how)

    def stop(self):
        if hasattr(self, "gateway"):
            self.gateway.stop()
        for engine in self.engines:
            engine.stop()


@pytest.fixture(scope="session")
def site_of_all(tmp_path_factory):
    it = Site(tmp_path_factory.mktemp("chaos"))
    yield it
    it.stop()


@pytest.fixture
def site(site_of_all):
    """The site; afterwards it holds nothing of what the test did, and works."""
    yield site_of_all
    site_of_all.gateway.assert_nothing_is_held()
    assert "Traceback" not in site_of_all.gateway.said()


@pytest.fixture
def together():
    """Run coroutines to their end, at once; at most a minute."""

    def run(*works):
        async def all_of_them():
            async with asyncio.timeout(60):
                try:
                    return await asyncio.gather(*works)
                finally:
                    await asyncio.sleep(0.02)  # what was closed is closed by then

        return asyncio.run(all_of_them())

    return run

"""Nothing is skipped: without Envoy (`make envoy`) every test here is an error that says so."""

import asyncio
import contextlib
import inspect

import pytest
import uvloop
from envoy_lab import EnvoyLab
from faking import Behaviours

LIMIT_S = 90.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def limited():
        async with asyncio.timeout(LIMIT_S):
            await pyfuncitem.obj(**arguments)

    uvloop.run(limited())
    return True


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """`async with lab() as it:` gives a fresh `EnvoyLab` that is torn down at the end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    @contextlib.asynccontextmanager
    async def make():
        it = EnvoyLab(tmp_path)
        try:
            yield it
        finally:
            await it.stop()

    return make


@pytest.fixture
def behaviours():
    return Behaviours

"""Coroutine tests run on uvloop, as the gateway does, each with a time limit of its own."""

import asyncio
import inspect

import pytest
import uvloop


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

"""Prefill engines that may be named: by address, and by whatever a name stands for now."""

import asyncio
import logging
import socket

import pytest

from sumibi.gateway import allowed
from sumibi.gateway.allowed import Allowed


class Names(dict[str, list[str]]):
    """What names stand for; a missing one cannot be resolved."""

    async def resolve(self, host: str) -> list[str]:
        if host not in self:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self[host]


@pytest.fixture
def names() -> Names:
    return Names()


async def test_addresses_and_words_as_given(names):
    some = Allowed(["10.0.0.1:8000", "[fd00::1]:8000", "prefill:8000"], names.resolve)
    await some.refresh()
    assert "10.0.0.1:8000" in some
    assert "[fd00::1]:8000" in some
    assert "prefill:8000" in some
    assert "10.0.0.1:8001" not in some
    assert "10.0.0.2:8000" not in some


async def test_a_name_stands_for_all_its_addresses_at_its_port(names):
    names["prefill"] = ["10.0.0.5", "10.0.0.6", "fd00::7"]
    some = Allowed(["prefill:8000"], names.resolve)
    assert "10.0.0.5:8000" not in some
    await some.refresh()
    assert all(word in some for word in ("10.0.0.5:8000", "10.0.0.6:8000", "[fd00::7]:8000"))
    assert "10.0.0.5:22" not in some


async def test_addresses_that_went_away_are_refused_and_new_ones_taken(names, monkeypatch):
    monkeypatch.setattr(allowed, "_EVERY_S", 0.01)
    names["prefill"] = ["10.0.0.5"]
    some = Allowed(["prefill:8000"], names.resolve)
    await some.refresh()
    task = asyncio.create_task(some.run())
    names["prefill"] = ["10.0.0.6"]
    async with asyncio.timeout(5):
        while "10.0.0.6:8000" not in some:
            await asyncio.sleep(0.01)
    assert "10.0.0.5:8000" not in some
    task.cancel()


async def test_a_name_that_cannot_be_resolved_keeps_what_it_stood_for_and_is_told_once(names, caplog):
    names["prefill"] = ["10.0.0.5"]
    some = Allowed(["prefill:8000", "nobody:8000"], names.resolve)
    with caplog.at_level(logging.WARNING):
        await some.refresh()
        del names["prefill"]
        await some.refresh()
        await some.refresh()
    assert "10.0.0.5:8000" in some
    assert [record.args[0] for record in caplog.records] == ["nobody:8000", "prefill:8000"]


async def test_without_names_there_is_nothing_to_do():
    await asyncio.wait_for(Allowed(["10.0.0.1:8000"]).run(), 1)


async def test_the_system_resolves_names():
    some = Allowed(["localhost:8000"])
    await some.refresh()
    assert "127.0.0.1:8000" in some or "[::1]:8000" in some
    await Allowed(["..:1", "\udcff:1"]).refresh()  # no names at all

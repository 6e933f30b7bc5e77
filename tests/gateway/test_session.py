"""The session that a request's headers name: found, hidden behind a hash, and heard by the router."""

import hashlib
import json

import pytest

from sumibi.gateway.session import SESSION_HEADERS, session_of

BODY = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}]}


def test_the_first_header_that_is_there_counts():
    every = {name: name for name in SESSION_HEADERS}
    for name in SESSION_HEADERS:
        assert session_of(every, "") == session_of({b"session_id": name}, "")
        del every[name]
    assert session_of(every, "") == session_of({b"session-id": b""}, "") == ""


def test_agents_own_headers_are_known():
    names = {b"x-claude-code-session-id", b"x-session-affinity", b"session-id", b"session_id"}
    assert names < set(SESSION_HEADERS)


def test_tenants_do_not_share_sessions_and_lengths_are_bounded():
    long = session_of({b"x-session-id": b"x" * 10_000}, "a")
    assert len(long) == 32
    assert long != session_of({b"x-session-id": b"x" * 10_000}, "b")


async def arrivals(gateway, directory):
    await gateway.stop(1.0)
    lines = (directory / "events.jsonl").read_text().splitlines()
    assert not any("my secret session" in line for line in lines)
    return [event for line in lines if (event := json.loads(line))["type"] == "Arrived"]


async def test_the_router_hears_of_sessions_and_recordings_hold_no_client_s_text(lab, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({hashlib.sha256(b"k").hexdigest(): "tenant-1"}))
    async with lab() as it:
        await it.engine()
        gateway = await it.start(record=tmp_path / "record", api_keys=keys)
        for headers in (
            {"X-Claude-Code-Session-Id": "my secret session"},
            {"x-claude-code-session-id": "my secret session"},
            {"x-claude-code-session-id": "my secret session", "Authorization": "Bearer k"},
            {},
        ):
            assert (await it.ask(body=BODY, headers=headers)).status == 200
        one, again, other, none = await arrivals(gateway, tmp_path / "record")
    assert one["session"] == again["session"] != other["session"]
    assert len(one["session"]) == 32
    assert none.get("session", "") == ""


@pytest.mark.parametrize("header", ["x-session-id", "session_id"])
async def test_a_session_stays_with_its_engine_whatever_it_asks(lab, header):
    async with lab() as it:
        engines = [await it.engine(), await it.engine(), await it.engine()]
        await it.start(policy="session-sticky")
        for number in range(6):
            messages = [{"role": "user", "content": f"question {number}"}]
            await it.ask(body={**BODY, "messages": messages}, headers={header: f"s{number % 2}"})
        asked = [len(engine.requests) for engine in engines]
    assert sorted(asked) == [0, 3, 3]

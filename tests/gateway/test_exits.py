"""Every way out of a request gives back all that it held; shutdown drains."""

import asyncio
import gc
import json
import random
import weakref

import pytest

from sumibi.gateway.options import Timeouts

CHAT = "/v1/chat/completions"


def chat(**fields):
    return {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], **fields}


async def test_thousands_of_mixed_exits_leave_nothing_behind(lab, behaviours):
    chance = random.Random(7)
    begun = behaviours.stream_head + behaviours.chunk(behaviours.token_event("a"))

    async def hang_a_little(request, writer):
        await asyncio.sleep(0.02)
        writer.close()

    async def begin_and_hang(request, writer):
        writer.write(begun)
        await asyncio.sleep(0.02)
        writer.transport.abort()

    faults = [
        behaviours.write_then_break(b""),
        behaviours.write_then_break(begun),
        behaviours.write_then_break(b"nonsense\r\n\r\n"),
        behaviours.status(500, {}),
        behaviours.status(400, {}),
        behaviours.status(429, {}),
        hang_a_little,
        begin_and_hang,
    ]

    async def moody(request, writer):
        await (chance.choice(faults) if chance.random() < 0.5 else behaviours.well)(request, writer)

    async with lab() as it:
        for _ in range(3):
            (await it.engine()).behave = moody
        await it.start(timeouts=Timeouts(upstream_idle_s=0.3))
        outcomes = []

        async def client():
            for _ in range(50):
                async with it.client() as connection:
                    for _ in range(3):
                        body = chat(stream=chance.random() < 0.5)
                        if chance.random() < 0.1:
                            body = chat(max_tokens=-1)
                        if chance.random() < 0.2:  # vanishes, before or while it is answered
                            await connection.send(b"POST %b HTTP/1.1\r\nHost: t\r\n" % CHAT.encode())
                            data = json.dumps(body).encode()
                            await connection.send(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
                            await asyncio.sleep(chance.choice((0, 0.001, 0.005)))
                            outcomes.append("vanished")
                            break
                        try:
                            answer = await connection.ask(body=body)
                        except ConnectionError:
                            outcomes.append("cut")
                            break
                        outcomes.append(answer.status if answer.whole else "cut")
                        if not answer.whole or answer.headers.get("connection") == "close":
                            break
                        if answer.events and "error" in answer.events[-1]:
                            break

        await asyncio.gather(*(client() for _ in range(20)))
        assert len(outcomes) > 1500
        assert {200, 400, "vanished"} <= set(outcomes)
        await it.until(lambda: not it.gateway.shell.completions and it.gateway.server.buffered_bytes == 0)
        it.assert_nothing_is_held()
        assert it.gateway.server.faults == 0
        counters = it.gateway.metrics.model("test-model")
        assert counters.in_flight == 0
        assert counters.requests == len(it.usage_records())


async def test_shutdown_lets_requests_finish_and_takes_no_new_ones(lab, behaviours):
    release = asyncio.Event()

    async def wait(request, writer):
        await release.wait()
        await behaviours.well(request, writer)

    async with lab() as it:
        engine = await it.engine()
        engine.behave = wait
        gateway = await it.start()
        async with it.client() as idle, it.client() as health:
            await health.ask("/health")
            asked = asyncio.ensure_future(it.ask(body=chat()))
            await it.until(lambda: len(engine.requests) == 1)
            stopping = asyncio.ensure_future(gateway.stop(20.0))
            assert await idle.closed()
            await asyncio.sleep(0.05)
            try:
                await it.ask("/health")
                raise AssertionError("a new connection was taken")
            except ConnectionError:
                pass
            assert not stopping.done()
            release.set()
            answer = await asked
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            await stopping
        it.assert_nothing_is_held()


async def test_a_request_under_way_on_a_connection_that_was_to_stay_open_is_answered_during_shutdown(lab):
    """Its client had no way to know: closing at once would fail it."""
    async with lab() as it:
        await it.engine()
        gateway = await it.start()
        async with it.client() as client, it.client() as idle:
            await idle.ask("/health")
            assert "connection" not in (await client.ask(body=chat())).headers
            stopping = asyncio.ensure_future(gateway.stop(20.0))
            await asyncio.sleep(0.05)
            answer = await client.ask(body=chat())
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await client.closed()
            assert await idle.closed()  # though not at once
            await stopping
        it.assert_nothing_is_held()


async def test_what_does_not_finish_in_the_drain_time_ends_with_an_error(lab, behaviours):
    async def begin_and_hang(request, writer):
        if request.json.get("stream"):
            writer.write(behaviours.stream_head + behaviours.chunk(behaviours.token_event("a")))
        await behaviours.hang(request, writer)

    async with lab() as it:
        engine = await it.engine()
        engine.behave = begin_and_hang
        gateway = await it.start()
        plain = asyncio.ensure_future(it.ask(body=chat()))
        stream = asyncio.ensure_future(it.ask(body=chat(stream=True)))
        await it.until(lambda: len(engine.requests) == 2)
        await gateway.stop(0.05)
        assert ((await plain).status, (await plain).json["error"]["code"]) == (503, "rejected-shutting-down")
        answer = await stream
        assert answer.whole
        assert json.loads(answer.events[-1])["error"]["code"] == "rejected-shutting-down"
        it.assert_nothing_is_held()
        assert engine.lost_clients == 2


@pytest.mark.interpreted  # compiled objects have no weak references
async def test_what_is_over_is_freed_without_waiting_for_a_collection(lab, behaviours):
    """Everything is looked through every ten minutes only: what waits for that is a leak of that size."""
    begun = behaviours.stream_head + behaviours.chunk(behaviours.token_event("a"))

    async def cut(request, writer):
        writer.write(begun)
        await asyncio.sleep(0.01)
        writer.transport.abort()

    async with lab() as it:
        engine = await it.engine()
        gateway = await it.start(timeouts=Timeouts(upstream_idle_s=0.1), scrape_interval_s=10.0)
        seen = []

        async def one(behave, *, leave):
            engine.behave = behave
            async with it.client() as client:
                asked = asyncio.ensure_future(client.ask(body=chat(stream=True)))
                served = len(engine.requests)
                await it.until(lambda: len(engine.requests) > served or asked.done())
                whole = (*gateway.server._connections, *gateway.shell.completions.values())
                seen.extend(map(weakref.ref, (*whole, *gateway.deadlines.waiting)))
                if leave:
                    asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await one(behaviours.well, leave=False)
                await one(cut, leave=False)
                await one(behaviours.hang, leave=True)
            await it.until(lambda: not gateway.deadlines.waiting)
            await asyncio.sleep(0.05)
            assert len(seen) > 30
            alive = [ref() for ref in seen if ref() is not None]
            assert not alive, [type(each).__name__ for each in alive]
        finally:
            gc.enable()

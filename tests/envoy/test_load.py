"""Many requests, some of whose clients leave: what is left of them, and how wrong the ledger is before."""

import asyncio
import contextlib
import random

import pytest
from faking import CHAT, STREAM_HEAD, chat, chunk, request_bytes, token_event, usage_event

from sumibi.gateway.epp.options import ResponsePhase

REQUESTS = 2_000
AT_ONCE = 32


async def short_stream(request, writer):
    writer.write(STREAM_HEAD)
    for event in (token_event("a"), token_event("b"), usage_event(), "data: [DONE]\n\n"):
        writer.write(chunk(event))
        await writer.drain()
        await asyncio.sleep(0.005)
    writer.write(b"0\r\n\r\n")


def counting(engine):
    """Let an engine's metrics say how many requests it has, as a real one's do."""
    running = 0

    async def behave(request, writer):
        nonlocal running
        running += 1
        engine.metrics["vllm:num_requests_running"] = float(running)
        try:
            await short_stream(request, writer)
        finally:
            running -= 1
            engine.metrics["vllm:num_requests_running"] = float(running)

    engine.behave = behave


async def load(it, requests=REQUESTS):
    """Requests, a tenth of whose clients leave; how many got a whole answer."""
    chance = random.Random(1)
    leaves = [chance.random() < 0.1 for _ in range(requests)]
    places = asyncio.Semaphore(AT_ONCE)
    whole = 0

    async def one(number):
        nonlocal whole
        async with places, it.client() as client:
            body = chat(f"number {number}", stream=True)
            if leaves[number]:
                await client.send(request_bytes(CHAT, body))
                await asyncio.sleep(chance.random() * 0.03)
                return
            answer = await client.ask(CHAT, body)
            assert (answer.status, answer.whole) == (200, True)
            whole += 1

    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(one(number))
    assert whole == requests - sum(leaves)
    return whole


async def test_no_reservation_is_left_with_the_response_phase_on(lab):
    async with lab() as it:
        await it.start()
        for engine in it.engines:
            engine.behave = short_stream
        whole = await load(it)
        await it.nothing_is_held()
        ends = it.picker.picker.ends
        assert ends["completed"] >= whole
        assert set(ends) <= {"completed", "aborted"}
        reasons = it.picker.router.counters().finished
        assert reasons["stop"] == ends["completed"]
        records = it.usage_records()
        assert sum(record["reason"] == "stop" and record["exact"] for record in records) >= whole


@pytest.mark.parametrize("by", ["the picker", "envoy"])
async def test_the_error_is_bounded_with_the_response_phase_off(lab, by):
    async with lab() as it:
        for _ in range(2):
            counting(await it.engine())
        if by == "envoy":
            await it.start(response_body="NONE", response_headers="SKIP")
        else:
            await it.start(picker_response_phase=ResponsePhase.OFF)
        errors = []

        async def sample():
            while True:
                await asyncio.sleep(0.02)
                really = sum(engine.metrics["vllm:num_requests_running"] for engine in it.engines)
                errors.append(abs(it.inflight - really))

        sampling = asyncio.create_task(sample())
        await load(it)
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
        async with it.metrics() as client:
            page = (await client.ask("/metrics")).body.decode()
        assert 'sumibi_ledger_grade{grade="estimated"} 1.0' in page
        errors.sort()
        assert errors[len(errors) // 2] <= 2 * AT_ONCE, errors[-10:]
        assert errors[-1] <= 8 * AT_ONCE, errors[-10:]
        await it.until(lambda: it.inflight == 0)
        await it.nothing_is_held()

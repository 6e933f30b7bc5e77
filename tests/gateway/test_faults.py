"""What a client gets when engines misbehave: an answer from elsewhere, or a clear error. Never silence."""

import asyncio
import json

import pytest

from sumibi.gateway.options import Timeouts

CHAT = "/v1/chat/completions"


def chat(**fields):
    return {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], **fields}


def both(it, behaviour):
    for engine in it.engines:
        engine.behave = behaviour


async def two_engines_of_which_the_first_asked_fails(it, fault):
    """Whichever engine is asked first misbehaves, once; the other one is well."""
    first, second = await it.engine(), await it.engine()
    gateway = await it.start()
    for engine in (first, second):
        well = engine.behave

        async def once(request, writer, engine=engine, well=well):
            for other in (first, second):
                other.behave = well
            await fault(request, writer)

        engine.behave = once
    return gateway


@pytest.mark.interpreted
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    ["reset", "reset-after-head", "garbage", "interim-with-body", "other-coding", "500", "503", "429"],
)
async def test_a_request_not_yet_answered_is_tried_elsewhere(lab, behaviours, fault, stream):
    faults = {
        "reset": behaviours.write_then_break(b""),
        "reset-after-head": behaviours.write_then_break(behaviours.stream_head),
        "garbage": behaviours.write_then_break(b"220 smtp ready\r\n\r\n"),
        # llhttp would put the interim answer's body before the true one's, and take the coding for none.
        "interim-with-body": behaviours.write_then_break(
            b"HTTP/1.1 103 X\r\ncontent-length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
        ),
        "other-coding": behaviours.write_then_break(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        ),
        "500": behaviours.status(500, {"error": {}}),
        "503": behaviours.status(503, {"error": {}}),
        "429": behaviours.status(429, {"error": {}}),
    }
    async with lab() as it:
        await two_engines_of_which_the_first_asked_fails(it, faults[fault])
        compared = []
        it.gateway.shell._compare = lambda completion, cached_tokens: compared.append(cached_tokens)
        answer = await it.ask(body=chat(stream=stream))
        assert answer.status == 200
        assert answer.whole
        assert sorted(len(engine.requests) for engine in it.engines) == [1, 1]
        (record,) = it.usage_records()
        assert (record["reason"], record["attempts"]) == ("stop", 2)
        assert compared == [], "what a further attempt is told to have been cached: no sign of foreign tokens"
        it.assert_nothing_is_held()


async def test_a_stream_that_the_engine_ends_with_an_error_is_passed_on_and_no_success(lab, behaviours):
    error = b'data: {"error": {"message": "boom"}}\n\n'
    events = [behaviours.token_event("a"), error.decode(), "data: [DONE]\n\n"]
    data = behaviours.stream_head + b"".join(map(behaviours.chunk, events)) + b"0\r\n\r\n"
    async with lab() as it:
        await it.engine()
        await it.start()
        both(it, behaviours.in_pieces(data, 1000))
        answer = await it.ask(body=chat(stream=True))
        assert (answer.whole, error in answer.body) == (True, True)
        (record,) = it.usage_records()
        assert record["reason"] == "engine_error"
        assert it.gateway.router.counters().finished == {"engine_error": 1}
        it.assert_nothing_is_held()


async def test_an_engine_that_refuses_connections_is_replaced_by_another(lab):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        await it.start(scrape_interval_s=30.0)
        await first.stop()
        answers = [await it.ask(body=chat()) for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert len(second.requests) == 4
        await it.until(lambda: not it.gateway.watches[0].up)  # noticed at once, not at the next interval
        it.assert_nothing_is_held()


async def test_when_every_engine_fails_the_client_gets_a_bad_gateway(lab, behaviours):
    async with lab() as it:
        await it.engine()
        await it.engine()
        await it.start()
        both(it, behaviours.write_then_break(b""))
        answer = await it.ask(body=chat())
        assert answer.status == 502
        assert answer.json["error"]["code"] == "engine_gone"
        assert "127.0.0.1" not in answer.json["error"]["message"]
        failures = [it.gateway.metrics.endpoint(engine.endpoint).failures for engine in it.engines]
        assert failures == [{"engine_gone": 1}, {"engine_gone": 1}]
        it.assert_nothing_is_held()


async def test_when_every_engine_answers_5xx_the_last_answer_is_passed_on(lab, behaviours):
    async with lab() as it:
        await it.engine()
        await it.engine()
        await it.start()
        both(it, behaviours.status(503, {"error": {"message": "engine is overloaded"}}))
        answer = await it.ask(body=chat())
        assert (answer.status, answer.json["error"]["message"]) == (503, "engine is overloaded")
        assert sum(len(engine.requests) for engine in it.engines) == 2
        it.assert_nothing_is_held()


@pytest.mark.parametrize("tail", ["", 'data: {"choices": [{"ind'])
async def test_a_stream_that_breaks_ends_with_an_error_event_after_whole_events(lab, behaviours, tail):
    begun = behaviours.stream_head + behaviours.chunk(behaviours.token_event("a"))
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.write_then_break(begun + (behaviours.chunk(tail) if tail else b""))
        await it.start()
        async with it.client() as client:
            answer = await client.ask(body=chat(stream=True))
            assert answer.whole
            assert json.loads(answer.events[0])["choices"][0]["delta"]["content"] == "a"
            error = json.loads(answer.events[1])["error"]
            assert error["code"] == "engine_gone"
            assert len(answer.events) == 2
            assert await client.closed()
        assert len(engine.requests) == 1
        (record,) = it.usage_records()
        assert record["reason"] == "engine_gone"
        it.assert_nothing_is_held()


async def test_an_answer_that_breaks_off_cannot_pass_for_whole(lab, behaviours):
    half = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"choices":'
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.write_then_break(half)
        await it.start()
        answer = await it.ask(body=chat())
        assert not answer.whole
        it.assert_nothing_is_held()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_usage_is_right_however_a_stream_is_cut(lab, behaviours, size):
    events = [behaviours.token_event("a"), behaviours.usage_event(1234, 56, 1024), "data: [DONE]\n\n"]
    wire = behaviours.stream_head + b"".join(map(behaviours.chunk, events)) + b"0\r\n\r\n"
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.in_pieces(wire, size)
        await it.start()
        answer = await it.ask(body=chat(stream=True))
        assert answer.body.decode() == "".join(events)
        (record,) = it.usage_records()
        assert (record["prompt_tokens"], record["output_tokens"], record["cached_tokens"]) == (1234, 56, 1024)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -5, "completion_tokens": 1},
        {"prompt_tokens": "many"},
        {"prompt_tokens_details": {"cached_tokens": 9}},
    ],
)
async def test_usage_that_cannot_be_is_not_believed(lab, behaviours, usage):
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.status(200, {"choices": [], "usage": usage})
        await it.start()
        assert (await it.ask(body=chat())).status == 200
        (record,) = it.usage_records()
        assert (record["cached_tokens"], record["output_tokens"], record["exact"]) == (None, None, False)
        it.assert_nothing_is_held()


async def test_an_engine_that_hangs_is_given_up_after_its_time(lab, behaviours):
    async with lab() as it:
        await it.engine()
        await it.start(timeouts=Timeouts(first_byte_s=0.2))
        both(it, behaviours.hang)
        answer = await it.ask(body=chat())
        assert (answer.status, answer.json["error"]["code"]) == (504, "timeout")
        await it.until(lambda: it.engines[0].lost_clients == 1)
        it.assert_nothing_is_held()


async def test_a_stream_that_stops_flowing_is_ended_after_its_time(lab, behaviours):
    async def stall(request, writer):
        writer.write(behaviours.stream_head + behaviours.chunk(behaviours.token_event("a")))
        await behaviours.hang(request, writer)

    async with lab() as it:
        engine = await it.engine()
        engine.behave = stall
        await it.start(timeouts=Timeouts(between_bytes_s=0.2))
        answer = await it.ask(body=chat(stream=True))
        assert json.loads(answer.events[-1])["error"]["code"] == "timeout"
        it.assert_nothing_is_held()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_has_its_request_aborted_at_once(lab, behaviours, begun):
    async def slow(request, writer):
        if begun:
            writer.write(behaviours.stream_head + behaviours.chunk(behaviours.token_event("a")))
        await behaviours.hang(request, writer)

    async with lab() as it:
        engine = await it.engine()
        engine.behave = slow
        await it.start()
        async with it.client() as client:
            await client.send(request(chat(stream=True)))
            if begun:
                await client.reader.readuntil(b"\n\n")
            else:
                await it.until(lambda: len(engine.requests) == 1)
        await it.until(lambda: engine.lost_clients == 1)
        it.assert_nothing_is_held()
        (record,) = it.usage_records()
        assert record["reason"] == "client_gone"


async def test_a_client_that_half_closes_counts_as_gone(lab, behaviours):
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.hang
        await it.start()
        async with it.client() as client:
            await client.send(request(chat()))
            await it.until(lambda: len(engine.requests) == 1)
            client.writer.write_eof()
            await it.until(lambda: engine.lost_clients == 1)
            assert await client.closed()
        it.assert_nothing_is_held()


async def test_a_client_that_does_not_read_holds_the_engine_back(lab, behaviours):
    sent = 0
    big = behaviours.chunk(behaviours.token_event("x" * 200_000))

    async def flood(request, writer):
        nonlocal sent
        writer.write(behaviours.stream_head)
        for _ in range(100):
            writer.write(big)
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")

    async with lab() as it:
        engine = await it.engine()
        engine.behave = flood
        await it.start()
        async with it.client() as client:
            client.writer.transport.pause_reading()
            await client.send(request(chat(stream=True)))
            await it.until(lambda: sent > 0)
            before = -1
            while before != sent:  # until it stands still
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 100
            client.writer.transport.resume_reading()
            answer = await client.answer()
            assert answer.whole
            assert len(answer.events) == 100
        it.assert_nothing_is_held()


async def test_a_client_that_never_reads_is_dropped_after_its_time(lab, behaviours):
    big = behaviours.chunk(behaviours.token_event("x" * 200_000))

    async def flood(request, writer):
        writer.write(behaviours.stream_head)
        while True:
            writer.write(big)
            await writer.drain()

    async with lab() as it:
        engine = await it.engine()
        engine.behave = flood
        await it.start(timeouts=Timeouts(client_write_s=0.2))
        async with it.client() as client:
            client.writer.transport.pause_reading()
            await client.send(request(chat(stream=True)))
            await it.until(lambda: engine.lost_clients == 1)
        it.assert_nothing_is_held()


async def test_a_kept_connection_that_the_engine_closed_costs_no_request(lab):
    """The engine closes an idle connection just as a request goes out on it."""
    async with lab() as it:
        engine = await it.engine()
        well = engine.behave

        async def well_then_close(request, writer):
            await well(request, writer)
            engine.behave = close_unanswered

        async def close_unanswered(request, writer):
            engine.behave = well
            writer.close()

        engine.behave = well_then_close
        await it.start()
        assert (await it.ask(body=chat())).status == 200
        assert (await it.ask(body=chat())).status == 200
        assert it.gateway.watches[0].upstream.stale_total == 1
        assert [record["attempts"] for record in it.usage_records()] == [1, 1]
        it.assert_nothing_is_held()


async def test_more_than_one_answer_to_a_request_is_not_given_to_the_next(lab, behaviours):
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n%b"

    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.in_pieces(answer % b"{}" + answer % b"[]", 1000)
        await it.start()
        assert (await it.ask(body=chat())).body == b"{}"
        engine.behave = behaviours.well
        assert (await it.ask(body=chat())).json["choices"]


def request(body) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

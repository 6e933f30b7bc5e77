"""One request after another through the real Envoy: what it gets, and what the picker knows of it."""

import asyncio
import json
import time

import pytest
from faking import CHAT, STREAM_HEAD, chat, chunk, request_bytes, respond_json, token_event, usage_event

from sumibi.routing.config import BandLimits
from sumibi.routing.decisions import Outcome

REASON = "x-llm-d-request-dropped-reason"


def served(it):
    """The engines that got a request for text, in order."""
    return [engine for engine in it.engines for _ in engine.requests]


async def test_a_chat_goes_to_an_engine_and_its_usage_is_recorded(lab):
    async with lab() as it:
        await it.start()
        answer = await it.ask(body=chat())
        assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 3)
        await it.nothing_is_held()
        (record,) = it.usage_records()
        assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (7, 4, 3)
        assert (record["exact"], record["reason"], record["attempts"]) == (True, "stop", 1)
        assert it.picker.picker.ends == {"completed": 1}
        (sent,) = served(it)[0].requests
        assert (sent.path, sent.json) == (CHAT, chat())


async def test_a_stream_flows_event_by_event(lab):
    async def slowly(request, writer):
        writer.write(STREAM_HEAD)
        for event in (token_event("a"), token_event("b"), usage_event(), "data: [DONE]\n\n"):
            writer.write(chunk(event))
            await writer.drain()
            await asyncio.sleep(0.2)
        writer.write(b"0\r\n\r\n")

    async with lab() as it:
        await it.start(engines=1)
        it.engines[0].behave = slowly
        async with it.client() as client:
            await client.send(request_bytes(CHAT, chat(stream=True)))
            await client.reader.readuntil(b"\r\n\r\n")
            first_t = time.monotonic()
            assert b'"a"' in await client.reader.readuntil(b"\n\n")
            assert time.monotonic() - first_t < 0.15
            assert b'"b"' in await client.reader.readuntil(b"\n\n")
            assert 0.15 < time.monotonic() - first_t < 0.4
            assert it.inflight == 1
        await it.nothing_is_held()


async def test_the_usage_of_a_stream_is_read_on_its_way(lab):
    async with lab() as it:
        await it.start()
        body = chat(stream=True, stream_options={"include_usage": True})
        answer = await it.ask(body=body, headers={"accept-encoding": "gzip"})
        assert answer.events[-1] == "[DONE]"
        await it.nothing_is_held()
        (record,) = it.usage_records()
        assert (record["output_tokens"], record["exact"]) == (3, True)
        assert record["ttft_s"] > 0
        (outcome,) = it.picker.router.outcomes()
        assert isinstance(outcome, Outcome)
        assert (outcome.cached_tokens, outcome.ttft_s is not None) == (4, True)
        (sent,) = served(it)[0].requests
        assert "accept-encoding" not in sent.headers


async def test_what_is_not_for_text_goes_to_any_endpoint(lab):
    async with lab() as it:
        await it.start()
        assert {card["id"] for card in (await it.ask("/v1/models")).json["data"]} == {"test-model"}
        assert (await it.ask("/v1/embeddings", body={"input": "x"})).status == 404  # the engine's word
        assert (await it.ask("/health")).status == 200
        assert it.picker.picker.passed_on == 3
        await it.nothing_is_held()


async def test_large_bodies_come_and_go_whole(lab):
    async def echo(request, writer):
        await respond_json(writer, 200, {"text": request.json["messages"][0]["content"]})

    async with lab() as it:
        await it.start()
        for engine in it.engines:
            engine.behave = echo
        text = "".join(chr(97 + i % 26) for i in range(2_000_000))
        answer = await it.ask(body=chat(text))
        assert (answer.status, answer.json["text"]) == (200, text)

        async def one(number):
            text = f"{number:02d}" * 690_000
            answer = await it.ask(body=chat(text))
            assert answer.json["text"] == text

        await asyncio.gather(*(one(number) for number in range(16)))
        await it.nothing_is_held()
        assert it.picker.picker.ends == {"completed": 17}


async def test_trailers_of_a_request_pass(lab):
    """Without retries: a route that has them makes Envoy 1.40 send the body of such a request twice."""
    async with lab() as it:
        await it.start(retries=0)
        body = json.dumps(chat()).encode()
        async with it.client() as client:
            head = b"POST %b HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\ntrailer: sum\r\n\r\n"
            await client.send(head % CHAT.encode() + b"%x\r\n%b\r\n0\r\nsum: 1\r\n\r\n" % (len(body), body))
            assert (await client.answer()).status == 200
        assert served(it)[0].requests[0].json == chat()
        await it.nothing_is_held()


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b"\xff\xfe", 400, "JSON"),
        (chat(model="another"), 404, "not served"),
        ({"model": "test-model"}, 400, "messages"),
        (chat(kv_transfer_params={}), 400, "kv_transfer_params"),
    ],
)
async def test_bad_requests_are_answered_here(lab, body, status, word):
    async with lab() as it:
        await it.start()
        answer = await it.ask(body=body)
        assert (answer.status, word in answer.json["error"]["message"]) == (status, True), answer.body
        assert served(it) == []
        await it.nothing_is_held()
        assert it.picker.picker.ends == {"rejected": 1}


FRAMINGS = ["content-length: 0\r\n\r\n", "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"]


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_an_empty_body_is_passed_on_or_refused_as_its_path_wants(lab, framing):
    async with lab() as it:
        await it.start()
        for path, status in ((CHAT, 400), ("/v1/unknown", 404)):
            async with it.client() as client:
                await client.send(f"POST {path} HTTP/1.1\r\nhost: test\r\n{framing}".encode())
                assert (await client.answer()).status == status, path
        assert served(it) == []
        await it.nothing_is_held()
        assert it.picker.picker.ends == {"rejected": 1, "completed": 1}


async def test_a_body_over_the_limit_gets_413(lab):
    async with lab() as it:
        await it.start(picker_max_body_bytes=100_000)
        answer = await it.ask(body=chat("x" * 200_000))
        assert (answer.status, "--max-body-bytes" in answer.json["error"]["message"]) == (413, True)
        assert served(it) == []
        await it.nothing_is_held()


async def test_without_a_ready_endpoint_everything_gets_503(lab):
    async with lab() as it:
        await it.start()
        for engine in it.engines:
            engine.healthy = False
        await it.until(lambda: not it.picker.ready)
        for path, body in ((CHAT, chat()), ("/v1/models", None)):
            answer = await it.ask(path, body)
            assert (answer.status, answer.headers[REASON]) == (503, "rejected-no-endpoints"), path
        await it.nothing_is_held()


@pytest.mark.parametrize("port_too", [True, False])
async def test_a_subset_hint_is_honoured(lab, port_too):
    async with lab() as it:
        await it.start_first(engines=3)
        port = it.engines[1].port
        await it.start_envoy(subset=[f"127.0.0.1:{port}"] if port_too else ["127.0.0.1"])
        for number in range(6):
            assert (await it.ask(body=chat(f"{number} is a prompt of its own"))).status == 200
        assert set(served(it)) == ({it.engines[1]} if port_too else set(served(it)))
        await it.nothing_is_held()


@pytest.mark.parametrize("subset", ["", "10.9.9.9:80", []])
async def test_a_subset_hint_that_leaves_nobody_gets_503(lab, subset):
    async with lab() as it:
        await it.start(subset=subset)
        for path, body in ((CHAT, chat()), ("/v1/models", None)):
            answer = await it.ask(path, body)
            assert (answer.status, answer.headers[REASON]) == (503, "rejected-no-endpoints")


async def test_a_dead_first_endpoint_is_passed_over_and_the_ledger_knows(lab):
    async with lab() as it:
        await it.start(engines=3, picker_scrape_interval_s=60.0)
        prompt = chat("a conversation that goes on " * 20)
        assert (await it.ask(body=prompt)).status == 200
        (warm,) = served(it)
        await warm.stop()
        answer = await it.ask(body=prompt)
        assert answer.status == 200
        await it.nothing_is_held()
        other = served(it)[-1] if served(it)[-1] is not warm else served(it)[0]
        first, last = it.picker.router.outcomes()[-2:]
        assert (first.endpoint, first.reason.value) == (warm.endpoint, "refused")
        assert (last.endpoint, last.reason.value, last.cached_tokens) == (other.endpoint, "stop", 4)
        assert it.usage_records()[-1]["attempts"] == 2
        assert not next(v for v in it.picker.router.fleet_view() if v.endpoint == warm.endpoint).reachable


async def test_the_head_of_an_answer_is_enough_to_know_whose_it_is(lab):
    """Envoy shows heads of answers and no bodies: the first one was dead, and ends are estimated."""
    async with lab() as it:
        await it.start(engines=2, picker_scrape_interval_s=60.0, response_body="NONE")
        prompt = chat("a conversation that goes on " * 20)
        assert (await it.ask(body=prompt)).status == 200
        await it.nothing_is_held()
        (warm,) = served(it)
        await warm.stop()
        assert (await it.ask(body={**prompt, "max_tokens": 5})).status == 200
        await it.nothing_is_held()
        reasons = [(o.endpoint == warm.endpoint, o.reason.value) for o in it.picker.router.outcomes()]
        assert reasons == [(True, "stop"), (True, "refused"), (False, "stop")]
        assert it.picker.picker.ends == {"unseen": 2}


async def test_when_no_endpoint_can_be_reached_that_is_told(lab):
    async with lab() as it:
        await it.start(engines=2, picker_scrape_interval_s=60.0)
        for engine in it.engines:
            await engine.stop()
        answer = await it.ask(body=chat())
        assert answer.status == 503
        await it.nothing_is_held()
        assert it.picker.picker.ends == {"completed": 1}
        assert it.picker.router.counters().finished


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_errors_of_engines_pass_and_end_the_reservation(lab, behaviours, status):
    async with lab() as it:
        await it.start(engines=1)
        it.engines[0].behave = behaviours.status(status, {"error": {"message": "no"}})
        answer = await it.ask(body=chat())
        assert (answer.status, answer.json["error"]["message"]) == (status, "no")
        await it.nothing_is_held()
        reason = it.picker.router.outcomes()[-1].reason.value
        assert reason == ("rejected" if status == 400 else "engine_error")


async def test_a_client_that_leaves_frees_its_reservation(lab, behaviours):
    async with lab() as it:
        await it.start(engines=1)
        it.engines[0].behave = behaviours.hang
        async with it.client() as client:
            await client.send(request_bytes(CHAT, chat(stream=True)))
            await it.until(lambda: it.inflight == 1 and bool(it.engines[0].requests))
        await it.nothing_is_held()
        await it.until(lambda: it.engines[0].lost_clients == 1)
        assert it.picker.picker.ends == {"aborted": 1}
        assert it.picker.router.outcomes()[-1].reason.value == "client_gone"


async def test_an_engine_that_dies_in_the_middle_frees_its_reservation(lab, behaviours):
    async with lab() as it:
        await it.start(engines=1)
        it.engines[0].behave = behaviours.write_then_break(STREAM_HEAD + chunk(token_event("a")))
        answer = await it.ask(body=chat(stream=True))
        assert not answer.whole
        await it.nothing_is_held()


async def test_a_request_may_be_evicted_under_way(lab, behaviours):
    async with lab() as it:
        await it.start(engines=1)
        it.engines[0].behave = behaviours.hang
        async with it.client() as client:
            await client.send(request_bytes(CHAT, chat()))
            await it.until(lambda: bool(it.engines[0].requests))
            (exchange,) = it.picker.shell.completions.values()
            exchange.evict(429, "evicted-priority", "somebody more urgent came")
            answer = await client.answer()
        assert (answer.status, answer.headers[REASON]) == (429, "evicted-priority")
        await it.nothing_is_held()
        await it.until(lambda: it.engines[0].lost_clients == 1)


async def test_held_requests_wait_longer_than_envoy_waits_for_messages(lab):
    """One endpoint with room for one: the second waits in the picker, the third does not fit the queue."""
    go = asyncio.Event()

    async def when_told(request, writer):
        await go.wait()
        await respond_json(writer, 200, {"choices": [], "usage": {}})

    async with lab() as it:
        await it.start(
            engines=1,
            message_timeout="0.5s",
            picker_hold_above_s=0.01,
            picker_max_sequences=1,
            picker_other_bands=BandLimits(max_requests=1, ttl_s=30.0),
        )
        it.engines[0].behave = when_told
        first = asyncio.create_task(it.ask(body=chat("one " * 4000)))
        await it.until(lambda: len(served(it)) == 1)
        second = asyncio.create_task(it.ask(body=chat("two " * 4000)))
        await it.until(lambda: it.picker.router.counters().held == 1)
        third = await it.ask(body=chat("three " * 4000))
        assert (third.status, third.headers[REASON]) == (429, "rejected-saturated")
        await asyncio.sleep(1.5)
        assert not second.done()
        go.set()
        assert [(await one).status for one in (first, second)] == [200, 200]
        await it.nothing_is_held()


async def test_a_held_request_whose_time_is_over_gets_429(lab, behaviours):
    async with lab() as it:
        await it.start(
            engines=1,
            picker_hold_above_s=0.01,
            picker_max_sequences=1,
            picker_other_bands=BandLimits(ttl_s=0.3),
        )
        it.engines[0].behave = behaviours.hang
        async with it.client() as client:
            await client.send(request_bytes(CHAT, chat("one " * 4000)))
            await it.until(lambda: len(served(it)) == 1)
            answer = await it.ask(body=chat("two " * 4000))
            assert (answer.status, answer.headers[REASON]) == (429, "rejected-ttl-expired")
        await it.nothing_is_held()


async def test_headers_say_model_and_identity_and_clients_do_not_say_ours(lab):
    async with lab() as it:
        await it.start(engines=1)
        headers = {
            "x-llm-d-model-name-rewrite": "test-model",
            "x-request-id": "mine-1",
            "x-prefiller-host-port": "10.0.0.9:80",
            "x-data-parallel-rank": "7",
            "x-gateway-destination-endpoint": "10.0.0.9:80",
            "x-kept": "1",
        }
        answer = await it.ask(body=chat(model="an alias of the gateway's", extra=[1]), headers=headers)
        assert answer.status == 200
        (sent,) = it.engines[0].requests
        assert sent.json == chat(extra=[1])
        assert "x-prefiller-host-port" not in sent.headers
        assert "x-data-parallel-rank" not in sent.headers
        assert sent.headers["x-gateway-destination-endpoint"] == f"127.0.0.1:{it.engines[0].port}"
        assert sent.headers["x-kept"] == "1"
        (record,) = it.usage_records()
        assert record["request"] == sent.headers["x-request-id"]

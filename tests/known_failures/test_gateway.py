"""F24, F27, F33, F35-F37, F45-F48, F50: the same on the wire, through a gateway between fake engines."""

import asyncio
import json
import random
import socket
import time

import pytest

from sumibi.core.kvevents import BlockStored
from sumibi.gateway.options import DEFAULT_MAX_BODY_BYTES, engine_options

BLOCK = 16
TOKENS = list(range(100, 100 + 8 * BLOCK))
BODY = {"model": "test-model", "prompt": TOKENS}
CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}]}


def stored(tokens, first_hash=1, parent=None):
    count = len(tokens) // BLOCK
    hashes = list(range(first_hash, first_hash + count))
    return BlockStored(hashes, parent, tokens[: count * BLOCK], BLOCK, medium="GPU")


def views(it):
    return {v.endpoint: v for v in it.gateway.router.fleet_view()}


async def test_f24_the_rank_that_has_the_blocks_is_addressed(lab):
    """R#2229, R#2379, R#2936, KV#357: two ranks publish on two ports; their events become one."""
    async with lab() as it:
        engine = await it.engine()
        engine.rank_events = [it.publisher(), it.publisher(), it.publisher()]
        await it.start()
        names = [f"{engine.url}#{rank}" for rank in range(3)]
        await it.until(lambda: all(v.grade == "exact" for v in views(it).values()))
        await engine.rank_events[2].publish(stored(TOKENS))
        await it.until(lambda: views(it)[names[2]].blocks == 8)
        assert [views(it)[name].blocks for name in names] == [0, 0, 8]
        for _ in range(3):
            await it.ask("/v1/completions", BODY)
        assert [r.headers["x-data-parallel-rank"] for r in engine.requests] == ["2"] * 3


@pytest.mark.parametrize("topic", [False, True], ids=["without topic", "with topic"])
async def test_f27_a_replay_is_read_in_both_layouts(lab, topic):
    """vllm#45174: replayed messages lack the topic frame that live ones have (added by vllm#45177)."""
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher(topic_in_replay=topic)
        await engine.events.publish(stored(TOKENS[: 2 * BLOCK]))
        await it.start()
        endpoint = engine.endpoint
        await it.until(lambda: views(it)[endpoint].blocks == 2 and views(it)[endpoint].grade == "exact")
        await engine.events.publish(stored(TOKENS[2 * BLOCK :], 3, 2), lose=True)
        await engine.events.publish(stored(list(range(BLOCK)), 20))
        await it.until(lambda: views(it)[endpoint].blocks == 9 and views(it)[endpoint].grade == "exact")
        assert it.gateway.metrics.endpoint(endpoint).replays_failed == 0


async def test_f33_a_restarted_gateway_learns_its_engines_anew(lab):
    """dyn#4904: a restarted frontend does not learn its workers again until they are restarted."""
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        for engine in (first, second):
            engine.events = it.publisher()
        await it.start()
        await it.until(lambda: all(v.grade == "exact" for v in views(it).values()))
        await second.events.publish(stored(TOKENS))
        await it.until(lambda: views(it)[second.endpoint].blocks == 8)
        await it.gateway.stop(0.0)
        await it.start()  # another one before the same engines
        await it.until(lambda: views(it)[second.endpoint].blocks == 8)
        await it.ask("/v1/completions", BODY)
        assert (len(first.requests), len(second.requests)) == (0, 1)


@pytest.mark.parametrize("seed", range(6))
async def test_f35_usage_is_right_under_any_chunking(lab, behaviours, seed):
    """R#2372, R#2447, R#2622: the usage's JSON is split over chunks and is lost."""
    events = [behaviours.token_event(word) for word in "abc"]
    events += [behaviours.usage_event(4321, 21, 4096), "data: [DONE]\n\n"]
    body = "".join(events)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(body)), rng.randint(1, 60)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    wire = behaviours.stream_head + b"".join(map(behaviours.chunk, pieces)) + b"0\r\n\r\n"
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.in_pieces(wire, rng.choice([1, 3, 17, 1000]))
        await it.start()
        answer = await it.ask(body={**CHAT, "stream": True})
        assert answer.body.decode() == body
        (record,) = it.usage_records()
        assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (4321, 4096, 21)


KEPT = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "remote_block_ids": [[1]],
    "remote_prefill_cached_tokens": 16,
}


async def apart(it, behaviours):
    """A prefill and a decode engine behind a gateway that always makes pairs."""
    prefill, decode = await it.engine(), await it.engine()
    body = {"usage": {"prompt_tokens": 4321}, "kv_transfer_params": KEPT}
    prefill.behave = behaviours.status(200, body)
    words = [f"{prefill.url},role=prefill", f"{decode.url},role=decode"]
    engines = engine_options([f"{word},connector=nixlv2" for word in words])
    await it.start(engines=engines, policy="round-robin")
    return prefill, decode


@pytest.mark.parametrize("size", [1, 3, 17, 1000])
async def test_f35_usage_of_a_pair_is_the_prefill_engine_s_under_any_chunking(lab, behaviours, size):
    """R#916, R#1274: the decode engine says that all of the prompt was cached."""
    events = [behaviours.token_event("a"), behaviours.usage_event(4321, 21, 4320), "data: [DONE]\n\n"]
    wire = behaviours.stream_head + behaviours.chunk("".join(events)) + b"0\r\n\r\n"
    async with lab() as it:
        _, decode = await apart(it, behaviours)
        decode.behave = behaviours.in_pieces(wire, size)
        answer = await it.ask(body={**CHAT, "stream": True})
        usage = json.loads(answer.events[1])["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (4321, {"cached_tokens": 16})
        it.assert_nothing_is_held()


async def test_f36_the_decode_half_leaves_after_the_prefill_s_answer(lab, behaviours):
    """R#2438, R#2451: the decode leg leaves first and waits 15.8 s for KV that nobody computes yet."""
    go = asyncio.Event()
    async with lab() as it:
        prefill, decode = await apart(it, behaviours)
        answer = prefill.behave

        async def behave(request, writer):
            await go.wait()
            await answer(request, writer)

        prefill.behave = behave
        asking = asyncio.ensure_future(it.ask(body=CHAT))
        await it.until(lambda: len(prefill.requests) == 1)
        await asyncio.sleep(0.05)
        assert decode.requests == []
        go.set()
        assert (await asking).status == 200
        assert decode.requests[0].json["kv_transfer_params"] == KEPT


@pytest.mark.parametrize("half", [0, 1])
async def test_f37_a_client_that_leaves_ends_the_work_of_both_engines(lab, behaviours, half):
    """L#1138, sgl#13631, sgl#6531: a cancel between prefill and decode strands what was reserved."""
    async with lab() as it:
        engines = await apart(it, behaviours)
        engines[half].behave = behaviours.hang
        async with it.client() as client:
            data = json.dumps(CHAT).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n"
            await client.send(head.encode() + data)
            await it.until(lambda: len(engines[half].requests) == 1)
        await it.until(lambda: engines[half].lost_clients == 1)
        await it.until(lambda: not it.gateway.shell.completions)
        it.assert_nothing_is_held()


async def test_f45_a_body_of_16_mb_passes_and_a_longer_one_is_named(lab):
    """GIE#2058: bodies above 4 MB are refused by the endpoint picker."""
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        frame = len(json.dumps({**CHAT, "messages": [{"role": "user", "content": ""}]}))
        text = "x" * (DEFAULT_MAX_BODY_BYTES - frame)
        body = json.dumps({**CHAT, "messages": [{"role": "user", "content": text}]}).encode()
        assert len(body) == DEFAULT_MAX_BODY_BYTES == 16 << 20
        assert (await it.ask(body=body)).status == 200
        assert engine.requests[0].body == body
        async with it.client() as client:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {(16 << 20) + 1}\r\n\r\n"
            )
            await client.send(head.encode())
            assert (await client.answer()).status == 413
        it.assert_nothing_is_held()


INVALID = [
    b'{"model": "test-model", "messages": [',
    b'{"model": "test-model", "messages": [{"role": "user", "content": "a"}]} trailing',
    b"{'model': 'test-model'}",
    b"\xff\xfe",
    b"[]",
]


@pytest.mark.parametrize("body", INVALID)
async def test_f46_a_body_that_is_no_json_is_refused_and_not_rewritten(lab, body):
    """GIE#847: invalid JSON is passed on as something else."""
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        answer = await it.ask(body=body)
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
        assert engine.requests == []
        it.assert_nothing_is_held()


async def test_f46_a_valid_body_reaches_the_engine_byte_for_byte(lab):
    """Odd spacing, escapes, repeated and unknown fields, numbers beyond 64 bits: all as it was written."""
    body = (
        b' {\n"messages" :[ {"content":"\\u00e9\\ud83d\\ude00", "role":"user","role":"user"}],'
        b'"x_unknown":1e400,"big":123456789012345678901234567890, "model":"test-model"  }\r\n'
    )
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        assert (await it.ask(body=body)).status == 200
        assert engine.requests[0].body == body


async def test_f47_two_thousand_streams_at_once_all_end_well(lab, behaviours):
    """ps#448: a router in Python collapses at a thousand concurrent streams and more."""
    streams, begun, go = 2000, 0, asyncio.Event()
    events = [behaviours.token_event("a"), behaviours.token_event("b"), behaviours.usage_event(7, 2, 0)]
    events.append("data: [DONE]\n\n")

    async def behave(request, writer):
        nonlocal begun
        writer.write(behaviours.stream_head + behaviours.chunk(events[0]))
        begun += 1
        await go.wait()
        writer.write(b"".join(map(behaviours.chunk, events[1:])) + b"0\r\n\r\n")
        await writer.drain()

    async with lab() as it:
        for _ in range(2):
            (await it.engine()).behave = behave
        await it.start()
        asks = []
        for sent in range(100, streams + 1, 100):  # more at once overflow the fake engines' backlog
            asks += [asyncio.ensure_future(it.ask(body={**CHAT, "stream": True})) for _ in range(100)]
            await it.until(lambda sent=sent: begun == sent)
        assert it.gateway.router.counters().requests_now == streams
        go.set()
        answers = await asyncio.gather(*asks)
        assert {(a.status, a.whole, a.body.decode()) for a in answers} == {(200, True, "".join(events))}
        taken = [len(engine.requests) for engine in it.engines]
        assert min(taken) > 0.45 * streams
        await it.until(lambda: it.gateway.shell.completions == {})
        it.assert_nothing_is_held()


async def test_f48_the_first_chunk_does_not_wait_for_an_acknowledgement(lab, behaviours):
    """dyn#14643: with Nagle's algorithm on, the chunk after the head waits 40 ms for a client that delays
    its acknowledgements. Every socket has it off; no stream of 30 comes near that time.
    """

    async def behave(request, writer):
        writer.write(behaviours.stream_head)
        await asyncio.sleep(0.001)
        for text in "ab":
            writer.write(behaviours.chunk(behaviours.token_event(text)))
            await asyncio.sleep(0.001)
        writer.write(behaviours.chunk("data: [DONE]\n\n") + b"0\r\n\r\n")

    async with lab() as it:
        (await it.engine()).behave = behave
        await it.start()
        took_s = []
        async with it.client() as client:
            for _ in range(30):
                began = time.perf_counter()
                assert (await client.ask(body={**CHAT, "stream": True})).status == 200
                took_s.append(time.perf_counter() - began)
            (client_side,) = it.gateway.server._connections
            engine_side = it.gateway.watches[0].upstream.idle[0]
            for transport in (client_side.transport, engine_side._transport):
                own = transport.get_extra_info("socket")
                assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sorted(took_s)[15] < 0.03


async def test_f50_what_was_predicted_stands_beside_what_came(lab, tmp_path):
    """R#792, R#2380, R#2896, R#2897: nobody can see how wrong the predictions are."""
    async with lab() as it:
        engine = await it.engine()
        engine.events = it.publisher()
        await it.start(record=tmp_path / "record")
        await engine.events.publish(stored(TOKENS))
        await it.until(lambda: views(it)[engine.endpoint].blocks == 8)
        await it.ask("/v1/completions", {**BODY, "stream": True, "stream_options": {"include_usage": True}})
        (outcome,) = it.gateway.router.outcomes()
        assert (outcome.predicted_cached_tokens, outcome.cached_tokens) == (7 * BLOCK, 4)
        assert outcome.predicted_ttft_s > 0
        assert 0 < outcome.ttft_s < 5
        page = (await it.ask("/metrics")).body.decode()
        assert f"sumibi_cached_tokens_predicted_total {7.0 * BLOCK}" in page
        assert "sumibi_cached_tokens_actual_total 4.0" in page


async def test_f42_children_that_name_their_agent_are_charged_to_it(lab, tmp_path):
    """R#2794 over HTTP: child agents with sessions of their own and the fairness id of their parent."""
    async with lab() as it:
        await it.engine()
        gateway = await it.start(record=tmp_path / "record")
        for session, fairness in (("1", "agent"), ("2", "agent"), ("3", "other"), ("4", None)):
            headers = {"x-session-id": session}
            if fairness is not None:
                headers["x-llm-d-inference-fairness-id"] = fairness
            assert (await it.ask(body=CHAT, headers=headers)).status == 200
        await gateway.stop(1.0)
        log = map(json.loads, (tmp_path / "record" / "events.jsonl").read_text().splitlines())
        arrived = [event for event in log if event["type"] == "Arrived"]
        sessions = [event["session"] for event in arrived]
        programs = [event.get("program", "") for event in arrived]
        assert len(set(sessions)) == 4
        assert programs[0] == programs[1] != ""
        assert programs[2] not in ("", programs[0])
        assert programs[3] == ""  # its session counts

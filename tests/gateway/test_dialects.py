"""Every dialect passes through: the client's bytes reach the engine, and the engine's the client; what is
read of them on the way, and what is said when something is wrong, is each dialect's own.
"""

import asyncio
import hashlib
import json

import pytest
import speaking
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speaking import (
    BODIES,
    CHAT,
    COUNT,
    GENERATE,
    GENERATING,
    HI,
    MESSAGES,
    NAMELESS,
    RESPONSES,
    SGLANG,
    STREAMS,
    WHOLE,
    answering,
)

from sumibi.gateway.http1 import Limits
from sumibi.gateway.options import Timeouts
from sumibi.routing.events import Arrived, Dispatched, Finished

PATHS = tuple(BODIES)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", GENERATING)
async def test_bytes_pass_both_ways_and_usage_is_read(lab, path, stream):
    body = json.dumps({**BODIES[path], "stream": stream, "unknown": {"a": [1, 2.50]}}).encode()
    async with lab() as it:
        engine = await it.engine()
        engine.behave = answering(chunked_at=37)
        await it.start()
        answer = await it.ask(path, body, {"anthropic-version": "2023-06-01"})
        (seen,) = engine.requests
        assert (seen.path, seen.body) == (path, body)
        assert seen.headers["anthropic-version"] == "2023-06-01"
        wanted = "".join(STREAMS[path]) if stream else json.dumps(WHOLE[path])
        assert (answer.status, answer.body.decode(), answer.whole) == (200, wanted, True)
        (record,) = it.usage_records()
        assert (record["model"], record["reason"], record["exact"]) == (
            "test-model",
            speaking.FINISH[path],
            True,
        )
        assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (7, 4, 3)
        it.assert_nothing_is_held()


async def test_a_stream_that_tells_no_usage_is_estimated(lab):
    """As many tokens as events, those aside that frame an answer of the dialect."""
    async with lab() as it:
        engine = await it.engine()

        async def behave(request, writer):
            events = [event for event in STREAMS[request.path] if "usage" not in event or "_start" in event]
            data = "".join(events).replace('"usage"', '"other"').replace('"meta_info"', '"other"').encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + data)
            await writer.drain()
            writer.close()

        engine.behave = behave
        await it.start()
        for path in (CHAT, GENERATE, SGLANG):
            await it.ask(path, {**BODIES[path], "stream": True})
        assert [(one["output_tokens"], one["exact"]) for one in it.usage_records()] == 3 * [(3, False)]


async def test_the_length_of_a_prompt_may_be_told_at_the_start_of_a_stream_only(lab):
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 4}}}
    end = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 3}}
    deltas = [{"type": "content_block_delta", "index": 0, "delta": {"text": "x"}}] * 9
    data = "".join(speaking.named(start, *deltas, end, {"type": "message_stop"})).encode()
    async with lab() as it:
        engine = await it.engine()

        async def behave(request, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            for at in range(0, len(data), 100):
                writer.write(data[at : at + 100])
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.close()

        engine.behave = behave
        await it.start()
        await it.ask(MESSAGES, {**BODIES[MESSAGES], "stream": True})
        (record,) = it.usage_records()
        assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (7, 4, 3)
        assert record["reason"] == "max_tokens"


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


async def test_unknown_fields_and_the_way_json_is_written_reach_the_engine_untouched(lab):
    """Whatever else a body holds, and however it is spelt, the engine gets the very bytes."""
    cases: list[tuple[str, bytes]] = []

    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(PATHS),
        st.dictionaries(st.text(min_size=9, max_size=12).map("x_".__add__), ANY_JSON, max_size=5),
        st.booleans(),
        st.sampled_from([None, 1, 3]),
        st.sampled_from([(",", ":"), (" , ", " :\t"), (",\n", ": ")]),
    )
    def collect(path, fields, ascii_only, indent, separators):
        data = json.dumps(
            {**fields, **BODIES[path]}, ensure_ascii=ascii_only, indent=indent, separators=separators
        )
        cases.append((path, data.encode(errors="surrogatepass")))

    collect()
    cases = [(path, body) for path, body in cases if _is_utf8(body)]
    assert {path for path, _ in cases} == set(PATHS)
    async with lab() as it:
        engine = await it.engine()
        engine.behave = answering()
        await it.start()
        async with it.client() as client:
            for path, body in cases:
                answer = await client.ask(path, body)
                assert answer.status == 200, (body, answer.body)
        assert [(one.path, one.body) for one in engine.requests] == cases


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


# -- what is refused


@pytest.mark.parametrize("path", PATHS)
async def test_errors_have_the_dialect_s_own_shape(lab, path):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        messages = path in (MESSAGES, COUNT)

        async def refused(body, status, kind, headers=None, method=None):
            answer = await it.ask(path, body, headers, method)
            assert answer.status == status
            said = speaking.error_of(path, answer.body)
            assert said[0] == kind
            return said[1]

        assert "JSON" in await refused(b"{", 400, "invalid_request_error")
        wrong = await refused({**BODIES[path], "stream": "yes", "tools": 7}, 400, "invalid_request_error")
        assert wrong.startswith(("stream: ", "tools: "))
        given_away = await refused({**BODIES[path], "kv_transfer_params": {}}, 400, "invalid_request_error")
        assert given_away.startswith("kv_transfer_params: ")
        await refused(None, 405, "invalid_request_error")
        if path != SGLANG:
            kind = "not_found_error" if messages else "invalid_request_error"
            assert "'other'" in await refused({**BODIES[path], "model": "other"}, 404, kind)
        if path not in NAMELESS:
            nameless = {name: value for name, value in BODIES[path].items() if name != "model"}
            assert await refused(nameless, 400, "invalid_request_error") == "model: this field is required"
        assert engine.requests == []
        assert it.gateway.metrics.refused_requests["400"] >= 3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("at_once", [True, False])
async def test_what_is_wrong_below_the_dialects_is_said_in_their_words_too(lab, path, at_once):
    async with lab() as it:
        await it.engine()
        await it.start()
        it.gateway.server.limits = Limits(body_bytes=100)
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        body = b"200\r\n" + b" " * 0x200 + b"\r\n" + b"0\r\n\r\n"
        async with it.client() as client:
            if at_once:
                await client.send(head + body)
            else:
                await client.send(head)
                await client.send(body)
            answer = await client.answer()
        assert answer.status == 413
        kind = "request_too_large" if path in (MESSAGES, COUNT) else "invalid_request_error"
        assert speaking.error_of(path, answer.body)[0] == kind
        it.assert_nothing_is_held()


@pytest.mark.parametrize("path", GENERATING)
async def test_an_engine_that_dies_ends_a_stream_in_the_dialect_s_own_way(lab, behaviours, path):
    begun = "".join(STREAMS[path][:2])
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.write_then_break(behaviours.stream_head + behaviours.chunk(begun))
        await it.start()
        answer = await it.ask(path, {**BODIES[path], "stream": True})
        parts = [part for part in answer.body.decode().split("\n\n") if part]
        assert "".join(f"{part}\n\n" for part in parts[:2]) == begun
        assert "broke off" in speaking.ending_error(path, parts[2])
        assert (answer.status, answer.whole, len(parts)) == (200, True, 3)
        if path == RESPONSES:
            assert json.loads(parts[2].partition("data: ")[2])["sequence_number"] == 2
        it.assert_nothing_is_held()


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_never_answers_is_said_in_the_dialect_s_words(lab, behaviours, path):
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.write_then_break(b"")
        await it.start()
        answer = await it.ask(path, BODIES[path])
        assert answer.status == 502
        kind = "api_error" if path in (MESSAGES, COUNT) else "server_error"
        assert speaking.error_of(path, answer.body)[0] == kind
        it.assert_nothing_is_held()


async def test_an_engine_s_own_errors_pass_as_they_are(lab, behaviours):
    said = {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.status(400, said)
        await it.start()
        answer = await it.ask(MESSAGES, BODIES[MESSAGES])
        assert (answer.status, answer.json) == (400, said)


@pytest.mark.parametrize(
    ("field", "value"),
    [("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("background", True)],
)
async def test_responses_that_need_a_memory_are_refused(lab, field, value):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        answer = await it.ask(RESPONSES, {**BODIES[RESPONSES], field: value})
        assert (answer.status, answer.json["error"]["param"]) == (400, field)
        assert "whole conversation" in answer.json["error"]["message"]
        assert (await it.ask("/v1/responses/resp_1")).status == 404
        assert engine.requests == []


# -- models and keys


@pytest.mark.parametrize("path", NAMELESS)
async def test_without_a_model_the_only_one_is_meant(lab, path):
    nameless = {name: value for name, value in BODIES[path].items() if name != "model"}
    async with lab() as it:
        engine = await it.engine()
        engine.behave = answering()
        engine.models, engine.root = ["test-model", "test-alias"], "/weights"
        await it.start()
        assert (await it.ask(path, nameless)).status == 200
        assert it.usage_records()[0]["model"] == "test-model"
        other = await it.engine()
        other.behave, other.models = answering(), ["other-model"]
    async with lab() as it:
        engine, other = await it.engine(), await it.engine()
        engine.behave = other.behave = answering()
        other.models = ["other-model"]
        await it.start()
        answer = await it.ask(path, nameless)
        assert (answer.status, answer.json["error"]["param"]) == (400, "model")
        assert "other-model, test-model" in answer.json["error"]["message"]
        assert (await it.ask(path, {**nameless, "model": "other-model"})).status == 200
        assert other.requests[0].json["model"] == "other-model"


async def test_without_a_model_and_before_any_engine_it_is_not_known_yet(lab):
    async with lab() as it:
        engine = await it.engine()
        await engine.stop()
        await it.start_only()
        answer = await it.ask(SGLANG, BODIES[SGLANG])
        assert (answer.status, answer.json["error"]["code"]) == (503, "engine_unavailable")


async def test_anthropic_s_way_to_send_a_key_is_one(lab, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(b'sk-1').hexdigest()}: team-a\n")
    async with lab() as it:
        engine = await it.engine()
        engine.behave = answering()
        await it.start(api_keys=keys)
        await it.ask(MESSAGES, BODIES[MESSAGES], {"x-api-key": "sk-1"})
        await it.ask(MESSAGES, BODIES[MESSAGES], {"Authorization": "Bearer sk-1"})
        await it.ask(MESSAGES, BODIES[MESSAGES], {"x-api-key": "sk-2"})
        assert [one["tenant"] for one in it.usage_records()] == ["team-a", "team-a", "anonymous"]
        for request in engine.requests:  # the gateway's own keys are none of an engine's business
            assert {"x-api-key", "authorization"}.isdisjoint(request.headers)


async def test_without_keys_of_its_own_the_gateway_passes_them_on(lab):
    async with lab() as it:
        engine = await it.engine()
        engine.behave = answering()
        await it.start()
        await it.ask(MESSAGES, BODIES[MESSAGES], {"x-api-key": "sk-1"})
        assert engine.requests[0].headers["x-api-key"] == "sk-1"


async def test_a_conversation_is_tokenised_by_an_engine_as_the_chat_that_it_is(lab):
    """Without a tokenizer here: one engine is asked, in the words that its /tokenize knows, once a prompt."""
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    found = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    said = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {**BODIES[MESSAGES], "messages": said, "tools": tools, "thinking": {"type": "disabled"}}
    async with lab() as it:
        engine = await it.engine()
        engine.behave, engine.tokens = answering(), list(range(100))
        await it.start()
        for _ in range(2):
            assert (await it.ask(MESSAGES, body)).status == 200
        asked = engine.tokenized
        assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "tool"]
        assert asked["tools"][0]["function"]["name"] == "f"
        assert asked["chat_template_kwargs"]["enable_thinking"] is False
        assert engine.tokenize_calls == 2  # the first one is to see whether it can
        assert it.gateway.router.decisions(1)[0].prompt_tokens == 100
        # What its /tokenize cannot know either gets byte keys, and reaches the engine all the same.
        picture = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]
        assert (await it.ask(MESSAGES, {**BODIES[MESSAGES], "messages": picture})).status == 200
        assert engine.tokenize_calls == 2
        # Its count is exact, too, and so are those of the gateway.
        count = {name: value for name, value in body.items() if name != "max_tokens"}
        assert (await it.ask(COUNT, count)).json == {"input_tokens": 100}
        assert it.gateway.metrics.token_counts == {"gateway": 1}


# -- how long a prompt is


async def test_a_count_is_asked_of_the_idlest_engine_when_tokens_are_not_known_here(lab):
    async with lab() as it:
        engines = [await it.engine(), await it.engine()]
        release = asyncio.Event()

        async def behave(request, writer):
            if request.path == CHAT:
                await release.wait()
            await answering()(request, writer)

        for engine in engines:
            engine.behave = behave
        await it.start()
        busy = asyncio.ensure_future(it.ask(CHAT, BODIES[CHAT]))
        await it.until(lambda: any(engine.requests for engine in engines))
        idle = next(engine for engine in engines if not engine.requests)
        for _ in range(3):
            answer = await it.ask(COUNT, BODIES[COUNT])
            assert (answer.status, answer.json) == (200, {"input_tokens": 7})
        assert [one.path for one in idle.requests] == 3 * [COUNT]
        assert it.gateway.router.counters().requests_now == 1  # counting is nothing that is placed
        release.set()
        await busy
        assert it.gateway.metrics.token_counts == {"engine": 3}
        assert len(it.usage_records()) == 1
        it.assert_nothing_is_held()


async def test_a_client_that_leaves_a_count_ends_it(lab, behaviours):
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.hang
        await it.start(timeouts=Timeouts(connect_s=2.0))
        async with it.client() as client:
            await client.send(_sent(COUNT, BODIES[COUNT]))
            await it.until(lambda: len(engine.requests) == 1)
        await it.until(lambda: engine.lost_clients == 1)
        await it.until(lambda: it.gateway.server.buffered_bytes == 0)


async def test_a_count_without_an_engine_is_an_overload(lab):
    async with lab() as it:
        engine = await it.engine()
        gateway = await it.start()
        await engine.stop()
        await it.until(lambda: not gateway.watches[0].up)
        answer = await it.ask(COUNT, BODIES[COUNT])
        assert (answer.status, speaking.error_of(COUNT, answer.body)[0]) == (503, "overloaded_error")


# -- one ledger over all routes


def _begin(path):
    return "".join(STREAMS[path][:2])


LEDGER = {
    # name: (engine's behaviour, body's fields, how it is told to have ended)
    "whole": ("well", {}, None),
    "stream": ("well", {"stream": True}, None),
    "refused by the engine": ("400", {}, "rejected"),
    "engine's fault": ("500", {}, "engine_error"),
    "gone before an answer": ("break", {}, "engine_gone"),
    "gone in its middle": ("begin", {"stream": True}, "engine_gone"),
    "client gone": ("hang", {}, "client_gone"),
    "client gone from a stream": ("begin and hang", {"stream": True}, "client_gone"),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("path", GENERATING)
async def test_every_route_is_in_the_same_ledger(lab, behaviours, path):
    """Whatever the route and however it ends: what was reserved is given back, once, and that is recorded."""
    begun = behaviours.stream_head + behaviours.chunk(_begin(path))

    async def begin_and_hang(request, writer):
        writer.write(begun)
        await behaviours.hang(request, writer)

    ways = {
        "well": answering(chunked_at=50),
        "400": behaviours.status(400, {"error": {"message": "no"}}),
        "500": behaviours.status(500, {"error": {"message": "no"}}),
        "break": behaviours.write_then_break(b""),
        "begin": behaviours.write_then_break(begun),
        "hang": behaviours.hang,
        "begin and hang": begin_and_hang,
    }
    async with lab() as it:
        engine = await it.engine()
        gateway = await it.start()
        events = []
        handle = gateway.router.handle
        gateway.router.handle = lambda event: (events.append(event), handle(event))[1]
        for name, (way, fields, reason) in LEDGER.items():
            engine.behave = ways[way]
            events.clear()
            seen = len(engine.requests)
            body = {**BODIES[path], **fields}
            if name.startswith("client gone"):
                async with it.client() as client:
                    await client.send(_sent(path, body))
                    await it.until(lambda seen=seen: len(engine.requests) == seen + 1)
                    (held,) = [view for view in gateway.router.fleet_view() if view.inflight]
                    assert held.inflight == 1
                    assert held.prefill_tokens + held.decoding > 0
            else:
                await it.ask(path, body)
            await it.until(lambda: not (gateway.shell.completions or gateway.server.buffered_bytes))
            it.assert_nothing_is_held()
            arrived = [event for event in events if isinstance(event, Arrived)]
            finished = [event for event in events if isinstance(event, Finished)]
            attempts = {event.attempt for event in events if isinstance(event, Dispatched)}
            assert len(arrived) == 1, name
            assert arrived[0].prompt_tokens > 0
            assert [event.attempt for event in finished] == sorted(attempts), (
                f"{name}: each attempt ends once"
            )
            record = it.usage_records()[-1]
            assert record["request"] == arrived[0].request
            assert record["reason"] == (reason or speaking.FINISH[path]), name
            if reason is None:
                assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (
                    7,
                    4,
                    3,
                )
        assert len(it.usage_records()) == len(LEDGER)
        counters = gateway.metrics.model("test-model")
        assert (counters.requests, counters.in_flight) == (len(LEDGER), 0)


def _sent(path, body):
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

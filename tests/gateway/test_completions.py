"""What a client gets through the gateway when nothing goes wrong."""

import asyncio
import hashlib
import json

import pytest

CHAT = "/v1/chat/completions"


def chat(**fields):
    return {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], **fields}


async def test_an_answer_and_its_request_pass_through_unchanged(lab):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        body = b'{ "messages":[{"content":"hi","role":"user"}],  "model":"test-model","x-unknown":[1,2.50]}'
        answer = await it.ask(body=body, headers={"X-Custom": "kept", "Content-Type": "application/json"})
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == "abc"
        (seen,) = engine.requests
        assert seen.body == body
        assert seen.headers["x-custom"] == "kept"
        assert seen.headers["host"] == f"127.0.0.1:{engine.port}"
        it.assert_nothing_is_held()


async def test_a_stream_passes_event_by_event_with_its_usage_recorded(lab):
    async with lab() as it:
        await it.engine()
        await it.start()
        answer = await it.ask(body=chat(stream=True, stream_options={"include_usage": True}))
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.whole
        assert answer.events[-1] == "[DONE]"
        texts = [json.loads(e)["choices"][0]["delta"]["content"] for e in answer.events[:4]]
        assert texts == ["", "a", "b", "c"]
        (record,) = it.usage_records()
        assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (7, 4, 3)
        assert record["exact"]
        it.assert_nothing_is_held()


async def test_without_usage_output_tokens_are_counted_and_marked_as_estimated(lab):
    async with lab() as it:
        await it.engine()
        await it.start()
        await it.ask(body=chat(stream=True))
        (record,) = it.usage_records()
        assert (record["output_tokens"], record["cached_tokens"], record["exact"]) == (3, None, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_record_says_in_the_engine_s_word_how_the_answer_ended(lab, behaviours, stream):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        choice = {"index": 0, "delta": {}, "message": {"content": "a"}, "finish_reason": "length"}
        if stream:
            last = "data: " + json.dumps({"choices": [choice]}) + "\n\n"
            events = [behaviours.token_event("a"), last, behaviours.usage_event(), "data: [DONE]\n\n"]
            data = behaviours.stream_head + b"".join(map(behaviours.chunk, events)) + b"0\r\n\r\n"
            engine.behave = behaviours.in_pieces(data, 20)
        else:
            engine.behave = behaviours.status(200, {"choices": [choice]})
        assert (await it.ask(body=chat(stream=stream))).status == 200
        (record,) = it.usage_records()
        assert record["reason"] == "length"
        assert it.gateway.router.counters().finished == {"stop": 1}, "a whole answer, whatever ended it"
        it.assert_nothing_is_held()


async def test_the_client_s_request_id_travels_and_comes_back(lab):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        answer = await it.ask(body=chat(), headers={"X-Request-Id": "my-id.1"})
        assert answer.headers["x-request-id"] == "my-id.1"
        assert engine.requests[0].headers["x-request-id"] == "my-id.1"
        spoofed = await it.ask(body=chat(), headers={"X-Request-Id": "a b\tc"})
        assert spoofed.headers["x-request-id"].startswith("req-")


async def test_hop_by_hop_and_secret_headers_do_not_reach_the_engine(lab):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        sent = {
            "Connection": "keep-alive, X-Named",
            "X-Named": "1",
            "TE": "trailers",
            "Proxy-Authorization": "Basic x",
            "X-Sumibi-Explain": "guess",
            "X-Data-Parallel-Rank": "3",
            "Authorization": "Bearer engine-key",
        }
        await it.ask(body=chat(), headers=sent)
        got = set(engine.requests[0].headers)
        assert got & {name.lower() for name in sent} == {"authorization"}


async def test_connections_are_kept_and_reused_on_both_sides(lab):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        before = engine.connections
        async with it.client() as client:
            for _ in range(5):
                assert (await client.ask(body=chat())).status == 200
        opened = it.gateway.watches[0].upstream.opened_total
        assert opened == 1
        assert engine.connections - before >= opened
        assert it.gateway.watches[0].upstream.open == 1


async def test_http_1_0_clients_get_a_plain_body_and_a_closed_connection(lab):
    async with lab() as it:
        await it.engine()
        await it.start()
        data = json.dumps(chat(stream=True)).encode()
        async with it.client() as client:
            head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(data)}\r\n\r\n"
            await client.send(head.encode() + data)
            answer = await client.answer()
            assert "transfer-encoding" not in answer.headers
            assert answer.events[-1] == "[DONE]"


async def test_models_and_health_come_from_the_engines(lab):
    async with lab() as it:
        first, second = await it.engine(), await it.engine()
        second.models = ["test-model", "other-model"]
        await it.start()
        cards = (await it.ask("/v1/models")).json["data"]
        assert {card["id"]: card["max_model_len"] for card in cards} == {
            "test-model": 4096,
            "other-model": 4096,
        }
        assert (await it.ask("/v1/models/other-model")).json["id"] == "other-model"
        assert (await it.ask("/v1/models/other%2Dmodel")).json["id"] == "other-model"  # as SDKs send a slash
        assert (await it.ask("/health")).status == 200
        await first.stop()
        await second.stop()
        await it.until(lambda: not any(watch.up for watch in it.gateway.watches))
        assert (await it.ask("/health")).status == 503


@pytest.mark.parametrize(
    ("path", "method", "body", "status", "code", "param"),
    [
        (CHAT, None, chat(model="nope"), 404, "model_not_found", "model"),
        (CHAT, None, b'{"model": "test-model", ', 400, "invalid_request_error", None),
        (CHAT, None, chat(messages="hello"), 400, "invalid_request_error", "messages"),
        (CHAT, None, chat(max_tokens=-1), 400, "invalid_request_error", "max_tokens"),
        (
            *(CHAT, None, chat(kv_transfer_params={"remote_host": "10.0.0.1"})),
            *(400, "invalid_request_error", "kv_transfer_params"),
        ),
        (CHAT, None, chat(bootstrap_host="10.0.0.1"), 400, "invalid_request_error", "bootstrap_host"),
        (CHAT, "GET", None, 405, "method_not_allowed", None),
        ("/v1/models", "DELETE", None, 405, "method_not_allowed", None),
        ("/v2/anything", "POST", {}, 404, "not_found", None),
        ("/v1/models/nope", None, None, 404, "model_not_found", "model"),
    ],
)
async def test_bad_requests_are_answered_here_in_openai_s_shape(lab, path, method, body, status, code, param):
    async with lab() as it:
        engine = await it.engine()
        await it.start()
        async with it.client() as client:
            answer = await client.ask(path, body, method=method)
            assert answer.status == status
            error = answer.json["error"]
            assert (error["code"], error["param"]) == (code, param)
            assert error["message"]
            assert answer.headers.get("x-request-id")
            # Nothing is lost by it: the connection goes on.
            assert (await client.ask(body=chat())).status == 200
        assert len(engine.requests) == 1


async def test_an_engine_s_own_refusal_reaches_the_client_as_it_is(lab, behaviours):
    async with lab() as it:
        engine = await it.engine()
        error = {"error": {"message": "prompt is longer than the context", "type": "BadRequestError"}}
        engine.behave = behaviours.status(400, error)
        await it.start()
        answer = await it.ask(body=chat())
        assert (answer.status, answer.json) == (400, error)
        it.assert_nothing_is_held()


async def test_a_request_before_any_engine_is_up_waits_for_one(lab):
    async with lab() as it:
        engine = await it.engine()
        await engine.stop()
        await it.start_only()
        asked = asyncio.ensure_future(it.ask(body=chat()))
        await it.until(lambda: it.gateway.router.counters().waiting_now == 1)
        await engine.start()
        assert (await asked).status == 200


async def test_long_prompts_are_read_beside_the_loop_and_short_ones_still_pass(lab):
    def body(number, size):
        messages = [{"role": "user", "content": f"{number} " + "smoke and embers " * (size // 17)}]
        return {"model": "test-model", "messages": messages}

    async with lab() as it:
        engine = await it.engine()
        await it.start()
        sizes = [400_000, 100, 100, 400_000, 100]
        answers = await asyncio.gather(*(it.ask(body=body(i, size)) for i, size in enumerate(sizes)))
        assert [answer.status for answer in answers] == [200] * 5
        assert len(engine.requests) == 5
        wrong = await it.ask(body={"model": "test-model", "messages": ["x" * 300_000]})
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "messages[0]")
        it.assert_nothing_is_held()


async def test_a_known_key_s_tenant_is_recorded_and_the_key_is_not_passed_on(lab, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(b'sk-team').hexdigest()}: team-a\n")
    async with lab() as it:
        engine = await it.engine()
        await it.start(api_keys=keys)
        await it.ask(body=chat(), headers={"Authorization": "Bearer sk-team"})
        await it.ask(body=chat(), headers={"Authorization": "Bearer sk-other"})
        assert [record["tenant"] for record in it.usage_records()] == ["team-a", "anonymous"]
        assert not any("authorization" in request.headers for request in engine.requests)

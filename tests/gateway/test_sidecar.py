"""The sidecar: a header in the place of a router, the same pairs, everything else passed through."""

import asyncio
import contextlib
import json

import pytest
import speaking

from sumibi.core.errors import ConfigError
from sumibi.gateway import sides
from sumibi.gateway.options import Timeouts
from sumibi.gateway.sidecar import Sidecar, SidecarOptions, sidecar_options

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"
PARAMETERS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "remote_prefill_cached_tokens": 3,
}
PREFILLED = {"choices": [], "usage": {"prompt_tokens": 7}, "kv_transfer_params": PARAMETERS}


TOLD = {"kv_connector": "stream", "kv_role": "kv_producer", "remote_host": "10.0.0.7", "remote_port": 5701}


@contextlib.asynccontextmanager
async def beside(it, behaviours, connector="nixlv2", **more):
    """(prefill engine, decode engine, sidecar) with the first one allowed."""
    prefill, decode = await it.engine(), await it.engine()
    prefill.behave = behaviours.status(200, PREFILLED)
    made = sidecar_options(
        decode.url, connector, [f"127.0.0.1:{prefill.port}"], host="127.0.0.1", port=1, kv_port=None
    )
    sidecar = Sidecar(
        SidecarOptions(decode=made.decode, allow=made.allow, port=0, timeouts=Timeouts(connect_s=1.0), **more)
    )
    await sidecar.start()
    try:
        yield prefill, decode, sidecar
        await it.until(lambda: not sidecar.shell.completions and not sidecar.server.buffered_bytes)
        assert sidecar.shell.prefillers == {}
        assert sidecar.server.faults == 0
    finally:
        await sidecar.stop(0.0)


async def ask(client_of, sidecar, **named):
    async with client_of(sidecar.server.port) as client:
        return await client.ask(**named)


def named(prefill):
    return {"x-prefiller-host-port": f"127.0.0.1:{prefill.port}", "x-request-id": "mine"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_prefill_engine_computes_the_prompt(lab, behaviours, client_of, stream):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        body = {**CHAT, "stream": stream, "max_tokens": 9}
        got = await ask(client_of, sidecar, body=body, headers=named(prefill))
        assert got.status == 200
        (first,), (second,) = prefill.requests, decode.requests
        assert (first.json["max_tokens"], first.json["stream"]) == (1, False)
        assert second.json == {**body, "kv_transfer_params": PARAMETERS}
        for request in (first, second):
            assert request.headers["x-request-id"] == "mine"
            assert "x-prefiller-host-port" not in request.headers
        if not stream:
            assert got.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        assert got.headers["x-sumibi-prefill"] == "ok; prompt_tokens=7; cached_tokens=3"
        legs = await ask(client_of, sidecar, path="/sidecar/legs")
        assert legs.json == {"nixlv2/ok": 1}


async def test_a_prefill_engine_that_is_not_allowed_gets_nothing(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        for word in ("127.0.0.1:1", f"127.0.0.1:{prefill.port},10.0.0.1:80", "", "x"):
            got = await ask(client_of, sidecar, body=CHAT, headers={"x-prefiller-host-port": word})
            assert (got.status, got.json["error"]["code"]) == (403, "prefiller_not_allowed")
        assert (prefill.requests, decode.requests) == ([], [])


@pytest.mark.parametrize("connector", ["nixlv2", "sglang", "stream"])
@pytest.mark.parametrize("fault", ["refuses", "errs", "breaks"])
async def test_a_prefill_that_fails_leads_to_a_whole_run(lab, behaviours, client_of, connector, fault):
    async with lab() as it, beside(it, behaviours, connector) as (prefill, decode, sidecar):

        async def behave(request, writer):
            awaited = {"kv_transfer_params", "bootstrap_room"} & set(request.json)
            await (behaviours.hang if awaited else behaviours.well)(request, writer)

        decode.behave = behave
        if fault == "refuses":
            await prefill.stop()
        elif fault == "errs":
            prefill.behave = behaviours.status(500, {})
        else:
            prefill.behave = behaviours.write_then_break(b"")
        got = await ask(client_of, sidecar, body=CHAT, headers=named(prefill))
        assert (got.status, decode.requests[-1].json) == (200, CHAT)
        reasons = {"refuses": "refused", "errs": "engine_error", "breaks": "engine_gone"}
        assert got.headers["x-sumibi-prefill"] == f"failed; reason={reasons[fault]}"


async def test_a_decode_engine_that_cannot_fetch_computes_it_by_itself(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):

        async def behave(request, writer):
            fetching = "kv_transfer_params" in request.json
            await (behaviours.status(500, {}) if fetching else behaviours.well)(request, writer)

        decode.behave = behave
        assert (await ask(client_of, sidecar, body=CHAT, headers=named(prefill))).status == 200
        decode.behave = behaviours.status(500, {"whole": False})
        got = await ask(client_of, sidecar, body=CHAT, headers=named(prefill))
        assert (got.status, got.json) == (500, {"whole": False})


@pytest.mark.parametrize("connector", ["nixlv2", "sglang", "stream"])
async def test_a_pair_whose_decode_engine_cannot_fetch_is_counted(lab, behaviours, client_of, connector):
    async with lab() as it, beside(it, behaviours, connector) as (prefill, decode, sidecar):
        if connector != "nixlv2":
            prefill.behave = behaviours.hang  # the decode engine is the first to know

        async def behave(request, writer):
            fetching = {"kv_transfer_params", "bootstrap_room"} & set(request.json)
            await (behaviours.status(503, {}) if fetching else behaviours.well)(request, writer)

        decode.behave = behave
        assert (await ask(client_of, sidecar, body=CHAT, headers=named(prefill))).status == 200
        legs = {f"{connector}/decode-failed": 1} | ({"nixlv2/ok": 1} if connector == "nixlv2" else {})
        assert (await ask(client_of, sidecar, path="/sidecar/legs")).json == legs


def side_channel(request):
    params = request.json["kv_transfer_params"]
    return params["remote_host"], params["remote_port"]


async def test_prefill_engines_say_where_their_side_channel_is(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours, "stream") as (prefill, decode, sidecar):
        prefill.transfer = TOLD
        for _ in range(3):
            assert (await ask(client_of, sidecar, body=CHAT, headers=named(prefill))).status == 200
        assert [side_channel(request) for request in decode.requests] == [("10.0.0.7", 5701)] * 3
        assert prefill.transfer_asks == 1, "and not for each request"
        # It was started again, and its side channel is elsewhere: a pair fails, so it is asked again.
        prefill.transfer = TOLD | {"remote_host": "", "remote_port": 5999}

        async def behave(request, writer):
            stale = "kv_transfer_params" in request.json and side_channel(request)[1] != 5999
            await (behaviours.status(503, {}) if stale else behaviours.well)(request, writer)

        decode.behave = behave
        for _ in range(2):
            assert (await ask(client_of, sidecar, body=CHAT, headers=named(prefill))).status == 200
        assert side_channel(decode.requests[-1]) == ("127.0.0.1", 5999)
        assert prefill.transfer_asks == 2


async def test_an_old_word_is_asked_for_again_beside_the_requests(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours, "stream") as (prefill, decode, sidecar):
        prefill.transfer, late_s = TOLD, 0.0
        sidecar.shell._sides._now = lambda: sidecar.shell.now() + late_s
        await ask(client_of, sidecar, body=CHAT, headers=named(prefill))
        prefill.transfer, late_s = TOLD | {"remote_port": 5999}, 11.0
        await ask(client_of, sidecar, body=CHAT, headers=named(prefill))
        await it.until(lambda: not sidecar.shell._sides._asking)
        await ask(client_of, sidecar, body=CHAT, headers=named(prefill))
        assert [side_channel(request)[1] for request in decode.requests] == [5701, 5701, 5999]


@pytest.mark.parametrize("silent", ["no such route", "keeps nothing", "no answer"])
async def test_an_engine_that_does_not_say_has_the_usual_port(
    lab, behaviours, client_of, silent, caplog, monkeypatch
):
    monkeypatch.setattr(sides, "_ASK_S", 0.1)
    async with lab() as it, beside(it, behaviours, "stream") as (prefill, decode, sidecar):
        if silent != "no such route":
            prefill.transfer = TOLD | ({"remote_port": 0} if silent == "keeps nothing" else {})
        prefill.transfer_wait_s = 60.0 if silent == "no answer" else 0.0
        for _ in range(2):
            assert (await ask(client_of, sidecar, body=CHAT, headers=named(prefill))).status == 200
        assert [side_channel(request) for request in decode.requests] == [("127.0.0.1", 5600)] * 2
        assert prefill.transfer_asks <= 1
        assert caplog.text.count("usual port is taken for it") == 1


@pytest.mark.parametrize(("connector", "kv_port"), [("stream", 7000), ("nixlv2", None)])
async def test_nobody_is_asked_for_what_is_said_or_not_needed(lab, behaviours, client_of, connector, kv_port):
    async with lab() as it, beside(it, behaviours, connector, kv_port=kv_port) as (prefill, decode, sidecar):
        prefill.transfer = TOLD
        assert (await ask(client_of, sidecar, body=CHAT, headers=named(prefill))).status == 200
        assert prefill.transfer_asks == 0
        if kv_port:
            assert side_channel(decode.requests[0]) == ("127.0.0.1", kv_port)


async def test_a_client_may_leave_while_an_engine_is_asked(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours, "stream") as (prefill, _, sidecar):
        prefill.transfer, prefill.transfer_wait_s = TOLD, 0.2
        asking = [
            asyncio.ensure_future(ask(client_of, sidecar, body=CHAT, headers=named(prefill))) for _ in "ab"
        ]
        await it.until(lambda: len(sidecar.shell.completions) == 2 and prefill.transfer_asks == 1)
        asking[0].cancel()
        await it.until(lambda: len(sidecar.shell.completions) == 1)
        assert (await asking[1]).status == 200
        await asyncio.gather(*asking, return_exceptions=True)
        assert (prefill.transfer_asks, len(prefill.requests)) == (1, 1)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_side_channel_s_port_is_one(port):
    with pytest.raises(ConfigError, match=f"--kv-port is {port}: want 1 to 65535"):
        sidecar_options("http://a:1", "stream", [], host="127.0.0.1", port=8000, kv_port=port)


@pytest.mark.parametrize("stream", [False, True])
async def test_everything_else_passes_through(lab, behaviours, client_of, stream):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        async with client_of(sidecar.server.port) as client:
            assert (await client.ask("/health")).json == {}
            assert (await client.ask("/v1/models")).json["data"][0]["id"] == "test-model"
            assert (await client.ask("/nothing")).status == 404
            body = {**CHAT, "stream": stream}
            got = await client.ask(PATH, body)
            assert (got.status, got.whole, decode.requests[0].json) == (200, True, body)
        assert prefill.requests == []


async def test_a_client_that_leaves_ends_what_it_asked_for(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        decode.behave = prefill.behave = behaviours.hang
        for headers, awaited in ((named(prefill), prefill), ({}, decode)):
            async with client_of(sidecar.server.port) as client:
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                data = b'{"model":"test-model","messages":[{"role":"user","content":"a"}]}'
                head = f"POST {PATH} HTTP/1.1\r\nHost: t\r\n{lines}Content-Length: {len(data)}\r\n\r\n"
                await client.send(head.encode() + data)
                await it.until(lambda engine=awaited: len(engine.requests) == 1)
            await it.until(lambda engine=awaited: engine.lost_clients == 1)


@pytest.mark.parametrize(
    ("decode", "connector", "allow", "wrong"),
    [
        ("127.0.0.1:1", "nixlv2", [], "http://HOST:PORT"),
        ("http://a:1", "nixl", [], "--connector"),
        ("http://a:1", "nixlv2", ["http://b:1"], "--allow-prefiller"),
        ("http://a:1", "nixlv2", ["b"], "--allow-prefiller"),
    ],
)
def test_a_malformed_option_is_named(decode, connector, allow, wrong):
    with pytest.raises(ConfigError, match=wrong):
        sidecar_options(decode, connector, allow, host="127.0.0.1", port=8000, kv_port=None)


RESPONSE = {"model": "test-model", "input": "hello", "temperature": 0}
RESPONSES = "/v1/responses"


def response_answer(**fields):
    """As vLLM answers: other names for usage, and in a stream the whole of it within the last event."""
    usage = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 6}}
    return {"id": "resp_1", "object": "response", "status": "completed", "usage": usage, **fields}


async def test_responses_are_pairs_as_well(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        prefill.behave = behaviours.status(200, response_answer(kv_transfer_params=PARAMETERS))
        decode.behave = behaviours.status(200, response_answer())
        body = {**RESPONSE, "max_output_tokens": 9, "store": True}
        got = await ask(client_of, sidecar, path=RESPONSES, body=body, headers=named(prefill))
        assert got.status == 200
        (first,), (second,) = prefill.requests, decode.requests
        assert (first.path, second.path) == (RESPONSES, RESPONSES)
        own = {name: first.json[name] for name in ("max_output_tokens", "stream", "store")}
        assert own == {"max_output_tokens": 1, "stream": False, "store": False}
        assert "max_tokens" not in first.json
        assert second.json == {**body, "kv_transfer_params": PARAMETERS}
        # What the prefill engine had in its cache, not what the decode engine was handed.
        assert got.json["usage"] == {
            "input_tokens": 7,
            "output_tokens": 2,
            "input_tokens_details": {"cached_tokens": 6},
        }
        assert (await ask(client_of, sidecar, path="/sidecar/legs")).json == {"nixlv2/ok": 1}


async def test_a_stream_of_a_response_says_what_the_prefill_engine_had(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        usage = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 2}}
        prefilled = response_answer(kv_transfer_params=PARAMETERS, usage=usage)
        prefill.behave = behaviours.status(200, prefilled)
        created = {"type": "response.created", "response": {"id": "resp_1", "usage": None}}
        completed = {"type": "response.completed", "response": response_answer(), "sequence_number": 2**60}
        events = "".join(
            f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in (created, completed)
        )
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(events)}\r\n\r\n"
        decode.behave = behaviours.in_pieces((head + events).encode(), 50)
        body = {**RESPONSE, "stream": True}
        got = await ask(client_of, sidecar, path=RESPONSES, body=body, headers=named(prefill))
        assert got.status == 200
        lines = [line for line in got.body.decode().splitlines() if line]
        assert lines[0::2] == ["event: response.created", "event: response.completed"]
        last = json.loads(lines[3].removeprefix("data: "))
        assert last["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 2}
        assert (last["sequence_number"], last["response"]["usage"]["output_tokens"]) == (2**60, 2)


@pytest.mark.parametrize(
    "field", [{"previous_response_id": "resp_0"}, {"background": True}, {"conversation": "conv_1"}]
)
async def test_a_response_that_hangs_on_the_engine_s_own_state_is_a_whole_run(
    lab, behaviours, client_of, field
):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        decode.behave = behaviours.status(200, response_answer())
        body = {**RESPONSE, **field}
        got = await ask(client_of, sidecar, path=RESPONSES, body=body, headers=named(prefill))
        assert (got.status, prefill.requests) == (200, [])
        assert [request.json for request in decode.requests] == [body]
        assert (await ask(client_of, sidecar, path="/sidecar/legs")).json == {"nixlv2/unfit-request": 1}


async def test_a_response_without_input_is_refused_and_other_routes_pass(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        got = await ask(
            client_of, sidecar, path=RESPONSES, body={"model": "test-model"}, headers=named(prefill)
        )
        assert got.status == 400
        assert "input" in got.json["error"]["message"]
        got = await ask(client_of, sidecar, path="/v1/responses/resp_1", method="GET", headers=named(prefill))
        assert got.status == 404, "the engine's own word"
        assert (prefill.requests, decode.requests) == ([], [])


@pytest.mark.parametrize("path", [speaking.MESSAGES, speaking.GENERATE, speaking.COMPLETIONS])
async def test_pairs_are_run_in_every_dialect(lab, behaviours, client_of, path):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        prefill.behave = behaviours.status(200, {**speaking.WHOLE[path], "kv_transfer_params": PARAMETERS})
        decode.behave = speaking.answering()
        body = speaking.BODIES[path]
        got = await ask(client_of, sidecar, path=path, body=body, headers=named(prefill))
        assert (got.status, got.json) == (200, speaking.WHOLE[path])
        assert (prefill.requests[0].path, decode.requests[0].path) == (path, path)
        assert decode.requests[0].json == {**body, "kv_transfer_params": PARAMETERS}
        assert (await ask(client_of, sidecar, path="/sidecar/legs")).json == {"nixlv2/ok": 1}


async def test_a_count_goes_to_the_decode_engine_as_it_is(lab, behaviours, client_of):
    async with lab() as it, beside(it, behaviours) as (prefill, decode, sidecar):
        decode.behave = speaking.answering()
        body = speaking.BODIES[speaking.COUNT]
        got = await ask(client_of, sidecar, path=speaking.COUNT, body=body, headers=named(prefill))
        assert (got.json, prefill.requests) == ({"input_tokens": 7}, [])
        decode.behave = behaviours.write_then_break(b"")
        got = await ask(client_of, sidecar, path=speaking.COUNT, body=body)
        assert speaking.error_of(speaking.COUNT, got.body)[0] == "api_error"

"""Pairs in every dialect: what each half gets, what the client is told, and what runs whole instead."""

import json

import pytest
from speaking import (
    BODIES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    GENERATING,
    MESSAGES,
    RESPONSES,
    SGLANG,
    STREAMS,
    WHOLE,
)

from sumibi.gateway.options import engine_options

PARAMETERS = {
    "do_remote_prefill": True,
    "remote_engine_id": "engine-1",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2, 3]],
}
LIMITS = {
    CHAT: {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1},
    COMPLETIONS: {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1},
    RESPONSES: {"max_output_tokens": 1, "store": False},
    MESSAGES: {"max_tokens": 1},
    GENERATE: {"sampling_params": {"max_tokens": 1, "min_tokens": 1, "temperature": 0.5}},
}
"""What makes a half one that computes the prompt and no more."""


async def pools(it, connector):
    prefill, decode = await it.engine(), await it.engine()
    words = [
        f"{prefill.url},role=prefill,connector={connector}",
        f"{decode.url},role=decode,connector={connector}",
    ]
    await it.start(engines=engine_options(words), policy="round-robin")

    async def compute(request, writer):
        data = json.dumps({**WHOLE[request.path], "kv_transfer_params": PARAMETERS}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()

    async def generate(request, writer):
        """An engine that fetched the whole prompt takes it for cached, all of it."""
        streams = request.json.get("stream")
        text = "".join(STREAMS[request.path]) if streams else json.dumps(WHOLE[request.path])
        data = (
            text.replace('"cached_tokens": 4', '"cached_tokens": 7')
            .replace(
                '"input_tokens": 3, "cache_read_input_tokens": 4',
                '"input_tokens": 0, "cache_read_input_tokens": 7',
            )
            .encode()
        )
        kind = b"text/event-stream" if streams else b"application/json"
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(data)) + data
        )
        await writer.drain()

    prefill.behave, decode.behave = compute, generate
    return prefill, decode


def asked(path, stream):
    body = {**BODIES[path], "stream": stream, "temperature": 0.5, "max_tokens": 50, "max_output_tokens": 50}
    if path in (GENERATE, RESPONSES):
        del body["max_tokens"], body["temperature"]
    if path != RESPONSES:
        del body["max_output_tokens"]
    if path == GENERATE:
        body["sampling_params"] = {"max_tokens": 50, "temperature": 0.5}
    return body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE])
async def test_a_pair_is_run_in_the_dialect_that_was_asked_in(lab, path, stream):
    async with lab() as it:
        prefill, decode = await pools(it, "nixlv2")
        body = asked(path, stream)
        got = await it.ask(path, body)
        (first,), (second,) = prefill.requests, decode.requests
        assert (first.path, second.path) == (path, path)
        half = {name: value for name, value in first.json.items() if name != "kv_transfer_params"}
        assert half == {**body, "stream": False, **LIMITS[path]}
        assert first.json["kv_transfer_params"]["do_remote_decode"] is True
        assert second.json == {**body, "kv_transfer_params": PARAMETERS}
        # The client is told what the prefill engine had, in the words of the dialect.
        assert got.status == 200
        wanted = STREAMS[path] if stream else [json.dumps(WHOLE[path])]
        assert list(map(_values, _parts(got.body.decode()))) == list(map(_values, _parts("".join(wanted))))
        (record,) = it.usage_records()
        assert (record["cached_tokens"], record["prompt_tokens"], record["output_tokens"]) == (4, 7, 3)
        assert (record["prefill"], record["endpoint"]) == (prefill.endpoint, decode.endpoint)
        assert it.gateway.metrics.legs == {("nixlv2", "ok"): 1}
        it.assert_nothing_is_held()


def _parts(text):
    return [part for part in text.split("\n\n") if part]


def _values(part):
    data = part.partition("data: ")[2] if "data: " in part else part
    if data == "[DONE]":
        return data
    said = json.loads(data)
    if said.get("type") == "message_start":  # what is known of the prompt is known at its start, too
        usage = said["message"]["usage"]
        said["message"]["usage"] = usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0)
    return said


@pytest.mark.parametrize("path", GENERATING)
async def test_sglangs_connector_is_spoken_where_its_engines_know_it(lab, path):
    spoken = path in (CHAT, COMPLETIONS, SGLANG)
    async with lab() as it:
        prefill, decode = await pools(it, "sglang")
        got = await it.ask(path, BODIES[path])
        assert got.status == 200
        assert len(decode.requests) == 1
        outcome = "ok" if spoken else "unfit-request"
        assert it.gateway.metrics.legs == {("sglang", outcome): 1}
        if spoken:
            first, second = prefill.requests[0].json, decode.requests[0].json
            assert first == second
            assert first["bootstrap_room"] > 0
        else:  # the decode engine does all of it, and gets the client's bytes
            assert prefill.requests == []
            assert decode.requests[0].json == BODIES[path]
        it.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (SGLANG, {}),
        (GENERATE, {"sampling_params": {"n": 2}}),
        (GENERATE, {"sampling_params": {"prompt_logprobs": 0}}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
    ],
)
async def test_what_a_pair_cannot_do_runs_whole_and_is_counted(lab, path, fields):
    async with lab() as it:
        prefill, decode = await pools(it, "nixlv2")
        body = {**BODIES[path], **fields}
        assert (await it.ask(path, body)).status == 200
        assert prefill.requests == []
        assert decode.requests[0].json == body
        assert it.gateway.metrics.legs == {("nixlv2", "unfit-request"): 1}
        it.assert_nothing_is_held()

"""What is learnt of an engine by asking it."""

import asyncio
import contextlib
import json

import pytest

from sumibi.core.errors import EngineUnavailable, WireError
from sumibi.engines.discovery import EventSource, TierInfo, discover, endpoint_id, event_source
from sumibi.engines.http import ask


@contextlib.asynccontextmanager
async def engine(routes, *, framing="length"):
    """An HTTP server that answers `routes` (path -> (status, body)); yields its URL."""

    async def serve(reader, writer):
        path = (await reader.readline()).split()[1].decode()
        status, body = routes.get(path, (404, b"{}"))
        head = f"HTTP/1.1 {status} X\r\n"
        if framing == "length":
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        elif framing == "chunked":
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunk + b"0\r\n\r\n")
        else:
            writer.write(f"{head}\r\n".encode() + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def routes():
    return {
        "/health": (200, b""),
        "/v1/models": (200, b'{"data": [{"id": "m", "root": "/models/m", "max_model_len": 8192}]}'),
        "/metrics": (200, b'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0\n'),
    }


async def test_an_engine_is_described_by_its_own_answers():
    async with engine(routes()) as url:
        info = await discover(url)
    assert (info.models, info.roots, info.max_model_tokens) == (("m",), ("/models/m",), 8192)
    (rank,) = info.ranks
    assert rank.endpoint == f"{url}#0"
    assert (rank.signals.block_tokens, rank.signals.kv_tokens) == (16, 160)
    assert rank.events is None


@pytest.mark.parametrize(
    ("models", "aliases"),
    [
        ([("m", "/w", None), ("also-m", "/w", None)], ("m", "also-m")),
        ([("m", "/w", None), ("adapter", "/w", "m")], ("m",)),
        ([("m", "/w", None), ("another", "/v", None)], ("m",)),
        ([("m", None, None), ("another", None, None)], ("m",)),
    ],
)
async def test_names_of_the_same_weights_are_aliases_and_adapters_are_not(models, aliases):
    data = [{"id": name, "root": root, "parent": parent} for name, root, parent in models]
    known = routes() | {"/v1/models": (200, json.dumps({"data": data}).encode())}
    async with engine(known) as url:
        assert (await discover(url)).aliases == aliases


@pytest.mark.parametrize("path", ["/metrics", "/kv_event_sources"])
async def test_an_engine_that_cannot_answer_now_is_not_taken_for_one_that_has_nothing_to_say(path):
    async with engine(routes() | {path: (503, b"busy")}) as url:
        with pytest.raises(EngineUnavailable, match=f"{path} answered 503"):
            await discover(url)


async def test_ranks_come_with_their_own_event_sources():
    sources = {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:5657",
        },
        "1": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5558",
            "replay_endpoint": None,
        },
        "2": {"enable_kv_cache_events": False},
    }
    known = routes() | {"/kv_event_sources": (200, json.dumps(sources).encode())}
    async with engine(known) as url:
        info = await discover(url)
    assert [rank.events for rank in info.ranks] == [
        EventSource("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5657"),
        EventSource("tcp://127.0.0.1:5558"),
    ]


async def test_tiers_below_the_device_are_told_beside_the_events():
    tiers = [{"name": "cpu", "tokens": 4096}, {"name": "storage", "shared": True, "gb_per_s": 2.5}]
    sources = {"0": {"kv_tiers": tiers, "kv_bytes_per_token": 23040}}
    known = routes() | {"/kv_event_sources": (200, json.dumps(sources).encode())}
    async with engine(known) as url:
        (rank,) = (await discover(url)).ranks
    assert rank.events is None
    assert rank.tiers == (TierInfo("cpu", tokens=4096), TierInfo("storage", shared=True, gb_per_s=2.5))
    assert rank.kv_bytes_per_token == 23040


async def test_numbers_of_a_tier_that_cannot_be_are_not_known():
    """A speed below zero would be a fetch that takes less than no time."""
    tiers = [
        {"name": "a", "tokens": -5, "gb_per_s": -1.0, "latency_s": -1.0},
        {"name": "b", "tokens": 0, "gb_per_s": 1e308, "latency_s": 1e308},
    ]
    known = routes() | {"/kv_event_sources": (200, json.dumps({"0": {"kv_tiers": tiers}}).encode())}
    async with engine(known) as url:
        (rank,) = (await discover(url)).ranks
    assert rank.tiers == (TierInfo("a"), TierInfo("b"))


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_answers_are_read_in_every_framing(framing):
    async with engine(routes(), framing=framing) as url:
        assert (await discover(url)).models == ("m",)


@pytest.mark.parametrize(
    ("path", "answer", "error"),
    [
        ("/health", (503, b""), EngineUnavailable),
        ("/v1/models", (500, b""), EngineUnavailable),
        ("/v1/models", (200, b"<html>"), WireError),
        ("/v1/models", (200, b'{"data": []}'), WireError),
        ("/v1/models", (200, b'{"data": [{"name": "m"}]}'), WireError),
    ],
)
async def test_what_is_no_engine_is_an_error(path, answer, error):
    async with engine(routes() | {path: answer}) as url:
        with pytest.raises(error, match=path):
            await discover(url)


@pytest.mark.parametrize("sources", [(404, b""), (200, b"[]"), (200, b'{"0": null}'), (200, b'{"a": {}}')])
async def test_an_engine_without_usable_event_sources_is_still_an_engine(sources):
    async with engine(routes() | {"/kv_event_sources": sources}) as url:
        assert (await discover(url)).ranks[0].events is None


async def test_an_engine_that_refuses_is_unavailable():
    async with engine(routes()) as url:
        pass
    with pytest.raises(EngineUnavailable, match="refused"):
        await discover(url)


async def test_an_engine_that_does_not_answer_is_given_up():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(EngineUnavailable, match=r"0\.05 s"):
        await ask("127.0.0.1", port, "/health", timeout_s=0.05)
    server.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"\x00\xff\r\n\r\n",
        b"",
    ],
    ids=["another protocol", "short", "no last chunk", "garbage", "nothing"],
)
async def test_what_is_no_whole_answer_is_none(answer):
    async def serve(reader, writer):
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with pytest.raises(EngineUnavailable):
        await ask("127.0.0.1", server.sockets[0].getsockname()[1], "/metrics")
    server.close()


async def test_an_answer_without_end_is_given_up():
    async def endless(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"100000\r\n" + b"a" * 0x100000 + b"\r\n")
                await writer.drain()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    with pytest.raises(EngineUnavailable, match="too long"):
        await ask("127.0.0.1", server.sockets[0].getsockname()[1], "/metrics", timeout_s=20)
    server.close()


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://host:8001", "http://host:8001#0"),
        ("http://HOST:8001/", "http://host:8001#0"),
        ("http://host", "http://host:80#0"),
        ("http://[::1]:8001", "http://[::1]:8001#0"),
    ],
)
def test_every_spelling_of_an_address_is_one_endpoint(url, endpoint):
    assert endpoint_id(url) == endpoint


@pytest.mark.parametrize(
    ("endpoint", "source"),
    [
        ("tcp://*:5557", EventSource("tcp://gpu-7:5557")),
        ("tcp://[::]:5557", EventSource("tcp://gpu-7:5557")),
        ("tcp://10.0.0.9:5557", EventSource("tcp://10.0.0.9:5557", bind=True)),
        ("ipc:///run/kv", EventSource("ipc:///run/kv")),
    ],
)
def test_who_binds_follows_vllm_s_rule(endpoint, source):
    assert event_source(endpoint, None, "gpu-7") == source

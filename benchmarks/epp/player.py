"""Plays Envoy towards a processor, and the engines that a picker asks how they are. A benchmark's worker.

A task is `{"port", "kind", "phase", "seconds"}`: as many requests as go within the time, `AT_ONCE` at a time.
"""

import asyncio
import itertools
import json
import random
import time

import grpc
import uvloop
from benchmarks.contestant import serve

from sumibi.gateway.epp.stream import FULL_DUPLEX, NO_BODY
from sumibi.gateway.epp.wire import SERVICE, ProcessingRequest, ProcessingResponse

AT_ONCE = 16
ENGINES = 8
MODEL = "model"
PIECE_BYTES = 65_536
"""As Envoy hands bodies over."""
SIZES = {"200 B": 200, "96 KB": 96_000, "96 KB + 20 chunks": 96_000}
CHUNKS = {"200 B": 1, "96 KB": 1, "96 KB + 20 chunks": 20}
CONVERSATIONS = 16
_EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
_USAGE = b'"usage":{"prompt_tokens":%d,"completion_tokens":20}'
_TEXT = """the of and to in is that for it as with was on are be by this from at or an which you we can have
not file test value error return function line path request server model cache token time memory thread lock
queue index block table list map string number true false none import class self result state event"""
_HEADERS = {
    "accept": b"*/*",
    "user-agent": b"OpenAI/Python 3.57.0",
    "content-type": b"application/json",
    "x-forwarded-proto": b"https",
    "x-forwarded-for": b"10.0.0.1",
    "x-stainless-lang": b"python",
    "x-session-id": b"session-1",
}


def body_of(kind, number):
    """A chat's body of the kind's size: the same words in an order of its own."""
    chance = random.Random(number)
    known = _TEXT.split()
    words = [chance.choice(known) for _ in range(SIZES[kind] // 3)]
    body = {"model": MODEL, "stream": CHUNKS[kind] > 1, "max_tokens": 20}
    empty = len(json.dumps({**body, "messages": [{"role": "user", "content": ""}]}))
    text = " ".join(words)[: max(8, SIZES[kind] - empty)]
    return json.dumps({**body, "messages": [{"role": "user", "content": text}]}).encode()


def request_messages(kind, number, mode):
    """What Envoy sends of a request: all but its id, which the first message ends with."""
    body = body_of(kind, number)
    headers = {":method": b"POST", ":path": b"/v1/chat/completions", ":authority": b"llm", ":scheme": b"http"}
    headers |= _HEADERS
    listed = [{"key": key, "raw_value": value} for key, value in headers.items()]
    head = ProcessingRequest(
        request_headers={"headers": {"headers": listed}},
        protocol_config={"request_body_mode": FULL_DUPLEX, "response_body_mode": mode},
    )
    pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
    rest = [
        ProcessingRequest(
            request_body={"body": piece, "end_of_stream": place == len(pieces) - 1}
        ).SerializeToString()
        for place, piece in enumerate(pieces)
    ]
    return head, rest


def answer_messages(kind):
    """What Envoy sends of an answer."""
    streamed = CHUNKS[kind] > 1
    content = b"text/event-stream" if streamed else b"application/json"
    headers = [(":status", b"200"), ("content-type", content), ("server", b"uvicorn")]
    listed = [{"key": key, "raw_value": value} for key, value in headers]
    usage = _USAGE % (SIZES[kind] // 4)
    last = (
        b'data: {"id":"c","choices":[],%b}\n\ndata: [DONE]\n\n' if streamed else b'{"choices":[],%b}'
    ) % usage
    pieces = [_EVENT] * (CHUNKS[kind] - 1) + [last]
    return [
        ProcessingRequest(response_headers={"headers": {"headers": listed}}).SerializeToString(),
        *(
            ProcessingRequest(
                response_body={"body": piece, "end_of_stream": place == len(pieces) - 1}
            ).SerializeToString()
            for place, piece in enumerate(pieces)
        ),
    ]


async def play(call, first, rest, answer):
    """One request. True if it went on to an endpoint and its answer came back whole."""
    write, read = call.write, call.read
    await write(first)
    for message in rest:
        await write(message)
    sent = 0
    while sent < len(rest):
        got = await read()
        if got is grpc.aio.EOF:
            return False
        reply = ProcessingResponse.FromString(got) if len(got) < 2000 else None
        if reply is not None and reply.HasField("immediate_response"):
            return False
        if reply is None or reply.HasField("request_body"):
            last = reply.request_body.response.body_mutation.streamed_response if reply else None
            sent += 1
            if last is None:
                last = ProcessingResponse.FromString(
                    got
                ).request_body.response.body_mutation.streamed_response
            if last.end_of_stream:
                break
    for message in answer:
        await write(message)
        if await read() is grpc.aio.EOF:
            return False
    await call.done_writing()
    return await read() is grpc.aio.EOF


class Engines:
    """What a picker asks engines: whether they are well, what they serve, how busy they are."""

    def __init__(self):
        self.ports = []

    async def start(self):
        for _ in range(ENGINES):
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.ports.append(server.sockets[0].getsockname()[1])

    async def _serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ", 2)[1]
        status, body = 200, b"{}"
        if path == b"/v1/models":
            body = json.dumps({"data": [{"id": MODEL, "max_model_len": 131_072}]}).encode()
        elif path == b"/metrics":
            body = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
            body += b'vllm:cache_config_info{block_size="16",num_gpu_blocks="65536"} 1.0\n'
        elif path != b"/health":
            status = 404
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()


class Player:
    """Runs tasks on a loop of its own."""

    def __init__(self):
        self.loop = uvloop.new_event_loop()
        self.engines = Engines()
        self.loop.run_until_complete(self.engines.start())
        self.numbers = itertools.count()

    def run(self, task):
        if task is None:
            # Engines are to be asked while nobody plays.
            self.loop.run_until_complete(asyncio.sleep(0.2))
            return self.engines.ports
        return self.loop.run_until_complete(self.window(**task))

    async def window(self, port, kind, phase, seconds):
        mode = FULL_DUPLEX if phase == "on" else NO_BODY
        conversations = [request_messages(kind, number, mode) for number in range(CONVERSATIONS)]
        answer = answer_messages(kind) if phase == "on" else []
        done = failed = 0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.stream_stream(f"/{SERVICE}/Process")
            end = time.monotonic() + seconds

            async def one_after_another():
                nonlocal done, failed
                while time.monotonic() < end:
                    number = next(self.numbers)
                    head, rest = conversations[number % CONVERSATIONS]
                    headers = head.request_headers.headers.headers
                    option = headers.add()
                    option.key, option.raw_value = "x-request-id", b"request-%d" % number
                    first = head.SerializeToString()
                    del headers[-1]
                    call = method()
                    if await play(call, first, rest, answer):
                        done += 1
                    else:
                        failed += 1
                        call.cancel()

            begun = time.monotonic()
            await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))
            took = time.monotonic() - begun
        return {"done": done, "failed": failed, "seconds": took}


def make():
    player = Player()
    return player.run, f"grpcio {grpc.__version__}"


if __name__ == "__main__":
    serve(make)

"""An engine that breaks on demand, as a process of its own: vLLM's wire as far as a gateway uses it.

A request says itself what goes wrong with it, in a field that gateways pass on (`"trouble": NAME`), and how
often it may (`"trouble_tries": N`, tries counted by `X-Sumibi-Attempt`). What goes wrong with the engine as a
whole is told on stdin, a JSON line each, answered by a line: see `Engine.told`. The process ends with its
stdin.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from sumibi.core.kvevents import BlockRemoved, BlockStored, encode_batch

MODEL = "trouble"
BLOCK_TOKENS = 16
_TOKENS = 5
"""Of an answer, if the request does not say."""
_KEPT_BATCHES = 20_000
"""For replays; vLLM keeps 10,000."""
_FOREVER_S = 3600.0
_ARRIVAL_S = 0.25
"""For what was sent to be read before what follows breaks it."""
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

Body = dict[str, Any]
Writer = asyncio.StreamWriter
Trouble = Callable[[Body, Writer], Awaitable[None]]


# --- one answer


def event(body: Body | str) -> bytes:
    """One server-sent event as a chunk."""
    text = body if isinstance(body, str) else json.dumps(body)
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(number: int) -> bytes:
    """The event of one token."""
    return event({"choices": [{"index": 0, "delta": {"content": f"t{number} "}}]})


def whole(body: Body, usage: Body | None = None, *, length: int = 0, status: int = 200) -> bytes:
    """An answer without streaming. `length` is added to the true one."""
    data = json.dumps({"choices": [{"message": {"content": "t"}, "finish_reason": "stop"}], "usage": usage})
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data) + length}\r\n\r\n{data}".encode()


def usual(body: Body) -> Body:
    """The usage of a sound answer."""
    prompt, output = 32, int(body.get("max_tokens") or _TOKENS)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def well(body: Body, to: Writer, usage: Body | None = None) -> None:
    """As it should be; `pace_s` between tokens."""
    usage = usage or usual(body)
    pace_s = float(body.get("pace_s") or 0.0)
    if not body.get("stream"):
        await asyncio.sleep(pace_s)
        to.write(whole(body, usage))
        return
    to.write(_STREAM_HEAD)
    for number in range(int(body.get("max_tokens") or _TOKENS)):
        to.write(token(number))
        await to.drain()
        if pace_s or number % 64 == 0:  # `drain` alone lets nobody else go on
            await asyncio.sleep(pace_s)
    to.write(event({"choices": [], "usage": usage}) + event("[DONE]") + b"0\r\n\r\n")


def reset(to: Writer) -> None:
    """Cut the connection with a reset, not an end."""
    sock = to.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    to.transport.abort()


async def _begin(body: Body, to: Writer) -> None:
    """The first of an answer, in the form that was asked for."""
    to.write(_STREAM_HEAD + token(0) + token(1) if body.get("stream") else whole(body)[:-10])
    await to.drain()
    await asyncio.sleep(_ARRIVAL_S)


async def hang(body: Body, to: Writer) -> None:
    """No answer, ever."""
    await asyncio.sleep(_FOREVER_S)


async def hang_midway(body: Body, to: Writer) -> None:
    """An answer that stops."""
    await _begin(body, to)
    await asyncio.sleep(_FOREVER_S)


async def reset_at_once(body: Body, to: Writer) -> None:
    """No answer but a reset."""
    reset(to)


async def reset_midway(body: Body, to: Writer) -> None:
    """A reset in an answer."""
    await _begin(body, to)
    reset(to)


async def close_midway(body: Body, to: Writer) -> None:
    """An orderly end in an answer."""
    await _begin(body, to)
    to.close()


async def garbage_status(body: Body, to: Writer) -> None:
    """Bytes that are no HTTP."""
    to.write(b"\x00\xff220 ready\r\nnonsense\r\n\r\n")


async def garbage_stream(body: Body, to: Writer) -> None:
    """A whole stream of bytes that are no events."""
    noise = random.Random(7).randbytes(5000)
    to.write(_STREAM_HEAD)
    for at in range(0, len(noise), 500):
        piece = noise[at : at + 500]
        to.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    to.write(b"0\r\n\r\n")


async def garbage_chunk(body: Body, to: Writer) -> None:
    """Framing that breaks after the first token."""
    to.write(_STREAM_HEAD + token(0))
    await to.drain()
    await asyncio.sleep(_ARRIVAL_S)
    to.write(b"zz\r\nno chunk\r\n")


async def length_too_long(body: Body, to: Writer) -> None:
    """More is announced than comes."""
    to.write(whole(body, usual(body), length=+10))
    to.close()


async def length_too_short(body: Body, to: Writer) -> None:
    """More comes than was announced."""
    to.write(whole(body, usual(body), length=-10))


async def usage_negative(body: Body, to: Writer) -> None:
    """Counts below zero."""
    await well(body, to, {**usual(body), "prompt_tokens": -5, "completion_tokens": -1})


async def usage_huge(body: Body, to: Writer) -> None:
    """Counts that no integer of 64 bits holds."""
    await well(body, to, {**usual(body), "prompt_tokens": 10**30, "completion_tokens": 10**30})


async def usage_contradicts(body: Body, to: Writer) -> None:
    """More cached than there was."""
    await well(body, to, {**usual(body), "prompt_tokens_details": {"cached_tokens": 10**6}})


async def error_in_stream(body: Body, to: Writer) -> None:
    """The engine's own word that it cannot go on."""
    to.write(_STREAM_HEAD + token(0) + event({"error": {"message": "out of memory"}}) + b"0\r\n\r\n")


def answers(status: int) -> Trouble:
    """An error answer."""

    async def answer(body: Body, to: Writer) -> None:
        to.write(whole(body, status=status))

    return answer


TROUBLES: dict[str, Trouble] = {
    "well": well,
    "hang": hang,
    "hang-midway": hang_midway,
    "reset": reset_at_once,
    "reset-midway": reset_midway,
    "close-midway": close_midway,
    "garbage-status": garbage_status,
    "garbage-stream": garbage_stream,
    "garbage-chunk": garbage_chunk,
    "length-too-long": length_too_long,
    "length-too-short": length_too_short,
    "usage-negative": usage_negative,
    "usage-huge": usage_huge,
    "usage-contradicts": usage_contradicts,
    "error-in-stream": error_in_stream,
    "400": answers(400),
    "429": answers(429),
    "500": answers(500),
}


# --- KV events


class Events:
    """Publishes blocks by ZMQ as vLLM does, answers replays, and loses or garbles messages when told to."""

    def __init__(self) -> None:
        context = zmq.asyncio.Context.instance()
        self.socket = context.socket(zmq.PUB)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # a flood must reach the other side's limit, not ours
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._replays = context.socket(zmq.ROUTER)
        self.replay_port = self._replays.bind_to_random_port("tcp://127.0.0.1")
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_BATCHES)
        self._next = 0
        self._block = 0
        self.replays = 0
        self._task = asyncio.ensure_future(self._serve_replays())

    async def publish(self, batches: int, *, lose: bool = False, disorder: bool = False) -> None:
        """Each batch a block stored and, after the first 50, an old one removed."""
        made = []
        for _ in range(batches):
            self._block += 1
            tokens = list(range(self._block, self._block + BLOCK_TOKENS))
            events: list[Any] = [BlockStored([self._block], None, tokens, BLOCK_TOKENS)]
            if self._block > 50:
                events.append(BlockRemoved([self._block - 50]))
            payload = encode_batch(0.0, events)
            self._kept.append((self._next, payload))
            made.append((self._next, payload))
            self._next += 1
        if disorder:
            made.reverse()
        for seq, payload in made if not lose else ():
            await self.socket.send_multipart([b"kv@trouble", seq.to_bytes(8, "big"), payload])

    async def garbage(self, messages: int) -> None:
        """Messages that are no batches."""
        draw = random.Random(messages)
        for number in range(messages):
            frames = [draw.randbytes(draw.randrange(30)) for _ in range(1 + number % 4)]
            await self.socket.send_multipart(frames)

    @property
    def published(self) -> int:
        """Batches of this life."""
        return self._next

    def forget(self) -> None:
        """A new process would begin anew."""
        self._kept.clear()
        self._next = self._block = 0

    async def _serve_replays(self) -> None:
        while True:
            peer, _, start = await self._replays.recv_multipart()
            self.replays += 1
            first = int.from_bytes(start, "big")
            for seq, payload in list(self._kept):
                if seq >= first:
                    await self._replays.send_multipart([peer, b"", seq.to_bytes(8, "big"), payload])
            await self._replays.send_multipart([peer, b"", b"\xff" * 8, b""])


# --- the engine


class Engine:
    """See the module."""

    def __init__(self, port: int, *, events: bool) -> None:
        self.port = port
        self._server: asyncio.Server | None = None
        self._writers: set[Writer] = set()
        self._started_s = 1000.0
        self._healthy = True
        self._flapping: asyncio.Task[None] | None = None
        self._events = Events() if events else None
        self._running = 0
        self._served = 0
        self._lost = 0  # requests whose connection was gone before their answer was written

    async def told(self, order: Body) -> Body:
        """Do what a line of stdin says, and answer.

        `{"do": "count"}`, `{"do": "flap", "every_s": 1}` (0 ends it), `{"do": "health", "is": false}`,
        `{"do": "restart"}` (as another process at the same place), `{"do": "publish", "batches": N, "lose":
        true, "disorder": true}`, `{"do": "garble", "messages": N}`.
        """
        match order:
            case {"do": "flap", "every_s": every_s}:
                await self._flap(every_s)
            case {"do": "health", "is": healthy}:
                self._healthy = healthy
            case {"do": "restart"}:
                self._started_s += 1
                await self._close()
                if self._events is not None:
                    self._events.forget()
                await self.listen()
            case {"do": "publish", "batches": batches, **how} if self._events is not None:
                await self._events.publish(batches, **{name: how[name] for name in how if name != "do"})
            case {"do": "garble", "messages": messages} if self._events is not None:
                await self._events.garbage(messages)
        counts = {"running": self._running, "served": self._served, "lost": self._lost}
        if self._events is not None:
            counts |= {"replays": self._events.replays, "published": self._events.published}
        return counts

    async def listen(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            reset(writer)
        await asyncio.sleep(0)

    async def _flap(self, every_s: float) -> None:
        if self._flapping is not None:
            self._flapping.cancel()
            await asyncio.gather(self._flapping, return_exceptions=True)
            self._flapping = None
        if every_s:
            self._flapping = asyncio.ensure_future(self._flap_on(every_s))
        elif self._server is None:
            await self.listen()

    async def _flap_on(self, every_s: float) -> None:
        while True:
            await self._close()
            await asyncio.sleep(every_s)
            await self.listen()
            await asyncio.sleep(every_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.transport.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split(" ")[1]
                if path.startswith("/v1/chat"):
                    await self._complete(json.loads(body), headers, reader, writer)
                else:
                    self._small(path, writer)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()

    async def _complete(
        self, body: Body, headers: dict[str, str], reader: asyncio.StreamReader, writer: Writer
    ) -> None:
        attempt = int(headers.get("x-sumibi-attempt", 1))
        name = body.get("trouble", "well") if attempt <= body.get("trouble_tries", 1) else "well"
        self._running += 1
        work = asyncio.ensure_future(TROUBLES[name](body, writer))
        gone = asyncio.ensure_future(_end_of(reader))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            broken = not work.done() or isinstance(work.exception(), ConnectionError)
            self._lost += broken
            self._served += not broken
            if broken or gone.done():
                raise ConnectionError
        finally:
            self._running -= 1
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _small(self, path: str, writer: Writer) -> None:
        status, body = 200, b"{}"
        if path == "/health":
            status = 200 if self._healthy else 503
        elif path == "/v1/models":
            body = json.dumps({"data": [{"id": MODEL, "max_model_len": 100_000}]}).encode()
        elif path == "/metrics":
            body = (
                b'vllm:num_requests_running{engine="0"} %d\nvllm:num_requests_waiting{engine="0"} 0\n'
                b'vllm:cache_config_info{block_size="16",num_gpu_blocks="5000"} 1.0\n'
                b"process_start_time_seconds %f\n" % (self._running, self._started_s)
            )
        elif path == "/kv_event_sources" and self._events is not None:
            source = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self._events.port}",
                "replay_endpoint": f"tcp://*:{self._events.replay_port}",
            }
            body = json.dumps({"0": source}).encode()
        else:
            status = 404
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Until the gateway closes; it sends nothing while it waits for an answer."""
    with contextlib.suppress(ConnectionError):
        await reader.read(1)


async def main(port: int, *, events: bool) -> None:
    """Listen, say where, then do as told until stdin ends."""
    engine = Engine(port, events=events)
    await engine.listen()
    print(json.dumps({"port": engine.port}), flush=True)
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        print(json.dumps(await engine.told(json.loads(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), events="events" in sys.argv[2:]))

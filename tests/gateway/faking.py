"""A small engine to break things with, and a client that speaks bytes: for every test of a door."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from sumibi.core.kvevents import KVEvent, encode_batch
from sumibi.prompts.dialects import DIALECTS

MODEL = "test-model"
CHAT = "/v1/chat/completions"


class Answer:
    """One HTTP answer as read from the wire."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, whole: bool) -> None:
        self.status, self.headers, self.body, self.whole = status, headers, body, whole

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """Data of each server-sent event."""
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]


class Client:
    """One connection to a server under test."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        return self

    async def __aexit__(self, *_exc) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ask(
        self, path: str = CHAT, body=None, headers: dict[str, str] | None = None, method=None
    ) -> Answer:
        """A whole request, and its whole answer."""
        await self.send(request_bytes(path, body, headers, method))
        return await self.answer()

    async def answer(self) -> Answer:
        """Read one answer; `whole` says whether its framing ended as it must."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as short:
            raise ConnectionError(f"closed after {short.partial!r}") from short
        lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
        status = int(lines[0].split()[1])
        if status == 100:
            return await self.answer()
        body, whole = bytearray(), True
        try:
            if headers.get("transfer-encoding") == "chunked":
                while True:
                    size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
                    body += (await self.reader.readexactly(size + 2))[:-2]
                    if size == 0:
                        break
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError) as short:
            body += getattr(short, "partial", b"")
            whole = False
        return Answer(status, headers, bytes(body), whole)

    async def closed(self) -> bool:
        """True once the server has closed the connection (and sent nothing more)."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read() == b""
        return True


def request_bytes(
    path: str, body=None, headers: dict[str, str] | None = None, method: str | None = None
) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if data:
        lines.append(f"Content-Length: {len(data)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def chat(text: str = "hello", **fields):
    """A chat request's body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def chunk(text: str) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text.encode())


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def token_event(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) + "\n\n"


def usage_event(prompt: int = 7, output: int = 3, cached: int = 4) -> str:
    return "data: " + json.dumps({"choices": [], "usage": usage(prompt, output, cached)}) + "\n\n"


def usage(prompt: int = 7, output: int = 3, cached: int = 4):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class EngineRequest(msgspec.Struct):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


Behaviour = Callable[[EngineRequest, asyncio.StreamWriter], Awaitable[None]]


async def answer_well(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
    """What an engine does: three tokens and usage, as a stream if asked for."""
    if request.json.get("stream"):
        events = [token_event(""), token_event("a"), token_event("b"), token_event("c")]
        if request.json.get("stream_options", {}).get("include_usage"):
            events.append(usage_event())
        events.append("data: [DONE]\n\n")
        writer.write(STREAM_HEAD)
        for event in events:
            writer.write(chunk(event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
    else:
        await respond_json(writer, 200, {"choices": [{"message": {"content": "abc"}}], "usage": usage()})


async def respond_json(writer: asyncio.StreamWriter, status: int, body) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


class FakeEngine:
    """Speaks as much of vLLM's wire as a gateway uses; `behave` may be replaced to misbehave."""

    def __init__(self) -> None:
        self.behave: Behaviour = answer_well
        self.requests: list[EngineRequest] = []
        """Completion requests, in order of arrival."""
        self.lost_clients = 0
        """Completion requests whose connection was closed before the answer was written."""
        self.connections = 0
        self.healthy = True
        self.models = [MODEL]
        self.root = ""
        """Where the weights of all its models are, as it says."""
        self.parents: dict[str, str] = {}
        """Adapter -> the model it is for."""
        self.metrics = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
        self.process_start_s = 1000.0
        self.events: FakePublisher | None = None
        """KV events of its only rank."""
        self.rank_events: list[FakePublisher] = []
        """KV events of each rank, of an engine with several."""
        self.tokens: list[int] | None = None
        """What /tokenize answers; None: there is no such route."""
        self.tokenize_calls = 0
        self.tokenized: object = None
        """The last question to it."""
        self.sources: dict[str, object] = {}
        """More that its only rank tells beside its KV events."""
        self.transfer: dict[str, object] | None = None
        """What /kv_transfer answers; None: there is no such route."""
        self.transfer_asks = 0
        self.transfer_wait_s = 0.0
        self.hints: list[str] = []
        """Requests that it was told to bring up."""
        self.hint_status: int | None = 202
        """What it answers to that; None: nothing."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> "FakeEngine":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"{self.url}#0"

    async def stop(self) -> None:
        """As kill -9 would: the listener and every connection are gone at once."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        try:
            while True:
                request = await _read_request(reader)
                if request is None:
                    return
                await self._answer(request, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, request: EngineRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        match request.path:
            case "/health":
                await respond_json(writer, 200 if self.healthy else 503, {})
            case "/v1/models":
                await respond_json(
                    writer,
                    200,
                    {
                        "data": [
                            {"id": m, "root": self.root, "parent": self.parents.get(m), "max_model_len": 4096}
                            for m in self.models
                        ]
                    },
                )
            case "/metrics":
                page = "".join(f'{k}{{engine="0"}} {v}\n' for k, v in self.metrics.items())
                page += 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
                page += f"process_start_time_seconds {self.process_start_s}\n"
                data = page.encode()
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            case "/kv_event_sources" if self.events is not None or self.rank_events:
                publishers = self.rank_events or [self.events]
                pages = {str(i): p.config | self.sources for i, p in enumerate(publishers)}
                await respond_json(writer, 200, pages)
            case "/kv_transfer" if self.transfer is not None:
                self.transfer_asks += 1
                await asyncio.sleep(self.transfer_wait_s)
                await respond_json(writer, 200, self.transfer)
            case "/kv_prefetch":
                self.hints.append(request.json["request_id"])
                if self.hint_status is None:
                    await asyncio.sleep(60)
                await respond_json(writer, self.hint_status or 500, {})
            case "/tokenize" if self.tokens is not None:
                self.tokenize_calls += 1
                self.tokenized = request.json
                await respond_json(writer, 200, {"tokens": self.tokens, "count": len(self.tokens)})
            case path if path in DIALECTS:
                self.requests.append(request)
                gone = asyncio.ensure_future(_watch_for_end(reader))
                work = asyncio.ensure_future(self.behave(request, writer))
                await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
                lost = not work.done() or isinstance(work.exception(), ConnectionError)
                self.lost_clients += lost
                for task in (gone, work):
                    task.cancel()
                await asyncio.gather(gone, work, return_exceptions=True)
                if lost or writer.transport.is_closing() or reader.at_eof():
                    raise ConnectionError
            case _:
                await respond_json(writer, 404, {"detail": "Not Found"})


async def _watch_for_end(reader: asyncio.StreamReader) -> None:
    """Until the peer closes; it sends nothing while it waits for an answer."""
    with contextlib.suppress(ConnectionError):
        assert await reader.read(1) == b""


async def _read_request(reader: asyncio.StreamReader) -> EngineRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
    if headers.get("transfer-encoding") == "chunked":
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return EngineRequest(method, path, headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    """A body in chunks; trailers are read and forgotten."""
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return bytes(body)


class FakePublisher:
    """KV events over ZMQ as vLLM publishes them, replay included."""

    def __init__(self, context: zmq.asyncio.Context, *, topic_in_replay: bool = True) -> None:
        self._context = context
        self._topic_in_replay = topic_in_replay
        self.batches: list[tuple[int, bytes]] = []
        self.next_seq = 0
        self.replays_asked: list[int] = []
        self.ends_replays = True
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._replay = context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.LINGER, 0)
        replay_port = self._replay.bind_to_random_port("tcp://127.0.0.1")
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
            "topic": "kv@test",
        }
        self._task = asyncio.ensure_future(self._serve_replays())

    def connect(self, address: str) -> None:
        """Publish to a subscriber that binds, too."""
        self._socket.connect(address)

    async def publish(self, *events: KVEvent, lose: bool = False) -> None:
        payload = encode_batch(float(self.next_seq), list(events))
        self.batches.append((self.next_seq, payload))
        if not lose:
            await self._socket.send_multipart([b"kv@test", self.next_seq.to_bytes(8, "big"), payload])
        self.next_seq += 1

    async def _serve_replays(self) -> None:
        while True:
            peer, _, start = await self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replays_asked.append(first)
            topic = [b"kv@test"] if self._topic_in_replay else []
            for seq, payload in self.batches:
                if seq >= first:
                    await self._replay.send_multipart([peer, b"", *topic, seq.to_bytes(8, "big"), payload])
            if not self.ends_replays:
                continue
            end = [b""] if self._topic_in_replay else []
            await self._replay.send_multipart([peer, b"", *end, b"\xff" * 8, b""])

    def close(self) -> None:
        self._task.cancel()
        self._socket.close()
        self._replay.close()


class Behaviours:
    """Ways in which an engine may answer a completion request."""

    @staticmethod
    def status(code: int, body) -> Behaviour:
        """Answer with a status of its own."""

        async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
            await respond_json(writer, code, body)

        return behave

    @staticmethod
    def write_then_break(data: bytes) -> Behaviour:
        """Send bytes, then cut the connection."""

        async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()

        return behave

    @staticmethod
    def in_pieces(data: bytes, size: int) -> Behaviour:
        """A whole answer, `size` bytes at a time."""

        async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
            for at in range(0, len(data), size):
                writer.write(data[at : at + size])
                await writer.drain()
                await asyncio.sleep(0)

        return behave

    @staticmethod
    async def hang(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        """Never answer."""
        await asyncio.sleep(3600)

    well = staticmethod(answer_well)
    stream_head = STREAM_HEAD
    chunk = staticmethod(chunk)
    token_event = staticmethod(token_event)
    usage_event = staticmethod(usage_event)

"""The engine's HTTP door: vLLM's routes over one `Engine`.

Runs in the event loop's thread and must not hold it up: the tokens of all streams pass through here. Long
prompts are therefore tokenised in a worker thread. A client that leaves ends its generation at once, also
while it waits for its first token.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import sumibi
from sumibi.core.errors import BadRequest, SumibiError
from sumibi.core.ids import new_id
from sumibi.engine.asked import Request
from sumibi.engine.choices import Choices, Piece
from sumibi.engine.dialects import COUNT_TOKENS, SPOKEN, Writer, error_body_for
from sumibi.engine.kvtiers import Hint, TierLink
from sumibi.engine.loop import Engine
from sumibi.engine.metrics import EngineMetrics
from sumibi.engine.options import KVEventsConfig
from sumibi.engine.requests import RequestReader
from sumibi.engine.wire import ModelCard, ModelList, Rendered, RenderedSampling, TierInfo, Tokenized
from sumibi.prompts.dialects import decode_body, parse_request
from sumibi.tiers import Tier

MAX_REQUEST_ID = 256
"""Characters of a client's request id that are kept."""
_ATTEMPT_DIGITS = 6
"""Of a header that counts attempts; a longer one is not read."""
MAX_BODY_BYTES = 64 * 1024 * 1024
_INLINE_BYTES = 16 * 1024
"""Bodies up to this are read in the event loop (a few milliseconds at most), longer ones in a thread."""

T = TypeVar("T")
_CHAT = "/v1/chat/completions"
_COMPLETION = "/v1/completions"


@dataclass(frozen=True, slots=True)
class EngineSources:
    """What `/kv_event_sources` tells."""

    kv_events: KVEventsConfig
    tiers: dict[Tier, TierInfo]
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Door:
    """What the routes answer from."""

    engine: Engine
    reader: RequestReader
    metrics: EngineMetrics
    sources: EngineSources
    dev_mode: bool
    tiers: TierLink | None = None

    def app(self) -> Starlette:
        """The ASGI application. The engine starts and stops with it."""
        routes = [
            *(Route(path, self.generate, methods=["POST"]) for path in SPOKEN),
            Route(COUNT_TOKENS, self.count_tokens, methods=["POST"]),
            Route(f"{_CHAT}/render", self.render, methods=["POST"]),
            Route(f"{_COMPLETION}/render", self.render, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics_page),
            Route("/kv_event_sources", self.kv_event_sources),
            Route("/kv_transfer", self.kv_transfer),
            Route("/kv_prefetch", self.kv_prefetch, methods=["POST"]),
        ]
        if self.dev_mode:
            routes.append(Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]))
        return Starlette(
            routes=routes,
            exception_handlers={
                SumibiError: _on_error,
                HTTPException: _on_http_error,
                ClientDisconnect: _on_client_left,
                Exception: _on_bug,
            },
            lifespan=self._lifespan,
        )

    async def generate(self, http: HttpRequest) -> Response:
        """`POST` to one of the paths of `SPOKEN`."""
        path: str = http.scope["path"]
        request = await _read(http, lambda body: self.reader.read(path, body))
        return _Answer(self.engine, self.reader, path, request, _name(http), _attempt(http))

    async def count_tokens(self, http: HttpRequest) -> Response:
        """`POST /v1/messages/count_tokens`: how many tokens the prompt of a message would have."""
        return _json({"input_tokens": await _read(http, self.reader.count)})

    async def render(self, http: HttpRequest) -> Response:
        """`POST .../render`: what the engine would compute; a list of prompts for completions, as in vLLM."""
        path: str = http.scope["path"].removesuffix("/render")
        request = await _read(http, lambda body: self.reader.read(path, body))
        rendered = [
            Rendered(
                request_id=new_id("render"),
                token_ids=job.token_ids,
                model=self.reader.model.name,
                stream=request.answer.stream,
                cache_salt=job.salt or None,
                sampling_params=RenderedSampling(
                    n=job.n,
                    max_tokens=job.params.max_tokens,
                    temperature=job.params.temperature,
                    top_p=job.params.top_p,
                    top_k=job.params.top_k,
                    min_p=job.params.min_p,
                ),
            )
            for job in request.jobs
        ]
        return _json(rendered[0] if path == _CHAT else rendered)

    async def tokenize(self, http: HttpRequest) -> Response:
        """`POST /tokenize` of a `prompt` or of `messages`, as the same request to a completion would be."""
        (token_ids,) = await _read(http, self._tokenize)
        return _json(
            Tokenized(count=len(token_ids), max_model_len=self.reader.model.max_tokens, tokens=token_ids)
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        """`POST /detokenize`: the text of `tokens`, special tokens shown."""
        request = await _read(http, lambda body: decode_body(_detokenize, body))
        text = self.reader.tokenizer.decode(request.tokens, skip_special_tokens=False)
        return _json({"prompt": text})

    async def models(self, http: HttpRequest) -> Response:
        """`GET /v1/models`."""
        model = self.reader.model
        card = ModelCard(id=model.name, root=model.root, max_model_len=model.max_tokens)
        return _json(ModelList([card]))

    async def health(self, http: HttpRequest) -> Response:
        """`GET /health`: 200 while the engine takes requests, else 503."""
        return Response(status_code=200 if self.engine.healthy else 503)

    async def version(self, http: HttpRequest) -> Response:
        """`GET /version`."""
        return _json({"version": f"sumibi {sumibi.__version__}"})

    async def metrics_page(self, http: HttpRequest) -> Response:
        """`GET /metrics`."""
        transfers = self.engine.transfers
        page = self.metrics.page() + (transfers.metrics.page() if transfers else b"")
        return Response(page, media_type="text/plain; version=0.0.4")

    async def kv_event_sources(self, http: HttpRequest) -> Response:
        """`GET /kv_event_sources`: where each data-parallel rank publishes (there is one)."""
        page = msgspec.to_builtins(self.sources.kv_events)
        page["kv_bytes_per_token"] = self.sources.kv_bytes_per_token
        page["kv_tiers"] = self._tier_infos()
        page["kv_prefetch"] = self.tiers is not None and self.tiers.prefetches
        return _json({"0": page})

    def _tier_infos(self) -> list[TierInfo]:
        """Each tier, with its speed as soon as that is measured."""
        speeds = self.tiers.speeds.told() if self.tiers is not None else {}
        infos = []
        for tier, info in self.sources.tiers.items():
            if self.tiers is not None:  # a reset gives the store another name
                info = msgspec.structs.replace(info, name=self.tiers.media[tier].lower())
            speed = speeds.get(tier)
            if speed is not None:
                info = msgspec.structs.replace(info, gb_per_s=speed.gb_per_s, latency_s=speed.latency_s)
            infos.append(info)
        return infos

    async def kv_transfer(self, http: HttpRequest) -> Response:
        """`GET /kv_transfer`: what a gateway has to know to pair this engine with another."""
        if self.engine.transfers is None:
            raise HTTPException(404, "this engine was started without --kv-transfer-config")
        return _json(self.engine.transfers.page)

    async def kv_prefetch(self, http: HttpRequest) -> Response:
        """`POST /kv_prefetch` with `{"request_id": ...}`: bring up to host memory what lower tiers have of a
        request that was answered here. 202: it will be, 404: no such request is remembered, 503: busy.
        """
        hint = await _read(http, lambda body: decode_body(_prefetch, body))
        if self.tiers is None:
            raise HTTPException(404, "this engine has no KV tiers; start it with --kv-tiers")
        outcome = self.tiers.prefetch(hint.request_id)
        return _json({"outcome": outcome}, _PREFETCH_STATUS[outcome])

    async def reset_prefix_cache(self, http: HttpRequest) -> Response:
        """`POST /reset_prefix_cache`, in development mode only: false while any block is held.

        `?reset_external=true` (vLLM's): nor is anything found that lies in the KV tiers now. In the shared
        store it stays for others.
        """
        if self.tiers is not None:
            await asyncio.to_thread(self.tiers.settle)
        done = await self.engine.clear_prefix_cache()
        if self.tiers is not None and http.query_params.get("reset_external", "").lower() in ("1", "true"):
            await asyncio.to_thread(self.tiers.clear)
        return _json({"success": done})

    def _tokenize(self, body: bytes) -> list[list[int]]:
        fields = decode_body(_tokenize, body)
        fields.setdefault("model", self.reader.model.name)
        path = _CHAT if "messages" in fields else _COMPLETION
        prompts = self.reader.tokenize(parse_request(path, msgspec.json.encode(fields)))
        if len(prompts) != 1:
            raise BadRequest("prompt: one text is needed", param="prompt")
        return prompts

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        transfers = self.engine.transfers
        self.engine.start()
        if transfers is not None:
            transfers.start()
        yield
        if transfers is not None:
            await asyncio.to_thread(transfers.stop)
        await self.engine.stop()
        if self.tiers is not None:
            await asyncio.to_thread(self.tiers.close)


class _Answer(Response):
    """Sends a generation's answer while watching for the client to leave."""

    def __init__(
        self,
        engine: Engine,
        reader: RequestReader,
        path: str,
        request: Request,
        request_id: str,
        attempt: int,
    ) -> None:
        super().__init__()
        self._request_id = request_id
        self._attempt = attempt
        self._engine = engine
        self._reader = reader
        self._path = path
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            generation = self._engine.submit(self._request.jobs, self._request_id, self._attempt)
        except SumibiError as error:
            await _send_whole(send, error.status, error_body_for(self._path, error))
            return
        tasks: set[asyncio.Task[None]] = set()
        try:
            model, tokenizer = self._reader.model, self._reader.tokenizer
            choices = Choices(self._request, generation, tokenizer, model.eos_token_ids)
            writer = SPOKEN[self._path].writer(model.name, choices, tokenizer)
            run = _send_events if self._request.answer.stream else _send_all
            work = asyncio.create_task(run(self._path, choices, writer, send))
            tasks = {work, asyncio.create_task(_client_left(receive))}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            generation.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _send_all(path: str, choices: Choices, writer: Writer, send: Send) -> None:
    """One JSON body, when everything is there."""
    merged: dict[int, Piece] = {}
    try:
        while not choices.done:
            for piece in await choices.take():
                merged.setdefault(piece.choice, Piece(piece.choice)).extend(piece)
    except SumibiError as error:
        await _send_whole(send, error.status, error_body_for(path, error))
        return
    await _send_whole(send, 200, writer.whole([merged[choice] for choice in sorted(merged)]))


async def _send_events(path: str, choices: Choices, writer: Writer, send: Send) -> None:
    """A stream. Headers go out with the first token, so that what fails before it has its own status."""
    begun = False
    try:
        while not choices.done:
            events = writer.events(await choices.take())
            if not begun:
                begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
    except SumibiError as error:
        if not begun:
            await _send_whole(send, error.status, error_body_for(path, error))
            return
        last = writer.failed(error)
    else:
        last = writer.end()
    await send({"type": "http.response.body", "body": last})


def _name(http: HttpRequest) -> str:
    """What the client calls its request; empty if it does not."""
    return http.headers.get("x-request-id", "")[:MAX_REQUEST_ID]


def _attempt(http: HttpRequest) -> int:
    """How often a gateway has sent the request under its name, this time included."""
    word = http.headers.get("x-sumibi-attempt", "")
    return int(word) if word.isascii() and word.isdigit() and len(word) <= _ATTEMPT_DIGITS else 1


class _Detokenize(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


class _Prefetch(msgspec.Struct):
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_ID)]


_prefetch = msgspec.json.Decoder(_Prefetch)
_PREFETCH_STATUS = {Hint.TAKEN: 202, Hint.UNKNOWN: 404, Hint.BUSY: 503}
_detokenize = msgspec.json.Decoder(_Detokenize)
_tokenize = msgspec.json.Decoder(dict[str, Any])


async def _read(http: HttpRequest, parse: Callable[[bytes], T]) -> T:
    """The body, parsed; in a worker thread if it is long."""
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")
    if len(body) <= _INLINE_BYTES:
        return parse(bytes(body))
    return await asyncio.to_thread(parse, bytes(body))


async def _client_left(receive: Receive) -> None:
    """Returns when the client has closed its side; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _json(payload: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(payload), status, media_type="application/json")


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, SumibiError)
    body = error_body_for(http.scope["path"], error)
    return Response(body, error.status, media_type="application/json")


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    """Unknown routes, wrong methods, bodies too large."""
    assert isinstance(error, HTTPException)
    return await _on_error(http, _HttpError(error))


async def _on_bug(http: HttpRequest, error: Exception) -> Response:
    """Anything unforeseen; the server logs it."""
    return await _on_error(http, SumibiError("the engine's server failed on this request"))


async def _on_client_left(http: HttpRequest, error: Exception) -> Response:
    """The client went while it was sending: nobody reads this answer."""
    return Response(status_code=499)


class _HttpError(SumibiError):
    """A status that the web framework decided on."""

    def __init__(self, cause: HTTPException) -> None:
        super().__init__(cause.detail)
        self.status = cause.status_code
        self.code = "not_found" if cause.status_code == 404 else "invalid_request_error"

"""What tokens an engine makes of a chat request: over HTTP, by whichever route it has."""

import http.client
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from sumibi.core.errors import ConfigError, EngineUnavailable, WireError

_TIMEOUT_S = 60.0
Answer = TypeVar("Answer")


class Route(StrEnum):
    """Where tokens can be had, best first."""

    RENDER = "/v1/chat/completions/render"
    """The chat API's own reading of a request, without computing it."""
    TOKENIZE = "/tokenize"
    """Reads messages too, though not every field of them as the chat API does."""


class Served(msgspec.Struct):
    """One model as `/v1/models` names it."""

    id: str
    root: str | None = None
    """Where its files are, as the engine sees them."""
    max_model_len: int | None = None


class Refused(Exception):
    """The engine refuses a request that is the client's fault (4xx); the message is the engine's."""


class _Models(msgspec.Struct):
    data: list[Served]


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class EngineDoor:
    """One engine at `url`. Keeps one connection; close it at the end."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for what is no http URL."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if parts.scheme != "http" or not host or parts.path.rstrip("/") not in ("", "/v1"):
            raise ConfigError(f"--against {url!r}: want http://HOST:PORT of an engine")
        self.url = f"http://{host}:{port or 80}"
        self._connection = http.client.HTTPConnection(host, port or 80, timeout=_TIMEOUT_S)
        self._more: dict[str, Any] = {}

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def models(self) -> list[Served]:
        """What it serves. Raises EngineUnavailable, WireError."""
        status, body = self._exchange("GET", "/v1/models", None)
        if status != 200:
            raise EngineUnavailable(f"{self.url}/v1/models answered {status}: {_said(body)}")
        return _decoded(body, _Models, "/v1/models").data

    def route(self, model: str) -> Route:
        """The best route that answers. Raises EngineUnavailable if none does."""
        hi = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        answers = []
        for route in Route:
            status, body = self._exchange("POST", route, msgspec.json.encode(hi))
            if status == 200:
                return route
            answers.append(f"{route} answered {status} ({_said(body)})")
        raise EngineUnavailable(
            f"{self.url} shows no tokens: {'; '.join(answers)}. vLLM has the first with --enable-scale-out,"
            " and /tokenize always"
        )

    def tokens(self, route: Route, request: dict[str, Any]) -> list[int]:
        """Token ids of a chat request. Raises Refused, EngineUnavailable, WireError."""
        if route is Route.TOKENIZE:
            names = ("model", "messages", "tools", "chat_template_kwargs")
            request = {name: request[name] for name in names if name in request}
        status, body = self._exchange("POST", route, msgspec.json.encode({**request, **self._more}))
        if status == 400 and "tools" in request and b"tool choice" in body and not self._more:
            # vLLM without a tool parser: requests with tools pass if nothing shall be called.
            self._more = {"tool_choice": "none"}
            return self.tokens(route, request)
        if 400 <= status < 500:
            raise Refused(_said(body))
        if status != 200:
            raise EngineUnavailable(f"{self.url}{route} answered {status}: {_said(body)}")
        if route is Route.RENDER:
            return _decoded(body, _Rendered, route).token_ids
        return _decoded(body, _Tokenized, route).tokens

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"} if body is not None else {}
        for attempt in (1, 2):  # an idle connection may have been closed meanwhile
            try:
                self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as cause:
                self._connection.close()
                if attempt == 2:
                    raise EngineUnavailable(f"no answer from {self.url}{path}: {cause}") from cause
        raise AssertionError


def _decoded(body: bytes, kind: type[Answer], path: str) -> Answer:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise WireError(f"the engine's answer to {path} is not understood: {cause}") from cause


def _said(body: bytes) -> str:
    """The words of an error answer."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        message = body.decode(errors="replace")
    return " ".join(str(message).split())[:300]

"""One streamed chat request, timed where a user sits: at the client's socket.

The first token is the first event that carries content; the clock starts before the request is written.
"""

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sumibi.core.errors import EngineUnavailable
from sumibi.demo.script import Message

REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request cost. `request_id` finds its decision at the admin door."""

    request_id: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    """Of `cached_tokens`, as the engine tells it: `device`, `host`, `disk`, `store`."""


class Stream:
    """An answer as it arrives; close it early to cancel the request."""

    def __init__(self, url: str, model: str, messages: list[Message], max_tokens: int) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S
        )
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._began = time.perf_counter()
        self._connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        self._response = self._connection.getresponse()
        self.request_id = self._response.headers.get("x-request-id", "")
        self.ttft_s: float | None = None
        if self._response.status != 200:
            said = self._response.read(2000).decode(errors="replace")
            self.close()
            raise EngineUnavailable(f"the gateway answered {self._response.status}: {said}")

    def events(self) -> Iterator[dict[str, Any]]:
        """Decoded server-sent events; `ttft_s` is set with the first one that carries content."""
        for line in self._response:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise EngineUnavailable(f"the stream ended with an error: {event['error']}")
            if self.ttft_s is None and any(c.get("delta", {}).get("content") for c in event["choices"]):
                self.ttft_s = time.perf_counter() - self._began
            yield event

    def wait_first_token(self) -> None:
        """Read until the first content; what follows stays unread."""
        for _ in self.events():
            if self.ttft_s is not None:
                return

    def close(self) -> None:
        """Drop the connection, which cancels what is still running."""
        self._response.close()
        self._connection.close()


def ask(url: str, model: str, messages: list[Message], max_tokens: int) -> Answer:
    """Send one request and read its whole answer. Raises EngineUnavailable, OSError."""
    stream = Stream(url, model, messages, max_tokens)
    try:
        usage: dict[str, Any] = {}
        for event in stream.events():
            usage = event.get("usage") or usage
    finally:
        stream.close()
    if stream.ttft_s is None or not usage:
        raise EngineUnavailable(f"request {stream.request_id}: the answer held no content or no usage")
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    by_tier = details.get("cached_tokens_by_tier") or ({"device": cached} if cached else {})
    return Answer(stream.request_id, stream.ttft_s, usage["prompt_tokens"], cached, by_tier)

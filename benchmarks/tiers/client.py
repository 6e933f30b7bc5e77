"""One streamed completion of token ids, timed at the client's socket."""

import http.client
import json
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request brought. Times are monotonic seconds."""

    sent_s: float
    token_times_s: list[float]
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]

    @property
    def ttft_s(self) -> float:
        """From before the request was written to the first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next."""
        times = self.token_times_s
        return [after - before for before, after in pairwise(times)]


def ask(url: str, model: str, prompt: list[int], max_tokens: int) -> Answer:
    """Send one greedy request and read its whole answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = json.dumps(body)
    usage: dict[str, Any] = {}
    times: list[float] = []
    sent_s = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {response.read(2000).decode()}")
        for line in response:
            now_s = time.perf_counter()
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(f"{url}: the stream ended with {event['error']}")
            if event["choices"]:
                times.append(now_s)
            usage = event.get("usage") or usage
    finally:
        connection.close()
    details = usage.get("prompt_tokens_details") or {}
    by_tier = details.get("cached_tokens_by_tier")
    cached = details.get("cached_tokens") or 0
    return Answer(sent_s, times, usage["prompt_tokens"], cached, by_tier or {"device": cached})


def random_tokens(name: str, count: int) -> list[int]:
    """Token ids without the special ones; every name gives others, the same on every machine."""
    draw = random.Random(name)
    return [draw.randrange(100, 49_000) for _ in range(count)]

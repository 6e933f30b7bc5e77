"""Every parser of what comes from outside, by name: each takes a fuzzer's bytes and raises what is wrong."""

from collections.abc import Callable
from random import Random

import fuzz_engines
import fuzz_http
import fuzz_words

Target = Callable[[bytes], None]

TARGETS: dict[str, Target] = {
    "http-requests": fuzz_http.requests,
    "http-answers": fuzz_http.answers,
    "dialects": fuzz_words.dialects,
    "streams": fuzz_words.streams,
    "answers": fuzz_words.answers,
    "kv-events": fuzz_words.kv_events,
    "connector-replies": fuzz_words.replies,
    "engines": fuzz_engines.engines,
    "metrics-pages": fuzz_words.pages,
    "blocks": fuzz_words.blocks,
}


def seeds(name: str, count: int = 200) -> list[bytes]:
    """Where a fuzzer begins: the same for every run."""
    draw = Random(name)
    return [draw.randbytes(draw.choice((4, 16, 60, 200))) for _ in range(count)]

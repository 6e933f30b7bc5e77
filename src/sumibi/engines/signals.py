"""What an engine's /metrics says about its load: vLLM's names and SGLang's.

Only the wanted lines are looked at: a busy vLLM's page is 100 KB of histograms, and it is read every
second for each engine.
"""

import re
from collections.abc import Iterator

import msgspec

_MAX_DIGITS = 18
"""Of a number that is believed."""
_LABEL = re.compile(rb'(?<!\w)(\w++)="((?:[^"\\]|\\.)*+)"')
"""From the beginning of a word and without going back: else a long word takes its length squared."""


class EngineSignals(msgspec.Struct, frozen=True):
    """One scrape of one data-parallel rank. None: the engine does not say."""

    running: int | None = None
    """Sequences being computed."""
    waiting: int | None = None
    """Requests in the engine's own queue."""
    kv_usage: float | None = None
    """0..1, 1 = the device KV cache is full."""
    block_tokens: int | None = None
    kv_tokens: int | None = None
    """Capacity of the device KV cache."""
    max_sequences: int | None = None
    """That it runs at once. vLLM does not say (its configuration is told in development mode only)."""
    process_start_s: float | None = None
    """Wall-clock start of the process: another value means another life."""


def parse_signals(page: bytes, *, rank: int = 0, ranks: int = 1) -> EngineSignals:
    """Signals of `rank` out of a metrics page in Prometheus' text form.

    With one rank, series with any `engine` label are summed up (several models may share an engine); with
    more, only those labelled `engine="<rank>"` count.
    """
    engine = None if ranks == 1 else str(rank).encode()
    running = _total(page, engine, b"vllm:num_requests_running", b"sglang:num_running_reqs")
    waiting = _total(page, engine, b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
    kv_usage = _highest(page, engine, b"vllm:kv_cache_usage_perc", b"sglang:token_usage")
    block_tokens, kv_tokens = _cache_size(page, engine)
    places = _highest(page, engine, b"sumibi:max_num_seqs")
    return EngineSignals(
        running=None if running is None else int(running),
        waiting=None if waiting is None else int(waiting),
        kv_usage=None if kv_usage is None else min(max(kv_usage, 0.0), 1.0),
        block_tokens=block_tokens,
        kv_tokens=kv_tokens,
        max_sequences=int(places) if places else None,
        process_start_s=_highest(page, None, b"process_start_time_seconds"),
    )


def _total(page: bytes, engine: bytes | None, *names: bytes) -> float | None:
    values = _values(page, engine, names)
    total = sum(values)
    return total if values and total < float("inf") else None


def _highest(page: bytes, engine: bytes | None, *names: bytes) -> float | None:
    return max(_values(page, engine, names), default=None)


def _values(page: bytes, engine: bytes | None, names: tuple[bytes, ...]) -> list[float]:
    """Finite, non-negative values of the first of `names` that the page has."""
    for name in names:
        values = []
        for labels, text in _series(page, name, engine):
            del labels
            try:
                value = float(text)
            except ValueError:
                continue
            if 0 <= value < float("inf"):
                values.append(value)
        if values:
            return values
    return []


def _cache_size(page: bytes, engine: bytes | None) -> tuple[int | None, int | None]:
    """(block size, capacity), both in tokens, from the labels of `cache_config_info`."""
    for name in (b"vllm:cache_config_info", b"sglang:cache_config_info"):
        for labels, _ in _series(page, name, engine):
            block = _int(labels, b"block_size", b"page_size")
            blocks = _int(labels, b"num_gpu_blocks", b"num_pages")
            tokens = _int(labels, b"kv_cache_size_tokens")
            if tokens is None and block is not None and blocks is not None:
                tokens = block * blocks
            return block, tokens
    tokens_total = _highest(page, engine, b"sglang:max_total_num_tokens")
    return None, None if tokens_total is None else int(tokens_total)


def _int(labels: dict[bytes, bytes], *names: bytes) -> int | None:
    """The first of `names` that holds a positive whole number."""
    for name in names:
        text = labels.get(name, b"")
        if text.isdigit() and len(text) <= _MAX_DIGITS and int(text) > 0:
            return int(text)
    return None


def _series(page: bytes, name: bytes, engine: bytes | None) -> Iterator[tuple[dict[bytes, bytes], bytes]]:
    """(labels, value text) of every line of the metric `name`."""
    at = 0
    while True:
        at = page.find(name, at)
        if at < 0:
            return
        start, at = at, at + len(name)
        if start > 0 and page[start - 1 : start] != b"\n":
            continue
        if page[at : at + 1] not in (b"{", b" "):
            continue  # a longer name that begins with this one
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        labels_text, brace, rest = line.rpartition(b"}")
        labels = dict(_LABEL.findall(labels_text)) if brace else {}
        if engine is not None and labels.get(b"engine", engine) != engine:
            continue
        value = rest.split()
        if value:
            yield labels, value[0]

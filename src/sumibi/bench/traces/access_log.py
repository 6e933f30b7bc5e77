"""OpenAI-style access logs: a JSON line a request, with its time, its messages or prompt text, its usage.

The text is hashed while it is read and not kept: stretches of bytes stand for blocks of tokens, as many
bytes as this log's usage says a token has. Names that are understood are in the tables below.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from sumibi.bench.traces.conversations import Asked, Conversations
from sumibi.bench.traces.lines import MAX_TOKENS, trace_error
from sumibi.core.errors import BadRequest
from sumibi.core.keys import DEFAULT_BLOCK_TOKENS
from sumibi.prompts.chunks import BYTES_PER_TOKEN, chunk_keys
from sumibi.prompts.dialects import PromptKind, PromptRequest, parse_request
from sumibi.sim.workload import Workload

TIME = ("time", "timestamp", "ts", "start_time", "created", "arrival")
"""Seconds, milliseconds or nanoseconds since 1970 (or since the log's start, in seconds), or ISO 8601."""
BODY = ("request", "body", "request_body", "input")
"""Where the request's body is if it is not the record itself; an object, or its JSON in a string."""
ANSWER = ("response", "response_body", "output")
"""Where `usage` is if it is not in the record itself."""
SESSION = ("session_id", "session", "conversation_id", "thread_id")
DURATION = (("duration_s", 1.0), ("latency_s", 1.0), ("duration_ms", 1e-3), ("latency_ms", 1e-3))

_MEASURED_LINES = 200
"""Requests from which the bytes of a token are learnt."""


@dataclass(slots=True)
class _Logged:
    start_s: float
    prompt: PromptRequest
    prompt_tokens: int | None
    output_tokens: int | None
    duration_s: float | None
    session: str


def matches(record: dict[str, object]) -> bool:
    """True if the first record of a file is of this format."""
    body = _body(record)
    return any(name in record for name in TIME) and ("messages" in body or "prompt" in body)


def read(path: Path, lines: Iterable[tuple[int, bytes]]) -> Workload:
    """All requests of a file, in an open loop; turns of one conversation are recognised by their prompts."""
    logged = (_logged(path, number, line) for number, line in lines)
    head = list(islice(logged, _MEASURED_LINES))
    bytes_per_token = _bytes_per_token(head)
    # chunk_keys reckons with its own bytes per token: ask for as many of its tokens as fill a block of ours
    chunk_tokens = max(1, round(DEFAULT_BLOCK_TOKENS * bytes_per_token / BYTES_PER_TOKEN))
    conversations = Conversations()
    for one in chain(head, logged):
        for keys, estimate in chunk_keys(one.prompt, chunk_tokens):
            tokens = one.prompt_tokens or round(estimate * BYTES_PER_TOKEN / bytes_per_token) or 1
            conversations.asked.append(
                Asked(
                    start_s=one.start_s,
                    keys=_as_many(keys.tolist(), tokens // DEFAULT_BLOCK_TOKENS, len(conversations.asked)),
                    prompt_tokens=tokens,
                    output_tokens=one.output_tokens,
                    end_s=None if one.duration_s is None else one.start_s + one.duration_s,
                    conversation=one.session,
                    max_tokens=one.prompt.max_tokens,
                    model=one.prompt.model,
                )
            )
    return conversations.workload(path.name.partition(".")[0], DEFAULT_BLOCK_TOKENS)


def _as_many(keys: list[int], blocks: int, unique: int) -> list[int]:
    """Keys for `blocks` blocks. Those that the text is too short for are nobody else's."""
    missing = blocks - len(keys)
    return keys[:blocks] + [hash((unique, i, *keys[-1:])) & ((1 << 64) - 1) for i in range(missing)]


def _bytes_per_token(head: list[_Logged]) -> float:
    read_bytes = tokens = 0
    for one in head:
        if one.prompt_tokens:
            read_bytes += sum(estimate * BYTES_PER_TOKEN for _, estimate in chunk_keys(one.prompt, 1 << 20))
            tokens += one.prompt_tokens
    return read_bytes / tokens if read_bytes else float(BYTES_PER_TOKEN)


def _logged(path: Path, number: int, line: bytes) -> _Logged:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise trace_error(path, number, f"is not JSON: {cause}") from cause
    if not isinstance(record, dict):
        raise trace_error(path, number, "must be a JSON object")
    body = _body(record)
    body.setdefault("model", record.get("model", "model"))
    where = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if "messages" not in body and "prompt" not in body:
        raise trace_error(path, number, f"needs `messages` or `prompt`, in itself or in one of {_all(BODY)}")
    try:
        prompt = parse_request(where, msgspec.json.encode(body))
        if prompt.kind is PromptKind.CHAT:
            _ = prompt.messages  # are decoded now, while it is known which line they are from
    except BadRequest as cause:
        raise trace_error(path, number, str(cause)) from cause
    usage = _usage(path, number, record)
    return _Logged(
        start_s=_time_s(path, number, record),
        prompt=prompt,
        prompt_tokens=_tokens(path, number, usage, ("prompt_tokens", "input_tokens")),
        output_tokens=_tokens(path, number, usage, ("completion_tokens", "output_tokens")),
        duration_s=_duration_s(record),
        session=str(next((record[name] for name in SESSION if record.get(name)), "")),
    )


def _usage(path: Path, number: int, record: dict[str, Any]) -> dict[str, Any]:
    for holder in (record, *(_object(record.get(name)) for name in ANSWER)):
        usage = holder.get("usage")
        if usage is not None:
            if not isinstance(usage, dict):
                raise trace_error(path, number, "`usage` must be an object")
            return usage
    return {}


def _body(record: dict[str, Any]) -> dict[str, Any]:
    """The request's body: the record itself, or where it is kept in it."""
    if "messages" in record or "prompt" in record:
        return record
    return next((body for name in BODY if (body := _object(record.get(name)))), record)


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return {}
    return value if isinstance(value, dict) else {}


def _tokens(path: Path, number: int, usage: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = usage.get(name)
        if value is not None:
            if type(value) is not int or not 0 <= value <= MAX_TOKENS:
                wanted = f"must be a whole number from 0 to {MAX_TOKENS}"
                raise trace_error(path, number, f"`usage.{name}` {wanted}, not {value!r}")
            return value
    return None


def _duration_s(record: dict[str, Any]) -> float | None:
    for name, unit_s in DURATION:
        value = record.get(name)
        if isinstance(value, int | float) and value >= 0:
            return float(value) * unit_s
    return None


def _time_s(path: Path, number: int, record: dict[str, Any]) -> float:
    name = next((name for name in TIME if record.get(name) is not None), None)
    if name is None:
        raise trace_error(path, number, f"has no time: one of {_all(TIME)} is needed")
    value = record[name]
    if isinstance(value, str):
        try:
            when = datetime.fromisoformat(value)
        except ValueError as cause:
            raise trace_error(path, number, f"`{name}` must be a number or ISO 8601: {cause}") from cause
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) / next(_units(abs(value)))
    raise trace_error(path, number, f"`{name}` must be a number or ISO 8601, not {value!r}")


def _units(value: float) -> Iterator[float]:
    """What a number of this size must be divided by to be seconds: 1e11 s is the year 5138."""
    for limit, divisor in ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6)):
        if value < limit:
            yield divisor
    yield 1e9


def _all(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)

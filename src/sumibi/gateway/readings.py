"""What is read of an answer, in the words of each dialect: token counts, why it ended, whether it failed.

A `Reading` is handed one JSON text, a whole answer or the data of one event of a stream, and says what it
finds. Which events it gets, and when, is the business of `answers`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from sumibi.engines.usage import MAX_TOKENS, tiers_of
from sumibi.prompts.dialects import Dialect

T = TypeVar("T")
_MAX_WORD: Final = 32


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    exact: bool
    """True if the engine said so; False if counted here."""
    cached_by_tier: dict[str, int] | None = None
    """`cached_tokens` by where they were, if the engine tells."""


class Said(NamedTuple):
    """What one JSON text says."""

    usage: Usage | None = None
    finish: str = ""
    """Why the answer ended, in the dialect's word; empty: it does not say."""
    failed: bool = False
    """It is the engine's word that it cannot go on."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one dialect are read."""

    read: Callable[[bytes], Said | None]
    """None for what is no answer in this dialect."""
    finish_word: bytes
    """Stands in every event that says why the answer ended."""
    usage_word: bytes = b'"usage"'
    """Stands in every event that has token counts."""
    overhead: int = 1
    """Events of a stream that bring no token."""
    opens_with_prompt: bool = False
    """The first event of a stream may have counts that the last ones leave out."""


def reading_of(dialect: Dialect) -> Reading:
    """The reading of answers to requests in `dialect`."""
    return _READINGS[dialect]


# -- OpenAI's chats and completions, vLLM's generate


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    cached_tokens_by_tier: Any = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    error: Any = None
    choices: list[_Choice] = []


class _OddAnswer(msgspec.Struct):
    """Whatever is in its choices must not stand in the way of the usage."""

    usage: _Usage | None = None
    error: Any = None


_answer = msgspec.json.Decoder(_Answer)
_odd_answer = msgspec.json.Decoder(_OddAnswer)
_DONE = b"[DONE]"


def _read_choices(text: bytes) -> Said | None:
    if text.strip() == _DONE:
        return None
    answer = _decode(_answer, text) or _decode(_odd_answer, text)
    if answer is None:
        return None
    choices = answer.choices if isinstance(answer, _Answer) else []
    finish = next((one.finish_reason for one in reversed(choices) if one.finish_reason), None)
    usage = answer.usage
    counts = None
    if usage is not None:
        counts = _counts(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details)
    return Said(counts, _word(finish), answer.error is not None)


# -- OpenAI's responses


class _ResponseUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _ResponseUsage | None = None
    incomplete_details: _Incomplete | None = None
    error: Any = None


class _ResponseEvent(_Response):
    type: str | None = None
    response: _Response | None = None


_response = msgspec.json.Decoder(_ResponseEvent)
_ENDED = ("completed", "incomplete", "failed", "cancelled")


def _read_response(text: bytes) -> Said | None:
    event = _decode(_response, text)
    if event is None:
        return None
    response = event.response or event
    usage, counts, finish = response.usage, None, ""
    if usage is not None:
        counts = _counts(usage.input_tokens, usage.output_tokens, usage.input_tokens_details)
    if response.status in _ENDED and (event.response is not None or event.type is None):
        details = response.incomplete_details
        finish = _word((details.reason if details is not None else None) or response.status)
    failed = event.type in ("error", "response.failed") or response.error is not None
    return Said(counts, finish, failed)


# -- Anthropic's messages


class _MessageUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct):
    usage: _MessageUsage | None = None
    stop_reason: str | None = None


class _MessageEvent(_Message):
    message: _Message | None = None
    delta: _Message | None = None
    error: Any = None


_message = msgspec.json.Decoder(_MessageEvent)


def _read_message(text: bytes) -> Said | None:
    event = _decode(_message, text)
    if event is None:
        return None
    usage = event.usage or (event.message.usage if event.message is not None else None)
    counts = None
    if usage is not None:
        read, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        prompt = usage.input_tokens
        if prompt is not None:  # what is in the cache, or was put there, is counted apart
            prompt += (read or 0) + (made or 0)
        details = _Details(read) if read is not None and prompt is not None else None
        counts = _counts(prompt, usage.output_tokens, details)
    stop = event.delta.stop_reason if event.delta is not None else event.stop_reason
    return Said(counts, _word(stop), event.error is not None)


# -- SGLang's generate


class _Reason(msgspec.Struct):
    type: str | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: msgspec.Raw = msgspec.Raw(b"null")


class _Generated(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None


_generated = msgspec.json.Decoder(_Generated | list[_Generated])
_reason = msgspec.json.Decoder(_Reason | None)


def _read_generated(text: bytes) -> Said | None:
    """Counts of a stream's events are those of the whole answer so far."""
    decoded = _decode(_generated, text)
    if decoded is None:
        return None
    answers = decoded if isinstance(decoded, list) else [decoded]
    metas = [one.meta_info for one in answers if one.meta_info is not None]
    counts = None
    if metas:
        cached = _sum(meta.cached_tokens for meta in metas)
        counts = _counts(
            _sum(meta.prompt_tokens for meta in metas),
            _sum(meta.completion_tokens for meta in metas),
            None if cached is None else _Details(cached),
        )
    reasons = [reason.type for meta in metas if (reason := _decode(_reason, meta.finish_reason)) is not None]
    return Said(
        counts, _word(reasons[-1] if reasons else None), any(one.error is not None for one in answers)
    )


def _sum(counts: Any) -> int | None:
    known = list(counts)
    return None if None in known else sum(known)


# -- in common


def _decode(decoder: "msgspec.json.Decoder[T]", text: bytes | msgspec.Raw) -> T | None:
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _word(said: str | None) -> str:
    return said[:_MAX_WORD] if said else ""


def _counts(prompt: int | None, output: int | None, details: _Details | None) -> Usage | None:
    """Token counts; None if they cannot be what they say."""
    cached = details.cached_tokens if details is not None else None
    counts = (prompt or 0, cached or 0, output or 0)
    if min(counts) < 0 or max(counts) > MAX_TOKENS or (cached or 0) > (prompt or 0):
        return None
    by_tier = None if details is None else tiers_of(details.cached_tokens_by_tier)
    return Usage(prompt, cached, output, exact=True, cached_by_tier=by_tier)


_CHOICES = Reading(_read_choices, b'"finish_reason"')
_MESSAGES = Reading(_read_message, b'"stop_reason"', overhead=5, opens_with_prompt=True)
_READINGS = {
    Dialect.CHAT: Reading(_read_choices, b'"finish_reason"', overhead=2),
    Dialect.COMPLETIONS: _CHOICES,
    Dialect.GENERATE: _CHOICES,
    Dialect.RESPONSES: Reading(_read_response, b'"status"', overhead=8),
    Dialect.MESSAGES: _MESSAGES,
    Dialect.COUNT_TOKENS: _MESSAGES,
    Dialect.SGLANG: Reading(_read_generated, b'"finish_reason"', usage_word=b'"meta_info"'),
}

"""What the gateway reads of an answer on its way through: where events end, how many, and the usage.

Nothing is parsed piece by piece. A stream is only cut at event boundaries, so that an error event can
always be put in after a whole event, however the engine's bytes were split; its usage is read once, from
its last events. The engine's `usage` is taken when it is there. A client that did not ask for it in its
stream (`stream_options.include_usage`) gets bytes without it, and we do not change requests: then output
tokens are counted as the events between the first and `[DONE]`, which is what vLLM sends one of per token,
and the record says that it is an estimate.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from sumibi.engines.usage import tiers_of

_EVENT_END = b"\n\n"
_CRLF_EVENT_END = b"\r\n\r\n"
_MAX_HELD_BYTES = 256 * 1024
"""An unfinished event longer than this is passed on as it is."""
_MAX_JSON_BYTES = 8 * 1024 * 1024
"""Longer answers without streaming are passed through and their usage is not read."""
_LAST_EVENTS = 4
"""How many of the last events are searched for usage, for an error, and for why it ended."""
_MAX_WORD = 32


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    exact: bool
    """True if the engine said so; False if counted here."""
    cached_by_tier: dict[str, int] | None = None
    """`cached_tokens` by where they were, if the engine tells."""


class Cached(msgspec.Struct, frozen=True):
    """What of a prompt an engine had, as another engine's answer is to say."""

    tokens: int
    by_tier: dict[str, int] | None = None
    """None: leave what is said of it."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    cached_tokens_by_tier: Any = None


class _WireUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    usage: _WireUsage | None = None
    error: Any = None
    choices: msgspec.Raw = msgspec.Raw(b"[]")
    """Whatever is in them must not stand in the way of the usage."""


_decoder = msgspec.json.Decoder(_Answer)
_choices = msgspec.json.Decoder(list[_Choice])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = msgspec.Raw(b"null")


class EventStream:
    """The body of a streamed answer: `feed` gives back what may go to the client now."""

    def __init__(self) -> None:
        self.events = 0
        """Whole events passed, `[DONE]` among them."""
        self.cached: Cached | None = None
        """What the usage is to say instead of the engine's word; None: leave it."""
        self._held = bytearray()
        self._last: list[bytes] = []  # the last blocks of whole events, newest last

    def feed(self, pieces: list[bytes]) -> bytes:
        """Whole events out of `pieces` and what was held before; empty if none is complete."""
        block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not self._held and block.endswith(_EVENT_END):
            return self._passed(block)
        return self._cut(block)

    def rest(self) -> bytes:
        """What is still held: an event that the engine did not finish."""
        rest = bytes(self._held)
        self._held.clear()
        return rest

    def usage(self) -> Usage | None:
        """Usage from the last events, None if there is none (or not in a form we know)."""
        return next(filter(None, map(_usage, self._newest(b'"usage"'))), None)

    def finish(self) -> str:
        """Why the engine says that it ended (`stop`, `length`, ...); empty: it does not."""
        return next(filter(None, map(_finish, self._newest(b'"finish_reason"'))), "")

    def failed(self) -> bool:
        """True if one of the last events is the engine's word that it cannot go on."""
        return any(answer.error is not None for answer in self._newest(b'"error"'))

    def _newest(self, word: bytes) -> Iterator[_Answer]:
        """The last events, the newest first; none if they do not hold `word` at all."""
        tail = b"".join(self._last)
        if word not in tail:
            return
        for event in reversed(tail.replace(b"\r\n", b"\n").split(_EVENT_END)[-_LAST_EVENTS - 1 :]):
            start = event.find(b"data:")
            answer = _decode(event[start + 5 :]) if start >= 0 else None
            if answer is not None:
                yield answer

    def _cut(self, block: bytes) -> bytes:
        """Whole events out of what was held and `block`; what is left stays held."""
        edge = bytes(self._held[1 - len(_CRLF_EVENT_END) :])  # a separator may straddle two blocks
        seam = edge + block
        end = max(_end_of(seam, _EVENT_END), _end_of(seam, _CRLF_EVENT_END)) - len(edge)
        if end <= 0 and len(self._held) + len(block) > _MAX_HELD_BYTES:
            end = len(block)
        if end <= 0:
            self._held += block
            return b""
        passed = bytes(self._held) + block[:end]
        self._held = bytearray(block[end:])
        return self._passed(passed)

    def _passed(self, block: bytes) -> bytes:
        """Take note of whole events, and give them back as they are to go on."""
        if self.cached is not None:
            block = _events_with_cached(block, self.cached)
        self.events += block.count(_EVENT_END) + block.count(_CRLF_EVENT_END)
        self._last.append(block)
        if len(self._last) > _LAST_EVENTS:
            del self._last[0]
        return block


class JsonAnswer:
    """The body of an answer without streaming: kept (references only) until its usage can be read."""

    def __init__(self) -> None:
        self.cached: Cached | None = None
        """As of `EventStream`: only `whole` heeds it."""
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._answer: _Answer | None = None
        """The whole answer, once it was read."""

    def feed(self, pieces: list[bytes]) -> None:
        """The next pieces."""
        self._bytes += sum(map(len, pieces))
        if self._bytes <= _MAX_JSON_BYTES:
            self._pieces += pieces
        else:
            self._pieces.clear()

    def whole(self) -> bytes | None:
        """The whole answer with the usage that it is to have, None if it is too long to be held here."""
        if self._bytes > _MAX_JSON_BYTES:
            return None
        body = b"".join(self._pieces)
        if self.cached is not None:
            body = with_cached(body, self.cached)
        self._pieces = [body]
        return body

    def overflows(self, pieces: list[bytes]) -> list[bytes] | None:
        """For answers that are held to their end: the next pieces. None while they are held; else what is
        to go on now, because it is too much to hold.
        """
        held = self._pieces if self._bytes <= _MAX_JSON_BYTES else []
        out = [*held, *pieces]
        self.feed(pieces)
        return out if self._bytes > _MAX_JSON_BYTES else None

    def usage(self) -> Usage | None:
        """Usage of the whole answer, None if there is none or it is too long to be read here."""
        answer = self._read()
        return _usage(answer) if answer is not None else None

    def finish(self) -> str:
        """Why the engine says that it ended; empty: it does not, or cannot be read here."""
        answer = self._read()
        return _finish(answer) if answer is not None else ""

    def _read(self) -> _Answer | None:
        if self._answer is None and self._pieces:
            self._answer = _decode(b"".join(self._pieces))
        return self._answer


def with_cached(answer: bytes, cached: Cached) -> bytes:
    """A JSON answer (or chunk of one) whose usage says what `cached` does; unchanged if it has no usage.

    Every other value stays as it was written. Streams of `/v1/responses` have the answer within an event.
    """
    try:
        fields = _fields.decode(answer)
        if "usage" not in fields and "response" in fields:
            inside = bytes(fields["response"])
            changed = with_cached(inside, cached)
            return (
                answer
                if changed is inside
                else msgspec.json.encode(fields | {"response": msgspec.Raw(changed)})
            )
        usage = _fields.decode(fields["usage"])
        name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        details = usage.get(name)
        inner: dict[str, Any] = dict(_fields.decode(details)) if details not in (None, _NULL) else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return answer
    inner["cached_tokens"] = cached.tokens
    if cached.by_tier is not None:
        inner["cached_tokens_by_tier"] = cached.by_tier
    return msgspec.json.encode({**fields, "usage": {**usage, name: inner}})


def _events_with_cached(block: bytes, cached: Cached) -> bytes:
    """The same for a block of whole events."""
    if b'"usage"' not in block:
        return block
    lines = block.split(b"\n")
    for at, line in enumerate(lines):
        if line.startswith(b"data:") and b'"usage"' in line:
            data = line[5:].strip()
            changed = with_cached(data, cached)
            if changed is not data:
                lines[at] = b"data: " + changed + (b"\r" if line.endswith(b"\r") else b"")
    return b"\n".join(lines)


def _end_of(data: bytes, separator: bytes) -> int:
    """Where the last `separator` ends, 0 if there is none."""
    at = data.rfind(separator)
    return at + len(separator) if at >= 0 else 0


def _decode(text: bytes) -> _Answer | None:
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return None


def _finish(answer: _Answer) -> str:
    """The `finish_reason` of the last choice that has one."""
    try:
        said = [choice.finish_reason for choice in _choices.decode(answer.choices)]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return next((word[:_MAX_WORD] for word in reversed(said) if word), "")


def _usage(answer: _Answer) -> Usage | None:
    """The usage in an answer; None if there is none, or if it cannot be what it says."""
    usage = answer.usage
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
    prompt, output = usage.prompt_tokens, usage.completion_tokens
    if min(prompt or 0, cached or 0, output or 0) < 0 or (cached or 0) > (prompt or 0):
        return None
    details = usage.prompt_tokens_details
    by_tier = None if details is None else tiers_of(details.cached_tokens_by_tier)
    return Usage(prompt, cached, output, exact=True, cached_by_tier=by_tier)

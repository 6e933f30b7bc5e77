"""What the gateway reads of an answer on its way through: where events end, how many, and the usage.

Nothing is parsed piece by piece. A stream is only cut at event boundaries, so that an error event can
always be put in after a whole event, however the engine's bytes were split; its usage is read once, from
its last events. The engine's `usage` is taken when it is there. A client that did not ask for it in its
stream (`stream_options.include_usage`) gets bytes without it, and we do not change requests: then output
tokens are counted as the events between the first and `[DONE]`, which is what vLLM sends one of per token,
and the record says that it is an estimate.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from sumibi.gateway.readings import Reading, Said, Usage
from sumibi.gateway.rewriting import Cached, events_with_cached, with_cached

_EVENT_END: Final = b"\n\n"
_CRLF_EVENT_END: Final = b"\r\n\r\n"
_MAX_HELD_BYTES: Final = 256 * 1024
"""An unfinished event longer than this is passed on as it is."""
_MAX_JSON_BYTES: Final = 8 * 1024 * 1024
"""Longer answers without streaming are passed through and their usage is not read."""
_LAST_EVENTS: Final = 4
"""How many of the last events are searched for usage, for an error, and for why it ended."""
_ERROR_WORD = b'"error"'
"""Stands in every event that says that the engine cannot go on, in any dialect."""


class EventStream:
    """The body of a streamed answer: `feed` gives back what may go to the client now."""

    def __init__(self, reading: Reading) -> None:
        self.events = 0
        """Whole events passed, `[DONE]` among them."""
        self.cached: Cached | None = None
        """What the usage is to say instead of the engine's word; None: leave it."""
        self._reading = reading
        self._held = bytearray()
        self._first = b""  # of readings that open with the prompt: the block with the first usage
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
        word = self._reading.usage_word
        usage = next((said.usage for said in self._newest(word) if said.usage is not None), None)
        if usage is None or usage.prompt_tokens is not None or not self._reading.opens_with_prompt:
            return usage
        events = self._first.replace(b"\r\n", b"\n").split(_EVENT_END)
        first = next((event for event in events if word in event), b"")
        opening = next((said.usage for said in self._read(first)), None)
        if opening is None:
            return usage
        return msgspec.structs.replace(
            usage, prompt_tokens=opening.prompt_tokens, cached_tokens=opening.cached_tokens
        )

    def estimate(self) -> Usage:
        """Usage without the engine's word: one event a token, those aside that frame the answer."""
        return Usage(None, None, max(0, self.events - self._reading.overhead), exact=False)

    def finish(self) -> str:
        """Why the engine says that it ended (`stop`, `length`, ...); empty: it does not."""
        return next((said.finish for said in self._newest(self._reading.finish_word) if said.finish), "")

    def failed(self) -> bool:
        """True if one of the last events is the engine's word that it cannot go on."""
        return any(said.failed for said in self._newest(_ERROR_WORD))

    def _newest(self, word: bytes) -> Iterator[Said]:
        """The last events, the newest first; none if they do not hold `word` at all."""
        tail = b"".join(self._last)
        return self._read(tail, _LAST_EVENTS) if word in tail else iter(())

    def _read(self, block: bytes, last: int = 0) -> Iterator[Said]:
        """Events of a block, the newest first; at most so many if `last` says how many."""
        for event in reversed(block.replace(b"\r\n", b"\n").split(_EVENT_END)[-last - 1 if last else 0 :]):
            start = event.find(b"data:")
            said = self._reading.read(event[start + 5 :]) if start >= 0 else None
            if said is not None:
                yield said

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
            block = events_with_cached(block, self.cached)
        self.events += block.count(_EVENT_END) + block.count(_CRLF_EVENT_END)
        if not self._first and self._reading.opens_with_prompt and self._reading.usage_word in block:
            self._first = block
        self._last.append(block)
        if len(self._last) > _LAST_EVENTS:
            del self._last[0]
        return block


class JsonAnswer:
    """The body of an answer without streaming: kept (references only) until its usage can be read."""

    def __init__(self, reading: Reading) -> None:
        self.cached: Cached | None = None
        """As of `EventStream`: only `whole` heeds it."""
        self._reading = reading
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._answer: Said | None = None
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
        return answer.usage if answer is not None else None

    def finish(self) -> str:
        """Why the engine says that it ended; empty: it does not, or cannot be read here."""
        answer = self._read()
        return answer.finish if answer is not None else ""

    def _read(self) -> Said | None:
        if self._answer is None and self._pieces:
            self._answer = self._reading.read(b"".join(self._pieces))
        return self._answer


def _end_of(data: bytes, separator: bytes) -> int:
    """Where the last `separator` ends, 0 if there is none."""
    at = data.rfind(separator)
    return at + len(separator) if at >= 0 else 0

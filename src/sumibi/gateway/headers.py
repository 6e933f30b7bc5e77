"""Which header lines of a request for text an engine gets, and those that are for us."""

from typing import Final

from sumibi.gateway.http1 import HOP_BY_HOP, Request
from sumibi.prompts.dialects import Dialect

EXPLAIN_HEADER: Final = b"x-sumibi-explain"
ATTEMPT_HEADER: Final = b"x-sumibi-attempt"
"""Tells an engine, from the second attempt on, which one of its request this is: so what an earlier one left
in its cache is not told as found there (the embedded engine heeds it).
"""
PREFILLER_HEADER: Final = b"x-prefiller-host-port"
"""Names a prefill engine to a sidecar; never goes on, for it is not for clients to say (llm-d's name)."""
PREFILLED_HEADER: Final = b"x-sumibi-prefill"
"""In a sidecar's answer: what became of the prefill half, for the picker that named it (`legs`)."""

CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
"""Either may hold the client's key: the first is OpenAI's way, the second Anthropic's."""

_ANTHROPIC = (Dialect.MESSAGES, Dialect.COUNT_TOKENS)

_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",  # usage must be readable on its way through
    b"x-request-id",
    b"x-data-parallel-rank",  # placement decides
    PREFILLER_HEADER,
    EXPLAIN_HEADER,
    ATTEMPT_HEADER,
}


def answer_ids(request_id: str, dialect: Dialect | None = None) -> list[tuple[bytes, bytes]]:
    """Header lines of an answer that name its request; Anthropic's clients look for a name of their own."""
    value = request_id.encode()
    ids = [(b"x-request-id", value)]
    return [*ids, (b"request-id", value)] if dialect in _ANTHROPIC else ids


def forwarded(request: Request, request_id: str, *, keep_credentials: bool) -> bytes:
    """The header lines that an engine gets, but for `Host` and the length of the body."""
    named = request.named.get(b"connection", b"").lower()
    dropped = _NOT_FORWARDED
    if named not in (b"", b"keep-alive", b"close"):
        dropped = dropped | {token.strip() for token in named.split(b",")}
    if not keep_credentials:
        dropped = dropped | CREDENTIALS
    lines = [b"%b: %b\r\n" % (name, value) for lower, name, value in request.headers if lower not in dropped]
    lines.append(b"x-request-id: %b\r\n" % request_id.encode())
    return b"".join(lines)

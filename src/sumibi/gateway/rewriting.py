"""The usage of an answer set right on its way through: of a pair, only the prefill engine knows what of the
prompt was cached, and the decode engine writes the answer.
"""

from typing import Any

import msgspec

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_count = msgspec.json.Decoder(int | None)
_NULL = msgspec.Raw(b"null")
_NESTED = ("response", "message")
"""Fields of events that hold the answer: of responses, and of Anthropic's messages."""
_MESSAGES = (b'"message"', b'"message_start"', b'"message_delta"')
"""Types of Anthropic's answers and events with usage: what was cached is counted beside `input_tokens`."""


class Cached(msgspec.Struct, frozen=True):
    """What of a prompt an engine had, as another engine's answer is to say."""

    tokens: int
    by_tier: dict[str, int] | None = None
    """None: leave what is said of it."""


def with_cached(answer: bytes, cached: Cached) -> bytes:
    """A JSON answer (or chunk of one) whose usage says what `cached` does; unchanged if it has no usage.

    Every other value stays as it was written.
    """
    try:
        fields = _fields.decode(answer)
        nested = next((name for name in _NESTED if name in fields), None)
        if "usage" not in fields and nested is not None:
            inside = bytes(fields[nested])
            changed = with_cached(inside, cached)
            return (
                answer if changed is inside else msgspec.json.encode(fields | {nested: msgspec.Raw(changed)})
            )
        usage = _fields.decode(fields["usage"])
        if bytes(fields.get("type", b"")) in _MESSAGES:
            return msgspec.json.encode({**fields, "usage": _message_usage(usage, cached)})
        name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        details = usage.get(name)
        inner: dict[str, Any] = dict(_fields.decode(details)) if details not in (None, _NULL) else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        return answer
    inner["cached_tokens"] = cached.tokens
    if cached.by_tier is not None:
        inner["cached_tokens_by_tier"] = cached.by_tier
    return msgspec.json.encode({**fields, "usage": {**usage, name: inner}})


def _message_usage(usage: dict[str, msgspec.Raw], cached: Cached) -> dict[str, Any]:
    """Anthropic's counts: what was read from the cache and what was not, together the prompt."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    if "input_tokens" not in usage:
        return usage
    prompt = sum(_count.decode(usage.get(name, _NULL)) or 0 for name in names)
    kept = {name: value for name, value in usage.items() if name != names[2]}
    return {**kept, names[0]: max(0, prompt - cached.tokens), names[1]: cached.tokens}


def events_with_cached(block: bytes, cached: Cached) -> bytes:
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

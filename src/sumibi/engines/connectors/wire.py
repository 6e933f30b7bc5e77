"""The bodies of a pair's two requests, and what is read of the prefill half's answer.

Only top-level fields are set or dropped; what stands in the others is passed on byte for byte (numbers of
any size, escapes, spacing inside values). A name that occurs twice keeps its last value, as engines read it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from sumibi.core.errors import BadRequest, WireError
from sumibi.engines.connectors.declare import Connector, Values, fill

_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
"""Of chats and completions; each is 1 on a prefill half of one token."""
_NO_STREAM = ("stream_options",)
_ALONE = ("prompt_logprobs", "use_beam_search", "best_of")
"""Fields with which an engine loads no KV from elsewhere, or runs a request as several."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What a prefill half brought."""

    returned: msgspec.Raw
    """For the decode half; `null` if the connector takes nothing."""
    prompt_tokens: int | None
    cached_tokens: int | None


def set_fields(body: bytes, changes: Mapping[str, Any], drop: tuple[str, ...] = ()) -> bytes:
    """`body` (a JSON object) with the top-level fields of `changes`, without those of `drop`.

    Raises BadRequest if it is no JSON object.
    """
    try:
        fields: dict[str, Any] = dict(_fields.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise BadRequest(f"the request body is not a JSON object: {cause}") from cause
    for name in drop:
        fields.pop(name, None)
    return msgspec.json.encode(fields | dict(changes))


def prefill_body(connector: Connector, body: bytes, values: Values) -> bytes:
    """The prefill half's request body, from the client's."""
    changes = dict(fill(connector.prefill, values))
    if not connector.one_token:
        return set_fields(body, changes)
    changes |= dict.fromkeys(_LIMITS, 1) | {"stream": False}
    return set_fields(body, changes, _NO_STREAM)


def decode_body(connector: Connector, body: bytes, values: Values) -> bytes:
    """The decode half's request body: the client's own limits and stream."""
    return set_fields(body, fill(connector.decode, values))


def unpairable(body: bytes) -> str:
    """The field that makes a request unfit for a pair, empty if there is none. Raises BadRequest."""
    try:
        fields = _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise BadRequest(f"the request body is not a JSON object: {cause}") from cause
    idle = (b"null", b"false", b"1")
    for name in _ALONE:
        # 0 asks for something of `prompt_logprobs` and for nothing of the others.
        if name in fields and bytes(fields[name]) not in idle[: 2 if name == "prompt_logprobs" else 3]:
            return name
    return ""


def read_prefill_answer(connector: Connector, body: bytes) -> PrefillAnswer:
    """What an answer with a status of success brought. Raises WireError naming the field at fault."""
    try:
        usage = _answer.decode(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        if connector.takes is not None:
            raise WireError(f"the prefill engine's answer is no JSON answer: {cause}") from cause
        usage = None  # a stream, for instance: the decode half needs nothing of it
    prompt = usage.prompt_tokens if usage is not None else None
    details = usage.prompt_tokens_details if usage is not None else None
    cached = details.cached_tokens if details is not None else None
    returned = msgspec.Raw(b"null")
    if connector.takes is not None and connector.returned is not None:
        returned = _fields.decode(body).get(connector.takes, returned)
        if bytes(returned) == b"null":
            raise WireError(f"{connector.takes}: missing in the prefill engine's answer")
        try:
            checked = msgspec.json.decode(returned, type=connector.returned)
        except msgspec.MsgspecError as cause:
            raise WireError(f"{connector.takes} of the prefill engine's answer: {cause}") from cause
        if cached is None:
            cached = getattr(checked, "remote_prefill_cached_tokens", None)
    if min(prompt or 0, cached or 0) < 0 or (prompt is not None and (cached or 0) > prompt):
        prompt = cached = None
    return PrefillAnswer(returned, prompt, cached)

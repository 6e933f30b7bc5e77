"""The bodies of a pair's two requests, and what is read of the prefill half's answer.

Only top-level fields are set or dropped; what stands in the others is passed on byte for byte (numbers of
any size, escapes, spacing inside values). A name that occurs twice keeps its last value, as engines read it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from sumibi.core.errors import BadRequest, WireError
from sumibi.engines.connectors.declare import Connector, Values, fill
from sumibi.engines.usage import MAX_TOKENS, tiers_of

_LIMITS = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}
"""Of chats and completions: what makes a prefill half one of one token."""
_API_LIMITS = {
    # Nobody will ask for a half's response by its id.
    "responses": {"max_output_tokens": 1, "store": False},
    "messages": {"max_tokens": 1},
}
_SAMPLING = "sampling_params"
_SAMPLING_LIMITS = {"max_tokens": 1, "min_tokens": 1}
"""In `sampling_params` of vLLM's generate."""
_NO_STREAM = ("stream_options",)
_ALONE = ("prompt_logprobs", "use_beam_search", "best_of")
"""Fields with which an engine loads no KV from elsewhere, or runs a request as several."""
_STATEFUL = ("previous_response_id", "conversation", "background")
"""Fields of `/v1/responses` by which a request means something at the engine that has its state only."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    cached_tokens_by_tier: Any = None


class _Usage(msgspec.Struct):
    """Of chats and completions; of responses the second half; of messages the last three without details."""

    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What a prefill half brought."""

    returned: msgspec.Raw
    """For the decode half; `null` if the connector takes nothing."""
    prompt_tokens: int | None
    cached_tokens: int | None
    cached_by_tier: dict[str, int] | None = None
    """Where these were, if the engine told."""


def set_fields(body: bytes, changes: Mapping[str, Any], drop: tuple[str, ...] = ()) -> bytes:
    """`body` (a JSON object) with the top-level fields of `changes`, without those of `drop`.

    Raises BadRequest if it is no JSON object.
    """
    fields: dict[str, Any] = dict(_top(body))
    for name in drop:
        fields.pop(name, None)
    return msgspec.json.encode(fields | dict(changes))


def prefill_body(connector: Connector, api: str, body: bytes, values: Values) -> bytes:
    """The prefill half's request body, from the client's; `api` is one of `connector.apis`."""
    changes = dict(fill(connector.prefill, values))
    if not connector.one_token:
        return set_fields(body, changes)
    if api == "generate":
        sampling = _top(body).get(_SAMPLING, msgspec.Raw(b"{}"))
        changes[_SAMPLING] = msgspec.Raw(set_fields(bytes(sampling), _SAMPLING_LIMITS))
    else:
        changes |= _API_LIMITS.get(api, _LIMITS)
    changes["stream"] = False
    return set_fields(body, changes, _NO_STREAM)


def decode_body(connector: Connector, body: bytes, values: Values) -> bytes:
    """The decode half's request body: the client's own limits and stream."""
    return set_fields(body, fill(connector.decode, values))


def unpairable(connector: Connector, api: str, body: bytes) -> str:
    """What makes a request unfit for a pair: a field, or its API; empty: nothing. Raises BadRequest."""
    if api not in connector.apis:
        return api
    fields = _top(body)
    if api == "generate":
        fields |= _top(bytes(fields.get(_SAMPLING, b"{}")))
    idle = (b"null", b"false", b"1")
    for name in _ALONE:
        # 0 asks for something of `prompt_logprobs` and for nothing of the others.
        if name in fields and bytes(fields[name]) not in idle[: 2 if name == "prompt_logprobs" else 3]:
            return name
    if api == "responses":
        return next((name for name in _STATEFUL if bytes(fields.get(name, b"null")) not in idle[:2]), "")
    return ""


def _top(body: bytes) -> dict[str, msgspec.Raw]:
    """The top-level fields of a JSON object. Raises BadRequest if it is none."""
    try:
        return _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise BadRequest(f"the request body is not a JSON object: {cause}") from cause


def read_prefill_answer(connector: Connector, body: bytes) -> PrefillAnswer:
    """What an answer with a status of success brought. Raises WireError naming the field at fault."""
    try:
        usage = _answer.decode(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        if connector.takes is not None:
            raise WireError(f"the prefill engine's answer is no JSON answer: {cause}") from cause
        usage = None  # a stream, for instance: the decode half needs nothing of it
    prompt, details = None, None
    if usage is not None:
        prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
        details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else None
    if usage is not None and usage.cache_read_input_tokens is not None:  # counted beside `input_tokens`
        cached = usage.cache_read_input_tokens
        prompt = (prompt or 0) + cached + (usage.cache_creation_input_tokens or 0)
    by_tier = None if details is None or cached is None else tiers_of(details.cached_tokens_by_tier)
    returned = msgspec.Raw(b"null")
    if connector.takes is not None and connector.returned is not None:
        try:
            returned = _fields.decode(body).get(connector.takes, returned)
            if bytes(returned) == b"null":
                raise WireError(f"{connector.takes}: missing in the prefill engine's answer")
            checked = msgspec.json.decode(returned, type=connector.returned)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
            raise WireError(f"{connector.takes} of the prefill engine's answer: {cause}") from cause
        if cached is None:
            cached = getattr(checked, "remote_prefill_cached_tokens", None)
    counts = (prompt or 0, cached or 0)
    if min(counts) < 0 or max(counts) > MAX_TOKENS or (prompt is not None and counts[1] > counts[0]):
        prompt = cached = by_tier = None
    return PrefillAnswer(returned, prompt, cached, by_tier)

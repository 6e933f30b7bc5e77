"""Errors as clients of each dialect expect them: a JSON body, or an event that ends a stream.

OpenAI's: `type` says whose fault it was, `code` is a word a program can go by, `param` names the field at
fault. vLLM's and SGLang's own routes have the same. Anthropic's has a type and a message.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sumibi.core.errors import BadRequest, SumibiError
from sumibi.prompts.dialects import DIALECTS, Dialect

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_TYPES |= {404: "invalid_request_error", 405: "invalid_request_error", 413: "invalid_request_error"}
_TYPES |= {429: "rate_limit_error"}
_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES |= {413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 502: "api_error"}
_ANTHROPIC_TYPES |= {503: "overloaded_error", 504: "timeout_error"}
_encoder = msgspec.json.Encoder()


class _Detail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct):
    error: _Detail


class _Event(_Body):
    """Of responses: the fields beside `error` are those documented, `error` is what clients raise on."""

    message: str
    code: str
    sequence_number: int
    param: str | None = None
    type: str = "error"


class _AnthropicDetail(msgspec.Struct):
    type: str
    message: str


class _AnthropicBody(msgspec.Struct):
    error: _AnthropicDetail
    type: str = "error"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How one dialect says errors."""

    body: Callable[[int, str, str | None, str | None], bytes]
    """(HTTP status, message, code, param) -> the body of an error answer."""
    event: Callable[[str, str, int], bytes]
    """(message, code, events before it) -> a server-sent event that ends a stream; clients raise on it."""

    def body_of(self, error: SumibiError) -> bytes:
        """The body for one of our own errors."""
        param = error.param if isinstance(error, BadRequest) else None
        return self.body(error.status, str(error), error.code, param)

    @property
    def internal(self) -> bytes:
        """What a client gets to see of a bug, with a status of 500."""
        return self.body(500, "internal error, see the gateway's log", "internal_error", None)


def shape_of(path: str) -> ErrorShape:
    """The shape of errors to requests for `path`; OpenAI's for what nobody's dialect has."""
    return shape_in(DIALECTS.get(path, Dialect.CHAT))


def shape_in(dialect: Dialect) -> ErrorShape:
    """The shape of errors to requests in `dialect`."""
    if dialect in (Dialect.MESSAGES, Dialect.COUNT_TOKENS):
        return ANTHROPIC
    return RESPONSES if dialect is Dialect.RESPONSES else OPENAI


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """The JSON body of an error answer with HTTP `status`, in OpenAI's shape."""
    return _encoder.encode(_Body(_detail(status, message, code, param)))


def error_body_of(error: SumibiError) -> bytes:
    """The same for one of our own errors."""
    return OPENAI.body_of(error)


def _detail(status: int, message: str, code: str | None, param: str | None) -> _Detail:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return _Detail(message, kind, param, code)


def _openai_body(status: int, message: str, code: str | None, param: str | None) -> bytes:
    return error_body(status, message, code=code, param=param)


def _openai_event(message: str, code: str, events: int) -> bytes:
    return b"data: " + error_body(502, message, code=code) + b"\n\n"


def _responses_event(message: str, code: str, events: int) -> bytes:
    event = _Event(_detail(502, message, code, None), message, code, events)
    return b"event: error\ndata: " + _encoder.encode(event) + b"\n\n"


def _anthropic_body(status: int, message: str, code: str | None, param: str | None) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _encoder.encode(_AnthropicBody(_AnthropicDetail(kind, message)))


def _anthropic_event(message: str, code: str, events: int) -> bytes:
    return b"event: error\ndata: " + _anthropic_body(502, message, code, None) + b"\n\n"


OPENAI = ErrorShape(_openai_body, _openai_event)
RESPONSES = ErrorShape(_openai_body, _responses_event)
ANTHROPIC = ErrorShape(_anthropic_body, _anthropic_event)
INTERNAL_ERROR = OPENAI.internal
"""What a client gets to see of a bug."""

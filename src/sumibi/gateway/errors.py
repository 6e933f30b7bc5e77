"""Errors as clients of the OpenAI API expect them: one JSON shape, whole or as an event of a stream.

`type` says whose fault it was, `code` is a word a program can go by, `param` names the field at fault.
"""

import msgspec

from sumibi.core.errors import BadRequest, SumibiError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_TYPES |= {404: "invalid_request_error", 405: "invalid_request_error", 413: "invalid_request_error"}
_TYPES |= {429: "rate_limit_error"}
_encoder = msgspec.json.Encoder()


class _Detail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct):
    error: _Detail


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """The JSON body of an error answer with HTTP `status`."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return _encoder.encode(_Body(_Detail(message, kind, param, code)))


def error_body_of(error: SumibiError) -> bytes:
    """The same for one of our own errors."""
    param = error.param if isinstance(error, BadRequest) else None
    return error_body(error.status, str(error), code=error.code, param=param)


def error_event(message: str, *, code: str) -> bytes:
    """A server-sent event that ends a stream with an error; OpenAI's clients raise on it."""
    return b"data: " + error_body(502, message, code=code) + b"\n\n"


INTERNAL_ERROR = error_body(500, "internal error, see the gateway's log", code="internal_error")
"""What a client gets to see of a bug."""

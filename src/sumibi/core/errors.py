"""The error tree: few classes, each says whose fault it was and what to do next.

Foreign exceptions are wrapped with `raise X(...) from cause`, so the cause is kept. The gateway turns
an error into a dialect's own JSON with `status` and `code`; the command line prints the message and
exits with `exit_code`.
"""


class SumibiError(Exception):
    """Base of every error that sumibi raises on purpose."""

    status = 500
    code = "internal_error"
    exit_code = 1


class ConfigError(SumibiError):
    """The user's configuration (flag, stack file, environment) is wrong; the message names the key."""

    status = 500
    code = "bad_configuration"
    exit_code = 2


class ModelError(SumibiError):
    """A checkpoint directory, tokenizer or template is missing, unfinished or of an unknown kind."""

    status = 500
    code = "bad_model"
    exit_code = 3


class EnvironmentProblem(SumibiError):
    """The machine lacks something: a port in use, disk full, a missing program."""

    status = 500
    code = "environment"
    exit_code = 4


class BadRequest(SumibiError):
    """The client's request is wrong: `param` names the field, the message what is allowed."""

    status = 400
    code = "invalid_request_error"
    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(BadRequest):
    """The model named in a request is not served here (HTTP 404, as engines answer)."""

    status = 404
    code = "model_not_found"


class WireError(SumibiError):
    """Bytes from a peer (KV event, engine reply) that do not decode."""

    status = 502
    code = "bad_wire_data"


class EngineUnavailable(SumibiError):
    """No engine could answer, or the one that did broke off."""

    status = 503
    code = "engine_unavailable"

"""What every door does with a request for text before the router hears of it: its name, whether it may be.

Anything that is wrong is a `BadRequest` that names the field.
"""

from collections.abc import Container, Mapping
from typing import Final

from sumibi.core.errors import BadRequest, EngineUnavailable, UnknownModel
from sumibi.core.ids import new_id
from sumibi.gateway.prompting import ModelReader, ModelReaders
from sumibi.prompts.dialects import PromptRequest

_MAX_REQUEST_ID: Final = 128
_SHOWN_MODELS: Final = 10
_MAX_MODEL_NAME: Final = 256
"""Longer names are not those of engines; they are in no answer and no log."""
_ID_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:")


def request_id(named: Mapping[bytes, bytes], in_flight: Container[str]) -> str:
    """The client's own, if it is usable and not in flight already; else a new one. `named`: its headers."""
    given = named.get(b"x-request-id")
    if given and len(given) <= _MAX_REQUEST_ID and _ID_BYTES.issuperset(given):
        text = given.decode()
        if text not in in_flight:
            return text
    return new_id("req")


def refuse_what_is_ours(asked: PromptRequest) -> None:
    """Raises BadRequest for what a client may not decide, or what needs a memory that nobody has here."""
    if asked.transfer:  # with it a client could have engines connect to wherever it likes
        raise BadRequest(
            f"{asked.transfer}: the gateway decides where KV comes from; leave it out", param=asked.transfer
        )
    if asked.stateful:
        raise BadRequest(
            f"{asked.stateful}: requests are stateless here; leave it out, and send the whole conversation",
            param=asked.stateful,
        )


def reader_for(asked: PromptRequest, readers: ModelReaders) -> ModelReader:
    """The reader of the model asked for; a request that names none gets the name of the only one.

    Raises UnknownModel, BadRequest if several could be meant, EngineUnavailable if none is known yet.
    """
    if not asked.model:
        asked.model = _only_model(readers)
    reader = readers.readers.get(asked.model)
    if reader is not None:
        return reader
    if readers.readers or len(asked.model) > _MAX_MODEL_NAME:
        shown = asked.model[:_MAX_MODEL_NAME]
        raise UnknownModel(f"the model {shown!r} is not served here", param="model")
    return readers.unknown


def _only_model(readers: ModelReaders) -> str:
    names = sorted({reader.name for reader in readers.readers.values()})
    if not names:
        raise EngineUnavailable("model: none is named, and no engine has been seen yet")
    if len(names) > 1:
        some = ", ".join(names[:_SHOWN_MODELS])
        raise BadRequest(f"model: name one, several are served here ({some})", param="model")
    return names[0]

"""`kv_transfer_params` of requests and answers: vLLM's fields, and `transfer_id` of our `stream`."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from sumibi.core.errors import BadRequest
from sumibi.engine.transfer.config import KVTransferConfig

_FIELD = "kv_transfer_params"
_MAX_SHOWN = 100
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class TransferAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefill side answers, for the decode side: vLLM's fields, all of them."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_block_ids: list[list[int]]
    """One list a KV group; the last block may be partial."""
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1
    remote_num_tokens: int
    remote_blocks_expiry_time: float | None = None
    """None, as vLLM's: the lease is extended while the decode side shows signs of life."""
    transfer_mode: str = "pull"
    remote_prefill_cached_tokens: int
    transfer_id: str | UnsetType = UNSET


class KeepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request's blocks are to be kept for a peer (`do_remote_decode`)."""

    transfer_id: str | None = None


class PullRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's blocks are at a peer (`do_remote_prefill`)."""

    host: str
    port: int
    engine_id: str | None
    """None: any life of the engine there."""
    key: str
    """The peer's name for the request: its `remote_request_id`, or the transfer id."""
    num_tokens: int | None = None
    """Tokens that the peer has computed; None: it is under way."""
    cached_tokens: int | None = None
    """Those of them that the peer had in its cache; None: it will tell."""


class _Fields(msgspec.Struct, kw_only=True):
    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    remote_host: Name | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    remote_block_ids: list[list[Count]] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    remote_prefill_cached_tokens: Count | None = None
    tp_size: Count | None = None
    dcp_size: Count | None = None
    pp_size: Count | None = None


def read_params(given: Any, config: KVTransferConfig | None) -> KeepRequest | PullRequest | None:
    """Check the request's `kv_transfer_params` (decoded JSON). Raises BadRequest naming the field."""
    if given is None:
        return None
    try:
        fields = msgspec.convert(given, _Fields)
    except msgspec.ValidationError as cause:
        problem, _, path = str(cause).partition(" - at `$")
        name = path.strip("`").removeprefix(".").partition("[")[0]
        if not name:
            raise BadRequest(f"{_FIELD}: {problem}", param=_FIELD) from cause
        raise _bad(name, f"{problem}; it is {_shown(given.get(name))}") from cause
    if fields.do_remote_prefill and fields.do_remote_decode:
        raise _bad("do_remote_prefill", "not together with do_remote_decode")
    if not (fields.do_remote_prefill or fields.do_remote_decode):
        return None
    name = "do_remote_prefill" if fields.do_remote_prefill else "do_remote_decode"
    if config is None:
        raise _bad(name, "this engine was started without --kv-transfer-config")
    if fields.do_remote_decode:
        if not config.produces:
            raise _bad(name, "this engine's kv_role is kv_consumer")
        return KeepRequest(transfer_id=fields.transfer_id)
    if not config.consumes:
        raise _bad(name, "this engine's kv_role is kv_producer")
    return _pull(fields)


def check_length(pull: PullRequest, prompt_tokens: int) -> None:
    """The peer can have no more tokens than the prompt has. Raises BadRequest."""
    if (pull.num_tokens or 0) > prompt_tokens:
        raise _bad(
            "remote_num_tokens", f"{pull.num_tokens} is more than this prompt has: {prompt_tokens} tokens"
        )


def _pull(fields: _Fields) -> PullRequest:
    for size in ("tp_size", "dcp_size", "pp_size"):
        if getattr(fields, size) not in (None, 1):
            raise _bad(size, f"is {getattr(fields, size)}; this engine is not split: only 1")
    host, port = fields.remote_host, fields.remote_port
    if host is None:
        raise _bad("remote_host", "is missing")
    if port is None:
        raise _bad("remote_port", "is missing")
    if fields.transfer_id is not None and fields.remote_request_id is None:
        return PullRequest(host=host, port=port, engine_id=fields.remote_engine_id, key=fields.transfer_id)
    for needed in ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_num_tokens"):
        if getattr(fields, needed) is None:
            raise _bad(needed, "is missing")
    assert fields.remote_request_id is not None
    assert fields.remote_num_tokens is not None
    if (fields.remote_prefill_cached_tokens or 0) > fields.remote_num_tokens:
        told = f"{fields.remote_prefill_cached_tokens} is more than remote_num_tokens"
        raise _bad("remote_prefill_cached_tokens", f"{told}, {fields.remote_num_tokens}")
    return PullRequest(
        host=host,
        port=port,
        engine_id=fields.remote_engine_id,
        key=fields.remote_request_id,
        num_tokens=fields.remote_num_tokens,
        cached_tokens=fields.remote_prefill_cached_tokens,
    )


def _shown(value: Any) -> str:
    """A wrong value for an error message: as JSON, not too long."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _bad(field: str, why: str) -> BadRequest:
    return BadRequest(f"{_FIELD}.{field}: {why}", param=f"{_FIELD}.{field}")

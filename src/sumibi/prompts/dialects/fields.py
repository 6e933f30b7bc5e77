"""Fields of request bodies: decoding them, and naming the one that is wrong."""

from typing import Annotated, Any, TypeVar

import msgspec

from sumibi.core.errors import BadRequest

Raw = msgspec.Raw
T = TypeVar("T")
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]

_object = msgspec.json.Decoder(dict[str, Any])
_raws = msgspec.json.Decoder(list[Raw])


def decode_body(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """Decode a JSON body. Raises BadRequest naming the field that is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as cause:
        problem, _, path = str(cause).partition(" - at `$")
        param = path.rstrip("`").removeprefix(".") or None
        if problem.startswith("Object missing required field"):
            param = problem.split("`")[1]
            problem = "this field is required"
        raise BadRequest(f"{param or 'request body'}: {problem}", param=param) from cause
    except RecursionError as cause:
        raise BadRequest("the request body is nested too deeply") from cause
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise BadRequest(f"the request body is not valid JSON: {cause}") from cause


def decode_objects(raws: list[Raw], field: str, start: int = 0) -> list[dict[str, Any]]:
    """Decode JSON objects; BadRequest names `field[index]` of one that is none, counting from `start`."""
    out: list[dict[str, Any]] = []
    for index, raw in enumerate(raws, start):
        try:
            out.append(_object.decode(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
            path = f"{field}[{index}]"
            raise BadRequest(f"{path}: a JSON object is needed: {cause}", param=path) from cause
    return out


def first_byte(raw: Raw) -> bytes:
    """The byte that says what kind of value it is; empty for a field that is not there."""
    return bytes(memoryview(raw)[:1])


def raw_list(raw: Raw | bytes) -> list[Raw]:
    """The items of a JSON array that was decoded as part of a body already."""
    return _raws.decode(raw)


def given(value: Raw, field: str) -> Raw | None:
    """A field that is an array if it is there and not null. Raises BadRequest for anything else."""
    first = first_byte(value)
    if first not in (b"", b"n", b"["):
        raise BadRequest(f"{field}: Expected `array | null`", param=field)
    return value if first == b"[" else None


def present(value: Raw) -> bool:
    """True if a field is there and not null."""
    return first_byte(value) not in (b"", b"n")


def first_present(**fields: Raw) -> str:
    """The name of the first field that is `present`, empty if none is."""
    return next((name for name, value in fields.items() if present(value)), "")


ABSENT = Raw()
"""The value of a field that is not in the body."""


class TransferFields(msgspec.Struct, kw_only=True):
    """Fields with which a client says itself where KV or embeddings come from."""

    kv_transfer_params: Raw = ABSENT
    ec_transfer_params: Raw = ABSENT
    bootstrap_host: Raw = ABSENT
    bootstrap_room: Raw = ABSENT
    kv_router_hint: Raw = ABSENT

    @property
    def transfer(self) -> str:
        """The name of the first one that is there."""
        for name in TransferFields.__struct_fields__:
            value = getattr(self, name)
            if value is not ABSENT and present(value):
                return name
        return ""

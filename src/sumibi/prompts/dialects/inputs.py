"""Prompts that are texts or token ids: the forms that a prompt field may have."""

import re

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.prompts.dialects.fields import Raw, T, TokenId

_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[TokenId])
_id_lists = msgspec.json.Decoder(list[list[TokenId]])
_first_item = re.compile(rb"\s*\[\s*(\S)")


def prompts_of(raw: Raw, field: str = "prompt") -> tuple[list[str], list[list[int]]]:
    """A prompt field is a text, a list of texts, a list of token ids, or a list of such lists.

    Gives back texts and lists of ids; one of them is empty. Raises BadRequest naming `field`.
    """
    first_item = _first_item.match(raw)
    if first_item is None:
        return [_decode(_text, raw, field)], []
    if first_item[1] == b'"':
        return _decode(_texts, raw, field), []
    return [], ids_of(raw, field)


def ids_of(raw: Raw, field: str) -> list[list[int]]:
    """Token ids alone: one list of them, or a list of such lists. Raises BadRequest naming `field`."""
    first_item = _first_item.match(raw)
    if first_item is not None and first_item[1] == b"[":
        lists = _decode(_id_lists, raw, field)
    else:
        lists = [_decode(_ids, raw, field)]
    if [] in lists:
        raise BadRequest(f"{field}: at least one text or one token id is needed", param=field)
    return lists


def _decode(decoder: "msgspec.json.Decoder[T]", raw: Raw, field: str) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
        raise BadRequest(
            f"{field}: a text, a list of texts, a list of token ids or a list of such lists: {cause}",
            param=field,
        ) from cause

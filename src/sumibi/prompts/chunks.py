"""Keys for prompts whose tokens are not known: chunks of bytes stand for blocks of tokens.

Good enough to find the same conversation again, useless against what engines say of their caches. They
are kept apart from token keys by their root.
"""

from array import array
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from sumibi.core.keys import pack_tokens, root_key
from sumibi.prompts.dialects import PromptKind, PromptRequest, decode_objects

BYTES_PER_TOKEN: Final = 4
"""Of text: between English prose (4.5) and code (3.5)."""

_MEDIA_TOKENS: Final = 1024
"""What an image, audio or video counts. Its true size is the model's own business."""

_PARTS = ("content", "output")
"""Fields of messages, and of items in responses, that may hold parts."""
_TEXT_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "refusal")
"""Types of parts that are text although they have no field of that name."""


def chunk_keys(request: PromptRequest, block_tokens: int) -> "list[tuple[array[int], int]]":
    """For each prompt of the request: keys of its chunks, and an estimate of its tokens."""
    root = root_key(request.model, adapter_version="byte chunks", salt=request.cache_salt)
    width = block_tokens * BYTES_PER_TOKEN
    return [(_keys(root, data, width), -(-len(data) // BYTES_PER_TOKEN)) for data in _prompt_bytes(request)]


def _keys(root: int, data: bytes, width: int) -> "array[int]":
    """The chain of `sumibi.core.keys` over bytes instead of packed tokens."""
    view = memoryview(data)
    key = root
    keys = array("Q")
    for start in range(0, len(data) - width + 1, width):
        key = xxh3_64_intdigest(view[start : start + width], key)
        keys.append(key)
    return keys


def _prompt_bytes(request: PromptRequest) -> list[bytes]:
    """Each prompt as bytes that grow at the end when the conversation grows."""
    if request.kind is PromptKind.TOKENS:
        return [pack_tokens(token_ids) for token_ids in request.token_ids]
    if request.kind is PromptKind.TEXT:
        return [text.encode() for text in request.texts]
    context = msgspec.json.encode((request.raw_head, request.raw_tools, request.template_arguments))
    messages = decode_objects(request.raw_messages, request.conversion.field)
    return [b"".join([context, *map(_message_bytes, messages)])]


def _message_bytes(message: dict[str, Any]) -> bytes:
    """A message or item of any dialect: what it holds besides its parts, then these."""
    rest = {name: value for name, value in message.items() if name not in _PARTS}
    parts = [message[name] for name in _PARTS if name in message]
    return b"".join([msgspec.json.encode(rest), *map(_parts_bytes, parts)])


def _parts_bytes(content: object) -> bytes:
    return b"".join(map(_part_bytes, content if isinstance(content, list) else [content]))


def _part_bytes(part: object) -> bytes:
    if isinstance(part, str):
        return part.encode()
    if not isinstance(part, dict):
        return msgspec.json.encode(part)
    if isinstance(part.get("content"), list):  # a tool's result, in Anthropic's words
        return msgspec.json.encode({**part, "content": None}) + _parts_bytes(part["content"])
    data = msgspec.json.encode(part)
    if isinstance(part.get("text"), str) or part.get("type") in _TEXT_BLOCKS:
        return data
    # Its own size says nothing about its tokens (a picture in base64 is a megabyte).
    return xxh3_128_digest(data) * (_MEDIA_TOKENS * BYTES_PER_TOKEN // 16)

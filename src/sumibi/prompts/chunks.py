"""Keys for prompts whose tokens are not known: chunks of bytes stand for blocks of tokens.

Good enough to find the same conversation again, useless against what engines say of their caches. They
are kept apart from token keys by their root.
"""

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from sumibi.core.keys import pack_tokens, root_key
from sumibi.prompts.dialects import PromptKind, PromptRequest
from sumibi.prompts.template import Message

BYTES_PER_TOKEN = 4
"""Of text: between English prose (4.5) and code (3.5)."""

_MEDIA_TOKENS = 1024
"""What an image, audio or video counts. Its true size is the model's own business."""


def chunk_keys(request: PromptRequest, block_tokens: int) -> list[tuple[list[int], int]]:
    """For each prompt of the request: keys of its chunks, and an estimate of its tokens."""
    root = root_key(request.model, adapter_version="byte chunks", salt=request.cache_salt)
    width = block_tokens * BYTES_PER_TOKEN
    return [(_keys(root, data, width), -(-len(data) // BYTES_PER_TOKEN)) for data in _prompt_bytes(request)]


def _keys(root: int, data: bytes, width: int) -> list[int]:
    """The chain of `sumibi.core.keys` over bytes instead of packed tokens."""
    view = memoryview(data)
    key = root
    keys = []
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
    context = msgspec.json.encode((request.raw_tools, request.template_arguments))
    return [b"".join([context, *map(_message_bytes, request.messages)])]


def _message_bytes(message: Message) -> bytes:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    head = msgspec.json.encode((message.get("role"), message.get("tool_calls")))
    return b"".join([head, *map(_part_bytes, parts)])


def _part_bytes(part: object) -> bytes:
    if isinstance(part, str):
        return part.encode()
    data = msgspec.json.encode(part)
    if part is None or (isinstance(part, dict) and isinstance(part.get("text"), str)):
        return data
    # Its own size says nothing about its tokens (a picture in base64 is a megabyte).
    return xxh3_128_digest(data) * (_MEDIA_TOKENS * BYTES_PER_TOKEN // 16)

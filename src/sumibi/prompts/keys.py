"""Prompts to routing keys: rendered and tokenised once, and only what is new of a known conversation.

Three ways to a prompt's keys, each checked against the slower one behind it:

1. *Seen before*: the same messages, byte for byte, with the same tools and arguments. Nothing is decoded.
2. *Grown*: the messages begin with those of a conversation seen before, and the template was proved
   append-only (`sumibi.prompts.growth`). Only the new messages are decoded, rendered and tokenised.
3. *Whole*: decoded, rendered and cut into segments; only segments not seen before at this place are
   tokenised (`sumibi.prompts.segments`).

Of the first two, one in a hundred is done the third way too. A difference is counted and switches both
off for good; `PromptReader.stats` says so.

Prompts that cannot be read here (no tokenizer or template, images, a template of the client's own) get
keys of byte chunks: good enough to find the same conversation again, useless against engines' KV events.
"""

import logging
from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256
from sys import getsizeof
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from sumibi.core.errors import BadRequest
from sumibi.core.keys import DEFAULT_BLOCK_TOKENS, extend_keys, root_key
from sumibi.prompts.dialects import PromptKind, PromptRequest, decode_objects
from sumibi.prompts.growth import HEAD_MESSAGES, Growth, Rendering, seam_of
from sumibi.prompts.segments import Segment, SegmentStore
from sumibi.prompts.template import ChatTemplate, Message, UnsupportedContent
from sumibi.prompts.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

CHECK_EVERY = 100
"""One in this many prompts recognised without rendering is rendered nevertheless, to compare."""

DEFAULT_CACHE_BYTES = 64 << 20

_NEWEST = 32
"""Messages from the end at which a known conversation is looked for: more than a turn ever adds."""

_BYTES_PER_TOKEN = 4
"""Of text, for byte-chunk keys and length estimates: between English prose (4.5) and code (3.5)."""

_MEDIA_TOKENS = 1024
"""What an image, audio or video counts in an estimate. Its true size is the model's own business."""


class PromptGrade(StrEnum):
    """How well a prompt's keys are known. The router uses the same words."""

    EXACT = "exact"
    """Rendered and tokenised as the engine does it."""
    APPROXIMATE = "approximate"
    """Byte-chunk keys, no tokenizer: comparable among themselves only."""


class Prompt(msgspec.Struct, kw_only=True):
    """What the router needs to know of one request's prompt."""

    keys: list[int]
    """Routing keys of the full blocks, in order."""
    prompt_tokens: int
    """Whole prompt, partial last block included; of all prompts, if the request has several."""
    grade: PromptGrade
    token_ids: list[int] | None = None
    """The prompt's tokens, if the reader keeps them and the grade is exact."""
    reused_tokens: int = 0
    """Tokens that came from the cache instead of the tokenizer."""


class ReaderStats(msgspec.Struct, kw_only=True):
    """Counts since the reader was made, for metrics and `sumibi doctor`."""

    seen: int = 0
    """Prompts recognised byte for byte."""
    grown: int = 0
    """Prompts of which only new messages were rendered."""
    whole: int = 0
    """Prompts rendered whole (chats) or cut whole (texts)."""
    approximate: int = 0
    """Prompts with byte-chunk keys although the reader has a tokenizer; the cause is logged once."""
    checks: int = 0
    mismatches: int = 0
    """Checks that found a difference. Anything but 0 is a bug, and the fast paths are off."""
    fast_paths_off: str = ""
    """Why prompts are no longer recognised without rendering; empty while they are."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    cache_bytes: int = 0
    cache_segments: int = 0
    evicted_segments: int = 0


class _Turn(NamedTuple):
    """A conversation as it was seen: where it ended, and where it goes on."""

    end: Segment
    """The whole prompt."""
    base: Segment | None = None
    """Where the text of further messages is put; None if the template is not append-only."""
    tail: str = ""
    """Text between `base` and those messages."""


class PromptReader:
    """Reads prompts for one model (and its adapters, which share its tokenizer). Not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        *,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        keep_token_ids: bool = False,
    ) -> None:
        """Without a tokenizer the reader knows byte chunks, and what `read_tokens` tells it.

        `block_tokens` is the router's block size, `cache_bytes` bounds all memory that grows with use,
        `keep_token_ids` makes prompts carry their tokens (an engine wants them, a router does not).
        """
        self._tokenizer = tokenizer
        self._template = template
        self._block_tokens = block_tokens
        self._store = SegmentStore(block_tokens, limit_bytes=cache_bytes, keep_token_ids=keep_token_ids)
        self._growth = Growth(template) if template is not None else None
        self._turns: dict[bytes, _Turn] = {}
        self._recognised = 0
        self._logged: set[str] = set()
        self._stats = ReaderStats()

    @property
    def grade(self) -> PromptGrade:
        """The grade of ordinary prompts; say it at start when it is not exact."""
        return PromptGrade.APPROXIMATE if self._tokenizer is None else PromptGrade.EXACT

    def stats(self) -> ReaderStats:
        """A copy of the counts, with the size of the cache as of now."""
        return msgspec.structs.replace(
            self._stats,
            cache_bytes=self._store.bytes,
            cache_segments=len(self._store),
            evicted_segments=self._store.evicted,
        )

    def read(self, request: PromptRequest) -> Prompt:
        """Keys of `request`'s prompt; of a request with several, those of the first and all tokens.

        Raises BadRequest when messages are malformed or the chat template refuses them.
        """
        prompts = self.read_each(request)
        if len(prompts) == 1:
            return prompts[0]
        return msgspec.structs.replace(
            prompts[0],
            prompt_tokens=sum(prompt.prompt_tokens for prompt in prompts),
            reused_tokens=sum(prompt.reused_tokens for prompt in prompts),
            token_ids=None,
        )

    def read_each(self, request: PromptRequest) -> list[Prompt]:
        """One `Prompt` for each prompt of the request, in order. Raises as `read` does."""
        if request.kind is PromptKind.TOKENS:
            return [self._read_ids(request, token_ids) for token_ids in request.token_ids]
        if self._tokenizer is None:
            return self._approximate(request)
        if request.opaque:
            return self._approximate(request, request.opaque)
        if request.kind is PromptKind.TEXT:
            return [self._read_text(request, text) for text in request.texts]
        if self._template is None:
            return self._approximate(request, "a chat, but the model has no chat template")
        try:
            return [self._read_chat(request)]
        except UnsupportedContent:
            return self._approximate(request, "message content that is no text")

    def recall(self, request: PromptRequest) -> Prompt | None:
        """What `read_tokens` was told about the same request before; None if nothing, or no more."""
        turn = self._turns.get(_digests(request, "")[-1])
        return None if turn is None else self._prompt(turn.end, turn.end.tokens)

    def read_tokens(self, request: PromptRequest, token_ids: Sequence[int]) -> Prompt:
        """The one prompt of `request`, as an engine rendered and tokenised it; kept for `recall`.

        For readers without a tokenizer: whoever holds the connections asks *one* engine
        (`/v1/chat/completions/render`, `/tokenize`) and hands the answer in here.
        """
        digest = _digests(request, "")[-1]
        root = self._store.root(_root_key(request))
        end = root.children.get(digest) or self._store.add(root, digest, token_ids)
        self._remember(digest, _Turn(end))
        return self._prompt(end, 0)

    def _read_ids(self, request: PromptRequest, token_ids: list[int]) -> Prompt:
        self._stats.prompt_tokens += len(token_ids)
        return Prompt(
            keys=extend_keys(_root_key(request), token_ids, self._block_tokens),
            prompt_tokens=len(token_ids),
            grade=PromptGrade.EXACT,
            token_ids=token_ids,
        )

    def _read_text(self, request: PromptRequest, text: str) -> Prompt:
        self._stats.whole += 1
        end, reused = self._extend(self._root(request), _cut(text, self._boundaries(text)))
        return self._prompt(self._closed(request, end), reused)

    def _read_chat(self, request: PromptRequest) -> Prompt:
        assert self._template is not None
        now = self._template.now(with_tools=request.raw_tools is not None)
        if now is None or request.continue_final_message or self._stats.fast_paths_off:
            return self._prompt(*self._whole(request, None))
        digests = _digests(request, now)
        found = self._recognise(request, digests)
        if found is None:
            return self._prompt(*self._whole(request, digests))
        self._recognised += 1
        if self._recognised % CHECK_EVERY == 0:
            self._check(request, found[0])
        return self._prompt(*found)

    def _whole(self, request: PromptRequest, digests: list[bytes] | None) -> tuple[Segment, int]:
        """Render everything; the segment where the prompt ends, and how many tokens were known."""
        assert self._template is not None
        text = self._template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.template_arguments,
        )
        self._stats.whole += 1
        return self._extend_chat(request, digests, self._root(request), text)

    def _recognise(self, request: PromptRequest, digests: list[bytes]) -> tuple[Segment, int] | None:
        """As `_whole`, for a conversation that was seen before, or was seen before it grew."""
        for new, digest in enumerate(reversed(digests)):
            turn = self._turns.get(digest)
            if turn is None:
                continue
            if new == 0:
                self._stats.seen += 1
                return turn.end, turn.end.tokens
            return self._grow(request, digests, turn, len(request.raw_messages) - new)
        return None

    def _grow(
        self, request: PromptRequest, digests: list[bytes], turn: _Turn, known: int
    ) -> tuple[Segment, int] | None:
        rendering = _rendering(request)
        if turn.base is None or self._growth is None or self._growth.proof(rendering) is None:
            return None
        raws = request.raw_messages
        first = decode_objects(raws[:HEAD_MESSAGES], "messages")
        late = decode_objects(raws[known - 1 :], "messages", known - 1)
        seam = [first[index] if index < len(first) else late[0] for index in seam_of(first, known)]
        grown = self._growth.grown(seam, late[1:], rendering)
        if grown is None:
            return None
        self._stats.grown += 1
        return self._extend_chat(request, digests, turn.base, turn.tail + grown)

    def _check(self, request: PromptRequest, recognised: Segment) -> None:
        """Render a recognised prompt whole. If anything differs, nothing is recognised any more."""
        self._stats.checks += 1
        try:
            whole, _ = self._whole(request, None)
        except BadRequest as refusal:
            self._distrust(f"the template refuses what was recognised: {refusal}")
            raise
        if whole is not recognised:
            self._distrust("a recognised prompt reads differently when rendered whole")

    def _distrust(self, cause: str) -> None:
        self._stats.mismatches += 1
        self._stats.fast_paths_off = cause
        self._turns.clear()
        _log.error("prompt keys: %s; from now on every prompt is rendered", cause)

    def _extend_chat(
        self, request: PromptRequest, digests: list[bytes] | None, start: Segment, text: str
    ) -> tuple[Segment, int]:
        """Put the rendered `text` after `start` and remember the conversation under its digest."""
        spans = self._boundaries(text)
        pieces = _cut(text, spans)
        last, reused = self._extend(start, pieces)
        end = self._closed(request, last)
        if digests is not None:
            length = self._length_without_prompt(request, text)
            turn = _Turn(end)
            if length is not None:
                back, at = _last_boundary(spans, length, len(pieces))
                base = last
                for _ in range(back):
                    assert base.parent is not None
                    base = base.parent
                turn = _Turn(end, base, text[at:length])
            self._remember(digests[-1], turn)
        return end, reused

    def _length_without_prompt(self, request: PromptRequest, text: str) -> int | None:
        """Characters of `text` that stay when messages are added; None if that is not known."""
        proof = self._growth.proof(_rendering(request)) if self._growth is not None else None
        if proof is None:
            return None
        if not request.add_generation_prompt:
            return len(text)
        prompt = proof.generation_prompt
        return len(text) - len(prompt) if text.endswith(prompt) else None

    def _extend(self, start: Segment, pieces: list[str]) -> tuple[Segment, int]:
        """Follow `pieces` from `start`, tokenising those not seen there before."""
        assert self._tokenizer is not None
        at, matched = self._store.walk(start, pieces)
        reused = at.tokens
        new = pieces[matched:]
        for piece, token_ids in zip(
            new, self._tokenizer.encode_batch(new, add_special_tokens=False), strict=True
        ):
            at = self._store.add(at, piece, token_ids)
        return at, reused

    def _root(self, request: PromptRequest) -> Segment:
        assert self._tokenizer is not None
        prefix = self._tokenizer.prefix_ids if request.add_special_tokens else ()
        return self._store.root(_root_key(request), prefix)

    def _closed(self, request: PromptRequest, end: Segment) -> Segment:
        """`end` with the tokens that the tokenizer adds after a text, where it does."""
        assert self._tokenizer is not None
        suffix = self._tokenizer.suffix_ids
        if not (request.add_special_tokens and suffix):
            return end
        name = tuple(suffix)  # no text segment has such a name
        return end.children.get(name) or self._store.add(end, name, suffix)

    def _boundaries(self, text: str) -> list[tuple[int, int]]:
        assert self._tokenizer is not None
        return self._tokenizer.boundaries(text)

    def _remember(self, digest: bytes, turn: _Turn) -> None:
        if digest not in self._turns:
            self._store.note(turn.end, digest, getsizeof(turn.tail))
        self._turns[digest] = turn

    def _prompt(self, end: Segment, reused: int) -> Prompt:
        keys, token_ids = self._store.use(end)
        for digest in self._store.dropped:
            self._turns.pop(digest, None)
        self._store.dropped.clear()
        self._stats.prompt_tokens += end.tokens
        self._stats.reused_tokens += reused
        return Prompt(
            keys=keys,
            prompt_tokens=end.tokens,
            grade=PromptGrade.EXACT,
            token_ids=token_ids,
            reused_tokens=reused,
        )

    def _approximate(self, request: PromptRequest, cause: str = "") -> list[Prompt]:
        """Byte-chunk keys; `cause` says why, if the reader could do better on other prompts."""
        if cause:
            self._stats.approximate += 1
            if cause not in self._logged:
                self._logged.add(cause)
                _log.warning("prompt keys: approximate for some prompts (%s)", cause)
        root = root_key(request.model, adapter_version="byte chunks", salt=request.cache_salt)
        return [
            Prompt(
                keys=_chunk_keys(root, data, self._block_tokens * _BYTES_PER_TOKEN),
                prompt_tokens=-(-len(data) // _BYTES_PER_TOKEN),
                grade=PromptGrade.APPROXIMATE,
            )
            for data in _prompt_bytes(request)
        ]


def _root_key(request: PromptRequest) -> int:
    return root_key(request.model, salt=request.cache_salt)


def _rendering(request: PromptRequest) -> Rendering:
    return Rendering(request.tools, request.template_arguments, request.add_generation_prompt)


def _digests(request: PromptRequest, now: str) -> list[bytes]:
    """Names of the request up to each of its last messages, the whole request last.

    SHA-256, because an engine computes with what it finds under a name: nobody must be able to make a
    conversation with the name of another one. Everything that the prompt depends on goes in. JSON values
    delimit themselves, so no two different requests hash the same bytes.
    """
    context = (
        request.kind,
        request.model,
        request.cache_salt,
        now,
        request.add_generation_prompt,
        request.continue_final_message,
        request.add_special_tokens,
        request.template_arguments,
        request.raw_tools,
        request.texts,
        request.opaque,
    )
    digest = sha256(msgspec.json.encode(context))
    older = max(0, len(request.raw_messages) - _NEWEST)
    digest.update(b"".join(request.raw_messages[:older]))
    digests = [] if request.raw_messages else [digest.digest()]
    for raw in request.raw_messages[older:]:
        digest.update(raw)
        digests.append(digest.digest())
    return digests


def _cut(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """`text` cut in front of each span; no empty piece."""
    starts = [start for start, _ in spans if start > 0]
    pieces = [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]
    return pieces if text else []


def _last_boundary(spans: list[tuple[int, int]], length: int, pieces: int) -> tuple[int, int]:
    """The last span that lies within `length` characters: how many pieces begin at or after it, and where.

    Only a span that is there entirely will still be one when other text follows.
    """
    for back, (start, stop) in enumerate(reversed(spans), start=1):
        if stop <= length:
            return back, start
    return pieces, 0


def _chunk_keys(root: int, data: bytes, width: int) -> list[int]:
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
    return xxh3_128_digest(data) * (_MEDIA_TOKENS * _BYTES_PER_TOKEN // 16)

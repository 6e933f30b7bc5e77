"""From a request's prompt to its routing keys: the one thing a gateway asks of this room.

What can be read here (text, and chats with a template) gets the keys of its tokens; the work is shared
with every prompt read before (`texts`, `chats`). What cannot (no tokenizer or template, images, a template
of the client's own) gets keys of byte chunks, and says so by its grade. A third way is for whoever holds
connections: ask an engine for the tokens and hand them in.
"""

import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from sumibi.core.keys import DEFAULT_BLOCK_TOKENS, extend_keys
from sumibi.prompts.chats import Chats, ChatStats, Found, request_digests, request_root
from sumibi.prompts.chunks import chunk_keys
from sumibi.prompts.dialects import PromptKind, PromptRequest
from sumibi.prompts.segments import Place, SegmentStore
from sumibi.prompts.template import ChatTemplate, UnsupportedContent
from sumibi.prompts.texts import Texts, TooLong, WrongCut
from sumibi.prompts.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

DEFAULT_CACHE_BYTES: Final = 64 << 20
"""About 125 conversations of 128 KB, token ids not kept."""


class PromptGrade(StrEnum):
    """How well a prompt's keys are known. The router uses the same words."""

    EXACT = "exact"
    """Rendered and tokenised as the engine does it."""
    APPROXIMATE = "approximate"
    """Byte-chunk keys, no tokenizer: comparable among themselves only."""


class Prompt(msgspec.Struct):
    """What the router needs to know of one request's prompt."""

    keys: Sequence[int]
    """Routing keys of the full blocks, in order."""
    prompt_tokens: int
    """Whole prompt, partial last block included; of all prompts, if the request has several."""
    grade: PromptGrade
    token_ids: list[int] | None = None
    """The prompt's tokens, if the reader keeps them and the grade is exact."""
    reused_tokens: int = 0
    """Tokens that came from the cache instead of the tokenizer."""


class ReaderStats(ChatStats):
    """Counts since the reader was made, for metrics and `sumibi doctor`."""

    approximate: int = 0
    """Requests with byte-chunk keys although the reader has a tokenizer; each cause is logged once."""
    prompt_tokens: int = 0
    """Of exact prompts."""
    reused_tokens: int = 0
    cache_bytes: int = 0
    cache_segments: int = 0
    evicted_segments: int = 0


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

        `block_tokens` is the router's block size, `cache_bytes` bounds the memory that grows with use,
        `keep_token_ids` makes prompts carry their tokens (an engine wants them, a router does not).
        """
        self._block_tokens = block_tokens
        self._store = SegmentStore(block_tokens, limit_bytes=cache_bytes, keep_token_ids=keep_token_ids)
        self._texts = None if tokenizer is None else Texts(tokenizer, self._store)
        self._chats = None
        if self._texts is not None and template is not None:
            self._chats = Chats(template, self._texts, self._store)
        self._said: set[str] = set()
        self._stats = ReaderStats()

    def allow(self, tokens: int) -> None:
        """Prompts may have as many tokens (the longest context of the engines that serve the model).

        Texts that are surely longer get byte-chunk keys: which engine refuses them does not matter, and
        tokenising them would hold up others. Until it is called, any length is read.
        """
        if self._texts is not None:
            self._texts.longest_tokens = max(tokens, self._texts.longest_tokens or 0)

    @property
    def grade(self) -> PromptGrade:
        """The grade of ordinary prompts; say it at start when it is not exact."""
        return PromptGrade.APPROXIMATE if self._texts is None else PromptGrade.EXACT

    def stats(self) -> ReaderStats:
        """The counts as of now."""
        chats = {} if self._chats is None else msgspec.structs.asdict(self._chats.stats)
        if self._texts is not None and self._texts.cuts_off:
            chats["mismatches"] = chats.get("mismatches", 0) + 1
            chats["fast_paths_off"] = chats.get("fast_paths_off") or self._texts.cuts_off
        return msgspec.structs.replace(
            self._stats,
            **chats,
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
        if request.opaque:
            return self._approximate(request, request.opaque)
        if request.kind is PromptKind.TOKENS:
            return [self._of_ids(request, token_ids) for token_ids in request.token_ids]
        if self._texts is None:
            return self._approximate(request, "")
        if self._chats is None and request.kind is PromptKind.CHAT:
            return self._approximate(request, "a chat, but the model has no chat template")
        try:
            try:
                return self._tokenised(request, self._texts)
            except WrongCut:
                return self._tokenised(request, self._texts)
        except TooLong:
            return self._approximate(request, "a prompt longer than any context")
        except UnsupportedContent:
            return self._approximate(request, "content that is no text, or that only the engine knows")

    def _tokenised(self, request: PromptRequest, texts: Texts) -> list[Prompt]:
        if self._chats is not None and request.kind is PromptKind.CHAT:
            return [self._exact(self._chats.read(request))]
        return [self._of_text(request, text, texts) for text in request.texts]

    def recall(self, request: PromptRequest) -> Prompt | None:
        """What `read_tokens` was told about the same request before; None if nothing, or no more."""
        place = self._store.find(request_digests(request, "")[-1])
        return None if place is None else self._exact(Found(place.end, place.end.tokens))

    def read_tokens(self, request: PromptRequest, token_ids: Sequence[int]) -> Prompt:
        """The one prompt of `request`, as an engine rendered and tokenised it; kept for `recall`.

        For readers without a tokenizer: whoever holds the connections asks *one* engine
        (`/v1/chat/completions/render`, `/tokenize`) and hands the answer in here.
        """
        name = request_digests(request, "")[-1]
        root = self._store.root(request_root(request))
        end = root.children.get(name) or self._store.add(root, name, token_ids)
        self._store.name(name, Place(end))
        return self._exact(Found(end, 0))

    def _of_ids(self, request: PromptRequest, token_ids: list[int]) -> Prompt:
        return Prompt(
            keys=extend_keys(request_root(request), token_ids, self._block_tokens),
            prompt_tokens=len(token_ids),
            grade=PromptGrade.EXACT,
            token_ids=token_ids,
        )

    def _of_text(self, request: PromptRequest, text: str, texts: Texts) -> Prompt:
        special = request.add_special_tokens
        put = texts.put(texts.start(request_root(request), add_special_tokens=special), text)
        return self._exact(Found(texts.close(put.end, add_special_tokens=special), put.reused_tokens))

    def _exact(self, found: Found) -> Prompt:
        keys, token_ids = self._store.use(found.end)
        self._stats.prompt_tokens += found.end.tokens
        self._stats.reused_tokens += found.reused_tokens
        return Prompt(
            keys=keys,
            prompt_tokens=found.end.tokens,
            grade=PromptGrade.EXACT,
            token_ids=token_ids,
            reused_tokens=found.reused_tokens,
        )

    def _approximate(self, request: PromptRequest, cause: str) -> list[Prompt]:
        """Byte-chunk keys; `cause` says why, if the reader can do better for other requests."""
        if cause:
            self._stats.approximate += 1
            if cause not in self._said:
                self._said.add(cause)
                _log.warning("prompt keys: approximate for some prompts (%s)", cause)
        return [
            Prompt(keys=keys, prompt_tokens=tokens, grade=PromptGrade.APPROXIMATE)
            for keys, tokens in chunk_keys(request, self._block_tokens)
        ]

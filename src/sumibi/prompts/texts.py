"""Texts with their tokens and keys: a tokenizer in front of the trie of segments."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from sumibi.prompts.segments import Segment, SegmentStore
from sumibi.prompts.tokenizer import Tokenizer

_SHORT_CHARACTERS: Final = 32
"""Half of a chat's pieces are markers such as `<|im_end|>\\n`; a call costs more than their few tokens."""


class TooLong(Exception):
    """A text has more tokens than any prompt may have; it was not tokenised."""


class Put(NamedTuple):
    """A text that stands in the trie."""

    end: Segment
    """Its last segment."""
    reused_tokens: int
    """Tokens on the path that were there before."""
    spans: list[tuple[int, int]]
    """Its boundaries (`Tokenizer.boundaries`)."""


class Texts:
    """Puts texts into a store, tokenising only what is not there."""

    def __init__(self, tokenizer: Tokenizer, store: SegmentStore) -> None:
        self._tokenizer = tokenizer
        self._store = store
        self.longest_tokens: int | None = None
        """Tokens that a prompt may have, None for any number."""
        self._encode_short = lru_cache(maxsize=1024)(self._encode_one)

    def start(self, root_key: int, *, add_special_tokens: bool) -> Segment:
        """Where texts under `root_key` begin."""
        return self._store.root(root_key, self._tokenizer.prefix_ids if add_special_tokens else ())

    def put(self, start: Segment, text: str) -> Put:
        """Put `text` after `start`, which must be a beginning, or the base of a boundary in `text`.

        Raises TooLong for a text that is so without looking closely.
        """
        if self.longest_tokens is not None and self._tokenizer.least_tokens(text) > self.longest_tokens:
            raise TooLong
        spans = self._tokenizer.boundaries(text)
        cuts = [0, *(at for at, _ in spans if at > 0), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)] if text else []
        end, known = self._store.walk(start, pieces)
        reused_tokens = end.tokens
        new = pieces[known:]
        # All at once and before anything is added: either the whole text stands in the trie or nothing.
        for piece, token_ids in zip(new, self._encode(new), strict=True):
            end = self._store.add(end, piece, token_ids)
        return Put(end, reused_tokens, spans)

    def _encode(self, pieces: list[str]) -> list[Sequence[int]]:
        long = [piece for piece in pieces if len(piece) > _SHORT_CHARACTERS]
        long_ids = iter(self._tokenizer.encode_batch(long, add_special_tokens=False))
        return [
            next(long_ids) if len(piece) > _SHORT_CHARACTERS else self._encode_short(piece)
            for piece in pieces
        ]

    def _encode_one(self, piece: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(piece, add_special_tokens=False))

    def close(self, end: Segment, *, add_special_tokens: bool) -> Segment:
        """`end` with the tokens that the tokenizer adds after a text, where it does."""
        suffix = self._tokenizer.suffix_ids
        if not (add_special_tokens and suffix):
            return end
        name = tuple(suffix)  # no segment of text has such a name
        return end.children.get(name) or self._store.add(end, name, suffix)


def last_boundary(start: Segment, put: Put, length: int) -> tuple[Segment, int]:
    """The last boundary within the first `length` characters: the segment before it, and its position.

    Only a boundary that lies there entirely will still be one when other text follows. If there is none,
    it is the `start` of the text.
    """
    before = put.end
    for at, stop in reversed(put.spans):
        if at > 0:
            assert before.parent is not None
            before = before.parent
        if stop <= length:
            return (before if at > 0 else start), at
    return start, 0

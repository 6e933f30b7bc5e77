"""Texts with their tokens and keys: a tokenizer in front of the trie of segments.

A text is cut at its special tokens, and what is long between two of them also between words, if the tokenizer
allows that (`sumibi.prompts.cuts`). Cuts are found from left to right and depend on nothing that follows, so
texts that begin alike are cut alike: of a long message with new words at its end only those are tokenised.
Pieces are read word by word where that can be done (`sumibi.prompts.words`).

That neither changes a token is checked: one in a hundred characters that are tokenised in parts is tokenised
again, the parts together and by the tokenizer itself. A difference is counted, logged, and ends both.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from sumibi.prompts.cuts import BETWEEN_WORDS
from sumibi.prompts.segments import Segment, SegmentStore
from sumibi.prompts.tokenizer import Tokenizer
from sumibi.prompts.words import words_of

_log = logging.getLogger(__name__)

_SHORT_CHARACTERS: Final = 32
"""Half of a chat's pieces are markers such as `<|im_end|>\\n`; a call costs more than their few tokens."""


PIECE_CHARACTERS: Final = 512
"""The next place between words that is so far from the last cut is one. Half of it is tokenised again when
words are added; a segment costs as much memory as so many characters."""

_CHECK_EVERY: Final = 100
_MOST_CHECKED: Final = 32_768
"""Characters tokenised again at once, at most: some ten milliseconds."""


class WrongCut(Exception):
    """A text was read in parts that have other tokens. Not again: all was forgotten; read once more."""


class TooLong(Exception):
    """A text has more tokens than any prompt may have; it was not tokenised."""


class Put(NamedTuple):
    """A text that stands in the trie."""

    end: Segment
    """Its last segment."""
    reused_tokens: int
    """Tokens on the path that were there before."""
    cuts: list[tuple[int, int]]
    """Where it was cut: `(start, end)`, in front of `start`, whatever comes after `end`."""


class Texts:
    """Puts texts into a store, tokenising only what is not there."""

    def __init__(self, tokenizer: Tokenizer, store: SegmentStore) -> None:
        self._tokenizer = tokenizer
        self._store = store
        self.longest_tokens: int | None = None
        """Tokens that a prompt may have, None for any number."""
        self.cuts_off = ""
        """Why texts are no longer read in parts; empty while they are."""
        self._words = words_of(tokenizer.backend)
        self._between_words = tokenizer.cuts_between_words
        self._to_check = 0.0
        """Characters that may be tokenised again."""
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
        cuts = self._cuts(text)
        at = [0, *(start for start, _ in cuts if start > 0), len(text)]
        pieces = [text[a:b] for a, b in pairwise(at)] if text else []
        end, known = self._store.walk(start, pieces)
        reused_tokens = end.tokens
        new = pieces[known:]
        # All at once and before anything is added: either the whole text stands in the trie or nothing.
        new_ids = self._encode(new)
        if len(new) > 0 and (self._between_words or self._words is not None):
            self._check(pieces, known)
        for piece, token_ids in zip(new, new_ids, strict=True):
            end = self._store.add(end, piece, token_ids)
        return Put(end, reused_tokens, cuts)

    def _cuts(self, text: str) -> list[tuple[int, int]]:
        """Where `text` is cut, from left to right. All are still there if more text follows."""
        boundaries = self._tokenizer.boundaries(text)
        if not self._between_words or len(text) <= PIECE_CHARACTERS:
            return boundaries
        cuts: list[tuple[int, int]] = []
        at = 0
        for boundary in boundaries:
            if boundary[0] - at > PIECE_CHARACTERS:
                _cut_between_words(text, at, boundary[0], cuts)
            cuts.append(boundary)
            at = boundary[0]
        if len(text) - at > PIECE_CHARACTERS:
            _cut_between_words(text, at, len(text), cuts)
        return cuts

    def _check(self, pieces: list[str], known: int) -> None:
        """Tokenise the last long piece again, with those from which it was cut between words, if it is time
        to.

        Raises WrongCut if its tokens are others; then everything was forgotten.
        """
        last = len(pieces) - 1
        while last >= known and len(pieces[last]) <= _SHORT_CHARACTERS:
            last -= 1
        if last < known:
            return
        self._to_check += sum(map(len, pieces[known:])) / _CHECK_EVERY
        if self._to_check <= 0:
            return
        first, characters = last, len(pieces[last])
        while first > 0 and pieces[first].startswith(" ") and characters < _MOST_CHECKED:
            first -= 1
            characters += len(pieces[first])
        run = pieces[first : last + 1]
        self._to_check -= 2 * characters
        whole = self._tokenizer.encode("".join(run), add_special_tokens=False)
        if whole == [token for part in self._encode(run) for token in part]:
            return
        self._between_words, self._words = False, None
        self.cuts_off = "a text read in parts has other tokens"
        self._store.clear()
        _log.error("prompt keys: %s; from now on every message is tokenised whole", self.cuts_off)
        raise WrongCut

    def _encode(self, pieces: list[str]) -> list[Sequence[int]]:
        found: list[Sequence[int] | None] = [
            self._encode_short(piece) if len(piece) <= _SHORT_CHARACTERS else self._by_words(piece)
            for piece in pieces
        ]
        left = [piece for piece, ids in zip(pieces, found, strict=True) if ids is None]
        if not left:
            return [ids for ids in found if ids is not None]
        rest = iter(self._tokenizer.encode_batch(left, add_special_tokens=False))
        return [next(rest) if ids is None else ids for ids in found]

    def _by_words(self, piece: str) -> list[int] | None:
        return self._words.ids(piece) if self._words is not None else None

    def _encode_one(self, piece: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(piece, add_special_tokens=False))

    def close(self, end: Segment, *, add_special_tokens: bool) -> Segment:
        """`end` with the tokens that the tokenizer adds after a text, where it does."""
        suffix = self._tokenizer.suffix_ids
        if not (add_special_tokens and suffix):
            return end
        name = tuple(suffix)  # no segment of text has such a name
        return end.children.get(name) or self._store.add(end, name, suffix)


def _cut_between_words(text: str, start: int, end: int, cuts: list[tuple[int, int]]) -> None:
    """Add the cuts between words in `text[start:end]`, in front of which it was cut."""
    at = start
    while end - at > PIECE_CHARACTERS:
        found = BETWEEN_WORDS.search(text, at + PIECE_CHARACTERS, end)
        if found is None:
            return
        at = found.start() + 1
        cuts.append((at, at + 2))


def last_cut(start: Segment, put: Put, length: int) -> tuple[Segment, int]:
    """The last cut within the first `length` characters: the segment before it, and its position.

    Only a cut that was decided there entirely will still be one when other text follows. If there is none, it
    is the `start` of the text.
    """
    before = put.end
    for at, stop in reversed(put.cuts):
        if at > 0:
            assert before.parent is not None
            before = before.parent
        if stop <= length:
            return (before if at > 0 else start), at
    return start, 0

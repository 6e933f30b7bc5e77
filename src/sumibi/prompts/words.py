"""Token ids by words: what a pre-tokenizer splits off, the model reads alone, so each word is read once.

Most words of a text were seen before. To find them with Python's `re` and put their ids together takes a
third to a sixth of what the tokenizers library takes: it remembers words, too, but spends its time on Unicode
and on objects.

Done where it changes nothing: for ASCII text, with byte-level BPE whose pre-tokenizer is made of regular
expressions (`cuts` says which), written here for ASCII alone. That they split as the real one does is tried
on made-up text when a tokenizer is loaded; and of a text that is read whole after all, because too many of
its words are new, the words are counted against the tokenizer's. `texts` checks some of what comes out of it.
"""

import random
import re
from itertools import groupby
from typing import Final

import tokenizers

from sumibi.prompts import cuts

MOST_WORDS: Final = 16_384
"""In one generation. Two are kept: what is used moves into the younger, the older is dropped with it full."""
MOST_CHARACTERS: Final = 64
"""Of a word that is kept: a longer one, a megabyte of one letter even, is hardly met again."""
FEW_NEW: Final = 8
"""New words are read one by one if they are no more than one in so many; else the whole text is."""
LEARNT_AHEAD: Final = 1 << 18
"""Characters of which words are learnt before any was met again. To learn makes reading dearer by half."""
LEARNT_OF: Final = 16
"""Where words are hardly ever met again, those of one character in so many are learnt."""

_ASCII_CLASSES: Final = {
    "L": "A-Za-z",
    "N": "0-9",
    "Lu": "A-Z",
    "Ll": "a-z",
    "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<=>\^`|~",
    **dict.fromkeys(("M", "Lt", "Lm", "Lo"), ""),
}
"""ASCII characters of each general category, as they are written inside brackets."""
_PROPERTY: Final = re.compile(r"\\p\{(\w+)\}")
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by, if it does."""

_AS_BYTES: Final = {code: chr(256 + at) for at, code in enumerate((*range(33), 127))}
"""How byte-level vocabularies write white space and what can't be seen; other ASCII stands for itself."""

_TRIED_TEXTS: Final = 64
_TRIED_CHARACTERS: Final = 200
_LIKELY: Final = (
    *("the", "A", "x1", "12345", "'s", "'LL", "'ve"),
    *("  ", "\n", "\r\n", "\t", " \n ", "__", "...", "/", "("),
)


class Words:
    """The ids of ASCII texts."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        splits: list[re.Pattern[str]],
        added: dict[str, int],
        barred: list[str],
    ) -> None:
        """`splits`: what to split by, one after the other, all but the last in a group; matches of the last
        one cover any text. `added`: tokens that are taken out of a text before; `barred`: those about which
        nothing is known here.
        """
        self._backend = backend
        self._model = backend.model
        self._splits = splits
        self._added_ids = added
        self._added = _any_of(added, "(%s)")
        self._barred = _any_of(barred, "%s")
        self._young: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}
        self._may_learn = LEARNT_AHEAD  # characters

    def ids(self, text: str) -> list[int] | None:
        """Ids of `text`, without added special tokens; None: nothing is known of this one."""
        if not text.isascii() or (self._barred is not None and self._barred.search(text)):
            return None
        if self._added is None:
            return self._between(text)
        out: list[int] = []
        for number, part in enumerate(self._added.split(text)):
            if number % 2:
                out.append(self._added_ids[part])
            elif part:
                ids = self._between(part)
                if ids is None:
                    return None
                out += ids
        return out

    def _between(self, text: str) -> list[int] | None:
        """Of a text in which no added token is."""
        words = self.split(text)
        if len(self._young) > MOST_WORDS:
            self._old, self._young = self._young, {}
        known, old = self._young, self._old
        out: list[int] = []
        new = 0
        for word in words:
            ids = known.get(word)
            if ids is None:
                ids = old.get(word)
                if ids is None:
                    new += 1
                    if new * FEW_NEW > len(words):
                        return self._whole(text, words)
                    ids = [token.id for token in self._model.tokenize(word.translate(_AS_BYTES))]
                if len(word) <= MOST_CHARACTERS:
                    known[word] = ids
            out += ids
        if new:
            self._may_learn = min(self._may_learn + len(text), LEARNT_AHEAD)
        return out

    def split(self, text: str) -> list[str]:
        """The words of a text."""
        parts = [text]
        for pattern in self._splits[:-1]:
            parts = [part for whole in parts for part in pattern.split(whole) if part]
        last = self._splits[-1]
        return (
            last.findall(text) if len(parts) == 1 else [word for part in parts for word in last.findall(part)]
        )

    def _whole(self, text: str, words: list[str]) -> list[int] | None:
        """Read all of it, and learn its words if that was of use so far."""
        if self._may_learn < 0:
            self._may_learn += len(text) // LEARNT_OF
            return None
        self._may_learn -= len(text)
        found = self._backend.encode(text, add_special_tokens=False)  # the fast form tells no words
        ids = found.ids
        places = [len(list(same)) for _, same in groupby(found.word_ids)]
        if len(places) != len(words):
            return None
        at, known = 0, self._young
        for word, count in zip(words, places, strict=True):
            if len(word) <= MOST_CHARACTERS:
                known[word] = ids[at : at + count]
            at += count
        return ids


def words_of(backend: tokenizers.Tokenizer) -> Words | None:
    """How this tokenizer's texts are read by words; None: not. Some ten milliseconds."""
    splits = _splits(backend)
    if not splits:
        return None
    added, barred = {}, []
    for number, token in backend.get_added_tokens_decoder().items():
        plain = not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        if token.content.isascii() and token.content:
            if plain:
                added[token.content] = number
            else:
                barred.append(token.content)
    words = Words(backend, splits, added, barred)
    return words if _splits_alike(backend, words) else None


def _splits(backend: tokenizers.Tokenizer) -> list[re.Pattern[str]]:
    """The expressions of a pre-tokenizer that is as it must be, for ASCII; none if it is not."""
    found = []
    for part in cuts.splits(backend):
        match part:
            case {"type": "Digits"}:
                found.append(r"\p{N}" if part["individual_digits"] else r"\p{N}+")
            case {"type": "ByteLevel"}:
                found += [_GPT2] if part["use_regex"] else []
            case {"type": "Split"}:
                found.append(part["pattern"]["Regex"])
    try:
        ascii_only = [_for_ascii(expression) for expression in found]
        return [
            *(re.compile(f"({one})", re.ASCII) for one in ascii_only[:-1]),
            *map(_covering, ascii_only[-1:]),
        ]
    except (re.error, KeyError):
        return []


def _covering(expression: str) -> re.Pattern[str]:
    """A pattern that finds what an expression matches, and what lies between."""
    return re.compile(rf"(?:{expression})|(?:(?!{expression})[\s\S])+", re.ASCII)


def _for_ascii(expression: str) -> str:
    """An expression with its Unicode properties as ranges of ASCII. Raises KeyError for an unknown one."""
    out, inside, at = "", False, 0
    while at < len(expression):
        named = _PROPERTY.match(expression, at)
        if named is not None:
            characters = _ASCII_CLASSES[named[1]]
            out += characters if inside else f"[{characters}]"
            at = named.end()
            continue
        character = expression[at]
        if character == "\\":
            out += expression[at : at + 2]
            at += 2
            continue
        inside = character == "[" or (inside and character != "]")
        out += character
        at += 1
    return out


def _splits_alike(backend: tokenizers.Tokenizer, words: Words) -> bool:
    """Try made-up texts, of all ASCII characters, the likely ones more often."""
    rng = random.Random(20_262)
    characters = [chr(code) for code in range(128)]
    for number in range(_TRIED_TEXTS):
        likely = _LIKELY if number % 2 else (*_LIKELY, *characters)
        text = "".join(rng.choice(likely) + rng.choice(("", " ", "a")) for _ in range(_TRIED_CHARACTERS // 3))
        spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
        if words.split(text) != [text[start:end] for start, end in spans]:
            return False
    return True


def _any_of(texts: "dict[str, int] | list[str]", form: str) -> re.Pattern[str] | None:
    """A pattern for the leftmost of these, the longest of several."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile(form % "|".join(map(re.escape, ordered))) if ordered else None

"""Which tokenizers let a text be cut between two words, so that the parts' tokens are those of the whole.

The cut is in front of a single space between two ASCII letters (`one| two`). It changes nothing if

- nothing is added to a text or moved in it (no normaliser, or NFC, which leaves the space and both letters
  alone; no prefix space),
- no added token reaches over such a place, or begins with a letter,
- the pre-tokenizer ends a piece there: a regular expression matched from left to right, in which nothing
  looks back, no branch goes on from a letter to a space, and nothing but white space looks ahead,
- the model is BPE, which treats each piece alone.

Whether an expression is like that is not worked out: all its branches must be among `_BRANCHES`, of which it
was. Then it is tried on made-up text. Tokenizers that pass neither are cut at special tokens only.
"""

import json
import random
import re
from itertools import pairwise
from typing import Any, Final

import tokenizers

BETWEEN_WORDS: Final = re.compile("[A-Za-z] [A-Za-z]")
"""Where a cut may be: behind the first of these three characters."""

_CONTRACTIONS: Final = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d")
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)

_BRANCHES: Final = (
    *_CONTRACTIONS,
    # words
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *_CASED,
    *(f"{cased}{contraction}?" for cased in _CASED for contraction in _CONTRACTIONS[:1]),
    "[一-龥\u3040-ゟ゠-ヿ]+",
    # numbers
    r" ?\p{N}+",
    r"\p{N}+",
    r"\p{N}",
    r"\p{N}{1,3}",
    # everything else
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    # white space
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r"\s+(?!\S)",
    r"\s+",
)
"""Of the expressions of GPT-2, cl100k, o200k, and of models after them (Llama 3, Qwen, DeepSeek, GLM)."""

_BRANCH: Final = "(?:" + "|".join(map(re.escape, sorted(_BRANCHES, key=len, reverse=True))) + ")"
_EXPRESSION: Final = re.compile(rf"{_BRANCH}(?:\|{_BRANCH})*")

_REACHES_OVER: Final = re.compile("^ ?[A-Za-z]|[A-Za-z] (?:[A-Za-z]|$)")

_TRIED_CHARACTERS: Final = 3000
_PIECES: Final = (
    *("the", "cache", "I", "don't", "we'LL", "HTTPServer", "x", "camelCase", "naïve", "e\u0301t\u00e9", "K"),
    *(
        "12",
        "1234567",
        "3rd",
        "a1b2",
        ".",
        "...",
        ", ",
        "!?",
        '{"a": [1]}',
        "def f(x):",
        "$x",
        "https://a.b/c",
    ),
    *("_", "\n", "\n\n", "\r\n", "\t", "  ", "    ", " \n ", "\u00a0", "\u3000", "\u200b", "<b>", "</think>"),
    *(
        "炭火",
        "ひらがな",
        "カタカナ",
        "한국어",
        "привет",
        "Ελλάδα",
        "مرحبا",
        "नमस्ते",
        "ภาษาไทย",
        "😀",
        "👩\u200d💻",
        "\u2028",
    ),
)


def between_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether text may be cut at `BETWEEN_WORDS`; some ten milliseconds."""
    return _has_the_shape(backend) and _holds(backend)


def _has_the_shape(backend: tokenizers.Tokenizer) -> bool:
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        if _REACHES_OVER.search(text) or (token.rstrip and text[-1:].isalpha()):
            return False
    return bool(splits(backend))


def splits(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The parts of a pre-tokenizer, as `tokenizer.json` has them, if text comes to it as it is, or in NFC, if
    all of them are among those known here, and the model treats each piece alone; else none.
    """
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout:
        return []
    if any(part["type"] != "NFC" for part in _parts(backend.normalizer, "normalizers")):
        return []
    found = _parts(backend.pre_tokenizer, "pretokenizers")
    known = bool(found) and found[-1]["type"] == "ByteLevel" and all(map(_splits_well, found))
    return found if known else []


def _parts(component: Any, parts: str) -> list[dict[str, Any]]:
    """What a normaliser or pre-tokenizer is made of, as `tokenizer.json` has it."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    return list(described[parts]) if described["type"] == "Sequence" else [described]


def _splits_well(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "Digits"}:
            return True
        case {"type": "ByteLevel", "add_prefix_space": False}:  # its own expression is GPT-2's
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            written = pattern.replace("\r", r"\r").replace("\n", r"\n")
            return _EXPRESSION.fullmatch(written) is not None
        case _:
            return False


def _holds(backend: tokenizers.Tokenizer) -> bool:
    """Try some two hundred cuts at once, between words that stand among all kinds of text."""
    text = _text_to_try()
    starts = [0, *(match.start() + 1 for match in BETWEEN_WORDS.finditer(text)), len(text)]
    parts = backend.encode_batch_fast([text[a:b] for a, b in pairwise(starts)], add_special_tokens=False)
    whole = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    if [token for part in parts for token in part.ids] != whole:
        return False
    # A pre-tokenizer may leave words together although this vocabulary has no token over a space.
    words = backend.pre_tokenizer.pre_tokenize_str("one two Three four")
    return len(words) == 4


def _text_to_try() -> str:
    rng = random.Random(20_261)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    text = ""
    while len(text) < _TRIED_CHARACTERS:
        text += rng.choice(_PIECES) + rng.choice(("", " ")) + f"{rng.choice(letters)} {rng.choice(letters)}"
        text += rng.choice(("", " ")) + rng.choice(_PIECES)
    return text

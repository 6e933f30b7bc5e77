"""A model's tokenizer, from the files of its checkpoint directory, as transformers would load it.

`tokenizer.json` decides how text becomes ids, its post-processor included (that is where a BOS comes
from). `tokenizer_config.json` names special tokens and may add to them; with it and the model type in
`config.json` a Llama tokenizer may have to be built anew (`sumibi.prompts.llama`). A tokenizer alone is a
few hundred milliseconds and needs neither torch nor transformers.

Two things here go beyond encode and decode. `Detokenizer` turns a stream of ids into text that never
holds half a character. `boundaries` finds the places where a text may be cut so that encoding the parts
gives the encoding of the whole: in front of a special token, because special tokens are taken out of a
text before anything else looks at it.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from sumibi.core.errors import BadRequest, ModelError
from sumibi.prompts import llama
from sumibi.prompts.cuts import between_words

# Read by the tokenizers library at each call. Its thread pool would fight the engines for cores, and a
# process that has used it cannot fork quietly. A user's own setting stands.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTEXT_TOKENS: Final = 8
"""Of a prompt's tokens, how many a detokenizer looks at, to know whether output begins with a space."""


class Tokenizer:
    """Text to token ids and back. Immutable after loading, so one object serves all threads."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str] | None = None) -> None:
        """Wrap `backend`; `special_tokens` maps names such as `bos_token` to their text."""
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        """Named special tokens as a chat template sees them, e.g. `{"eos_token": "<|im_end|>"}`."""
        # Truncation and padding written into a file are training leftovers; serving never wants them.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._longest_token: int | None = None  # characters; found when first asked for
        self._decoder = "" if backend.decoder is None else str(backend.decoder)
        self._boundary = _boundary_pattern(list(added.values()))
        self.cuts_between_words = between_words(backend)
        """Whether text may also be cut between two words (`sumibi.prompts.cuts`)."""
        self.prefix_ids, self.suffix_ids = self._affixes()
        """What `encode(..., add_special_tokens=True)` puts around a text."""

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read `tokenizer.json` and, if they are there, both configurations. Raises ModelError."""
        path = directory / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except OSError as cause:
            raise ModelError(f"{path}: cannot read the tokenizer ({cause.strerror})") from cause
        except ValueError as cause:
            raise ModelError(f"{path}: not a tokenizer file: {cause}") from cause
        config = read_tokenizer_config(directory)
        llama.build_anew(backend, config, read_object(directory / "config.json").get("model_type"))
        _add_configured(backend, config.get("added_tokens_decoder"), directory)
        named = {
            key: text
            for key, value in config.items()
            if (key in _NAMED or key.endswith("_token")) and (text := _token_text(value)) is not None
        }
        extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
        if isinstance(extra, dict):
            named.update({key: text for key, value in extra.items() if (text := _token_text(value))})
            extra = []
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        texts = [*named.values(), *(text for value in extra if (text := _token_text(value)))]
        for text in dict.fromkeys(texts):
            if text not in known:
                backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
        return cls(backend, named)

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token, None if the model has none."""
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a turn or text, None if the model has none."""
        return self.token_id(self.special_tokens.get("eos_token"))

    def token_id(self, token: str | None) -> int | None:
        """The id of one token's text, None if it is not in the vocabulary."""
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what the model's file says (often BOS): True for a plain completion,
        False for a rendered chat, whose template has written them already.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. Raises BadRequest for a text that is no Unicode (half a surrogate pair)."""
        try:
            # The "fast" form skips character offsets, which nobody wants here: half the time on long texts.
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as cause:  # tool arguments are JSON in JSON: their escapes can say anything
            raise BadRequest("the prompt holds half a surrogate pair, which is no character") from cause
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, without tokenising it: 0 if nothing can be said.

        Tells that a text of megabytes fits no context before it costs seconds. True only where every
        character ends up in a token, and none takes in more than its own text: byte-level vocabularies
        without a normaliser, and without special tokens that swallow white space.
        """
        if self._longest_token is None:
            self._longest_token = self._longest()
        return len(text) // self._longest_token if self._longest_token else 0

    def _longest(self) -> int:
        """Characters of the longest vocabulary entry (its bytes are no fewer); 0 if that is no bound."""
        backend = self.backend
        splits = str(backend.pre_tokenizer)
        swallow = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        if backend.normalizer is not None or "ByteLevel" not in splits or "Removed" in splits or swallow:
            return 0
        return max(map(len, backend.get_vocab()), default=0)

    def token_text(self, token_id: int) -> str:
        """The vocabulary entry of one id (byte-level alphabet, not readable text); empty if unknown."""
        return self.backend.id_to_token(token_id) or ""

    def unfinished(self, token_ids: Sequence[int]) -> int:
        """How many tokens at the end belong to a character that is not complete yet (at most 3)."""
        data = b""
        for back, token_id in enumerate(reversed(token_ids[-3:]), start=1):
            data = self._token_bytes(token_id) + data
            if _unfinished_bytes(data):
                return back
            if not data or data[0] & 0xC0 != 0x80:
                return 0
        return 0

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, as far as the way its text is written tells."""
        text = self.token_text(token_id)
        if "ByteLevel" in self._decoder:
            try:
                return bytes(map(_BYTE_ALPHABET.__getitem__, text))
            except KeyError:  # an added token, written as it is
                return text.encode()
        fallback = _FALLBACK_BYTE.fullmatch(text) if "ByteFallback" in self._decoder else None
        return bytes.fromhex(fallback[1]) if fallback else text.encode()

    def detokenizer(self, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> "Detokenizer":
        """A fresh `Detokenizer` for output that follows `context` (the prompt's ids, or its tail)."""
        return Detokenizer(self, context, skip_special_tokens=skip_special_tokens)

    def boundaries(self, text: str) -> list[tuple[int, int]]:
        """Spans of special tokens in `text` in front of each of which it may safely be cut.

        For each `(start, end)`, without added special tokens:
        `encode(text) == encode(text[:start]) + encode(text[start:])`. Whether a span is a boundary
        depends on nothing outside it, so boundaries stay when text is put before or after.
        """
        return [match.span() for match in self._boundary.finditer(text)] if self._boundary else []

    def _affixes(self) -> tuple[list[int], list[int]]:
        bare = self.encode("a", add_special_tokens=False)
        full = self.encode("a", add_special_tokens=True)
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise ModelError(f"tokenizer: its post-processor changes tokens ({bare} became {full})")


class Detokenizer:
    """Turns ids that arrive one by one into text, holding back what is not yet a whole character.

    Decoding a token alone is wrong (a character may span tokens, and sentencepiece drops a leading
    space), decoding everything again each time is quadratic. So it decodes a window: the last piece that
    went out, and what came since; the piece's own text is cut off the front.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = [i for i in context[-_CONTEXT_TOKENS:] if i not in self._skip]
        self._done = len(self._window)
        self._done_text = self._decode(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more ids; return the text that is now certain (possibly empty)."""
        self._window += [i for i in token_ids if i not in self._skip]
        return self._emit(len(self._window) - self._tokenizer.unfinished(self._window))

    def finish(self) -> str:
        """The rest: an unfinished character at the very end comes out as U+FFFD."""
        return self._emit(len(self._window))

    def _emit(self, end: int) -> str:
        if end <= self._done:
            return ""
        text = self._decode(self._window[:end])
        if text.startswith(self._done_text):
            piece = text[len(self._done_text) :]
        else:  # byte fallback spoils a whole run of bytes for one that fits nowhere; what is out is out
            piece = self._decode(self._window[self._done : end])
        self._window = self._window[self._done :]
        self._done = end - self._done
        self._done_text = self._decode(self._window[: self._done])
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""


def _unfinished_bytes(data: bytes) -> int:
    """How many bytes at the end of `data` begin a UTF-8 character that more bytes could complete."""
    for back in range(1, min(len(data), 3) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # not a continuation: an ASCII character, or a lead that says its length
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return back if length > back else 0
    return 0


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes.

    Printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on, in order (GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()
_FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _add_configured(backend: tokenizers.Tokenizer, entries: object, directory: Path) -> None:
    """Add the tokens that `tokenizer_config.json` lists by id; its rules win over the file's."""
    if not entries:
        return
    try:
        assert isinstance(entries, dict)
        tokens = [
            tokenizers.AddedToken(
                token["content"],
                **{rule: bool(token.get(rule, False)) for rule in ("lstrip", "rstrip", "single_word")},
                normalized=bool(token.get("normalized", not token.get("special", False))),
                special=bool(token.get("special", False)),
            )
            for _, token in sorted(entries.items(), key=lambda entry: int(entry[0]))
        ]
    except (AssertionError, TypeError, KeyError, ValueError, AttributeError) as cause:
        raise ModelError(
            f"{directory}/tokenizer_config.json: added_tokens_decoder is no object of tokens by their ids"
        ) from cause
    backend.add_tokens(tokens)


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json` as a dict, empty if there is none. Raises ModelError if it is broken."""
    return read_object(directory / "tokenizer_config.json")


def read_object(path: Path) -> dict[str, Any]:
    """A file with one JSON object, empty if there is none. Raises ModelError if it is broken."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as cause:
        raise ModelError(f"{path}: cannot read it as JSON: {cause}") from cause
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def _token_text(value: object) -> str | None:
    """A special token is written as a string or as `{"content": ...}`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _boundary_pattern(added: list[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """A pattern for the special tokens whose text always begins a token, wherever it stands; None if none.

    The tokenizers library takes added tokens that match raw text (`normalized` false) out of a text
    before anything else: leftmost first, longest at one place. So the text of such a token begins a
    token unless an added token that starts further left overlaps it, or one of the two has a rule about
    its surroundings. Tokens for which either is possible are left out; real chat tokens (`<|im_start|>`,
    `<s>`, `[INST]`) pass.
    """
    raw = [token for token in added if not token.normalized and token.content]
    # Both could be asked pair by pair, but some vocabularies have thousands of added tokens.
    insides = "\0".join(token.content[1:] for token in raw)
    ends = {token.content[start:] for token in raw for start in range(1, len(token.content))}
    texts = [
        token.content
        for token in raw
        if token.special
        and not token.single_word
        and not token.content[0].isspace()  # the token before might swallow it (rstrip)
        and token.content not in insides
        and not any(token.content[:end] in ends for end in range(1, len(token.content)))
        # a longer one that takes the whitespace in front along
        and not any(other.lstrip and other.content.startswith(token.content) for other in raw)
    ]
    texts.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None

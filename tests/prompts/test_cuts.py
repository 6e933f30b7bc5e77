"""Long texts are cut between words only where that changes no token; of one that grew the new words are read.

With `TEMPLATES` (`make test-templates`) real vocabularies are tried, too.
"""

import json
import logging
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sumibi.core.keys import extend_keys, root_key
from sumibi.prompts.cuts import BETWEEN_WORDS, between_words
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptReader
from sumibi.prompts.segments import SegmentStore
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.texts import PIECE_CHARACTERS, Texts, last_cut
from sumibi.prompts.tokenizer import Tokenizer

BLOCK = 8
ODD = [
    *(
        "the cache",
        " of",
        "A b",
        "don't x",
        "\n",
        "  ",
        " \n",
        "\t",
        "0",
        " 12",
        "é",
        "e\u0301",
        "炭火",
        "😀",
    ),
    *(
        "\u00a0",
        "\u212a b",
        "<|im_start|>",
        "<|im_end|>",
        "<s>",
        "<tool>",
        "<think>",
        ".",
        "'",
        " {",
        "]",
        "a",
    ),
]
odd_texts = st.lists(st.sampled_from(ODD) | st.text(max_size=4), max_size=40).map("".join)
FILLER = "words that fill a line, one two three 4 five; " * 14
long_texts = st.lists(odd_texts | st.just(FILLER), min_size=1, max_size=6).map("".join)


def vocabularies():
    named = os.environ.get("TEMPLATES")
    found = sorted(Path(named).glob("*/tokenizer.json")) if named else []
    assert found or not named
    return [pytest.param(path.parent, id=path.parent.name) for path in found]


@pytest.fixture(
    params=["tests' own", pytest.param("smollm2", marks=pytest.mark.real_model), *vocabularies()],
    ids=str,
)
def tokenizer(request, checkpoint):
    named = request.param
    if isinstance(named, str):
        named = request.getfixturevalue("smollm2") if named == "smollm2" else checkpoint("byte-level")
    return Tokenizer.load(named)


def test_between_words_no_token_changes(tokenizer):
    if not tokenizer.cuts_between_words:
        assert "ByteLevel" not in str(tokenizer.backend.pre_tokenizer)
        return

    @settings(max_examples=150)
    @given(odd_texts)
    def check(text):
        at = [0, *(match.start() + 1 for match in BETWEEN_WORDS.finditer(text)), len(text)]
        whole, *parts = tokenizer.encode_batch(
            [text, *(text[a:b] for a, b in pairwise(at))], add_special_tokens=False
        )
        assert [token for part in parts for token in part] == whole

    check()


def test_what_stands_in_the_trie_are_the_tokens_of_the_whole_text(tokenizer):
    @settings(max_examples=40)
    @given(st.lists(long_texts, min_size=2, max_size=3))
    def check(parts):
        store = SegmentStore(BLOCK, limit_bytes=1 << 20, keep_token_ids=True)
        texts = Texts(tokenizer, store)
        start = texts.start(0, add_special_tokens=False)
        text = ""
        for part in parts:
            text += part
            keys, token_ids = store.use(texts.put(start, text).end)
            assert token_ids == tokenizer.encode(text, add_special_tokens=False)
            assert keys == extend_keys(0, token_ids, BLOCK)
            store.check_integrity()
        assert texts.cuts_off == ""

    check()


def test_what_is_put_after_a_cut_ends_where_the_whole_text_does(tokenizer):
    @settings(max_examples=40)
    @given(long_texts, long_texts)
    def check(text, more):
        store = SegmentStore(BLOCK, limit_bytes=1 << 20, keep_token_ids=False)
        texts = Texts(tokenizer, store)
        start = texts.start(0, add_special_tokens=False)
        known = texts.put(start, text)
        whole = texts.put(start, text + more)
        assert set(known.cuts) <= set(whole.cuts)
        base, at = last_cut(start, known, len(text))
        assert texts.put(base, text[at:] + more).end is whole.end

    check()


SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
)


def byte_level(split=SPLIT, *, normalizer=None, added=(), behaviour="isolated", model=None, prefix=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(model or models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    first = [] if split is None else [pre_tokenizers.Split(Regex(split), behaviour)]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return backend


def token(text, **rules):
    return AddedToken(text, normalized=False, **rules)


CUT = {
    "GPT-2's expression": byte_level(None),
    "an expression of known branches": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "tokens that reach over no words": byte_level(added=[token("<a 1>"), token("</x>", rstrip=True)]),
}
NOT_CUT = {
    "an expression that is not known": byte_level(SPLIT + "|[a-z]+ [a-z]+"),
    "one that looks back": byte_level(r"(?<=o) \p{L}+|" + SPLIT),
    "pieces that are merged": byte_level(behaviour="merged_with_next"),
    "no words at all": byte_level(r"\p{N}{1,3}"),
    "a space put in front": byte_level(prefix=True),
    "a normaliser that moves text": byte_level(normalizer=normalizers.Lowercase()),
    "a token of two words": byte_level(added=[token("<two words>")]),
    "a token that takes a space along": byte_level(added=[token("<x", rstrip=True)]),
    "a token that begins with a letter": byte_level(added=[token("end>")]),
    "chance": byte_level(model=models.BPE({"a": 0}, [], dropout=0.1)),
    "another model": byte_level(model=models.WordLevel({"a": 0}, unk_token="a")),
}


@pytest.mark.parametrize("backend", CUT.values(), ids=CUT.keys())
def test_is_cut_with(backend):
    assert between_words(backend)


@pytest.mark.parametrize("backend", NOT_CUT.values(), ids=NOT_CUT.keys())
def test_is_not_cut_with(backend):
    assert not between_words(backend)


@pytest.mark.parametrize("kind", ["metaspace", "prepend", "llama", "llama-legacy"])
def test_sentencepiece_is_not_cut(checkpoint, kind):
    assert not Tokenizer.load(checkpoint(kind)).cuts_between_words


def words(characters, of):
    """Text that begins differently for every `of`."""
    text = " ".join(f"{of} says word{at} again" for at in range(characters // 15))
    return text[:characters]


def body(*contents):
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return parse_request("/v1/chat/completions", json.dumps({"model": "m", "messages": messages}).encode())


def reader_of(checkpoint, **options):
    directory = checkpoint("byte-level", "chatml")
    tokenizer = Tokenizer.load(directory)
    options = {"block_tokens": BLOCK, "keep_token_ids": True, **options}
    return tokenizer, PromptReader(tokenizer, ChatTemplate.load(directory), **options)


def rendered(contents):
    roles = ["system", *["user", "assistant"] * len(contents)]
    turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, contents, strict=False)]
    return "".join(turns) + "<|im_start|>assistant\n"


def test_of_a_known_message_with_more_words_only_those_are_read(checkpoint):
    tokenizer, reader = reader_of(checkpoint)
    system, asked = words(5000, "system"), words(8000, "user")
    for number in range(12):
        contents = [system, asked + f" and {number}: " + words(1500, f"tail{number}")]
        prompt = reader.read(body(*contents))
        whole = tokenizer.encode(rendered(contents), add_special_tokens=False)
        assert prompt.token_ids == whole
        assert prompt.keys == extend_keys(root_key("m"), whole, BLOCK)
        if number > 0:
            known = rendered([system, asked])[: -len("<|im_end|>\n<|im_start|>assistant\n")]
            behind = len(tokenizer.encode(known, add_special_tokens=False)) - prompt.reused_tokens
            assert 0 <= behind <= PIECE_CHARACTERS + 20
    stats = reader.stats()
    assert (stats.whole - stats.checks, stats.grown, stats.mismatches) == (1, 11, 0)


def test_other_last_words_find_the_conversation(checkpoint):
    tokenizer, reader = reader_of(checkpoint)
    before = [words(900, "system"), "ask", words(900, "answer")]
    for last in ("one", "two", words(2000, "three"), "four"):
        prompt = reader.read(body(*before, last))
        assert prompt.token_ids == tokenizer.encode(rendered([*before, last]), add_special_tokens=False)
    stats = reader.stats()
    assert (stats.whole - stats.checks, stats.grown) == (1, 3)


def test_messages_without_the_last_are_no_prompt_that_was_seen(checkpoint):
    tokenizer, reader = reader_of(checkpoint)
    contents = [words(900, "system"), "ask", "answer", "ask more"]
    reader.read(body(*contents))
    prompt = reader.read(body(*contents[:-1]))
    assert prompt.token_ids == tokenizer.encode(rendered(contents[:-1]), add_special_tokens=False)
    assert reader.stats().seen == 0


def test_memory_is_bounded_with_other_last_words_without_end(checkpoint):
    _, reader = reader_of(checkpoint, cache_bytes=60_000)
    asked = words(4000, "user")
    for number in range(60):
        reader.read(body("be brief", asked + words(1000, f" tail{number}")))
        assert reader.stats().cache_bytes <= 60_000
    reader._store.check_integrity()
    assert reader.stats().evicted_segments > 0
    assert reader.stats().grown > 50


def deceiving(checkpoint, template):
    """A tokenizer with tokens over a space behind a letter, that says it may be cut there; and its reader."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    over = [(letter, "Ġ") for letter in "abcdefghijklmnopqrstuvwxyz"]
    names = [*alphabet, *map("".join, over)]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, over))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([token("<|im_start|>"), token("<|im_end|>")])
    tokenizer = Tokenizer(backend)
    assert not tokenizer.cuts_between_words
    tokenizer.cuts_between_words = True
    found = ChatTemplate.load(checkpoint("byte-level", template)) if template else None
    return tokenizer, PromptReader(tokenizer, found, block_tokens=BLOCK, keep_token_ids=True)


def test_a_cut_that_changes_tokens_is_found_out(checkpoint, caplog):
    tokenizer, reader = deceiving(checkpoint, None)
    with caplog.at_level(logging.ERROR):
        for number in range(5):
            text = words(3000, f"text{number}")
            asked = parse_request("/v1/completions", json.dumps({"model": "m", "prompt": text}).encode())
            assert reader.read(asked).token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert reader.stats().mismatches == 1
    assert "read in parts" in reader.stats().fast_paths_off
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_after_a_wrong_cut_nothing_that_was_read_before_is_believed(checkpoint):
    tokenizer, reader = deceiving(checkpoint, "chatml")
    reader._texts._to_check = -100.0  # the first texts are not tokenised again
    contents = [words(900, "system"), words(2000, "user")]
    wanted = tokenizer.encode(rendered(contents), add_special_tokens=False)
    assert reader.read(body(*contents)).token_ids != wanted  # it did deceive
    reader._texts._to_check = 0.0
    for number in range(2):
        other = [contents[0], words(2000, f"other{number}")]
        whole = tokenizer.encode(rendered(other), add_special_tokens=False)
        assert reader.read(body(*other)).token_ids == whole
    assert reader.read(body(*contents)).token_ids == wanted
    assert reader.stats().mismatches == 1
    reader._store.check_integrity()

"""Texts that are read word by word have the tokens that the tokenizers library gives them.

With `TEMPLATES` (`make test-templates`) real vocabularies are tried, too.
"""

import json
import logging
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from sumibi.prompts import words as rooms
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptReader
from sumibi.prompts.tokenizer import Tokenizer
from sumibi.prompts.words import Words, words_of

READ = [Path(__file__).read_text(), *(path.read_text() for path in Path(rooms.__file__).parent.glob("*.py"))]
"""Texts with words, numbers, and all kinds of signs, to train on and to read."""

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


def trained(*first, regex=False, normalizer=None, added=(), size=900):
    """A vocabulary with merges, so that a text that is split elsewhere has other tokens."""
    backend = Backend(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(READ, trainer)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return backend


def split_by(*expressions):
    return [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]


def token(text, **rules):
    return AddedToken(text, normalized=False, **rules)


MARKS = [token("<|im_start|>"), token("<|im_end|>"), token("<|im|>"), token("<t"), token("<tool>")]
BY_WORDS = {
    "GPT-2": trained(regex=True),
    "single digits, then GPT-2": trained(pre_tokenizers.Digits(individual_digits=True), regex=True),
    "runs of digits, then GPT-2": trained(pre_tokenizers.Digits(individual_digits=False), regex=True),
    "cl100k and NFC": trained(*split_by(CL100K), normalizer=normalizers.NFC()),
    "o200k": trained(*split_by(O200K)),
    "one after the other": trained(*split_by(*DEEPSEEK)),
    "words only, the rest is left over": trained(*split_by(r"\p{L}+".replace(r"\p{L}", r" ?\p{L}"))),
    "added tokens": trained(*split_by(CL100K), added=MARKS),
    "added tokens about which it is not known": trained(
        *split_by(CL100K), added=[*MARKS, AddedToken("<x>", normalized=True), token("<y>", rstrip=True)]
    ),
}


def vocabularies():
    named = os.environ.get("TEMPLATES")
    return sorted(Path(named).glob("*/tokenizer.json")) if named else []


@pytest.fixture(
    params=[
        *BY_WORDS,
        pytest.param("smollm2", marks=pytest.mark.real_model),
        *(pytest.param(path.parent, id=path.parent.name) for path in vocabularies()),
    ]
)
def backend(request):
    named = request.param
    if named in BY_WORDS:
        return BY_WORDS[named]
    return Tokenizer.load(request.getfixturevalue("smollm2") if named == "smollm2" else named).backend


LIKELY = (
    "the",
    "Cache",
    " of",
    "x1",
    "2026",
    "'s",
    "'LL",
    "  ",
    "\n",
    "\r\n",
    "\t",
    " \n ",
    "_",
    "...",
    "/",
    "({",
    "é",
    "炭",
)
MARKED = ("<|im_start|>", "<|im_end|>", "<|im|>", "<t", "<tool>", "<x>", "<y> ")
texts = st.lists(
    st.sampled_from((*LIKELY, *MARKED)) | st.text(st.characters(max_codepoint=127), max_size=5), max_size=60
).map("".join)


def test_the_tokens_are_the_library_s(backend):
    words = words_of(backend)
    if words is None:
        assert "ByteLevel" not in str(backend.pre_tokenizer)
        return
    read = 0

    @settings(max_examples=150)
    @given(texts)
    def check(text):
        nonlocal read
        for _ in range(2):
            ids = words.ids(text)
            assert ids is None or ids == backend.encode(text, add_special_tokens=False).ids
            read += ids is not None

    check()
    rng = random.Random(3)
    for _ in range(200):
        whole = rng.choice(READ)
        at = rng.randrange(len(whole))
        text = whole[at : at + 700]
        ids = words.ids(text)
        assert ids is None or ids == backend.encode(text, add_special_tokens=False).ids
        read += ids is not None
    assert read > 150


def test_words_that_were_met_are_not_read_again():
    words = words_of(BY_WORDS["cl100k and NFC"])
    known = next(text for text in READ if text.isascii())
    assert words.ids(known) is not None
    met = dict(words._young)
    assert words.ids(known[200:]) is not None
    new = {word: ids for word, ids in words._young.items() if word not in met}
    assert len(new) <= 1  # the one that was cut through
    text = known[:500] + " unheardof"
    assert words.ids(text) == BY_WORDS["cl100k and NFC"].encode(text).ids
    assert " unheardof" in words._young


NOT = {
    "an expression that is not known": trained(*split_by(CL100K + "|[a-z]+ [a-z]+")),
    "no expression at all": trained(),
    "a normaliser": trained(*split_by(CL100K), normalizer=normalizers.Lowercase()),
    "pieces that are merged": trained(pre_tokenizers.Split(Regex(CL100K), "merged_with_next")),
    "words": Backend(models.WordLevel({"a": 0}, unk_token="a")),
}


@pytest.mark.parametrize("backend", NOT.values(), ids=NOT.keys())
def test_is_not_read_by_words(backend):
    assert words_of(backend) is None


@pytest.mark.parametrize("kind", ["metaspace", "prepend", "llama", "llama-legacy"])
def test_sentencepiece_is_not_read_by_words(checkpoint, kind):
    assert words_of(Tokenizer.load(checkpoint(kind)).backend) is None


def test_expressions_that_split_otherwise_are_found_out_when_loaded():
    backend = BY_WORDS["GPT-2"]
    assert words_of(backend) is not None
    backend_of_others = trained(*split_by(CL100K))
    splits = rooms._splits(backend_of_others)
    assert not rooms._splits_alike(backend, Words(backend, splits, {}, []))


def random_words(seed, count):
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=12)) for _ in range(count))


def test_words_that_are_never_met_again_take_no_more_memory_and_are_hardly_learnt():
    backend = BY_WORDS["GPT-2"]
    words = words_of(backend)
    learnt = read = 0
    for number in range(300):
        text = random_words(number, 400)
        ids = words.ids(text)
        learnt += ids is not None
        read += len(text)
        assert ids is None or ids == backend.encode(text).ids
        assert len(words._young) <= rooms.MOST_WORDS + 400
        assert len(words._old) <= rooms.MOST_WORDS + 400
    assert read > 4 * rooms.LEARNT_AHEAD
    ahead = rooms.LEARNT_AHEAD * 300 / read
    assert learnt <= ahead + 300 / rooms.LEARNT_OF + 2


def test_a_word_without_end_is_read_and_not_kept():
    backend = BY_WORDS["cl100k and NFC"]
    words = words_of(backend)
    known = next(text for text in READ if text.isascii())[:2000]
    for text in ("a" * 5000, known, known + " " + "b" * 5000):
        assert words.ids(text) == backend.encode(text).ids
    assert words._young
    assert max(map(len, words._young)) <= rooms.MOST_CHARACTERS


def completion(text):
    return parse_request("/v1/completions", json.dumps({"model": "m", "prompt": text}).encode())


def test_a_word_with_other_tokens_is_found_out_and_all_is_forgotten(caplog):
    tokenizer = Tokenizer(BY_WORDS["cl100k and NFC"])
    reader = PromptReader(tokenizer, None, block_tokens=8, keep_token_ids=True)
    texts = reader._texts
    first = READ[0][:400]
    reader.read(completion(first))
    word = next(word for word in texts._words._young if word.isalpha() and len(word) > 5)
    texts._words._young[word] = [0]
    texts._to_check = -1e9
    wrong = first + word
    assert reader.read(completion(wrong)).token_ids != tokenizer.encode(wrong, add_special_tokens=False)
    texts._to_check = 0.0
    with caplog.at_level(logging.ERROR):
        for text in (first[:350] + word, wrong):
            whole = tokenizer.encode(text, add_special_tokens=False)
            assert reader.read(completion(text)).token_ids == whole
    assert reader.stats().mismatches == 1
    assert "read in parts" in reader.stats().fast_paths_off
    assert [record.levelname for record in caplog.records] == ["ERROR"]

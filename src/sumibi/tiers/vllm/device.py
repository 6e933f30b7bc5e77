"""vLLM's KV tensors as blocks, and the name of what lies in them."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm.platforms import current_platform

from sumibi.core.errors import ConfigError
from sumibi.tiers.connector.names import WEIGHTS, files_digest, namespace_of
from sumibi.tiers.connector.worker import DeviceBlocks, HostBlocks
from sumibi.tiers.host import Bytes


def open_device(kv_caches: Mapping[str, Any], blocks: int) -> DeviceBlocks:
    """`kv_caches` as `register_kv_caches` gets them, of an engine with that many blocks. Raises ConfigError
    for tensors whose blocks are not rows.
    """
    rows: dict[int, torch.Tensor] = {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"kv tiers: the KV of layer {name!r} is no single tensor: such models are not supported"
            )
        rows.setdefault(tensor.data_ptr(), _rows(name, tensor, blocks))  # layers may share one
    tensors = list(rows.values())
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return HostBlocks([tensor.numpy() for tensor in tensors])
    return _TorchBlocks(tensors)


def _rows(name: str, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """The same memory as (blocks, bytes of a block)."""
    if tensor.is_contiguous() and tensor.shape[0] % blocks == 0:
        return tensor.view(blocks, -1).view(torch.uint8)  # a kernel's blocks may be smaller
    if tensor.shape[0] == blocks and tensor[0].is_contiguous():
        return tensor.flatten(1).view(torch.uint8)
    raise ConfigError(
        f"kv tiers: the KV of layer {name!r} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
        f"the {blocks} blocks are not rows in it, and such layouts are not supported"
    )


class _TorchBlocks:
    """Blocks of an accelerator. Untested: no accelerator has run it."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = list(layers)
        self._ends = np.cumsum([layer.shape[1] for layer in layers]).tolist()

    @property
    def block_bytes(self) -> int:
        """See `DeviceBlocks`."""
        return int(self._ends[-1])

    def read(self, blocks: Sequence[int], into: Bytes) -> None:
        """See `DeviceBlocks`."""
        if not blocks:
            return
        index = torch.tensor(blocks, device=self._layers[0].device)
        for layer, end in zip(self._layers, self._ends, strict=True):
            into[:, end - layer.shape[1] : end] = layer.index_select(0, index).cpu().numpy()

    def write(self, blocks: Sequence[int], source: Bytes) -> None:
        """See `DeviceBlocks`."""
        if not blocks:
            return
        device = self._layers[0].device
        index = torch.tensor(blocks, device=device)
        for layer, end in zip(self._layers, self._ends, strict=True):
            part = np.ascontiguousarray(source[:, end - layer.shape[1] : end])
            layer.index_copy_(0, index, torch.from_numpy(part).to(device))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def namespace(vllm_config: Any, kv_caches: Mapping[str, Any], weights: str | None) -> str:
    """Everything that makes a block's bytes what they are beside vLLM's hash of it. `weights`: what the user
    calls them, if so. Raises ConfigError.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layers = vllm_config.compilation_config.static_forward_context
    shapes = [
        (name, str(tensor.dtype), tuple(tensor.shape[1:]), tensor.stride(), _backend(layers.get(name)))
        for name, tensor in kv_caches.items()
    ]
    parallel = vllm_config.parallel_config
    return namespace_of(
        {
            "engine": f"vllm {vllm.__version__}",
            "weights": weights or _weights(model),
            "model": _model(model),
            "dtype": model.dtype,
            "quantization": model.quantization,
            "cache_dtype": cache.cache_dtype,
            "block_tokens": cache.block_size,
            "hash": cache.prefix_caching_hash_algo,
            "layers": shapes,
            "platform": [current_platform.device_type, *_hardware()],
            "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        }
    )


def _backend(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return backend.get_name() if backend else ""


def _hardware() -> list[str]:
    """What may change how a kernel lays a block out inside."""
    if current_platform.is_cpu():
        amx = torch.cpu._is_amx_tile_supported()
        return [
            str(current_platform.get_cpu_architecture()),
            torch.backends.cpu.get_cpu_capability(),
            f"amx={amx}",
        ]
    return [current_platform.get_device_name()]


def _model(model: Any) -> str:
    """The model's shape, with what flags overrode in it (rope scaling, say)."""
    shape = model.hf_config.to_dict()
    for key in ("_name_or_path", "transformers_version"):
        shape.pop(key, None)
    return blake2b(namespace_of(shape).encode(), digest_size=16).hexdigest()


def _weights(model: Any) -> str:
    """A digest of the checkpoint's files."""
    where = Path(model.model)
    try:
        if not where.exists():
            from huggingface_hub import snapshot_download

            where = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        return files_digest(where, WEIGHTS)
    except (ConfigError, OSError, ValueError) as cause:
        raise ConfigError(
            f"kv tiers: the weights of {model.model!r} cannot be told from others ({cause}); name them, and "
            'anew whenever they change, by "weights" in kv_connector_extra_config'
        ) from cause

"""The forward pass of a Llama-family model over a paged KV cache, for any mix of prefill and decode.

It knows tensors, blocks and positions; it knows nothing of requests, sampling or the schedule.

What is folded into the weights when they are loaded, because small operations cost as much as small
products: the weights of the norms (into the products that follow them), sqrt(hidden) of the RMS, and the
log2(e) / sqrt(head_dim) of the scores (into the query rows). A norm is then
x / hypot(|x|, sqrt(hidden * eps)).

In the last layer only rows whose logits are wanted are computed after their keys and values are stored.
"""

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sumibi.engine.attention import AttentionPlan, HeadShape, Query
from sumibi.engine.batch import SequenceStep, StepBatch
from sumibi.engine.checkpoint import CheckpointWeights, ModelConfig, WeightSource, read_config
from sumibi.engine.linear import CPU_MIN_ROWS, Linear, limit_kept_shapes, make_linear
from sumibi.engine.rope import RotaryTable, Rotation

BITS = math.log2(math.e)
"""A nat in bits: attention's scores are in bits."""

KV_LAYOUT = "layer,kv,head,token,dim"
"""Order of the numbers in a block that is read or written as a whole, outermost first."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class _Layer:
    qkv: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear
    qk_norm: Tensor | None
    """[query heads + key heads, head_dim], scaled as the folded norms are; None if the model has none."""
    cache: Tensor
    """[2 * kv_heads, blocks, block_tokens * head_dim]: keys, then values. The last block takes padding's."""
    slots: Tensor
    """The same memory, [2 * kv_heads, blocks * block_tokens, head_dim]."""


class Model:
    """Weights and KV cache of one model on one device. Not thread-safe: one step at a time.

    Make one with `load` or `random`. Positions in the cache that were never written hold zeros.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: str,
        device: str,
        block_tokens: int,
        num_blocks: int,
        threads: int,
    ) -> None:
        limit_kept_shapes()
        torch.set_num_threads(threads)
        self.config = config
        self.dtype = DTYPES[dtype]
        self.device = torch.device(device)
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.kv_bytes_per_token = 2 * config.layers * config.kv_heads * config.head_dim * self.dtype.itemsize
        self._shape = HeadShape(config.kv_heads, config.heads // config.kv_heads, config.head_dim)
        self._min_rows = CPU_MIN_ROWS if self.device.type == "cpu" else 1
        positions = min(config.max_positions, num_blocks * block_tokens)
        self._rotary = RotaryTable(
            config.rope, config.head_dim, positions=positions, dtype=self.dtype, device=self.device
        )
        self._hidden_floor = self._norm_floor(config.hidden)
        self._head_floor = self._norm_floor(config.head_dim)
        loader = _Loader(config, weights, self.dtype, self.device)
        self._embedding, self._head = loader.embedding(), loader.head()
        shape = (2 * config.kv_heads, num_blocks + 1, block_tokens * config.head_dim)
        caches = _zeros((config.layers, *shape), self.dtype, self.device)
        self._caches = caches.view(torch.uint8)
        """[layers, 2 * kv_heads, blocks, bytes]: all layers' caches, the same memory."""
        # numpy copies these strides twice as fast as torch does, on the one thread that calls it.
        self._memory = self._caches.numpy() if self.device.type == "cpu" else None
        self.block_bytes = block_tokens * self.kv_bytes_per_token
        self._layers = [loader.layer(index, cache) for index, cache in enumerate(caches)]

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: str,
        device: str,
        block_tokens: int,
        num_blocks: int,
        threads: int,
    ) -> "Model":
        """The model of a checkpoint directory. `dtype` is float32 or bfloat16. Raises ModelError."""
        config = read_config(directory)
        model = cls(
            config,
            CheckpointWeights(directory),
            dtype=dtype,
            device=device,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            threads=threads,
        )
        _return_free_memory()
        return model

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        seed: int,
        dtype: str,
        device: str,
        block_tokens: int,
        num_blocks: int,
        threads: int,
    ) -> "Model":
        """A model of shape `config` with random weights: the same for the same seed."""
        return cls(
            config,
            _RandomWeights(seed),
            dtype=dtype,
            device=device,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            threads=threads,
        )

    def forward(self, batch: StepBatch) -> Tensor:
        """Compute a step: store the KV of all its tokens, return the logits that it asks for.

        Returns float32 [wanted, vocab] on the model's device, in order of sequences, then `logits_at`.
        """
        with torch.inference_mode():
            return self._forward(batch)

    def _forward(self, batch: StepBatch) -> Tensor:
        step = _Step(batch, self._min_rows, self.block_tokens, self.num_blocks)
        rotated = self._shape.query_heads + self._shape.kv_heads
        rotation = self._rotary.at(torch.tensor(step.positions, device=self.device), rotated)
        slots = torch.tensor(step.slots, device=self.device)
        plan = self._plan(step.queries, len(step.positions))
        x = F.embedding(torch.tensor(step.token_ids, device=self.device), self._embedding)
        for layer in self._layers[:-1]:
            heads = self._store(layer, x, rotation, slots)
            x = self._finish(layer, x, plan.run(heads, layer.cache))
        layer = self._layers[-1]
        heads = self._store(layer, x, rotation, slots)
        if not step.wanted:
            return torch.empty(0, self.config.vocab, device=self.device)
        if step.wanted_rows != list(range(len(x))):
            chosen = torch.tensor(step.wanted_rows, device=self.device)
            x, heads = x.index_select(0, chosen), heads.index_select(0, chosen)
            plan = self._plan(step.wanted_queries, len(step.wanted_rows))
        x = self._finish(layer, x, plan.run(heads, layer.cache))
        return self._head(x / self._norm(x, self._hidden_floor))[: step.wanted].float()

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the KV of physical blocks, (source, target) each, in all layers. Sources are read first."""
        if not pairs:
            return
        with torch.inference_mode():
            sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
            for layer in self._layers:
                layer.cache.index_copy_(1, targets, layer.cache.index_select(1, sources))

    def read_blocks(self, blocks: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Copy the KV of physical blocks out: all layers of a block into one buffer of `block_bytes`.

        From any thread, also while a step runs, for blocks that no step writes to meanwhile. The order of
        the numbers is `KV_LAYOUT`. The interpreter is free while bytes are copied.
        """
        for block, buffer in zip(blocks, buffers, strict=True):
            if self._memory is not None:
                np.copyto(self._shaped(buffer), self._memory[:, :, block])
            else:
                torch.from_numpy(self._shaped(buffer)).copy_(self._caches[:, :, block])

    def write_blocks(self, blocks: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """The other way round: fill physical blocks that no step reads or writes meanwhile.

        When it returns, every later step sees what was written.
        """
        for block, buffer in zip(blocks, buffers, strict=True):
            if self._memory is not None:
                np.copyto(self._memory[:, :, block], self._shaped(buffer))
            else:
                self._caches[:, :, block].copy_(torch.from_numpy(self._shaped(buffer).copy()))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _shaped(self, buffer: memoryview) -> "np.ndarray[Any, Any]":
        """One block's buffer as bytes [layers, 2 * kv_heads, bytes]."""
        layers, heads, _, size = self._caches.shape
        return np.frombuffer(buffer, np.uint8, layers * heads * size).reshape(layers, heads, size)

    def _store(self, layer: _Layer, x: Tensor, rotation: Rotation, slots: Tensor) -> Tensor:
        """Heads [rows, query + key + value heads, head_dim] of `x`, rotated; keys and values are cached."""
        shape = self._shape
        heads = layer.qkv(x / self._norm(x, self._hidden_floor)).view(x.shape[0], -1, shape.head_dim)
        if layer.qk_norm is not None:
            normed = heads[:, : layer.qk_norm.shape[0]]
            normed.div_(self._norm(normed, self._head_floor)).mul_(layer.qk_norm)
        rotation.apply_(heads[:, : shape.query_heads + shape.kv_heads])
        layer.slots.index_copy_(1, slots, heads[:, shape.query_heads :].transpose(0, 1))
        return heads

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, given the residual stream `x` and what its heads attended to."""
        x = layer.o.plus(attended, x)
        normed = x / self._norm(x, self._hidden_floor)
        return layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), x)

    def _norm(self, x: Tensor, floor: Tensor) -> Tensor:
        """sqrt(|x|^2 + width * eps) along the last axis: RMS times sqrt(width)."""
        return torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), floor)

    def _norm_floor(self, width: int) -> Tensor:
        return torch.tensor(math.sqrt(width * self.config.norm_eps), dtype=self.dtype, device=self.device)

    def _plan(self, queries: list[Query], rows: int) -> AttentionPlan:
        return AttentionPlan(
            queries,
            rows=rows,
            shape=self._shape,
            block_tokens=self.block_tokens,
            dtype=self.dtype,
            device=self.device,
        )


class _Step:
    """A batch as flat rows: decodes first (long contexts before short), then chunks, then padding."""

    def __init__(self, batch: StepBatch, min_rows: int, block_tokens: int, num_blocks: int) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        """Where each row's KV goes: block * block_tokens + offset."""
        self.queries: list[Query] = []
        sequences = batch.sequences
        first_rows = [0] * len(sequences)
        for index in sorted(range(len(sequences)), key=lambda i: _order(sequences[i])):
            sequence = sequences[index]
            first_rows[index] = row = len(self.token_ids)
            count, start, table = len(sequence.token_ids), sequence.start, sequence.block_table
            positions = range(start, start + count)
            self.token_ids += sequence.token_ids
            self.positions += positions
            self.slots += [table[p // block_tokens] * block_tokens + p % block_tokens for p in positions]
            self.queries.append(Query(row, count, start, table))
        padding = [0] * (min_rows - len(self.token_ids))
        self.token_ids += padding
        self.positions += padding
        self.slots += [num_blocks * block_tokens] * len(padding)
        self.wanted_rows: list[int] = []
        """Rows whose logits are asked for, in the batch's order, then padding."""
        self.wanted_queries: list[Query] = []
        """The same as queries over the rows 0, 1, ... that they are gathered into."""
        for sequence, first in zip(sequences, first_rows, strict=True):
            for begin, end in _runs(sequence.logits_at):
                row, count = len(self.wanted_rows), end - begin
                self.wanted_queries.append(Query(row, count, sequence.start + begin, sequence.block_table))
                self.wanted_rows += range(first + begin, first + end)
        self.wanted = len(self.wanted_rows)
        unused = [row for row in range(min_rows) if row not in self.wanted_rows]
        self.wanted_rows += unused[: max(0, min_rows - self.wanted)]


def _order(sequence: SequenceStep) -> tuple[bool, int]:
    return len(sequence.token_ids) > 1, -sequence.start


def _runs(indexes: Iterable[int]) -> list[tuple[int, int]]:
    """[3, 4, 5, 9] -> [(3, 6), (9, 10)]: maximal runs of consecutive numbers, as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for index in indexes:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


class _Loader:
    """Turns named checkpoint tensors into a model's parts, with the foldings the module names."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._weights, self._dtype, self._device = config, weights, dtype, device

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        weight = self._weights.get("model.embed_tokens.weight", (self._config.vocab, self._config.hidden))
        return weight.to(self._device, self._dtype, copy=True)

    def head(self) -> Linear:
        """The output matrix, with the final norm in it."""
        name = "model.embed_tokens.weight" if self._config.tied else "lm_head.weight"
        return self._linear([name], [self._config.vocab], columns=self._norm("model.norm"))

    def layer(self, index: int, cache: Tensor) -> _Layer:
        """Layer `index`, with `cache` for its keys and values."""
        config = self._config
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        inner, hidden = config.intermediate, config.hidden
        before_mlp = self._norm(f"{prefix}post_attention_layernorm")
        return _Layer(
            qkv=self._linear(
                [f"{attention}{part}_proj.weight" for part in "qkv"],
                [query, key, key],
                columns=self._norm(f"{prefix}input_layernorm"),
                rows=self._query_scale(query, query + 2 * key),
                bias=config.qkv_bias,
            ),
            o=self._linear([f"{attention}o_proj.weight"], [hidden], width=query, bias=config.o_bias),
            gate=self._linear([f"{mlp}gate_proj.weight"], [inner], columns=before_mlp, bias=config.mlp_bias),
            up=self._linear([f"{mlp}up_proj.weight"], [inner], columns=before_mlp, bias=config.mlp_bias),
            down=self._linear([f"{mlp}down_proj.weight"], [hidden], width=inner, bias=config.mlp_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            cache=cache,
            slots=cache.view(cache.shape[0], -1, config.head_dim),
        )

    def _linear(
        self,
        names: list[str],
        outs: list[int],
        *,
        width: int | None = None,
        columns: Tensor | None = None,
        rows: Tensor | None = None,
        bias: bool = False,
    ) -> Linear:
        """The matrices `names`, of `outs` rows each, below one another; columns and rows scaled."""
        inputs = width or self._config.hidden
        parts = [self._weights.get(name, (out, inputs)) for name, out in zip(names, outs, strict=True)]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if columns is not None or rows is not None:
            weight = _scaled(weight, columns, rows, self._dtype)
        offset = None
        if bias:
            biases = [name.removesuffix("weight") + "bias" for name in names]
            offset = torch.cat([self._get(name, out) for name, out in zip(biases, outs, strict=True)])
            if rows is not None:
                offset = offset * rows
            offset = offset.to(self._device, self._dtype)
        return make_linear(weight.to(self._device, self._dtype), offset)

    def _norm(self, name: str) -> Tensor:
        """A norm's weights times sqrt(hidden), to be folded into the columns of what follows it."""
        return self._get(f"{name}.weight", self._config.hidden) * math.sqrt(self._config.hidden)

    def _query_scale(self, query: int, rows: int) -> Tensor | None:
        """What the rows of a query-key-value matrix are multiplied by; with norms on heads, nothing."""
        if self._config.qk_norm:
            return None
        scale = torch.ones(rows)
        scale[:query] = BITS / math.sqrt(self._config.head_dim)
        return scale

    def _qk_norm(self, attention: str) -> Tensor:
        """One row a head. sqrt(head_dim) of the RMS and 1/sqrt(head_dim) of the scores cancel in queries."""
        config = self._config
        query = self._get(f"{attention}q_norm.weight", config.head_dim) * BITS
        key = self._get(f"{attention}k_norm.weight", config.head_dim) * math.sqrt(config.head_dim)
        rows = torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])
        return rows.to(self._device, self._dtype)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self._weights.get(name, shape).float()


def _scaled(weight: Tensor, columns: Tensor | None, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`weight` [out, in] times a factor a column and a factor a row, rounded once, to `dtype`.

    In panels: a float32 copy of a whole output matrix would be most of the memory and time of loading.
    """
    result = torch.empty(weight.shape, dtype=dtype)
    for first in range(0, len(weight), 1024):
        here = slice(first, first + 1024)
        panel = weight[here].float()
        if columns is not None:
            panel = panel * columns
        if rows is not None:
            panel = panel * rows[here, None]
        result[here] = panel
    return result


class _RandomWeights:
    """Weights drawn in the order they are asked for; norms are ones."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See WeightSource."""
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        return torch.randn(shape, generator=self._generator) * 0.02


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: a masked position's values are multiplied by 0, which must not meet a NaN.

    On a CPU they are pages of the system that take memory when they are first written: an engine is ready
    before its whole cache is.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _return_free_memory() -> None:
    """Give the pages of the unpacked weights back to the system, where the C library can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # another C library: it keeps the pages, nothing else changes

"""Matrix products with fixed weights: `x W^T + b`, where a model spends most of its time.

On a CPU the weights are stored once in the blocked layout that oneDNN computes from, and what follows
the product (adding the residual, SwiGLU) is fused into it. Measured on one core with AVX512-BF16
against `F.linear`: 1.6-1.9 times faster at one row, 1.05 at 512 (there the arithmetic is the limit).
The operators are torch's private ones, so torch is pinned, and where they are missing or do not give
the right answer on a probe the plain form is used, which is also the form on CUDA.
"""

import functools
import logging
import os
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_log = logging.getLogger(__name__)

CPU_MIN_ROWS = 4
"""Fewer rows than this take longer: at 1 row oneDNN's product streams weights at 15 GB/s, at 4 at 18."""

_FUSED_MIN_ROWS = 32
"""With fewer rows a fused product's set-up (8 to 15 us) costs more than the operation that it saves."""


_SHAPES_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "96", "LRU_CACHE_CAPACITY": "48"}
"""oneDNN compiles a kernel for every shape of a product and keeps the last 1,024, at 0.3 to 1 MB each (torch
a second list for its linears): over a day of prompts of all lengths that is a gigabyte. A step has 12 shapes
of linears and two for each tile of a prefill; compiling one takes under 1 ms. Kept so, they take 60 MB."""


def limit_kept_shapes() -> None:
    """Bound the memory of compiled products; what the user's environment says wins.

    Has an effect only before the first product of the process: oneDNN reads its environment then.
    """
    for name, value in _SHAPES_KEPT.items():
        os.environ.setdefault(name, value)


class Linear(Protocol):
    """One weight matrix [out, in] with an optional bias [out]. Inputs are [rows, in], contiguous."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product x W^T + b: [rows, out]."""
        ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product with the residual added, x W^T + b + residual: [rows, out]."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product: [rows, out]."""
        ...

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times `factor`, elementwise, (x W^T + b) * factor: [rows, out]."""
        ...


class PlainLinear:
    """The product as `F.linear` computes it, on any device."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """See Linear."""
        return self(x).add_(residual)

    def silu(self, x: Tensor) -> Tensor:
        """See Linear."""
        return F.silu(self(x), inplace=True)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """See Linear."""
        return self(x).mul_(factor)


class PackedLinear:
    """The product from a weight in oneDNN's layout (CPU). The given weight is not kept."""

    __slots__ = ("_bias", "_weight")

    # The operator behind the overload object: a step makes 150 calls, and the object's own costs 3 us.
    _unary = staticmethod(torch.ops.mkldnn._linear_pointwise.default._op)
    _binary = staticmethod(torch.ops.mkldnn._linear_pointwise.binary._op)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._unary(x, self._weight, self._bias, "none", [], "")

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """See Linear."""
        if x.shape[0] < _FUSED_MIN_ROWS:
            return self(x).add_(residual)
        return self._binary(x, residual, self._weight, self._bias, "add")

    def silu(self, x: Tensor) -> Tensor:
        """See Linear."""
        if x.shape[0] < _FUSED_MIN_ROWS:
            return F.silu(self(x), inplace=True)
        return self._unary(x, self._weight, self._bias, "swish", [], "")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """See Linear."""
        if x.shape[0] < _FUSED_MIN_ROWS:
            return self(x).mul_(factor)
        return self._binary(x, factor, self._weight, self._bias, "mul")


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest form for the device and dtype that `weight` has."""
    if weight.device.type == "cpu" and packing_works(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight.contiguous(), bias)


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """True if this torch and processor compute packed products of `dtype` correctly; logged if not."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 32), (_FUSED_MIN_ROWS, 32), (64,), (_FUSED_MIN_ROWS, 64))
    weight, x, bias, other = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    try:
        if not torch.backends.mkldnn.is_available():
            raise RuntimeError("this torch has no oneDNN")
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise RuntimeError("this processor has no bfloat16 arithmetic that oneDNN can use")
        packed, plain = PackedLinear(weight, bias), PlainLinear(weight.float(), bias.float())
        pairs = [
            (packed(x), plain(x.float())),
            (packed.plus(x, other), plain.plus(x.float(), other.float())),
            (packed.silu(x), plain.silu(x.float())),
            (packed.times(x, other), plain.times(x.float(), other.float())),
        ]
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        if not all(torch.allclose(ours.float(), right, tolerance, tolerance) for ours, right in pairs):
            raise RuntimeError("they give wrong results")
    except (RuntimeError, NotImplementedError, AttributeError) as problem:
        _log.warning("packed CPU weights are off for %s, products will be slower: %s", dtype, problem)
        return False
    return True

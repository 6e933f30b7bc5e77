"""Rotary position embedding: a table of all positions, and the rotation of one step's heads.

The rotation of a head x = (x1, x2) (two halves) by angles t is (x1 cos t - x2 sin t, x2 cos t + x1 sin t)
(Su et al., RoFormer, arXiv:2104.09864, in the half-split form that checkpoints use).
"""

import math

import torch
from torch import Tensor

from sumibi.engine.checkpoint import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each of the head_dim / 2 pairs, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: Tensor = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, between them a blend.

    Waves longer than original / low_freq_factor positions are long, those shorter than
    original / high_freq_factor are short (Meta's reference code for Llama 3.1).
    """
    waves = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((rope.original_max_positions / waves - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


class RotaryTable:
    """Cosines and sines of all positions, made once; steps pick their rows."""

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        *,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """For positions 0 to `positions` - 1."""
        frequencies = inverse_frequencies(rope, head_dim)
        angles = torch.arange(positions).float()[:, None] * frequencies[None, :]
        cos, sin = angles.cos(), angles.sin()
        self._table = torch.cat((cos, cos, -sin, sin), -1).to(device, dtype)

    def at(self, positions: Tensor, heads: int) -> "Rotation":
        """The rotation of rows at `positions` (int64 [rows]), of `heads` heads each."""
        cos, sin = self._table.index_select(0, positions).unsqueeze(1).chunk(2, -1)
        # Written out for every head: an elementwise product of equal shapes is twice as fast as one
        # that repeats its smaller factor.
        return Rotation(cos.repeat(1, heads, 1), sin.repeat(1, heads, 1))


class Rotation:
    """The rotation of one step, the same in every layer."""

    __slots__ = ("_cos", "_half", "_sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """Both [rows, heads, head_dim]; the first half of the sines is negative."""
        self._cos, self._sin, self._half = cos, sin, cos.shape[-1] // 2

    def apply_(self, heads: Tensor) -> None:
        """Rotate `heads` [rows, heads, head_dim], in place."""
        swapped = heads.roll(self._half, -1)
        heads.mul_(self._cos).addcmul_(swapped, self._sin)

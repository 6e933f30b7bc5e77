"""Rotary position embedding: tables for one step, and the rotation of all heads at once.

The rotation of a head x = (x1, x2) (two halves) by angles t is (x1 cos t - x2 sin t, x2 cos t + x1 sin t)
(Su et al., RoFormer, arXiv:2104.09864, in the half-split form checkpoints use). Values ride along with
angle zero, so queries, keys and values are one tensor before and after, and one write stores KV.
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


class Rotation:
    """The rotation of one step: tables [rows, heads, head_dim] made once, used in every layer."""

    __slots__ = ("_cos", "_half", "_sin")

    def __init__(
        self, positions: Tensor, frequencies: Tensor, *, rotated: int, still: int, dtype: torch.dtype
    ) -> None:
        """`positions` [rows]; the first `rotated` heads turn, the next `still` heads stay."""
        angles = positions.float()[:, None] * frequencies[None, :]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        rows, self._half = angles.shape
        # Written out for every head: an elementwise product of equal shapes is twice as fast as one
        # that repeats its smaller factor.
        self._cos = cos.new_ones(rows, rotated + still, 2 * self._half)
        self._sin = cos.new_zeros(rows, rotated + still, 2 * self._half)
        self._cos[:, :rotated] = torch.cat((cos, cos), -1)[:, None]
        self._sin[:, :rotated] = torch.cat((-sin, sin), -1)[:, None]

    def __call__(self, heads: Tensor) -> Tensor:
        """[rows, rotated + still, head_dim], rotated."""
        return torch.addcmul(heads * self._cos, heads.roll(self._half, -1), self._sin)

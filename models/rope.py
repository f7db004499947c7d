"""Rotary positions: adjacent channel pairs, YaRN on the layers with compressed keys.

Shape letters: B sequences, T tokens, H heads, K head width, P rotated channel pairs.
Sources: Su et al. 2021 (RoFormer), eq. 34; Peng et al. 2023 (YaRN), section 3.2, without its
magnitude factor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ppruntime.models.dims import ModelDims
from ppruntime.models.precision import widened


class Rotation(NamedTuple):
    """Angles of some positions, as fp32 cosines and sines."""

    cos: Tensor
    """[B, T, P]"""
    sin: Tensor
    """[B, T, P]"""


def yarn_ramp(dims: ModelDims, base: float) -> tuple[int, int]:
    """Pairs up to the first keep their frequency, from the second on all is interpolated."""

    def pair_with_rotations(rotations: float) -> float:
        turns = dims.yarn_original_length / (rotations * 2 * math.pi)
        return dims.rope_dim * math.log(turns) / (2 * math.log(base))

    low = math.floor(pair_with_rotations(dims.yarn_beta_fast))
    high = math.ceil(pair_with_rotations(dims.yarn_beta_slow))
    return max(low, 0), min(high, dims.rope_dim - 1)


def frequencies(dims: ModelDims, *, compressed: bool) -> Tensor:
    """theta_P in fp32 on the CPU: angle per position; `compressed` layers have a ratio above 0."""
    base = dims.compress_rope_theta if compressed else dims.rope_theta
    exponents = torch.arange(0, dims.rope_dim, 2, dtype=torch.float32) / dims.rope_dim
    plain = 1.0 / base**exponents
    if not compressed or dims.yarn_factor == 1:
        return plain
    low, high = yarn_ramp(dims, base)
    pairs = torch.arange(dims.rope_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / dims.yarn_factor * ramp + plain * (1 - ramp)


class Rope(nn.Module):
    """Positions -> rotation, with the frequencies of one kind of layer."""

    frequencies: Tensor

    def __init__(
        self, dims: ModelDims, *, compressed: bool, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.dims = dims
        self.compressed = compressed
        values = frequencies(dims, compressed=compressed)
        self.register_buffer("frequencies", values.to(device or "cpu"), persistent=False)

    def reset_buffers(self) -> None:
        """Fills the frequencies again, after a module was made on the meta device."""
        self.frequencies.copy_(frequencies(self.dims, compressed=self.compressed))

    def forward(self, positions_BT: Tensor) -> Rotation:
        angles_BTP = positions_BT.unsqueeze(-1).to(torch.float32) * self.frequencies
        return Rotation(angles_BTP.cos(), angles_BTP.sin())


def rotate(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Rotates the last 2P channels of x [B, T, K] or [B, T, H, K]; the others stay. fp32 inside."""
    cos, sin = rotation
    if inverse:
        sin = -sin
    if x.dim() == 4:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    num_rotated = 2 * cos.shape[-1]
    kept, turned = x[..., :-num_rotated], widened(x[..., -num_rotated:])
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((kept, pairs.flatten(-2).to(x.dtype)), dim=-1)

"""Rounding of cached keys to the formats they are stored in, with straight-through gradients.

Training with it (QAT) shows the model the keys that inference will read. Every value is rounded to
nearest, ties to even, and multiplied back by the scale of its group of consecutive channels.
Source: DeepSeek-V4.1 report, section 3.2; formats as in the OCP MX specification 1.0 and NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ppruntime.models.precision import in_dtype

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


class CacheFormat(Enum):
    """How a kind of key is stored."""

    FP8 = "fp8"
    """E4M3, groups of 32, power-of-two scales rounded up: window keys."""
    MXFP4 = "mxfp4"
    """E2M1, groups of 32, power-of-two scales rounded up: index queries and keys."""
    NVFP4 = "nvfp4"
    """E2M1, groups of 16, E4M3 scales: compressed keys."""


def power_of_two_ceiling(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x, exactly; x is positive, normal, fp32."""
    mantissa, exponent = torch.frexp(x)
    # frexp has 0.5 <= mantissa < 1, so a power of two itself shows as 0.5.
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def round_to_e2m1(x: Tensor) -> Tensor:
    """x in [-6, 6] to the nearest of +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, ties to even."""
    magnitude = x.abs()
    # Spacing is 0.5 below 2, 1 below 4, 2 above; torch.round takes ties to even.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign((magnitude / step).round() * step, x)


def _fp8(groups: Tensor, largest: Tensor) -> Tensor:
    scale = power_of_two_ceiling(largest.clamp_min(1e-4) * (1 / _E4M3_MAX))
    clamped = (groups / scale).clamp(-_E4M3_MAX, _E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).float() * scale


def _mxfp4(groups: Tensor, largest: Tensor) -> Tensor:
    scale = power_of_two_ceiling(largest.clamp_min(_E2M1_MAX * 2.0**-126) * (1 / _E2M1_MAX))
    return round_to_e2m1((groups / scale).clamp(-_E2M1_MAX, _E2M1_MAX)) * scale


def _nvfp4(groups: Tensor, largest: Tensor) -> Tensor:
    scale = (largest.clamp_min(_E2M1_MAX * 2.0**-9) / _E2M1_MAX).to(torch.float8_e4m3fn).float()
    return round_to_e2m1((groups / scale).clamp(-_E2M1_MAX, _E2M1_MAX)) * scale


_ROUNDING: dict[CacheFormat, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    CacheFormat.FP8: (32, _fp8),
    CacheFormat.MXFP4: (32, _mxfp4),
    CacheFormat.NVFP4: (16, _nvfp4),
}


class _StraightThrough(torch.autograd.Function):
    """Rounds in the forward, passes the gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cache_format: CacheFormat) -> Tensor:
        group_size, rounded = _ROUNDING[cache_format]
        num_channels = x.shape[-1]
        num_groups = -(-num_channels // group_size)
        padded = functional.pad(x.float(), (0, num_groups * group_size - num_channels))
        groups = padded.view(*x.shape[:-1], num_groups, group_size)
        largest = groups.abs().amax(-1, keepdim=True)
        return in_dtype(rounded(groups, largest).flatten(-2)[..., :num_channels], x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def through_cache(x: Tensor, cache_format: CacheFormat) -> Tensor:
    """x [..., channels] as it would come back from the cache, in x's dtype."""
    y: Tensor = _StraightThrough.apply(x, cache_format)  # type: ignore[no-untyped-call]
    return y

"""RMSNorm, computed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppruntime.models.precision import widened


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean x^2 + eps) over the last axis, fp32, that axis kept with extent 1."""
    return torch.rsqrt(widened(x).square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the weight is applied before the cast back."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        normed = widened(x) * inverse_rms(x, self.eps)
        return (normed * widened(self.weight)).to(x.dtype)

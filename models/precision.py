"""Where a low-precision model computes in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in fp32; fp64 stays, so that gradients can be checked in it."""
    return x if x.dtype is torch.float64 else x.float()


def holder_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Dtype of the parameters that stay fp32 in a model of compute dtype `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32

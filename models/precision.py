"""Where a low-precision model computes in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in fp32; fp64 stays, so that gradients can be checked in it."""
    return x if x.dtype is torch.float64 else x.float()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; no operation where it is. For what an autograd function returns: where that
    comes from a cast that does nothing, torch 2.11's compiler loses its gradient."""
    return x if x.dtype is dtype else x.to(dtype)


def is_low(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are summed in fp32: bf16 and fp16."""
    return dtype in (torch.bfloat16, torch.float16)


def fp32_product(a_XC: Tensor, b_CY: Tensor) -> Tensor:
    """[X, Y] fp32 (fp64 stays) whatever the dtype of the operands."""
    if a_XC.is_cuda and is_low(a_XC.dtype):
        return torch.mm(a_XC, b_CY, out_dtype=torch.float32)
    return widened(a_XC) @ widened(b_CY)


def add_product(sum_XY: Tensor | None, a_XC: Tensor, b_CY: Tensor) -> Tensor:
    """sum + a b, in place and in fp32 (fp64 stays); None is a sum of nothing."""
    if sum_XY is None:
        return fp32_product(a_XC, b_CY)
    if a_XC.is_cuda and a_XC.dtype is not sum_XY.dtype:
        return torch.addmm(sum_XY, a_XC, b_CY, out_dtype=sum_XY.dtype, out=sum_XY)
    return sum_XY.addmm_(widened(a_XC), widened(b_CY))


def holder_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Dtype of the parameters that stay fp32 in a model of compute dtype `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""The clamped SwiGLU of rows in the compute dtype, in one pass each way.

    h  = silu(min(g, limit)) clamp(u, -limit, limit)       [g | u] = z
    dz = [dh u silu'(g) | dh silu(g)], zero where a clamp holds

Kept for the backward: z. Bytes of N rows of F channels in bf16: 6 N F forward, 10 N F backward;
plain PyTorch moves some ten times as much, in fp32. A row has the same bits whatever rows lie
beside it. Numeric class: summation order (the exponential's last bit; rounded once, as the
reference). Shape letters: N rows, F channels of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.rounding import sigmoid, to_bf16

_BLOCK = 1024


def swiglu(z: Tensor, limit: float) -> Tensor:
    """z [..., 2 F] -> h [..., F], as `experts.clamped_swiglu`. Raises ValueError for dtypes that it
    does not take, and for an odd number of channels."""
    if z.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"swiglu: z is {z.dtype}; the kernel takes bfloat16 and float32")
    if z.shape[-1] % 2:
        raise ValueError(
            f"swiglu: z has {z.shape[-1]} channels; gate and up are halves of an even number"
        )
    h: Tensor = _Swiglu.apply(z, limit)
    return h


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.limit = limit
        h: Tensor = _forward(z, limit)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return _backward(dh, z, ctx.limit), None


@torch.library.custom_op("ppruntime::shared_swiglu", mutates_args=())
def _forward(z: Tensor, limit: float) -> Tensor:
    z = z.contiguous()
    width = z.shape[-1] // 2
    h = z.new_empty(*z.shape[:-1], width)
    if h.numel():
        _forward_kernel[_grid(h)](z, h, limit, width, _BLOCK, num_warps=4)
    return h


@_forward.register_fake
def _(z: Tensor, limit: float) -> Tensor:
    return z.new_empty(*z.shape[:-1], z.shape[-1] // 2)


@torch.library.custom_op("ppruntime::shared_swiglu_backward", mutates_args=())
def _backward(dh: Tensor, z: Tensor, limit: float) -> Tensor:
    dh, z = dh.contiguous(), z.contiguous()
    dz = torch.empty_like(z)
    if dh.numel():
        _backward_kernel[_grid(dh)](dh, z, dz, limit, dh.shape[-1], _BLOCK, num_warps=4)
    return dz


@_backward.register_fake
def _(dh: Tensor, z: Tensor, limit: float) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _grid(h: Tensor) -> tuple[int, int]:
    """Rows first: a grid's second axis has room for 65,535."""
    width = h.shape[-1]
    return h.numel() // width, triton.cdiv(width, _BLOCK)


@triton.jit
def _forward_kernel(z_ptr, h_ptr, limit, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < F
    gate = tl.load(z_ptr + row * (2 * F) + channels, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + row * (2 * F) + F + channels, mask=inside, other=0.0).to(tl.float32)
    gate = _below(gate, limit)
    up = _below(_above(up, -limit), limit)
    _store(h_ptr + row * F + channels, gate * _opening(gate) * up, inside)


@triton.jit
def _backward_kernel(dh_ptr, z_ptr, dz_ptr, limit, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < F
    at_gate = row * (2 * F) + channels
    gate = tl.load(z_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + at_gate + F, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * F + channels, mask=inside, other=0.0).to(tl.float32)
    gate_is_open, up_is_open = gate <= limit, (up <= limit) & (up >= -limit)
    gate = _below(gate, limit)
    up = _below(_above(up, -limit), limit)
    opening = _opening(gate)
    dgate = dh * up * (opening * (1.0 + gate * (1.0 - opening)))
    dup = dh * (gate * opening)
    _store(dz_ptr + at_gate, tl.where(gate_is_open, dgate, 0.0), inside)
    _store(dz_ptr + at_gate + F, tl.where(up_is_open, dup, 0.0), inside)


@triton.jit
def _opening(x):
    # Below, it is zero to 34 digits, and the interpreter's exponential would overflow.
    return sigmoid(_above(x, -80.0))


@triton.jit
def _below(x, limit):
    """What is no number stays none, as in torch's clamp: a broken run has to show."""
    return tl.where(x > limit, limit, x)


@triton.jit
def _above(x, limit):
    return tl.where(x < limit, limit, x)


@triton.jit
def _store(ptrs, x, mask):
    if ptrs.dtype.element_ty == tl.bfloat16:
        x = to_bf16(x)
    tl.store(ptrs, x, mask=mask)

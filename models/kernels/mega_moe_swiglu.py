# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""The clamped SwiGLU of bf16 experts in the pool, forward and backward, each in one pass.

The formulas of `swiglu`, the routing weight included, without quantisation: rows stay rows, for the
data gradient and for the weight gradient alike. Padding rows become zeros, which weight gradients
may add. Shape letters: R pool rows, F inner width, G = F/128.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.quantize import GROUP
from ppruntime.models.kernels.rounding import sigmoid, to_bf16
from ppruntime.models.kernels.swiglu import swiglu_reference

_ROWS = 32


class Bf16SwigluGrads(NamedTuple):
    """What the backward hands to the GEMMs and to the router."""

    gate_up_RC: Tensor
    """[dg | du], bf16 [R, 2F]."""
    inner_RF: Tensor
    """h again, bf16 [R, F]."""
    weight_R: Tensor
    """fp32 gradient of each row's routing weight."""


@triton.jit
def _swiglu_bf16(
    z_ptr, weight_ptr, pair_ptr, inner_ptr, limit, F: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    live = (tl.load(pair_ptr + rows) >= 0)[:, None]
    wide_rows = rows.to(tl.int64)[:, None]
    gate = tl.load(z_ptr + wide_rows * (2 * F) + channels, mask=live, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + wide_rows * (2 * F) + F + channels, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + rows)[:, None]
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    inner = gate * sigmoid(gate) * up * weight
    tl.store(inner_ptr + wide_rows * F + channels, to_bf16(inner))


def swiglu_bf16(z_RC: Tensor, weight_R: Tensor, pair_R: Tensor, limit: float) -> Tensor:
    """h [R, F] bf16. `pair_R` is -1 in padding, which `z_RC` may fill with anything."""
    rows, width = z_RC.shape[0], z_RC.shape[1] // 2
    inner_RF = z_RC.new_empty(rows, width)
    if rows:
        _swiglu_bf16[(width // GROUP, rows // _ROWS)](
            z_RC, weight_R, pair_R, inner_RF, limit, width, _ROWS, num_warps=4
        )
    return inner_RF


def swiglu_bf16_reference(z_RC: Tensor, weight_R: Tensor, pair_R: Tensor, limit: float) -> Tensor:
    """The same in torch."""
    live_R1 = (pair_R >= 0).unsqueeze(1)
    return swiglu_reference(torch.where(live_R1, z_RC.float(), 0), weight_R, limit).to(z_RC.dtype)


@triton.jit
def _swiglu_bf16_backward(
    z_ptr, grad_ptr, weight_ptr, pair_ptr, gate_up_ptr, inner_ptr, dot_ptr, limit, R,
    F: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    live = (tl.load(pair_ptr + rows) >= 0)[:, None]
    wide_rows = rows.to(tl.int64)[:, None]
    z_offsets = wide_rows * (2 * F) + channels
    offsets = wide_rows * F + channels
    gate = tl.load(z_ptr + z_offsets, mask=live, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + z_offsets + F, mask=live, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + rows)[:, None]
    gate_open, up_open = gate <= limit, tl.abs(up) <= limit
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    opening = sigmoid(gate)
    silu = gate * opening
    weighted = grad * weight
    gate_grad = tl.where(gate_open, weighted * up * opening * (1.0 + gate * (1.0 - opening)), 0.0)
    up_grad = tl.where(up_open, weighted * silu, 0.0)
    tl.store(gate_up_ptr + z_offsets, to_bf16(gate_grad))
    tl.store(gate_up_ptr + z_offsets + F, to_bf16(up_grad))
    tl.store(inner_ptr + offsets, to_bf16(silu * up * weight))
    # One partial sum per 128 channels; they are added in order afterwards.
    tl.store(dot_ptr + tl.program_id(0) * R + rows, tl.sum(grad * silu * up, axis=1))


def swiglu_bf16_backward(
    z_RC: Tensor, grad_RF: Tensor, weight_R: Tensor, pair_R: Tensor, limit: float
) -> Bf16SwigluGrads:
    """Everything the backward needs from z and the gradient of h."""
    rows, width = z_RC.shape[0], z_RC.shape[1] // 2
    gate_up_RC, inner_RF = torch.empty_like(z_RC), z_RC.new_empty(rows, width)
    dot_GR = z_RC.new_empty(width // GROUP, rows, dtype=torch.float32)
    if rows:
        _swiglu_bf16_backward[(width // GROUP, rows // _ROWS)](
            z_RC, grad_RF, weight_R, pair_R, gate_up_RC, inner_RF, dot_GR, limit, rows,
            width, _ROWS, num_warps=8,
        )  # fmt: skip
    return Bf16SwigluGrads(gate_up_RC, inner_RF, dot_GR.sum(0))


def swiglu_bf16_backward_reference(
    z_RC: Tensor, grad_RF: Tensor, weight_R: Tensor, pair_R: Tensor, limit: float
) -> Bf16SwigluGrads:
    """By autograd, so that the kernel's closed forms are checked against it."""
    live_R1 = (pair_R >= 0).unsqueeze(1)
    z = torch.where(live_R1, z_RC.float(), 0).requires_grad_()
    weight = weight_R.detach().clone().requires_grad_()
    with torch.enable_grad():
        inner = swiglu_reference(z, weight, limit)
        grad = torch.where(live_R1, grad_RF.float(), 0)
        grad_z, grad_weight = torch.autograd.grad(inner, (z, weight), grad)
    return Bf16SwigluGrads(
        grad_z.to(z_RC.dtype),
        inner.detach().to(z_RC.dtype),
        torch.where(pair_R >= 0, grad_weight, 0),
    )

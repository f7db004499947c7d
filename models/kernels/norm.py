# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""RMSNorm in Triton: one pass each way, where plain PyTorch takes eight and fifteen.

    y = x r w, r = 1 / rms(x)        dx = r (g w - n mean(g w n)), n = x r        dw = sum of g n

Bytes: x and y forward; gradient, x and its gradient backward. Kept for the backward: x and r, as
the reference does.

Numeric class: summation order; the reference's gradient is rounded twice, this one once.
Shape letters: N rows, W width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.rounding import to_bf16
from ppruntime.models.kernels.token_shares import SHARES, tokens_per_program

_TILE = 4096
"""Values that a program works on at a time: so many rows as they are."""
_STAGES = 3
"""Tiles that a program which goes through many has under way."""


def rms_norm(x: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """As `norm.rms_norm`: [..., W] in x's dtype. Raises ValueError for dtypes that it does not
    take, and for a weight of another width."""
    for name, tensor in (("x", x), ("the weight", weight_W)):
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"rms_norm: {name} is {tensor.dtype}; the kernel takes bfloat16 and float32"
            )
    if weight_W.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: x is {list(x.shape)} and the weight {list(weight_W.shape)}; it has to be "
            f"{list(x.shape[-1:])}"
        )
    y: Tensor = _RMSNorm.apply(x, weight_W, eps)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y_NW, inverse_N = _norm(x.reshape(-1, x.shape[-1]), weight, eps)
        ctx.save_for_backward(x, weight, inverse_N)
        y: Tensor = y_NW.view(x.shape)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse_N = ctx.saved_tensors
        width = x.shape[-1]
        dx, dweight = _norm_backward(
            grad.reshape(-1, width), x.reshape(-1, width), weight, inverse_N
        )
        wants_x, wants_weight, _ = ctx.needs_input_grad
        return dx.view(x.shape) if wants_x else None, dweight if wants_weight else None, None


# The ops


@torch.library.custom_op("ppruntime::rms_norm", mutates_args=())
def _norm(x_NW: Tensor, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y [N, W] in x's dtype, 1 / rms [N])."""
    y_NW, inverse_N = _outputs(x_NW)
    num_rows, width = x_NW.shape
    if num_rows:
        padded, rows = _tile(width)
        _norm_kernel[(triton.cdiv(num_rows, rows),)](
            x_NW.contiguous(), weight_W, y_NW, inverse_N, eps, num_rows,
            width, padded, rows, num_warps=4,
        )  # fmt: skip
    return y_NW, inverse_N


def _outputs(x_NW: Tensor) -> tuple[Tensor, Tensor]:
    y_NW = torch.empty_like(x_NW, memory_format=torch.contiguous_format)
    return y_NW, x_NW.new_empty(x_NW.shape[0], dtype=torch.float32)


@_norm.register_fake
def _(x_NW: Tensor, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _outputs(x_NW)


@torch.library.custom_op("ppruntime::rms_norm_backward", mutates_args=())
def _norm_backward(
    grad_NW: Tensor, x_NW: Tensor, weight_W: Tensor, inverse_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    num_rows, width = x_NW.shape
    dx_NW = torch.empty_like(x_NW, memory_format=torch.contiguous_format)
    if not num_rows:
        return dx_NW, torch.zeros_like(weight_W)
    padded, rows = _tile(width)
    tiles = tokens_per_program(triton.cdiv(num_rows, rows), 2 * SHARES)
    programs = triton.cdiv(num_rows, tiles * rows)
    parts = inverse_N.new_empty(programs, width)
    _norm_backward_kernel[(programs,)](
        grad_NW.contiguous(), x_NW.contiguous(), weight_W, inverse_N, dx_NW, parts, num_rows, tiles,
        width, padded, rows, _STAGES, num_warps=4,
    )  # fmt: skip
    return dx_NW, parts.sum(0).to(weight_W.dtype)


@_norm_backward.register_fake
def _(grad_NW: Tensor, x_NW: Tensor, weight_W: Tensor, inverse_N: Tensor) -> tuple[Tensor, Tensor]:
    dx_NW = torch.empty_like(x_NW, memory_format=torch.contiguous_format)
    return dx_NW, torch.empty_like(weight_W)


def _tile(width: int) -> tuple[int, int]:
    """(the width as a power of two, rows of a program)."""
    padded = triton.next_power_of_2(width)
    return padded, max(1, _TILE // padded)


# The kernels


@triton.jit
def _cast(x, like_ptr):
    """fp32 to the type behind a pointer, to nearest."""
    return to_bf16(x) if like_ptr.dtype.element_ty == tl.bfloat16 else x


@triton.jit(do_not_specialize=("num_rows",))
def _norm_kernel(
    x_ptr, weight_ptr, y_ptr, inverse_ptr, eps, num_rows,
    W: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, PADDED)
    places = rows[:, None] * W + channels[None, :]
    mask = (rows < num_rows)[:, None] & (channels < W)[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / W + eps)
    tl.store(inverse_ptr + rows, inverse, mask=rows < num_rows)
    weight = tl.load(weight_ptr + channels, mask=channels < W, other=0.0).to(tl.float32)
    y = x * inverse[:, None] * weight[None, :]
    tl.store(y_ptr + places, _cast(y, y_ptr), mask=mask)


@triton.jit(do_not_specialize=("num_rows", "tiles"))
def _norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, inverse_ptr, dx_ptr, dweights_ptr, num_rows, tiles,
    W: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tiles of rows, one by one: the gradient of x, and their part of the weight's."""
    channels = tl.arange(0, PADDED)
    in_row = channels < W
    weight = tl.load(weight_ptr + channels, mask=in_row, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([ROWS, PADDED], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles
    for tile in tl.range(first, first + tiles, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        places = rows[:, None] * W + channels[None, :]
        mask = (rows < num_rows)[:, None] & in_row[None, :]
        inverse = tl.load(inverse_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32) * inverse
        dweight += grad * normed
        weighted = grad * weight
        dx = inverse * (weighted - normed * (tl.sum(weighted * normed, 1) / W)[:, None])
        tl.store(dx_ptr + places, _cast(dx, dx_ptr), mask=mask)
    part = dweights_ptr + tl.program_id(0).to(tl.int64) * W + channels
    tl.store(part, tl.sum(dweight, 0), mask=in_row)

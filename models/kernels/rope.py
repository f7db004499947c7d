# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""Rotation of the last channels in Triton; with a projection it happens where the product lies.

`rotate` copies, since its input may be someone else's. `project_rotated` turns 2 P of a head's K
channels in place right after the product, so that neither an unrotated copy nor a pass over the
other channels is left: of V4.1's queries (8,192 tokens) 134 MB are read and written, not 1.07 GB.
The gradient is turned back in a copy, which both gradients of the product then read.

Numeric class: bitwise. Products and differences are rounded one by one, as torch does.

Shape letters: B sequences, T tokens, H heads, K head width, P rotated pairs, I input width, N rows.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ppruntime.models.kernels.rounding import to_bf16
from ppruntime.models.linear import Linear, WeightGradQueue, product_now_or_later
from ppruntime.models.rope import Rotation

_ROWS = 32
"""Heads of one program."""


@runtime_checkable
class ProjectsRotated(Protocol):
    """A linear that makes the turned product itself, such as one in FP8."""

    def project_rotated(self, x_BTI: Tensor, rotation: Rotation, num_heads: int) -> Tensor:
        """As the function of this name."""
        ...


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """As `rope.rotate`: x [B, T, K] or [B, T, H, K] with its last 2 P channels turned, a copy."""
    turned: Tensor = _rotate(x, rotation.cos, rotation.sin, False)
    return turned


def project_rotated(linear: Linear, x_BTI: Tensor, rotation: Rotation, num_heads: int) -> Tensor:
    """[B, T, H, K] the product as heads, turned where it lies. Weight gradients can wait."""
    if type(linear) is not Linear:  # whose product is not ours to make
        if isinstance(linear, ProjectsRotated):
            return linear.project_rotated(x_BTI, rotation, num_heads)
        return rotate(linear(x_BTI).unflatten(-1, (num_heads, -1)), rotation)
    q_BTHK: Tensor = _ProjectRotated.apply(
        x_BTI, linear.weight, rotation.cos, rotation.sin, num_heads, linear.queue
    )
    return q_BTHK


class _ProjectRotated(torch.autograd.Function):
    """The product and its rotation as one node, whose weight gradient may wait in the queue."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTI: Tensor,
        weight: Tensor,
        cos_BTP: Tensor,
        sin_BTP: Tensor,
        num_heads: int,
        queue: WeightGradQueue | None,
    ) -> Tensor:
        ctx.save_for_backward(x_BTI, weight, cos_BTP, sin_BTP)
        ctx.queue, ctx.parameter = queue, weight
        q_BTHK: Tensor = _project_rotated(x_BTI, weight, cos_BTP, sin_BTP, num_heads)
        return q_BTHK

    @staticmethod
    def backward(ctx: Any, grad_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        x_BTI, weight, cos_BTP, sin_BTP = ctx.saved_tensors
        back_BTHK = _rotate(grad_BTHK.to(x_BTI.dtype), cos_BTP, sin_BTP, True)
        grad_NO = back_BTHK.view(-1, weight.shape[0])
        grad_x = (grad_NO @ weight).view_as(x_BTI) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            x_NI = x_BTI.reshape(-1, x_BTI.shape[-1])
            grad_weight = product_now_or_later(ctx.queue, ctx.parameter, grad_NO, x_NI)
        return grad_x, grad_weight, None, None, None, None


# The ops


@torch.library.custom_op("ppruntime::rotate", mutates_args=())
def _rotate(x: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, inverse: bool) -> Tensor:
    """x with its last 2 P channels turned, by minus the angles if `inverse`."""
    _check(x, cos_BTP, sin_BTP)
    x = x.contiguous()
    turned = torch.empty_like(x)
    _launch(x, turned, cos_BTP, sin_BTP, inverse=inverse)
    return turned


@_rotate.register_fake
def _(x: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, inverse: bool) -> Tensor:
    turned: Tensor = torch.empty_like(x, memory_format=torch.contiguous_format)
    return turned


def _setup_context(ctx, inputs, output) -> None:
    _, cos_BTP, sin_BTP, ctx.inverse = inputs
    ctx.save_for_backward(cos_BTP, sin_BTP)


def _backward(ctx, grad: Tensor):
    return _rotate(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rotate.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("ppruntime::rotated_linear", mutates_args=())
def _project_rotated(
    x_BTI: Tensor, weight: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, num_heads: int
) -> Tensor:
    """[B, T, H, K] = x W^T with every head turned. No gradient of its own."""
    q_BTHK = functional.linear(x_BTI, weight).view(*x_BTI.shape[:-1], num_heads, -1)
    _check(q_BTHK, cos_BTP, sin_BTP)
    turn_(q_BTHK, Rotation(cos_BTP, sin_BTP))
    return q_BTHK


@_project_rotated.register_fake
def _(x_BTI: Tensor, weight: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, num_heads: int) -> Tensor:
    return x_BTI.new_empty(*x_BTI.shape[:-1], num_heads, weight.shape[0] // num_heads)


def turn_(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> None:
    """Turns the last 2 P channels of a contiguous x [B, T, K] or [B, T, H, K] where they lie.

    No op and no gradient: for what has just been made and nobody else has seen.
    """
    assert x.is_contiguous(), "what is turned in place has to be contiguous"
    _launch(x, x, rotation.cos, rotation.sin, inverse=inverse)


def turn_for_a_while_(x: Tensor, rotation: Rotation) -> Tensor:
    """`turn_`, and the last 2 P channels as they were, [rows, 2 P], for `put_back_`. One pass."""
    assert x.is_contiguous(), "what is turned in place has to be contiguous"
    num_pairs = rotation.cos.shape[-1]
    kept = x.new_empty(x.numel() // x.shape[-1], 2 * num_pairs)
    _launch(x, x, rotation.cos, rotation.sin, inverse=False, kept=kept)
    return kept


def put_back_(x: Tensor, kept: Tensor) -> None:
    """Makes the last channels of x what they were before `turn_for_a_while_`, to the bit."""
    num_rows, width = kept.shape
    if num_rows:
        _put_back_kernel[(triton.cdiv(num_rows, 2 * _ROWS),)](
            x, kept, num_rows, x.shape[-1], width, 2 * _ROWS, num_warps=4
        )


# The kernel


@triton.jit
def _rotate_kernel(
    x_ptr, y_ptr, kept_ptr, cos_ptr, sin_ptr, num_rows,
    H: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr,
    INVERSE: tl.constexpr, IN_PLACE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    is_row = rows < num_rows
    if not IN_PLACE:
        channels = tl.arange(0, ALL)[None, :]
        is_kept = is_row & (channels < K - 2 * P)
        kept = tl.load(x_ptr + rows * K + channels, mask=is_kept)
        tl.store(y_ptr + rows * K + channels, kept, mask=is_kept)
    tail = rows * K + (K - 2 * P) + tl.arange(0, 2 * P)[None, :]
    x = tl.load(x_ptr + tail, mask=is_row, other=0.0)
    if KEEP:
        tl.store(kept_ptr + rows * (2 * P) + tl.arange(0, 2 * P)[None, :], x, mask=is_row)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [ROWS, P, 2]))
    pairs = tl.arange(0, P)[None, :]
    if H % ROWS == 0:  # all rows are one token's, whose angles are read once
        angles = tl.program_id(0).to(tl.int64) * ROWS // H * P + pairs
        cos, sin = tl.load(cos_ptr + angles), tl.load(sin_ptr + angles)
    else:
        angles = rows // H * P + pairs
        cos = tl.load(cos_ptr + angles, mask=is_row, other=1.0)
        sin = tl.load(sin_ptr + angles, mask=is_row, other=0.0)
    if INVERSE:
        sin = -sin
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    turned = tl.reshape(turned, [ROWS, 2 * P])
    if y_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(y_ptr + tail, to_bf16(turned), mask=is_row)
    else:
        tl.store(y_ptr + tail, turned, mask=is_row)


@triton.jit
def _put_back_kernel(
    x_ptr, kept_ptr, num_rows, K: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channels = tl.arange(0, TAIL)[None, :]
    is_row = rows < num_rows
    kept = tl.load(kept_ptr + rows * TAIL + channels, mask=is_row)
    tl.store(x_ptr + rows * K + (K - TAIL) + channels, kept, mask=is_row)


def _launch(
    x: Tensor,
    y: Tensor,
    cos_BTP: Tensor,
    sin_BTP: Tensor,
    *,
    inverse: bool,
    kept: Tensor | None = None,
) -> None:
    width, num_pairs = x.shape[-1], cos_BTP.shape[-1]
    num_rows = x.numel() // width
    if num_rows == 0:
        return
    _rotate_kernel[(triton.cdiv(num_rows, _ROWS),)](
        x, y, kept, cos_BTP.contiguous(), sin_BTP.contiguous(), num_rows,
        x.shape[2] if x.dim() == 4 else 1, width, num_pairs, triton.next_power_of_2(width), _ROWS,
        inverse, y is x, kept is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _check(x: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> None:
    """Raises ValueError unless the kernel takes these tensors."""
    num_pairs = cos_BTP.shape[-1]
    if x.dim() not in (3, 4) or cos_BTP.shape != (*x.shape[:2], num_pairs):
        raise ValueError(
            f"rotate: x is {list(x.shape)} and cosines {list(cos_BTP.shape)}; they are [B, T, K] "
            "or [B, T, H, K], and [B, T, P]"
        )
    if sin_BTP.shape != cos_BTP.shape or {cos_BTP.dtype, sin_BTP.dtype} != {torch.float32}:
        raise ValueError(
            f"rotate: sines are {list(sin_BTP.shape)} {sin_BTP.dtype}; they have to be float32 and "
            f"as the cosines, {list(cos_BTP.shape)}"
        )
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"rotate: x is {x.dtype}; the kernel takes bfloat16 and float32")
    if num_pairs & (num_pairs - 1) or not 0 < 2 * num_pairs <= x.shape[-1]:
        raise ValueError(
            f"rotate: {num_pairs} pairs of {x.shape[-1]} channels; the kernel takes a power of "
            f"two up to {x.shape[-1] // 2}"
        )

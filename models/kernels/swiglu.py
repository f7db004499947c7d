# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""The experts' clamped SwiGLU between the FP8 GEMMs, forward and backward, each in one pass.

    h  = p silu(g') u'             g' = min(g, limit), u' = clamp(u, -limit, limit)
    dp = <d, silu(g') u'>          d: gradient of h, p: the pair's routing weight
    dg = [g <= limit]   p d u' s (1 + g' (1 - s)),   s = sigmoid(g')
    du = [|u| <= limit] p d g' s

The routing weight goes in before h is rounded, so nothing is left to weigh after the second GEMM.
Shape letters: P pool rows, B = P/128, F inner width, C = 2F (gate channels, then up), G = channel
groups of 128. fp32 inside; z and d come in bf16.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.moe_layout import Layout
from ppruntime.models.kernels.quantize import (
    GROUP,
    Quantized,
    column_scale,
    columns_like,
    on_hopper,
    part_rows,
    pool_rows_like,
    store_columns,
    store_rows,
)
from ppruntime.models.kernels.rounding import e4m3_pair, e4m3_words, reciprocal_of_scale, sigmoid


class SwigluGrads(NamedTuple):
    """What the backward hands to the GEMMs and to the router."""

    rows: Quantized
    """[dg | du] in row groups: data [P, C], scale [G, P], for the data gradient."""
    columns: Quantized
    """[dg | du] in column groups, for the weight gradient of gate and up."""
    inner_columns: Quantized
    """h in column groups, for the weight gradient of down."""
    weight_NK: Tensor
    """fp32 gradient of the routing weights; 0 where a pair is routed nowhere."""


def swiglu_reference(z_PC: Tensor, weight_P: Tensor, limit: float) -> Tensor:
    """h [P, F], fp32 (fp64 stays): differentiable, and its gradient is the formulas above."""
    wide = z_PC if z_PC.dtype is torch.float64 else z_PC.float()
    gate, up = wide.chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return inner * weight_P.unsqueeze(1)


def weight_of_rows(weight_NK: Tensor, layout: Layout) -> Tensor:
    """Routing weight of each pool row, [P] fp32; 0 in padding."""
    weight_P = weight_NK.flatten()[layout.pair_P.long().clamp_min(0)]
    return torch.where(layout.pair_P >= 0, weight_P, 0)


@triton.jit
def _swiglu(
    z_ptr, weight_ptr, pair_ptr, expert_ptr, rows_ptr, row_scale_ptr, P, limit,
    F: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    if tl.load(expert_ptr + tl.program_id(1) * ROWS // 128) < 0:
        return
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * 128
    pair = tl.load(pair_ptr + rows)
    routed = pair >= 0
    # Rows of padding may hold anything: they are masked, not multiplied by 0.
    offsets = rows.to(tl.int64)[:, None] * (2 * F) + column + tl.arange(0, 128)[None, :]
    gate = tl.load(z_ptr + offsets, mask=routed[:, None], other=0.0).to(tl.float32)
    up = tl.load(z_ptr + offsets + F, mask=routed[:, None], other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + pair, mask=routed, other=0.0)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    inner = gate * sigmoid(gate) * up * weight[:, None]
    scales = row_scale_ptr + (column // 128) * P
    store_rows(inner, rows_ptr, scales, rows, column, F, POWER_OF_TWO)


def swiglu(
    z_PC: Tensor, weight_NK: Tensor, layout: Layout, limit: float, *, power_of_two: bool
) -> Quantized:
    """h in row groups: data [P, F], scale [G, P]. Padding rows are zeros; blocks without an expert
    are not written."""
    num_rows, width = z_PC.shape[0], z_PC.shape[1] // 2
    inner = pool_rows_like(z_PC, num_rows, width)
    if num_rows:
        _swiglu[(width // GROUP, num_rows // 32)](
            z_PC, weight_NK, layout.pair_P, layout.expert_B, *inner, num_rows, limit,
            width, 32, power_of_two, num_warps=4,
        )  # fmt: skip
    return inner


@triton.jit
def _gradients(z_ptr, grad_ptr, weight_ptr, pair_ptr, rows, column, limit, F: tl.constexpr):
    """h, the terms of dp, dg and du of some rows and 128 channels, fp32; zeros in padding."""
    pair = tl.load(pair_ptr + rows)
    routed = (pair >= 0)[:, None]
    channels = column + tl.arange(0, 128)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    z_offsets = wide_rows * (2 * F) + channels
    gate = tl.load(z_ptr + z_offsets, mask=routed, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + z_offsets + F, mask=routed, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + wide_rows * F + channels, mask=routed, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + pair, mask=pair >= 0, other=0.0)[:, None]
    gate_open, up_open = gate <= limit, tl.abs(up) <= limit
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    opening = sigmoid(gate)
    silu = gate * opening
    weighted = grad * weight
    gate_grad = tl.where(gate_open, weighted * up * opening * (1.0 + gate * (1.0 - opening)), 0.0)
    up_grad = tl.where(up_open, weighted * silu, 0.0)
    return silu * up * weight, grad * silu * up, gate_grad, up_grad


@triton.jit
def _store_pass(
    z_ptr, grad_ptr, weight_ptr, pair_ptr, dot_ptr, P, limit, rows, column,
    rows_ptr, gate_scales, up_scales, F: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Stores what a part gives by rows; gives h, dg and du."""
    inner, dot, gate_grad, up_grad = _gradients(
        z_ptr, grad_ptr, weight_ptr, pair_ptr, rows, column, limit, F
    )
    # One partial sum per 128 channels; they are added in order afterwards.
    tl.store(dot_ptr + tl.program_id(0) * P + rows, tl.sum(dot, axis=1))
    store_rows(gate_grad, rows_ptr, gate_scales, rows, column, 2 * F, POWER_OF_TWO)
    store_rows(up_grad, rows_ptr, up_scales, rows, column + F, 2 * F, POWER_OF_TWO)
    return inner, gate_grad, up_grad


@triton.jit
def _largest(x0, x1, x2, x3):
    return tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))


@triton.jit
def _words(x0, x1, x2, x3, inverse):
    return e4m3_words(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)


@triton.jit
def _swiglu_backward(
    z_ptr, grad_ptr, weight_ptr, pair_ptr, expert_ptr, P, limit,
    rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr, inner_ptr, inner_scale_ptr, dot_ptr,
    F: tl.constexpr, POWER_OF_TWO: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 4
    block = tl.program_id(1)
    column = tl.program_id(0) * 128
    if tl.load(expert_ptr + block) < 0:
        return
    gate_scales = row_scale_ptr + (column // 128) * P
    up_scales = gate_scales + (F // 128) * P
    if KEEP:
        i0, g0, u0 = _store_pass(
            z_ptr, grad_ptr, weight_ptr, pair_ptr, dot_ptr, P, limit, part_rows(block, 0, PARTS),
            column, rows_ptr, gate_scales, up_scales, F, POWER_OF_TWO,
        )  # fmt: skip
        i1, g1, u1 = _store_pass(
            z_ptr, grad_ptr, weight_ptr, pair_ptr, dot_ptr, P, limit, part_rows(block, 1, PARTS),
            column, rows_ptr, gate_scales, up_scales, F, POWER_OF_TWO,
        )  # fmt: skip
        i2, g2, u2 = _store_pass(
            z_ptr, grad_ptr, weight_ptr, pair_ptr, dot_ptr, P, limit, part_rows(block, 2, PARTS),
            column, rows_ptr, gate_scales, up_scales, F, POWER_OF_TWO,
        )  # fmt: skip
        i3, g3, u3 = _store_pass(
            z_ptr, grad_ptr, weight_ptr, pair_ptr, dot_ptr, P, limit, part_rows(block, 3, PARTS),
            column, rows_ptr, gate_scales, up_scales, F, POWER_OF_TWO,
        )  # fmt: skip
        inner_largest = _largest(i0, i1, i2, i3)
        gate_largest = _largest(g0, g1, g2, g3)
        up_largest = _largest(u0, u1, u2, u3)
    else:
        inner_largest = tl.zeros([32, 128], tl.float32)
        gate_largest = tl.zeros([32, 128], tl.float32)
        up_largest = tl.zeros([32, 128], tl.float32)
        # Not unrolled: the parts' loads would all be moved to the front, and take more registers.
        for j in range(PARTS):
            inner, gate_grad, up_grad = _store_pass(
                z_ptr, grad_ptr, weight_ptr, pair_ptr, dot_ptr, P, limit, part_rows(block, j),
                column, rows_ptr, gate_scales, up_scales, F, POWER_OF_TWO,
            )  # fmt: skip
            inner_largest = tl.maximum(inner_largest, tl.abs(inner))
            gate_largest = tl.maximum(gate_largest, tl.abs(gate_grad))
            up_largest = tl.maximum(up_largest, tl.abs(up_grad))

    inner_inverse = reciprocal_of_scale(column_scale(
        tl.max(inner_largest, axis=0), inner_scale_ptr, block, column, F, False, POWER_OF_TWO
    ))[None, :]  # fmt: skip
    gate_inverse = reciprocal_of_scale(column_scale(
        tl.max(gate_largest, axis=0), column_scale_ptr, block, column, 2 * F, False, POWER_OF_TWO
    ))[None, :]  # fmt: skip
    up_inverse = reciprocal_of_scale(column_scale(
        tl.max(up_largest, axis=0), column_scale_ptr, block, column + F, 2 * F, False, POWER_OF_TWO
    ))[None, :]  # fmt: skip
    if KEEP:
        inner_words = _words(i0, i1, i2, i3, inner_inverse)
        gate_words = _words(g0, g1, g2, g3, gate_inverse)
        up_words = _words(u0, u1, u2, u3, up_inverse)
    else:
        # Computed again, from inputs that are still in the cache.
        inner_words = tl.zeros([32, 128], tl.int32)
        gate_words = tl.zeros([32, 128], tl.int32)
        up_words = tl.zeros([32, 128], tl.int32)
        for j in range(0, PARTS, 2):
            i0, _, g0, u0 = _gradients(
                z_ptr, grad_ptr, weight_ptr, pair_ptr, part_rows(block, j), column, limit, F
            )
            i1, _, g1, u1 = _gradients(
                z_ptr, grad_ptr, weight_ptr, pair_ptr, part_rows(block, j + 1), column, limit, F
            )
            inner_words |= e4m3_pair(i0 * inner_inverse, i1 * inner_inverse) << 8 * j
            gate_words |= e4m3_pair(g0 * gate_inverse, g1 * gate_inverse) << 8 * j
            up_words |= e4m3_pair(u0 * up_inverse, u1 * up_inverse) << 8 * j
    first = block.to(tl.int64) * (F * 128)
    store_columns(inner_words, inner_ptr, first, 128, column, PARTS)
    store_columns(gate_words, columns_ptr, 2 * first, 128, column, PARTS)
    store_columns(up_words, columns_ptr, 2 * first, 128, column + F, PARTS)


class BackwardTile(NamedTuple):
    """How the backward works on its tiles of 128 rows and 128 channels.

    All give the same bytes. The number of warps says how many neighbouring channels of a row a
    thread adds up, and so the last bits of the routing weights' gradient.
    """

    keep: bool = False
    """Holds the three results in fp32 until the columns' scales are known; otherwise works them
    out twice, the second time from inputs that are still in the cache."""
    hopper: bool = False
    """By the Gluon kernel of swiglu_hopper.py, which keeps them too. With 8 or 16 warps."""
    num_warps: int = 8
    max_registers: int | None = None
    """Per thread: 65,536 are shared by the threads that a multiprocessor is to hold."""


TRITON_BACKWARD = BackwardTile(keep=True)
HOPPER_BACKWARD = BackwardTile(keep=True, hopper=True)
"""0.49 ms for 49,920 rows of V4.1's width on an H200, with 16 warps 0.53; Triton's best 0.72 (a
sweep without a record)."""
BACKWARD_TO_TRY = (
    HOPPER_BACKWARD,
    BackwardTile(keep=True, hopper=True, num_warps=16),
    TRITON_BACKWARD,
    BackwardTile(keep=True, num_warps=16),
    BackwardTile(),
    BackwardTile(num_warps=16),
)
"""What a bench measures."""


def swiglu_backward(
    z_PC: Tensor,
    grad_PF: Tensor,
    weight_NK: Tensor,
    layout: Layout,
    limit: float,
    *,
    power_of_two: bool,
    tile: BackwardTile | None = None,
) -> SwigluGrads:
    """Everything the backward needs, from z and the gradient of h, without writing h or its
    gradients in bf16. `tile` is for benches: without it, what is fastest here."""
    num_rows, width = z_PC.shape[0], z_PC.shape[1] // 2
    rows = pool_rows_like(z_PC, num_rows, 2 * width)
    columns = columns_like(z_PC, num_rows, 2 * width, tile_scales=False)
    inner_columns = columns_like(z_PC, num_rows, width, tile_scales=False)
    dot_GP = z_PC.new_empty(width // GROUP, num_rows, dtype=torch.float32)
    if tile is None:
        fits = on_hopper(z_PC) and z_PC.dtype is grad_PF.dtype is torch.bfloat16
        tile = HOPPER_BACKWARD if fits else TRITON_BACKWARD
    if num_rows:
        tiles = (width // GROUP, num_rows // GROUP)
        programs = min(tiles[0] * tiles[1], _num_multiprocessors(z_PC))
        kernel = _hopper().swiglu_backward_kernel if tile.hopper else _swiglu_backward
        kernel[(programs,) if tile.hopper else tiles](
            z_PC, grad_PF, weight_NK, layout.pair_P, layout.expert_B,
            num_rows, limit, *rows, columns.data.view(torch.int32), columns.scale,
            inner_columns.data.view(torch.int32), inner_columns.scale, dot_GP,
            width, power_of_two, tile.num_warps if tile.hopper else tile.keep,
            num_warps=tile.num_warps, maxnreg=tile.max_registers,
        )  # fmt: skip
    return SwigluGrads(rows, columns, inner_columns, weight_grads(dot_GP, layout))


def _hopper() -> ModuleType:
    # Where Triton has no Gluon, nothing asks for this.
    return importlib.import_module("ppruntime.models.kernels.swiglu_hopper")


def _num_multiprocessors(x: Tensor) -> int:
    if not x.is_cuda:
        return 3  # simulated
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def weight_grads(dot_GP: Tensor, layout: Layout) -> Tensor:
    """Gradient of the routing weights [N, K] from its partial sums per channel group."""
    row_NK = layout.row_NK.long()
    total_NK = dot_GP[:, row_NK.clamp_min(0)].sum(0)
    return torch.where(row_NK >= 0, total_NK, 0)

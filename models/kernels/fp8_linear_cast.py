# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""The cast of a rotated projection's gradient: turned back, rounded, to rows and columns, at once.

Query heads leave their projection turned by RoPE, so their gradient has to be turned back before
both gradients of the projection read it. Here that happens between the load and the two casts: no
turned copy in bf16 (V4.1, 8,192 tokens: 0.54 GB written, and read again). Bitwise the same as the
rotation followed by the cast: what is turned is rounded to bf16 on the way.

Shape letters: N rows (tokens), P rows padded to 128, C channels = H heads of K, R rotated pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.quantize import (
    GROUP,
    Quantized,
    column_scale,
    columns_like,
    part_rows,
    pool_rows_like,
    store_columns,
    store_rows,
)
from ppruntime.models.kernels.rounding import e4m3_words, reciprocal, to_bf16


def can_turn(head_width: int, num_pairs: int) -> bool:
    """Whether the kernel takes heads of that width: a tile of 128 channels lies in one head."""
    return head_width % GROUP == 0 and 0 < 2 * num_pairs <= head_width


@triton.jit
def _turned_part(
    x_ptr, cos_ptr, sin_ptr, rows, N, column,
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """128 channels of 32 rows, fp32, the last 2 R channels of their head turned by minus the
    angles. Rows from N on are zeros."""
    inside = (rows < N)[:, None]
    wide_rows = rows.to(tl.int64)[:, None]
    offsets = wide_rows * C + column + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    first = column % K
    if first + 128 > K - 2 * R:
        even, odd = tl.split(tl.reshape(x, [32, 64, 2]))
        pairs = (first - (K - 2 * R)) // 2 + tl.arange(0, 64)[None, :]
        is_turned = inside & (pairs >= 0)
        angles = wide_rows * R + pairs
        cos = tl.load(cos_ptr + angles, mask=is_turned, other=1.0)
        sin = -tl.load(sin_ptr + angles, mask=is_turned, other=0.0)
        turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        x = tl.reshape(turned, [32, 128])
        if ROUNDED:
            x = to_bf16(x).to(tl.float32)
    return x


@triton.jit
def _quantize_turned(
    x_ptr, cos_ptr, sin_ptr, N, P,
    rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr,
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    column = tl.program_id(0) * 128
    rows0, rows1 = part_rows(block, 0), part_rows(block, 1)
    rows2, rows3 = part_rows(block, 2), part_rows(block, 3)
    x0 = _turned_part(x_ptr, cos_ptr, sin_ptr, rows0, N, column, C, K, R, ROUNDED)
    x1 = _turned_part(x_ptr, cos_ptr, sin_ptr, rows1, N, column, C, K, R, ROUNDED)
    x2 = _turned_part(x_ptr, cos_ptr, sin_ptr, rows2, N, column, C, K, R, ROUNDED)
    x3 = _turned_part(x_ptr, cos_ptr, sin_ptr, rows3, N, column, C, K, R, ROUNDED)
    scales = row_scale_ptr + (column // 128) * P
    store_rows(x0, rows_ptr, scales, rows0, column, C, False)
    store_rows(x1, rows_ptr, scales, rows1, column, C, False)
    store_rows(x2, rows_ptr, scales, rows2, column, C, False)
    store_rows(x3, rows_ptr, scales, rows3, column, C, False)
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    scale = column_scale(tl.max(largest, axis=0), column_scale_ptr, block, column, C, False, False)
    inverse = reciprocal(scale)[None, :]
    words = e4m3_words(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    store_columns(words, columns_ptr, block.to(tl.int64) * (C * 128), 128, column)


def quantize_turned(
    x_NC: Tensor, cos_NR: Tensor, sin_NR: Tensor, *, head_width: int
) -> tuple[Quantized, Quantized]:
    """Rows (data [P, C], scale [C/128, P]) and columns (data [P/128, C, 128], scale [P/128, C]) of
    x with the last 2 R channels of each head turned by minus the angles. x is bf16 or fp32, cosines
    and sines are fp32. Padding rows are zeros."""
    num_tokens, channels = x_NC.shape
    num_pairs = cos_NR.shape[-1]
    assert can_turn(head_width, num_pairs), (head_width, num_pairs)
    num_rows = -(-num_tokens // GROUP) * GROUP
    rows = pool_rows_like(x_NC, num_rows, channels)
    columns = columns_like(x_NC, num_rows, channels, tile_scales=False)
    if num_rows:
        _quantize_turned[(channels // GROUP, num_rows // GROUP)](
            x_NC.contiguous(), cos_NR.contiguous(), sin_NR.contiguous(), num_tokens, num_rows,
            *rows, columns.data.view(torch.int32), columns.scale,
            channels, head_width, num_pairs, x_NC.dtype is torch.bfloat16,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return rows, columns

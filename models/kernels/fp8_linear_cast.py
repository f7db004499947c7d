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
def _part(
    x_ptr, cos_ptr, sin_ptr, rows, N, column, first,
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TURNS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """128 channels of 32 rows, fp32, which begin at channel `first` of their head; the last 2 R
    channels of a head turned by minus the angles. Rows from N on are zeros."""
    inside = (rows < N)[:, None]
    wide_rows = rows.to(tl.int64)[:, None]
    channels = tl.arange(0, 128)[None, :]
    base = x_ptr + wide_rows * C + column
    x = tl.load(base + channels, mask=inside, other=0.0).to(tl.float32)
    if TURNS:
        # The other channel of the pair comes by a load of its own, from the cache: taking pairs
        # apart would give the whole tile a layout in which it is stored at a fraction of the speed.
        other = tl.load(base + (channels ^ 1), mask=inside, other=0.0).to(tl.float32)
        in_tail = first + channels - (K - 2 * R)
        is_turned = inside & (in_tail >= 0)
        angles = wide_rows * R + in_tail // 2
        cos = tl.load(cos_ptr + angles, mask=is_turned, other=1.0)
        sin = tl.load(sin_ptr + angles, mask=is_turned, other=0.0)
        x = x * cos + other * tl.where(channels % 2 == 0, sin, -sin)
        if ROUNDED:
            x = to_bf16(x).to(tl.float32)
    return x


@triton.jit
def _quantize_turned(
    x_ptr, cos_ptr, sin_ptr, N, P,
    rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr,
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    TURNS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """One of COUNT tiles of a head from tile FIRST on, and 128 rows."""
    block = tl.program_id(1)
    first = (FIRST + tl.program_id(0) % COUNT) * 128
    column = tl.program_id(0) // COUNT * K + first
    rows0, rows1 = part_rows(block, 0), part_rows(block, 1)
    rows2, rows3 = part_rows(block, 2), part_rows(block, 3)
    x0 = _part(x_ptr, cos_ptr, sin_ptr, rows0, N, column, first, C, K, R, TURNS, ROUNDED)
    x1 = _part(x_ptr, cos_ptr, sin_ptr, rows1, N, column, first, C, K, R, TURNS, ROUNDED)
    x2 = _part(x_ptr, cos_ptr, sin_ptr, rows2, N, column, first, C, K, R, TURNS, ROUNDED)
    x3 = _part(x_ptr, cos_ptr, sin_ptr, rows3, N, column, first, C, K, R, TURNS, ROUNDED)
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
    tiles, turned = head_width // GROUP, -(-2 * num_pairs // GROUP)
    for first, count in ((0, tiles - turned), (tiles - turned, turned)):
        if num_rows and count:
            _quantize_turned[(channels // head_width * count, num_rows // GROUP)](
                x_NC.contiguous(), cos_NR.contiguous(), sin_NR.contiguous(), num_tokens, num_rows,
                *rows, columns.data.view(torch.int32), columns.scale,
                channels, head_width, num_pairs, first, count,
                first == tiles - turned, x_NC.dtype is torch.bfloat16,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
    return rows, columns

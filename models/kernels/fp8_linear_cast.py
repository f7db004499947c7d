# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""The cast of a rotated projection's gradient: turned back, rounded, to rows and columns, at once.

Query heads leave their projection turned by RoPE, so their gradient has to be turned back before
both gradients of the projection read it. Only the tails of heads turn: their tiles are turned into
a tensor of their own, from which the casts take them. No turned copy of the whole (V4.1, 8,192
tokens: 0.54 GB written, and read again; the tails are 0.13). Bitwise the same as the rotation
followed by the cast.

Shape letters: N rows (tokens), P rows padded to 128, C channels = H heads of K, R rotated pairs.
"""

from __future__ import annotations

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
    store_block,
    store_rows,
    words_of,
)
from ppruntime.models.kernels.rounding import e4m3_words, reciprocal_of_scale, to_bf16


def can_turn(head_width: int, num_pairs: int) -> bool:
    """Whether the kernel takes heads of that width: a tile of 128 channels lies in one head."""
    return head_width % GROUP == 0 and 0 < 2 * num_pairs <= head_width


@triton.jit
def _turn_tails(
    x_ptr, cos_ptr, sin_ptr, tails_ptr, num_heads,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Of some heads of some rows the last TAIL channels, of which the last 2 R are turned by minus
    the angles. PAIRS: a power of two from TAIL / 2 on."""
    heads = (tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS))[:, None]
    is_head = heads < num_heads
    channels = tl.arange(0, 2 * PAIRS)[None, :]
    mask = is_head & (channels < TAIL)
    x = tl.load(x_ptr + heads * K + (K - TAIL) + channels, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [HEADS, PAIRS, 2]))
    pairs = tl.arange(0, PAIRS)[None, :] - (TAIL // 2 - R)
    is_turned = is_head & (pairs >= 0) & (pairs < R)
    cos = tl.load(cos_ptr + heads // H * R + pairs, mask=is_turned, other=1.0)
    sin = -tl.load(sin_ptr + heads // H * R + pairs, mask=is_turned, other=0.0)
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    turned = tl.reshape(turned, [HEADS, 2 * PAIRS])
    if tails_ptr.dtype.element_ty == tl.bfloat16:
        turned = to_bf16(turned)
    tl.store(tails_ptr + heads * TAIL + channels, turned, mask=mask)


@triton.jit
def _quantize_turned(
    x_ptr, tails_ptr, N, P, rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr,
    C: tl.constexpr, K: tl.constexpr, TAIL: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    column = tl.program_id(0) * 128
    in_tail = column % K - (K - TAIL)
    # A tile lies in a tail as a whole, or not at all: which tensor it is in is one choice.
    start = tl.where(in_tail >= 0, tails_ptr + column // K * TAIL + in_tail, x_ptr + column)
    start = tl.multiple_of(start, 16)
    pitch = tl.multiple_of(tl.where(in_tail >= 0, C // K * TAIL, C), 128)
    rows0, rows1 = part_rows(block, 0), part_rows(block, 1)
    rows2, rows3 = part_rows(block, 2), part_rows(block, 3)
    x0 = _part(start, pitch, rows0, N)
    x1 = _part(start, pitch, rows1, N)
    x2 = _part(start, pitch, rows2, N)
    x3 = _part(start, pitch, rows3, N)
    scales = row_scale_ptr + (column // 128) * P
    store_rows(x0, rows_ptr, scales, rows0, column, C, False)
    store_rows(x1, rows_ptr, scales, rows1, column, C, False)
    store_rows(x2, rows_ptr, scales, rows2, column, C, False)
    store_rows(x3, rows_ptr, scales, rows3, column, C, False)
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    scale = column_scale(tl.max(largest, axis=0), column_scale_ptr, block, column, C, False, False)
    inverse = reciprocal_of_scale(scale)[None, :]
    words = e4m3_words(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    store_block(words, columns_ptr, block, column, P, C, DENSE)


@triton.jit
def _part(start_ptr, pitch, rows, N):
    """128 channels of 32 rows, fp32. Rows from N on are zeros."""
    offsets = rows.to(tl.int64)[:, None] * pitch + tl.arange(0, 128)[None, :]
    return tl.load(start_ptr + offsets, mask=(rows < N)[:, None], other=0.0).to(tl.float32)


def quantize_turned(
    x_NC: Tensor, cos_NR: Tensor, sin_NR: Tensor, *, head_width: int, dense: bool = False
) -> tuple[Quantized, Quantized]:
    """Rows (data [P, C], scale [C/128, P]) and columns (data [P/128, C, 128], scale [P/128, C]) of
    x with the last 2 R channels of each head turned by minus the angles. x is bf16 or fp32, cosines
    and sines are fp32. Padding rows are zeros. `dense`: as in `quantize_routed`."""
    num_tokens, channels = x_NC.shape
    num_pairs = cos_NR.shape[-1]
    assert can_turn(head_width, num_pairs), (head_width, num_pairs)
    num_rows = -(-num_tokens // GROUP) * GROUP
    rows = pool_rows_like(x_NC, num_rows, channels)
    columns = columns_like(x_NC, num_rows, channels, tile_scales=False, dense=dense)
    if num_rows:
        x_NC, num_heads = x_NC.contiguous(), channels // head_width
        tail = -(-2 * num_pairs // GROUP) * GROUP
        padded = triton.next_power_of_2(tail)
        tails = x_NC.new_empty(num_tokens, num_heads, tail)
        heads = max(1, 4096 // padded)
        _turn_tails[(triton.cdiv(num_tokens * num_heads, heads),)](
            x_NC, cos_NR.contiguous(), sin_NR.contiguous(), tails, num_tokens * num_heads,
            num_heads, head_width, num_pairs, tail, padded // 2, heads,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _quantize_turned[(channels // GROUP, num_rows // GROUP)](
            x_NC, tails, num_tokens, num_rows, *rows, words_of(columns.data),
            columns.scale, channels, head_width, tail, dense, num_warps=8,
        )  # fmt: skip
    return rows, columns

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Gluon kernels of quantize.py and swiglu.py beside this file, for Hopper: the same bytes, faster.

Triton lays every tile out as the widest store of it wants it: 16 channels a thread. Then a thread
holds the scales of 16 columns, divides for each, and what goes through shared memory to find their
largest values meets four to a bank, one number at a time. Here a thread has 128 / WARPS channels of
every part; the warps' largest values are put down as vectors, one thread works out one column's
scale, and all that threads share waits for one barrier instead of one per row vector.

Gluon has no interpreter: these run on a GPU only; tests/simulated_gluon.py runs what they compute.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from ppruntime.models.kernels.quantize import group_scale
from ppruntime.models.kernels.rounding import e4m3_words, reciprocal_of_scale, to_e4m3


@gluon.constexpr_function
def tile_layout(warps):
    """A part [32, 128]: each thread has one row and 128 / warps neighbouring channels."""
    channels = 128 // warps
    return gl.BlockedLayout([1, channels], [channels // 4, 128 // channels], [warps, 1], [1, 0])


@gluon.constexpr_function
def turned_layout(warps):
    """Words [32, 128] for a store with rows running fastest, 16 bytes a thread."""
    return gl.BlockedLayout([4, 1], [8, 4], [1, warps], [0, 1])


@gluon.constexpr_function
def columns_layout(tensors, warps):
    """The warps' largest values [tensors x warps, 128]: all of a column's in one thread."""
    return gl.BlockedLayout([warps, 1], [1, 32], [tensors, warps // tensors], [1, 0])


@gluon.jit
def part_rows(j: gl.constexpr, WARPS: gl.constexpr):
    """The rows of part j, counted from the first of its block."""
    return 4 * gl.arange(0, 32, layout=gl.SliceLayout(1, tile_layout(WARPS))) + j


@gluon.jit
def tile_channels(WARPS: gl.constexpr):
    """A tile's channels [1, 128], counted from its first."""
    return gl.arange(0, 128, layout=gl.SliceLayout(0, tile_layout(WARPS)))[None, :]


@gluon.jit
def store_rows(
    x, data_ptr, scale_ptr, rows, channels, is_live, C: gl.constexpr, POWER: gl.constexpr
):  # fmt: skip
    """`quantize.store_rows`, both pointers at the tile's first element: what threads add to them
    then fits into 32 bits."""
    scale = group_scale(gl.max(gl.abs(x), axis=1), POWER)
    offsets = rows[:, None] * C + channels
    live = (rows >= 0) & is_live
    rounded = to_e4m3(x * reciprocal_of_scale(scale)[:, None])
    gl.store(data_ptr + offsets, rounded, mask=live[:, None])
    gl.store(scale_ptr + rows, scale, mask=live)


@gluon.jit
def put_largest(largest_shared, x0, x1, x2, x3, WARPS: gl.constexpr):
    """Writes each warp's largest magnitudes of its rows of a tile, [WARPS, 128]."""
    largest = gl.maximum(gl.maximum(gl.abs(x0), gl.abs(x1)), gl.maximum(gl.abs(x2), gl.abs(x3)))
    of_warps = gl.reshape(largest, [WARPS, 32 // WARPS, 128])
    largest_shared.store(gl.max(of_warps, axis=1))


@gluon.jit
def store_columns(x0, x1, x2, x3, inverse, data_ptr, pitch, is_live, WARPS: gl.constexpr):
    """Scales a tile's parts by `inverse` [1, 128] and stores them turned: 32 words a channel, the
    first at `data_ptr`, the next channel's `pitch` words on."""
    TURNED: gl.constexpr = turned_layout(WARPS)
    words = e4m3_words(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    channels = gl.arange(0, 128, layout=gl.SliceLayout(0, TURNED))[None, :]
    places = channels * pitch + gl.arange(0, 32, layout=gl.SliceLayout(1, TURNED))[:, None]
    gl.store(data_ptr + places, gl.convert_layout(words, TURNED), mask=(places >= 0) & is_live)


@gluon.jit
def _routed_part(
    x_ptr, x_scale_ptr, pair, column, is_live,
    C: gl.constexpr, PAIRS_PER_TOKEN: gl.constexpr, FP8_INPUT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    routed = (pair >= 0) & is_live
    source = (pair // PAIRS_PER_TOKEN).to(gl.int64)
    places = source[:, None] * C + column + tile_channels(WARPS)
    x = gl.load(x_ptr + places, mask=routed[:, None], other=0.0)
    x = x.to(gl.float32)
    if FP8_INPUT:
        scale = gl.load(x_scale_ptr + source * (C // 128) + column // 128, mask=routed, other=0.0)
        x = x * scale[:, None]
    return x


@gluon.jit
def quantize_routed_kernel(
    x_ptr, x_scale_ptr, pair_ptr, expert_ptr, P,
    rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr,
    C: gl.constexpr, PAIRS_PER_TOKEN: gl.constexpr, FP8_INPUT: gl.constexpr,
    WITH_ROWS: gl.constexpr, POWER: gl.constexpr, DENSE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """`quantize._quantize_routed` without scales of whole tiles."""
    TILE: gl.constexpr = tile_layout(WARPS)
    ACROSS: gl.constexpr = columns_layout(1, WARPS)
    block = gl.program_id(1)
    column = gl.program_id(0) * 128
    first = block.to(gl.int64) * 128
    pair_ptr += first
    rows0, rows1 = part_rows(0, WARPS), part_rows(1, WARPS)
    rows2, rows3 = part_rows(2, WARPS), part_rows(3, WARPS)
    # No branch: the pairs are asked for before it is known whether the block has an expert.
    is_live = gl.load(expert_ptr + block) >= 0
    pair0, pair1 = gl.load(pair_ptr + rows0), gl.load(pair_ptr + rows1)
    pair2, pair3 = gl.load(pair_ptr + rows2), gl.load(pair_ptr + rows3)
    x0 = _routed_part(
        x_ptr, x_scale_ptr, pair0, column, is_live, C, PAIRS_PER_TOKEN, FP8_INPUT, WARPS
    )
    x1 = _routed_part(
        x_ptr, x_scale_ptr, pair1, column, is_live, C, PAIRS_PER_TOKEN, FP8_INPUT, WARPS
    )
    x2 = _routed_part(
        x_ptr, x_scale_ptr, pair2, column, is_live, C, PAIRS_PER_TOKEN, FP8_INPUT, WARPS
    )
    x3 = _routed_part(
        x_ptr, x_scale_ptr, pair3, column, is_live, C, PAIRS_PER_TOKEN, FP8_INPUT, WARPS
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    largest_shared = gl.allocate_shared_memory(gl.float32, [WARPS, 128], PLAIN)
    inverse_shared = gl.allocate_shared_memory(gl.float32, [1, 128], PLAIN)
    put_largest(largest_shared, x0, x1, x2, x3, WARPS)
    if WITH_ROWS:
        channels = tile_channels(WARPS)
        data_ptr = rows_ptr + first * C + column
        scales = row_scale_ptr + (column // 128).to(gl.int64) * P + first
        store_rows(x0, data_ptr, scales, rows0, channels, is_live, C, POWER)
        store_rows(x1, data_ptr, scales, rows1, channels, is_live, C, POWER)
        store_rows(x2, data_ptr, scales, rows2, channels, is_live, C, POWER)
        store_rows(x3, data_ptr, scales, rows3, channels, is_live, C, POWER)
    scale = group_scale(gl.max(largest_shared.load(ACROSS), axis=0), POWER)
    own = gl.arange(0, 128, layout=gl.SliceLayout(0, ACROSS))
    gl.store(column_scale_ptr + block * C + column + own, scale, mask=(own >= 0) & is_live)
    inverse_shared.store(reciprocal_of_scale(scale)[None, :])
    inverse = inverse_shared.load(TILE)
    if DENSE:
        turned_ptr = columns_ptr + block * 32 + column.to(gl.int64) * (P // 4)
        store_columns(x0, x1, x2, x3, inverse, turned_ptr, P // 4, is_live, WARPS)
    else:
        turned_ptr = columns_ptr + first * (C // 4) + column * 32
        store_columns(x0, x1, x2, x3, inverse, turned_ptr, 32, is_live, WARPS)

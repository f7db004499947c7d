# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Gluon kernel of swiglu.py beside this file, for Hopper: the backward, the same bytes, faster.

Everything is worked out once. The three results of a tile of 128 x 128 stay in registers, in fp32,
until the columns' scales are known: with 16 warps that takes 96 of a thread's 128. One program then
fills a multiprocessor, and nothing else would load while it computes: so it goes from tile to tile,
and copies each part of the next tile to shared memory as soon as it has read this one's.

Layouts and what they are good for: quantize_hopper.py.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from ppruntime.models.kernels.quantize import group_scale
from ppruntime.models.kernels.quantize_hopper import (
    columns_layout,
    part_rows,
    put_largest,
    store_columns,
    store_rows,
    tile_channels,
    tile_layout,
)
from ppruntime.models.kernels.rounding import reciprocal_of_scale, sigmoid


@gluon.jit
def _room(LAYOUT: gl.constexpr):
    """For a part's gate, up and gradient: apart, so that the compiler sees what waits for what."""
    gate = gl.allocate_shared_memory(gl.bfloat16, [32, 128], LAYOUT)
    up = gl.allocate_shared_memory(gl.bfloat16, [32, 128], LAYOUT)
    return gate, up, gl.allocate_shared_memory(gl.bfloat16, [32, 128], LAYOUT)


@gluon.jit
def _is_live(expert_ptr, tile, num_tiles, F: gl.constexpr):
    """Whether there is such a tile, and some expert's rows in it."""
    return gl.load(expert_ptr + tile // (F // 128), mask=tile < num_tiles, other=-1) >= 0


@gluon.jit
def _pairs(pair_ptr, tile, is_live, j: gl.constexpr, F: gl.constexpr, WARPS: gl.constexpr):
    """The pairs in the rows of a tile's part j; -1 in padding and where nothing is to be read."""
    rows = part_rows(j, WARPS)
    first = (tile // (F // 128)).to(gl.int64) * 128
    return gl.load(pair_ptr + first + rows, mask=(rows >= 0) & is_live, other=-1)


@gluon.jit
def _fetch(
    shared, z_ptr, grad_ptr, pair, tile, j: gl.constexpr, F: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Starts copying part j of a tile's gate, up and gradient; zeros in padding."""
    column = tile % (F // 128) * 128
    first = (tile // (F // 128)).to(gl.int64) * 128
    rows, channels = part_rows(j, WARPS), tile_channels(WARPS)
    routed = (pair >= 0)[:, None]
    z = z_ptr + (first * (2 * F) + column) + (rows[:, None] * (2 * F) + channels)
    async_copy.async_copy_global_to_shared(shared[0], z, mask=routed)
    async_copy.async_copy_global_to_shared(shared[1], z + F, mask=routed)
    grad = grad_ptr + (first * F + column) + (rows[:, None] * F + channels)
    async_copy.async_copy_global_to_shared(shared[2], grad, mask=routed)
    async_copy.commit_group()


@gluon.jit
def _begin(
    shared, z_ptr, grad_ptr, weight_ptr, pair_ptr, tile, is_live, j: gl.constexpr,
    F: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Fetches part j of a program's first tile. Gives its rows' weights."""
    pair = _pairs(pair_ptr, tile, is_live, j, F, WARPS)
    _fetch(shared, z_ptr, grad_ptr, pair, tile, j, F, WARPS)
    return gl.load(weight_ptr + pair, mask=pair >= 0, other=0.0)


@gluon.jit
def _gradients(gate, up, grad, weight, limit):
    """`swiglu._gradients` of values that are there already."""
    gate, up, grad = gate.to(gl.float32), up.to(gl.float32), grad.to(gl.float32)
    weight = weight[:, None]
    gate_open, up_open = gate <= limit, gl.abs(up) <= limit
    gate = gl.minimum(gate, limit)
    up = gl.minimum(gl.maximum(up, -limit), limit)
    opening = sigmoid(gate)
    silu = gate * opening
    weighted = grad * weight
    gate_grad = gl.where(gate_open, weighted * up * opening * (1.0 + gate * (1.0 - opening)), 0.0)
    up_grad = gl.where(up_open, weighted * silu, 0.0)
    return silu * up * weight, grad * silu * up, gate_grad, up_grad


@gluon.jit
def _part(
    shared, z_ptr, grad_ptr, weight_ptr, pair_ptr, weight, tile, next_tile, end, limit,
    is_live, next_live, rows_ptr, row_scale_ptr, dot_ptr,
    j: gl.constexpr, F: gl.constexpr, POWER: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Works on part j, starts the next tile's in its place and stores what this one's gives by
    rows. Gives h, dg, du and the weights of the next tile's rows."""
    TILE: gl.constexpr = tile_layout(WARPS)
    # Asked for before it is needed: nobody else computes while a program waits.
    next_pair = _pairs(pair_ptr, next_tile, next_live, j, F, WARPS)
    async_copy.wait_group(3)
    gate, up, grad = shared[0].load(TILE), shared[1].load(TILE), shared[2].load(TILE)
    inner, dot, gate_grad, up_grad = _gradients(gate, up, grad, weight, limit)
    _fetch(shared, z_ptr, grad_ptr, next_pair, next_tile, j, F, WARPS)
    next_weight = gl.load(weight_ptr + next_pair, mask=next_pair >= 0, other=0.0)
    rows, channels = part_rows(j, WARPS), tile_channels(WARPS)
    group = tile % (F // 128)
    first = (tile // (F // 128)).to(gl.int64) * 128
    # One partial sum per 128 channels; they are added in order afterwards.
    of_group = group.to(gl.int64) * end + first
    gl.store(dot_ptr + of_group + rows, gl.sum(dot, axis=1), mask=(rows >= 0) & is_live)
    data_ptr = rows_ptr + (first * (2 * F) + group * 128)
    scales = row_scale_ptr + of_group
    store_rows(gate_grad, data_ptr, scales, rows, channels, is_live, 2 * F, POWER)
    scales += (F // 128) * end
    store_rows(up_grad, data_ptr + F, scales, rows, channels, is_live, 2 * F, POWER)
    return inner, gate_grad, up_grad, next_weight


@gluon.jit
def swiglu_backward_kernel(
    z_ptr, grad_ptr, weight_ptr, pair_ptr, expert_ptr, P, limit,
    rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr, inner_ptr, inner_scale_ptr, dot_ptr,
    F: gl.constexpr, POWER: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """`swiglu._swiglu_backward`; any number of programs share the tiles."""
    TILE: gl.constexpr = tile_layout(WARPS)
    ACROSS: gl.constexpr = columns_layout(4, WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    G: gl.constexpr = F // 128
    shared0, shared1 = _room(PLAIN), _room(PLAIN)
    shared2, shared3 = _room(PLAIN), _room(PLAIN)
    largest_shared = gl.allocate_shared_memory(gl.float32, [4 * WARPS, 128], PLAIN)
    inverse_shared = gl.allocate_shared_memory(gl.float32, [4, 128], PLAIN)
    num_tiles = P // 128 * G
    tile = gl.program_id(0)
    next_live = _is_live(expert_ptr, tile, num_tiles, F)
    w0 = _begin(shared0, z_ptr, grad_ptr, weight_ptr, pair_ptr, tile, next_live, 0, F, WARPS)
    w1 = _begin(shared1, z_ptr, grad_ptr, weight_ptr, pair_ptr, tile, next_live, 1, F, WARPS)
    w2 = _begin(shared2, z_ptr, grad_ptr, weight_ptr, pair_ptr, tile, next_live, 2, F, WARPS)
    w3 = _begin(shared3, z_ptr, grad_ptr, weight_ptr, pair_ptr, tile, next_live, 3, F, WARPS)
    # Of a fourth tensor, which is none: a thread then has one column of one tensor.
    nothing = gl.zeros([4 * WARPS, 128], gl.float32, layout=ACROSS)
    largest_shared.store(nothing)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        block, column = tile // G, tile % G * 128
        is_live = next_live
        next_live = _is_live(expert_ptr, next_tile, num_tiles, F)
        i0, g0, u0, w0 = _part(
            shared0, z_ptr, grad_ptr, weight_ptr, pair_ptr, w0, tile, next_tile, P, limit,
            is_live, next_live, rows_ptr, row_scale_ptr, dot_ptr, 0, F, POWER, WARPS,
        )  # fmt: skip
        i1, g1, u1, w1 = _part(
            shared1, z_ptr, grad_ptr, weight_ptr, pair_ptr, w1, tile, next_tile, P, limit,
            is_live, next_live, rows_ptr, row_scale_ptr, dot_ptr, 1, F, POWER, WARPS,
        )  # fmt: skip
        i2, g2, u2, w2 = _part(
            shared2, z_ptr, grad_ptr, weight_ptr, pair_ptr, w2, tile, next_tile, P, limit,
            is_live, next_live, rows_ptr, row_scale_ptr, dot_ptr, 2, F, POWER, WARPS,
        )  # fmt: skip
        i3, g3, u3, w3 = _part(
            shared3, z_ptr, grad_ptr, weight_ptr, pair_ptr, w3, tile, next_tile, P, limit,
            is_live, next_live, rows_ptr, row_scale_ptr, dot_ptr, 3, F, POWER, WARPS,
        )  # fmt: skip
        put_largest(largest_shared.slice(0 * WARPS, WARPS), g0, g1, g2, g3, WARPS)
        put_largest(largest_shared.slice(1 * WARPS, WARPS), u0, u1, u2, u3, WARPS)
        put_largest(largest_shared.slice(2 * WARPS, WARPS), i0, i1, i2, i3, WARPS)
        of_warps = gl.reshape(largest_shared.load(ACROSS), [4, WARPS, 128])
        scale = group_scale(gl.max(of_warps, axis=1), POWER)
        SCALES: gl.constexpr = scale.type.layout
        own = gl.arange(0, 128, layout=gl.SliceLayout(0, SCALES))[None, :]
        of = gl.arange(0, 4, layout=gl.SliceLayout(1, SCALES))[:, None]
        places = block * (2 * F) + column + of * F + own
        gl.store(column_scale_ptr + places, scale, mask=(of < 2) & is_live)
        places = block * F + column + 0 * of + own
        gl.store(inner_scale_ptr + places, scale, mask=(of == 2) & is_live)
        inverse_shared.store(reciprocal_of_scale(scale))
        first = block.to(gl.int64) * (F * 32) + column * 32
        both = columns_ptr + (block.to(gl.int64) * (F * 64) + column * 32)
        inverse = inverse_shared.slice(0, 1).load(TILE)
        store_columns(g0, g1, g2, g3, inverse, both, 32, is_live, WARPS)
        inverse = inverse_shared.slice(1, 1).load(TILE)
        store_columns(u0, u1, u2, u3, inverse, both + F * 32, 32, is_live, WARPS)
        inverse = inverse_shared.slice(2, 1).load(TILE)
        store_columns(i0, i1, i2, i3, inverse, inner_ptr + first, 32, is_live, WARPS)
    async_copy.wait_group(0)

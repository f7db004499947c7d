# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Gluon kernel of the grouped products in FP8, for Hopper: `grouped_gemm`'s, and with rows that are
waited for, sent home or drawn by ticket `mega_moe_gemm`'s.

Three groups of warps side by side, as in grouped_gemm_hopper.py, whose products these are
(`add_products`: two halves of 64 rows a step, scales of x by row, of weights by tile):

    give        one warp: which tile comes next, waits for its rows, TMA copies of its operands
    multiply    two warpgroups: one half of a tile's 256 columns each, which begin their products in
                turns; rows leave as bf16, whole lines at a time

Only `give` knows the order of tiles; where a tile lies goes with its first operands. The bits are
those of the Triton kernels.

Gluon has no interpreter: this runs on a GPU only; tests/simulated_gluon.py runs what it computes.
docs/bench/moe-experts.json has its times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ppruntime.models.kernels.grouped_gemm import Tile
from ppruntime.models.kernels.grouped_gemm_hopper import (
    add_products,
    descriptor,
    give_turn,
    ring,
    whole_lines,
)
from ppruntime.models.kernels.mega_moe import LATE_PART, PARTS
from ppruntime.models.kernels.moe_layout import Layout
from ppruntime.models.kernels.quantize import GROUP, Quantized

if TYPE_CHECKING:
    from ppruntime.models.kernels.mega_moe_gemm import Homes, Ready

PLACE_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _acquired(word_ptr):
    """A word, and what was written before it was."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [word_ptr.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _keep_first(word_ptr, code):
    """Writes `code` where 0 is."""
    gl.inline_asm_elementwise(
        "atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, $2;", "=r,l,r", [word_ptr.to(gl.int64), code],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _nanoseconds(polls):
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def _proxy_fence():
    """See `mega_moe.proxy_fence`."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _drawn(ticket_ptr):
    """The next ticket, by one warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane, ticket; mov.u32 lane, %laneid;"
        " setp.eq.u32 first, lane, 0; mov.u32 ticket, 0;"
        " @first atom.relaxed.gpu.global.add.u32 ticket, [$1], 1;"
        " shfl.sync.idx.b32 $0, ticket, 0, 31, 0xffffffff; }",
        "=r,l", [ticket_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _rows_at(address):
    """bf16 at an address."""
    return gl.multiple_of(address.to(gl.pointer_type(gl.bfloat16)), [16])


@gluon.jit
def _wait_until(word_ptr, wanted, error_ptr, code, limit):
    """`mega_moe.wait_until`."""
    seen = _acquired(word_ptr)
    if seen < wanted:
        begin = _nanoseconds(0)
        failed = _acquired(error_ptr)
        polls = 0
        waited = begin - begin
        while (seen < wanted) & (failed == 0) & (waited < limit):
            polls += 1
            seen = _acquired(word_ptr)
            failed = _acquired(error_ptr)
            waited = _nanoseconds(polls) - begin
        if seen < wanted:
            _keep_first(error_ptr, code)


@gluon.jit
def _give(
    x_desc, w_desc, x_scale_desc, expert_ptr, start_ptr, L, R, flag_ptr, ticket_ptr, error_ptr,
    limit, late, helps, places, shared, ready, free,
    OUTS: gl.constexpr, INS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr,
    PARTS: gl.constexpr, WAIT: gl.constexpr, DRAWS: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """One warp: fills stage after stage, each when both warpgroups have done with what it held."""
    x_shared, w_shared, x_scales, _ = shared
    row_block_of, column_block_of = places
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BYTES: gl.constexpr = (128 + COLUMNS) * 128 + 128 * 4
    NUM_COLUMNS: gl.constexpr = OUTS // COLUMNS
    num_rows = gl.load(start_ptr + L) // 128  # what lies beyond belongs to no expert
    num_tiles = num_rows * NUM_COLUMNS
    num_fixed = num_tiles
    tile = gl.program_id(0)
    if DRAWS:
        num_fixed = num_tiles - num_tiles // 4
        tile += helps * num_fixed
        if tile >= num_fixed:
            tile = num_fixed + _drawn(ticket_ptr)
    step = 0
    turn = 0
    while tile < num_tiles:
        group = tile // (GROUP * NUM_COLUMNS)
        within = tile % (GROUP * NUM_COLUMNS)
        size = gl.minimum(num_rows - group * GROUP, GROUP)
        block = group * GROUP + within % size
        column_block = within // size
        expert = gl.load(expert_ptr + block)
        if expert >= 0:
            if WAIT:
                _wait_until(flag_ptr + block, PARTS, error_ptr, late, limit)
                _proxy_fence()
            slot = turn % SLOTS
            row_block_of.index(slot).store(gl.full([1], block, gl.int32, layout=ONE))
            column_block_of.index(slot).store(gl.full([1], column_block, gl.int32, layout=ONE))
            turn += 1
            w_row = expert * OUTS + column_block * COLUMNS
            for k in range(0, INS // 128):
                stage = step % STAGES
                # A new barrier counts as past its phase 1: the first round waits for nothing.
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                full = ready.index(stage)
                mbarrier.expect(full, BYTES)
                row = block * 128
                tma.async_copy_global_to_shared(
                    x_desc, [row, k * 128], full, x_shared.index(2 * stage)
                )
                tma.async_copy_global_to_shared(
                    x_desc, [row + 64, k * 128], full, x_shared.index(2 * stage + 1)
                )
                tma.async_copy_global_to_shared(
                    w_desc, [w_row, k * 128], full, w_shared.index(stage)
                )
                row += k * R
                tma.async_copy_global_to_shared(
                    x_scale_desc, [row], full, x_scales.index(2 * stage)
                )
                tma.async_copy_global_to_shared(
                    x_scale_desc, [row + 64], full, x_scales.index(2 * stage + 1)
                )
                step += 1
        tile += gl.num_programs(0)
        if DRAWS:  # noqa: SIM102
            if tile >= num_fixed:
                tile = num_fixed + _drawn(ticket_ptr)
    # A place before all others, behind the last step, says that there are no more.
    row_block_of.index(turn % SLOTS).store(gl.full([1], -1, gl.int32, layout=ONE))
    mbarrier.wait(free.index(step % STAGES), (step // STAGES & 1) ^ 1)
    mbarrier.arrive(ready.index(step % STAGES), count=1)


@gluon.jit
def _place(of, slot):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(of.index(slot).load(ONE), axis=0)


@gluon.jit
def _store_rows(
    y_ptr, home_ptr, bases_ptr, offset, most_pairs, x, row, column, OUTS: gl.constexpr,
    PUSH: gl.constexpr,
):  # fmt: skip
    """64 rows of sums, in bf16, into y or to their homes."""
    OUT: gl.constexpr = whole_lines(x.shape[1], 8)
    y = gl.convert_layout(x.to(gl.bfloat16), OUT)
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    columns = column + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, OUT))
    if PUSH:
        home = gl.load(home_ptr + rows)
        live = home >= 0
        home = gl.maximum(home, 0)
        base = gl.load(bases_ptr + home // most_pairs)
        target = _rows_at(base + offset + (home % most_pairs).to(gl.int64) * (2 * OUTS))
        gl.store(target[:, None] + columns[None, :], y, mask=live[:, None])
    else:
        gl.store(y_ptr + rows.to(gl.int64)[:, None] * OUTS + columns[None, :], y)


@gluon.jit
def _multiply(
    y_ptr, w_scale_ptr, expert_ptr, home_ptr, bases_ptr, offset, most_pairs, places, shared, ready,
    free, WARPGROUP: gl.constexpr, OUTS: gl.constexpr, INS: gl.constexpr,
    COLUMNS: gl.constexpr, PUSH: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of every tile's columns."""
    row_block_of, column_block_of = places
    OWN: gl.constexpr = COLUMNS // 2
    FIRST: gl.constexpr = WARPGROUP * OWN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 32])
    if WARPGROUP == 1:
        give_turn(0)  # it begins
    step = 0
    turn = 0
    block = 0
    while block >= 0:
        mbarrier.wait(ready.index(step % STAGES), step // STAGES & 1)
        block = _place(row_block_of, turn % SLOTS)
        if block >= 0:
            row = block * 128
            column = _place(column_block_of, turn % SLOTS) * COLUMNS + FIRST
            turn += 1
            expert = gl.load(expert_ptr + block)
            w_scale = w_scale_ptr + (expert * (OUTS // 128) + column // 128) * (INS // 128)
            upper = gl.zeros([64, OWN], gl.float32, layout=MMA)
            lower = gl.zeros([64, OWN], gl.float32, layout=MMA)
            upper, lower, step = add_products(
                upper, lower, expert >= 0, step, INS // 128, shared, ready, free, w_scale, w_scale,
                1, 1, WARPGROUP, MMA, False, True, STAGES, True,
            )  # fmt: skip
            _store_rows(
                y_ptr, home_ptr, bases_ptr, offset, most_pairs, upper, row, column, OUTS, PUSH
            )
            _store_rows(
                y_ptr, home_ptr, bases_ptr, offset, most_pairs, lower, row + 64, column, OUTS, PUSH
            )


@gluon.jit(do_not_specialize=["helps"])
def gemm_kernel(
    x_desc, w_desc, y_ptr, x_scale_desc, w_scale_ptr, expert_ptr, start_ptr, L, R,
    flag_ptr, ticket_ptr, error_ptr, limit, late, home_ptr, bases_ptr, offset, most_pairs, helps,
    OUTS: gl.constexpr, INS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr,
    PARTS: gl.constexpr, WAIT: gl.constexpr, PUSH: gl.constexpr, DRAWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`mega_moe_gemm.mega_gemm` in FP8; any number of programs share the tiles.

    Descriptors as `grouped_gemm_hopper.descriptor` makes them: x in boxes of 64 rows, its scales
    [G, R], flat, in boxes of 64; weights in boxes of COLUMNS.
    """
    # So many tiles may be under way in the stages, one more in the warpgroups, and the end.
    SLOTS: gl.constexpr = STAGES + 2
    places = (
        gl.allocate_shared_memory(gl.int32, [SLOTS, 1], PLACE_LAYOUT),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 1], PLACE_LAYOUT),
    )
    x_scales = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], x_scale_desc.layout)
    shared = (
        gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 64, 128], x_desc.layout),
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], w_desc.layout),
        x_scales,
        x_scales,
    )
    ready, free = ring(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                y_ptr, w_scale_ptr, expert_ptr, home_ptr, bases_ptr, offset, most_pairs, places,
                shared, ready, free, 0, OUTS, INS, COLUMNS, PUSH, STAGES, SLOTS,
            )),
            (_multiply, (
                y_ptr, w_scale_ptr, expert_ptr, home_ptr, bases_ptr, offset, most_pairs, places,
                shared, ready, free, 1, OUTS, INS, COLUMNS, PUSH, STAGES, SLOTS,
            )),
            (_give, (
                x_desc, w_desc, x_scale_desc, expert_ptr, start_ptr, L, R, flag_ptr, ticket_ptr,
                error_ptr, limit, late, helps, places, shared, ready, free, OUTS, INS, COLUMNS,
                GROUP, PARTS, WAIT, DRAWS, STAGES, SLOTS,
            )),
        ],
        [4, 1],
        # A thread's registers, of the second warpgroup and the copies; the first gets the rest.
        [232, 40],
    )  # fmt: skip


def launch(
    x: Quantized,
    weights: Quantized,
    layout: Layout,
    y_RO: Tensor | None,
    *,
    tile: Tile,
    sms: int,
    ready: Ready | None = None,
    homes: Homes | None = None,
    ticket_1: Tensor | None = None,
    helps: int = 0,
) -> None:
    """One launch of `gemm_kernel` on so many multiprocessors, as `mega_moe_gemm.mega_gemm` says;
    with `helps` those tiles alone that are drawn."""
    rows, ins = x.data.shape
    num, outs, _ = weights.data.shape
    columns = tile.columns if outs % tile.columns == 0 else GROUP
    num_tiles = rows // GROUP * (outs // columns)
    peers = ready.peers if ready else None
    gemm_kernel[(min(num_tiles, sms),)](
        descriptor(x.data, GROUP // 2),
        descriptor(weights.data.view(num * outs, ins), columns),
        y_RO,
        descriptor(x.scale.view(-1), GROUP // 2),
        weights.scale, layout.expert_B, layout.start_E1, num, rows,
        ready.flag_B if ready else None, ticket_1,
        peers.error if peers else None, peers.limit if peers else 0, LATE_PART,
        homes.home_R if homes else None, homes.peers.bases_P if homes else None,
        homes.offset if homes else 0, homes.most_pairs if homes else 1, helps,
        outs, ins, columns, tile.group, PARTS,
        ready is not None, homes is not None, ticket_1 is not None, tile.num_stages,
        num_warps=tile.num_warps,
    )  # fmt: skip

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""Grouped GEMMs of the fused MoE layer, in FP8 or bf16: they wait for rows, and send them home.

    waiting   a block of rows is multiplied as soon as its flag says that it is there
    pushing   the result goes to the place of the row's pair at its source, whichever rank that is
    helped    the last quarter of the tiles is drawn by ticket, also by programs that start once the
              multiprocessors that brought the rows are free

One kernel; these are options of it. Each pair has a place of its own, so nothing is added
up on the way and the bits do not depend on who comes first. bf16 is summed in fp32 by the tensor
cores; FP8 as in `grouped_gemm`, 128 values of K at a time.

Shape letters: R pool rows, B = R/128, L experts here, O and I output and input width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ppruntime.models.kernels.grouped_gemm import (
    Tile,
    all_sms,
    forward_tile,
    grouped_gemm_reference,
    num_programs,
    tile_place,
)
from ppruntime.models.kernels.mega_moe import LATE_PART, PARTS, Peers, proxy_fence, wait_until
from ppruntime.models.kernels.moe_layout import Layout
from ppruntime.models.kernels.quantize import GROUP, Quantized
from ppruntime.models.kernels.rounding import INTERPRETED, to_bf16

BF16_TILE = Tile(rows=128, columns=256, num_warps=8, num_stages=3, group=8)
"""One program on a multiprocessor. Not tuned on a GPU yet."""
_BF16_STEP = 64


class Ready(NamedTuple):
    """What the rows wait for."""

    flag_B: Tensor
    """See `mega_moe.PulledRows`."""
    peers: Peers


class Helpers(NamedTuple):
    """More programs of a product, behind what already runs on a stream of their own."""

    ticket_1: Tensor
    """int32 [1], 0."""
    num_sms: int
    """Multiprocessors that they get."""
    stream: torch.cuda.Stream | None
    """None, in the interpreter: they run before the product's own programs."""


class Homes(NamedTuple):
    """Where the results go: row `pair` of the bf16 rows [pairs, O] that begin `offset` bytes into
    the arena of the row's source."""

    home_R: Tensor
    peers: Peers
    offset: int
    most_pairs: int


@triton.jit
def _factor(x):
    """A bf16 operand; the interpreter would multiply its bits as integers."""
    return x.to(tl.float32) if INTERPRETED else x


@triton.jit
def _tile(
    tile, num_rows, x_desc, w_desc, y_desc, x_scale_ptr, w_scale_ptr, expert_ptr, start_ptr,
    count_ptr, R, flag_ptr, error_ptr, limit, late, home_ptr, bases_ptr, offset, most_pairs,
    OUTS: tl.constexpr, INS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, GROUP_ROWS: tl.constexpr, PARTS: tl.constexpr,
    FP8: tl.constexpr, TURNED: tl.constexpr, WAIT: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    row_block, column_block = tile_place(tile, num_rows, OUTS // COLUMNS, GROUP_ROWS)
    row = row_block * ROWS
    column = column_block * COLUMNS
    expert = tl.load(expert_ptr + row // 128)
    end = tl.load(start_ptr + expert) + tl.load(count_ptr + expert)
    if row < end:  # a half block may be all padding
        if WAIT:
            wait_until(flag_ptr + row // 128, PARTS, error_ptr, late, limit, "gpu")
            proxy_fence()
            tl.debug_barrier()
        rows = row + tl.arange(0, ROWS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        if FP8:
            w_scales = w_scale_ptr + (expert * (OUTS // 128) + column // 128) * (INS // 128)
            for group in range(INS // 128):
                x = x_desc.load([row, group * 128])
                w = w_desc.load([expert * OUTS + column, group * 128])
                scale = tl.load(x_scale_ptr + group * R + rows) * tl.load(w_scales + group)
                total += tl.dot(x, w.T) * scale[:, None]
        elif TURNED:
            for first in range(0, INS, STEP):
                x = x_desc.load([row, first])
                w = w_desc.load([expert * INS + first, column])
                total = tl.dot(_factor(x), _factor(w), total)
        else:
            for first in range(0, INS, STEP):
                x = x_desc.load([row, first])
                w = w_desc.load([expert * OUTS + column, first])
                total = tl.dot(_factor(x), _factor(w).T, total)
        y = to_bf16(total)
        if PUSH:
            home = tl.load(home_ptr + rows)
            live = home >= 0
            home = tl.maximum(home, 0)
            base = tl.load(bases_ptr + home // most_pairs)
            place = base + offset + (home % most_pairs).to(tl.int64) * (2 * OUTS)
            target = tl.multiple_of(place.to(tl.pointer_type(tl.bfloat16)), [16])
            columns = column + tl.arange(0, COLUMNS)
            tl.store(target[:, None] + columns[None, :], y, mask=live[:, None])
        else:
            y_desc.store([row, column], y)


@triton.jit(do_not_specialize=["helps"])
def _mega_gemm(
    x_desc, w_desc, y_desc, x_scale_ptr, w_scale_ptr, expert_ptr, start_ptr, count_ptr, L, R,
    flag_ptr, ticket_ptr, error_ptr, limit, late,
    home_ptr, bases_ptr, offset, most_pairs, helps,
    OUTS: tl.constexpr, INS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, GROUP_ROWS: tl.constexpr, PARTS: tl.constexpr,
    FP8: tl.constexpr, TURNED: tl.constexpr, WAIT: tl.constexpr, PUSH: tl.constexpr,
    DRAWS: tl.constexpr,
):  # fmt: skip
    num_rows = tl.load(start_ptr + L) // ROWS  # what lies beyond belongs to no expert
    num_tiles = num_rows * (OUTS // COLUMNS)
    num_fixed = num_tiles - num_tiles // 4 if DRAWS else num_tiles
    end = num_fixed
    if DRAWS:
        end = tl.where(helps == 0, num_fixed, 0)
    for tile in range(tl.program_id(0), end, tl.num_programs(0)):
        _tile(
            tile, num_rows, x_desc, w_desc, y_desc, x_scale_ptr, w_scale_ptr, expert_ptr, start_ptr,
            count_ptr, R, flag_ptr, error_ptr, limit, late, home_ptr, bases_ptr, offset, most_pairs,
            OUTS, INS, ROWS, COLUMNS, STEP, GROUP_ROWS, PARTS, FP8, TURNED, WAIT, PUSH,
        )  # fmt: skip
    if DRAWS:
        # A ticket orders nothing: its one meaning is that nobody else has drawn it.
        tile = num_fixed + tl.atomic_add(ticket_ptr, 1, sem="relaxed")
        while tile < num_tiles:
            _tile(
                tile, num_rows, x_desc, w_desc, y_desc, x_scale_ptr, w_scale_ptr, expert_ptr,
                start_ptr, count_ptr, R, flag_ptr, error_ptr, limit, late, home_ptr, bases_ptr,
                offset, most_pairs, OUTS, INS, ROWS, COLUMNS, STEP, GROUP_ROWS, PARTS, FP8, TURNED,
                WAIT, PUSH,
            )  # fmt: skip
            tile = num_fixed + tl.atomic_add(ticket_ptr, 1, sem="relaxed")


def mega_gemm(
    x: Quantized | Tensor,
    weights: Quantized | Tensor,
    layout: Layout,
    *,
    turned: bool = False,
    ready: Ready | None = None,
    homes: Homes | None = None,
    tile: Tile | None = None,
    gemm_sms: int | None = None,
    helpers: Helpers | None = None,
) -> Tensor | None:
    """y[r] = W_e x[r], e the expert of row r: [R, O] bf16, or None if the rows go to their `homes`.

    FP8: x in row groups with scale [G, R], weights [L, O, I] in blocks. bf16: x [R, I], weights
    [L, O, I] or, `turned`, [L, I, O]. Rows of padding hold garbage where they could be skipped, and
    so do those beyond the last expert's end.
    The bits depend neither on the tile's rows and columns nor on `gemm_sms` nor on who multiplies
    what. With `helpers` the current stream does not wait for theirs.
    """
    x_data, x_scale = x if isinstance(x, tuple) else (x, x)
    w_data, w_scale = weights if isinstance(weights, tuple) else (weights, weights)
    fp8 = isinstance(x, tuple)
    assert not (fp8 and turned), "FP8 weights are turned beforehand"
    rows, ins = x_data.shape
    here, outs = len(w_data), w_data.shape[2 if turned else 1]
    y_RO = None if homes else x_data.new_empty(rows, outs, dtype=torch.bfloat16)
    if not rows:
        return y_RO
    sms = gemm_sms or all_sms(x_data)
    if tile is None:
        tile = forward_tile(x_data, rows, outs, sms) if fp8 else BF16_TILE
    if tile.hopper:
        assert isinstance(x, Quantized), "in FP8 alone"
        assert isinstance(weights, Quantized), "in FP8 alone"
        _by_hopper(x, weights, layout, y_RO, tile, ready, homes, sms, helpers)
        return y_RO
    columns = tile.columns if outs % tile.columns == 0 else GROUP
    step = GROUP if fp8 else _BF16_STEP
    y_desc = None if y_RO is None else TensorDescriptor.from_tensor(y_RO, [tile.rows, columns])
    w_block = [step, columns] if turned else [columns, step]
    peers = ready.peers if ready else None
    num_tiles = (rows // tile.rows) * (outs // columns)
    arguments = (
        TensorDescriptor.from_tensor(x_data, [tile.rows, step]),
        TensorDescriptor.from_tensor(w_data.view(-1, w_data.shape[2]), w_block),
        y_desc, x_scale if fp8 else None, w_scale if fp8 else None,
        layout.expert_B, layout.start_E1, layout.count_E, here, rows,
        ready.flag_B if ready else None, helpers.ticket_1 if helpers else None,
        peers.error if peers else None, peers.limit if peers else 0, LATE_PART,
        homes.home_R if homes else None, homes.peers.bases_P if homes else None,
        homes.offset if homes else 0, homes.most_pairs if homes else 1,
    )  # fmt: skip
    kind = (
        outs, ins, tile.rows, columns, step, tile.group, PARTS,
        fp8, turned, ready is not None, homes is not None, helpers is not None,
    )  # fmt: skip

    def launch(sms: int, *, helps: int) -> None:
        _mega_gemm[(num_programs(num_tiles, tile, sms),)](
            *arguments, helps, *kind, num_warps=tile.num_warps, num_stages=tile.num_stages
        )

    _launch_both(launch, sms, helpers)
    return y_RO


def _launch_both(launch: Callable[..., None], sms: int, helpers: Helpers | None) -> None:
    """The product and, behind what runs on their stream, its helpers."""
    if helpers is not None and helpers.stream is None:
        launch(helpers.num_sms, helps=1)
    launch(sms, helps=0)
    if helpers is not None and helpers.stream is not None:
        with torch.cuda.stream(helpers.stream):
            launch(helpers.num_sms, helps=1)


def _by_hopper(
    x: Quantized,
    weights: Quantized,
    layout: Layout,
    y_RO: Tensor | None,
    tile: Tile,
    ready: Ready | None,
    homes: Homes | None,
    sms: int,
    helpers: Helpers | None,
) -> None:
    hopper = importlib.import_module("ppruntime.models.kernels.mega_moe_gemm_hopper")
    ticket_1 = helpers.ticket_1 if helpers else None

    def launch(sms: int, *, helps: int) -> None:
        hopper.launch(
            x, weights, layout, y_RO,
            tile=tile, sms=sms, ready=ready, homes=homes, ticket_1=ticket_1, helps=helps,
        )  # fmt: skip

    _launch_both(launch, sms, helpers)


def mega_gemm_reference(
    x: Quantized | Tensor, weights: Quantized | Tensor, layout: Layout, *, turned: bool = False
) -> Tensor:
    """[R, O] bf16, summed in fp32; 0 in blocks without an expert."""
    if isinstance(x, tuple):
        assert isinstance(weights, tuple)
        return grouped_gemm_reference(x, weights, layout).bfloat16()
    assert isinstance(weights, Tensor)
    weight_LIO = weights if turned else weights.transpose(1, 2)
    y_RO = x.new_zeros(len(x), weight_LIO.shape[2])
    for block, expert in enumerate(layout.expert_B.tolist()):
        rows = slice(block * GROUP, (block + 1) * GROUP)
        if expert >= 0:
            y_RO[rows] = (x[rows].float() @ weight_LIO[expert].float()).to(x.dtype)
    return y_RO

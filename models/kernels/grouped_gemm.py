# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""Grouped GEMMs in block-scaled FP8: one weight per expert, rows grouped by expert.

    grouped_gemm        y[r] = W_e x[r],         e the expert of pool row r: forward, data gradient
    grouped_weight_grad dW_e += sum of a[r] b[r]^T over the rows r of e, into fp32

Every 128 values along K are summed by the tensor cores and then scaled and added in fp32: Hopper's
FP8 accumulator keeps about 13 bits, which over a whole K of 5120 would cost 4e-3.

Shape letters: P pool rows, B = P/128, E experts, O and I output and input width, A and C channels.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ppruntime.models.kernels.moe_layout import Layout
from ppruntime.models.kernels.quantize import (
    GROUP,
    Quantized,
    dequantize_blocks,
    dequantize_columns,
    dequantize_rows,
    on_hopper,
)
from ppruntime.models.kernels.rounding import INTERPRETED, to_bf16


@dataclass(frozen=True, slots=True)
class Tile:
    """How a GEMM kernel is cut: a block of the output per program, and how it is run."""

    rows: int = 64
    columns: int = 128
    num_warps: int = 4
    num_stages: int = 3
    group: int = 16
    """Row blocks that share their columns' operand in the second-level cache."""
    prefetch: bool = False
    """Triton's weight gradient only: the accumulator's tile comes into the cache meanwhile."""
    max_registers: int | None = None
    """A thread's at the most; fewer than it would take leave room for more programs."""
    hopper: bool = False
    """By the Gluon kernels of grouped_gemm_hopper.py and mega_moe_gemm_hopper.py, in tiles of 128
    rows; their programs stay."""


FORWARD_TILE = Tile()
"""Best on H200 (Triton 3.6) of those in docs/bench/moe-experts.json, as programs that stay."""
WEIGHT_GRAD_TILE = Tile(num_stages=3, prefetch=True, max_registers=168)
"""Best there too, one program per tile: three on a multiprocessor hide each other's accumulator, at
the price of a few spilled registers."""
HOPPER_TILE = Tile(128, 256, num_stages=4, group=8, hopper=True)
HOPPER_WEIGHT_GRAD_TILE = Tile(128, 256, num_stages=3, group=12, hopper=True)
"""By Gluon; `columns` are 128 where the width is no multiple of 256, which then is slower than
Triton's kernels."""
_HOPPER_GAIN = 1.28
"""A full multiprocessor's rate by HOPPER_TILE over that by FORWARD_TILE (H200)."""


def forward_tile(x: Tensor, num_rows: int, outs: int, sms: int) -> Tile:
    """The faster one for products of so many rows on so many multiprocessors. The bits are those of
    any other."""
    return HOPPER_TILE if on_hopper(x) and fills(num_rows, outs, sms) else FORWARD_TILE


def fills(num_rows: int, outs: int, sms: int) -> bool:
    """Whether the large tiles of the Gluon kernel leave so little of the last round idle that it is
    the faster one."""
    if outs % HOPPER_TILE.columns:
        return False

    def share(tile: Tile, per_sm: int) -> float:
        tiles, at_once = num_rows // tile.rows * (outs // tile.columns), sms * per_sm
        return tiles / (-(-tiles // at_once) * at_once) if tiles else 0.0

    return _HOPPER_GAIN * share(HOPPER_TILE, 1) > share(FORWARD_TILE, 2)


class WeightGradOperands(NamedTuple):
    """One micro-batch's operands of one weight gradient: left^T right per expert."""

    left: Quantized
    """Gradient of the output: columns or tiles, data [B, A, 128]."""
    right: Quantized
    """Input: columns or tiles, data [B, C, 128]."""
    layout: Layout


def grouped_gemm_reference(x: Quantized, weights: Quantized, layout: Layout) -> Tensor:
    """[P, O] fp32 from the same FP8 values, exact but for fp32 rounding; 0 in unneeded blocks.
    x in row groups with scale [G, P]."""
    x_PI = dequantize_rows(Quantized(x.data, x.scale.t()))
    y_PO = x_PI.new_zeros(x_PI.shape[0], weights.data.shape[1])
    for block, expert in enumerate(layout.expert_B.tolist()):
        if expert >= 0:
            rows = slice(block * GROUP, (block + 1) * GROUP)
            one = Quantized(weights.data[expert : expert + 1], weights.scale[expert : expert + 1])
            y_PO[rows] = x_PI[rows] @ dequantize_blocks(one)[0].t()
    return y_PO


def grouped_weight_grad_reference(
    accumulator_EAC: Tensor, micro_batches: Sequence[WeightGradOperands]
) -> None:
    """Adds the micro-batches' weight gradients in order, each summed by itself first."""
    for left, right, layout in micro_batches:
        left_PA, right_PC = dequantize_columns(left), dequantize_columns(right)
        starts = layout.start_E1.tolist()
        for expert, (start, stop) in enumerate(pairwise(starts)):
            if start < stop:
                accumulator_EAC[expert] += left_PA[start:stop].t() @ right_PC[start:stop]


@triton.jit
def tile_place(
    tile, num_rows, NUM_COLUMNS: tl.constexpr, GROUP_ROWS: tl.constexpr
):  # fmt: skip
    """Row block and column block of a tile: `GROUP_ROWS` row blocks go through all columns before
    the next ones, so that in-flight tiles share operands."""
    group = tile // (GROUP_ROWS * NUM_COLUMNS)
    first = group * GROUP_ROWS
    size = tl.minimum(num_rows - first, GROUP_ROWS)
    within = tile % (GROUP_ROWS * NUM_COLUMNS)
    return first + within % size, within // size


@triton.jit
def _grouped_gemm(
    x_desc, w_desc, y_desc, x_scale_ptr, w_scale_ptr, expert_ptr, start_ptr, count_ptr, P,
    OUTS: tl.constexpr, INS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    NUM_COLUMNS: tl.constexpr = OUTS // COLUMNS
    num_rows = P // ROWS
    for tile in range(tl.program_id(0), num_rows * NUM_COLUMNS, tl.num_programs(0)):
        row_block, column_block = tile_place(tile, num_rows, NUM_COLUMNS, GROUP_ROWS)
        row = row_block * ROWS
        column = column_block * COLUMNS
        expert = tl.load(expert_ptr + row // 128)
        is_needed = expert >= 0
        if is_needed:
            # A half block may be all padding.
            end = tl.load(start_ptr + expert) + tl.load(count_ptr + expert)
            is_needed = row < end
        if is_needed:
            rows = row + tl.arange(0, ROWS)
            w_row = expert * OUTS + column
            w_scales = w_scale_ptr + (expert * (OUTS // 128) + column // 128) * (INS // 128)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            # Scales come a step ahead of their product: nothing waits for them after it.
            x_scale, w_scale = tl.load(x_scale_ptr + rows), tl.load(w_scales)
            for group in range(INS // 128):
                x = x_desc.load([row, group * 128])
                w = w_desc.load([w_row, group * 128])
                scale = x_scale * w_scale
                ahead = tl.minimum(group + 1, INS // 128 - 1)
                x_scale = tl.load(x_scale_ptr + ahead * P + rows)
                w_scale = tl.load(w_scales + ahead)
                total += tl.dot(x, w.T) * scale[:, None]
            y_desc.store([row, column], to_bf16(total))


def grouped_gemm(
    x: Quantized,
    weights: Quantized,
    layout: Layout,
    *,
    tile: Tile | None = None,
    gemm_sms: int | None = None,
) -> Tensor:
    """[P, O] bf16. x in row groups with scale [G, P]; weights [E, O, I] in blocks.

    Rows of padding hold garbage where the kernel could skip them. `gemm_sms` limits the
    multiprocessors used, for kernels that run beside it; the bits do not depend on it.
    """
    num_rows, ins = x.data.shape
    num, outs, _ = weights.data.shape
    y_PO = x.data.new_empty(num_rows, outs, dtype=torch.bfloat16)
    sms = gemm_sms or all_sms(x.data)
    tile = tile or forward_tile(x.data, num_rows, outs, sms)
    num_tiles = (num_rows // tile.rows) * (outs // tile.columns)
    if num_rows and tile.hopper:
        hopper = importlib.import_module("ppruntime.models.kernels.mega_moe_gemm_hopper")
        hopper.launch(x, weights, layout, y_PO, tile=tile, sms=sms)
    elif num_tiles:
        _grouped_gemm[(num_programs(num_tiles, tile, sms),)](
            TensorDescriptor.from_tensor(x.data, [tile.rows, GROUP]),
            TensorDescriptor.from_tensor(weights.data.view(num * outs, ins), [tile.columns, GROUP]),
            TensorDescriptor.from_tensor(y_PO, [tile.rows, tile.columns]),
            x.scale, weights.scale, layout.expert_B, layout.start_E1, layout.count_E, num_rows,
            outs, ins, tile.rows, tile.columns, tile.group,
            num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
        )  # fmt: skip
    return y_PO


def num_programs(num_tiles: int, tile: Tile, sms: int | None) -> int:
    """One program per tile, or as many as run at once on `sms` multiprocessors."""
    if sms is None:
        return num_tiles
    per_sm = max(1, 8 // tile.num_warps)  # what registers and shared memory allow
    return min(num_tiles, sms * per_sm)


def all_sms(x: Tensor) -> int:
    if not x.is_cuda:
        return 1  # the interpreter
    return torch.cuda.get_device_properties(x.device).multi_processor_count


@triton.jit
def _scales(scale_ptr, block, first, WIDTH: tl.constexpr, COUNT: tl.constexpr, TILES: tl.constexpr):
    """Of a 128-row block the scales of COUNT channels from `first`: each its own, or the tile's."""
    if TILES:
        scales = tl.load(scale_ptr + block * (WIDTH // 128) + first // 128)
    elif COUNT < 128:
        scales = tl.load(scale_ptr + block * WIDTH + first + tl.arange(0, COUNT))
    else:
        # By pairs: a load of fewer elements than there are threads gets the product's layout at
        # once; a larger one goes through shared memory, with all warps waiting for each other.
        pairs = (scale_ptr + block * WIDTH + first).to(tl.pointer_type(tl.int64))
        pair = tl.load(pairs + tl.arange(0, COUNT // 2))
        low, high = pair.to(tl.int32), (pair >> 32).to(tl.int32)
        both = tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
        scales = tl.reshape(both, [COUNT])
    return scales


@triton.jit
def _partial(
    left_desc, right_desc, left_scale_ptr, right_scale_ptr, start_ptr, expert, row, column,
    A: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LEFT_TILES: tl.constexpr, RIGHT_TILES: tl.constexpr,
):  # fmt: skip
    """One micro-batch's part of one output tile, summed from zero."""
    first_block = tl.load(start_ptr + expert) // 128
    stop_block = tl.load(start_ptr + expert + 1) // 128
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(first_block, stop_block):
        left = left_desc.load([block * A + row, 0])
        right = right_desc.load([block * C + column, 0])
        # Asked for before the product, so that nothing waits for them after it.
        left_scale = _scales(left_scale_ptr, block, row, A, ROWS, LEFT_TILES)
        right_scale = _scales(right_scale_ptr, block, column, C, COLUMNS, RIGHT_TILES)
        product = tl.dot(left, right.T)
        of_rows = left_scale if LEFT_TILES else left_scale[:, None]
        of_columns = right_scale if RIGHT_TILES else right_scale[None, :]
        total += product * (of_rows * of_columns)
    return total


@triton.jit
def _prefetch(pointers):
    """Fetches the cache lines at `pointers` into the second-level cache."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _grouped_weight_grad(
    acc_ptr, E,
    left0, right0, left_scale0, right_scale0, start0,
    left1, right1, left_scale1, right_scale1, start1,
    left2, right2, left_scale2, right_scale2, start2,
    left3, right3, left_scale3, right_scale3, start3,
    A: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, LEFT_TILES: tl.constexpr, RIGHT_TILES: tl.constexpr,
    NUM: tl.constexpr, TURNED: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    NUM_ROWS: tl.constexpr = A // ROWS
    NUM_COLUMNS: tl.constexpr = C // COLUMNS
    TILES: tl.constexpr = NUM_ROWS * NUM_COLUMNS
    for tile in range(tl.program_id(0), E * TILES, tl.num_programs(0)):
        expert = tile // TILES
        row_block, column_block = tile_place(tile % TILES, NUM_ROWS, NUM_COLUMNS, GROUP_ROWS)
        row, column = row_block * ROWS, column_block * COLUMNS
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        accumulator = acc_ptr + expert.to(tl.int64) * (A * C)
        if TURNED:
            place = accumulator + columns[None, :] * A + rows[:, None]
            lines = row + 32 * tl.arange(0, ROWS // 32)
            line_ptrs = accumulator + columns[None, :] * A + lines[:, None]
        else:
            place = accumulator + rows[:, None] * C + columns[None, :]
            lines = column + 32 * tl.arange(0, COLUMNS // 32)
            line_ptrs = accumulator + rows[:, None] * C + lines[None, :]
        if PREFETCH:
            _prefetch(line_ptrs)
        # Each micro-batch is summed from zero and added by itself: the same bits as one launch
        # each. What the second reads back is still in the cache.
        for i in tl.static_range(NUM):
            if i == 0:
                left, right, left_scale, right_scale, start = (
                    left0, right0, left_scale0, right_scale0, start0)  # fmt: skip
            elif i == 1:
                left, right, left_scale, right_scale, start = (
                    left1, right1, left_scale1, right_scale1, start1)  # fmt: skip
            elif i == 2:
                left, right, left_scale, right_scale, start = (
                    left2, right2, left_scale2, right_scale2, start2)  # fmt: skip
            else:
                left, right, left_scale, right_scale, start = (
                    left3, right3, left_scale3, right_scale3, start3)  # fmt: skip
            if tl.load(start + expert) < tl.load(start + expert + 1):
                total = _partial(
                    left, right, left_scale, right_scale, start, expert, row, column,
                    A, C, ROWS, COLUMNS, LEFT_TILES, RIGHT_TILES,
                )  # fmt: skip
                tl.store(place, tl.load(place) + total)


MOST_MICRO_BATCHES = 4
"""Micro-batches that one launch adds at most."""
_ALIGNED_BYTES = 16
"""Where TMA's tensors begin. Asked of accumulators wherever they are added to, so that a run fails
on its first micro-batch and on every device."""


def grouped_weight_grad(
    accumulator_EAC: Tensor,
    micro_batches: Sequence[WeightGradOperands],
    *,
    tile: Tile | None = None,
    gemm_sms: int | None = None,
) -> None:
    """Adds the micro-batches' weight gradients to the fp32 accumulator [E, A, C], in order.

    One launch for up to `MOST_MICRO_BATCHES` reads and writes the accumulator's memory once. The
    bits are those of one launch per micro-batch, and do not depend on `gemm_sms`; nor on the tile,
    but that the second-level cache, where it adds, takes subnormal numbers for zero.

    Raises ValueError for an accumulator whose memory does not begin at a multiple of 16 bytes.
    """
    num, left_width, right_width = accumulator_EAC.shape
    assert 1 <= len(micro_batches) <= MOST_MICRO_BATCHES, len(micro_batches)
    assert accumulator_EAC.dtype is torch.float32, accumulator_EAC.dtype
    assert accumulator_EAC.is_contiguous(), accumulator_EAC.stride()
    if beyond := accumulator_EAC.data_ptr() % _ALIGNED_BYTES:
        raise ValueError(
            f"a weight gradient of shape {tuple(accumulator_EAC.shape)} begins {beyond} bytes "
            f"after a multiple of {_ALIGNED_BYTES}, where TMA cannot add to it; make it a tensor "
            "of its own, or let its part of a larger one begin at a multiple of four elements"
        )
    for left, right, _ in micro_batches:
        assert left.data.is_contiguous(), "columns by blocks"
        assert right.data.is_contiguous(), "columns by blocks"
    micro_batches = [operand for operand in micro_batches if operand.layout.num_rows]
    if not micro_batches:
        return
    # A thread of the MMA holds few rows and many columns of a tile: the columns' scales are what
    # costs, so an operand whose scales are tiles goes there, and the product is stored turned.
    left, right, _ = micro_batches[0]
    turned = left.scale.shape[1] != left_width and right.scale.shape[1] == right_width
    if turned:
        micro_batches = [WeightGradOperands(b, a, layout) for a, b, layout in micro_batches]
        left_width, right_width = right_width, left_width
    if tile is None:
        fits = on_hopper(accumulator_EAC) and right_width % HOPPER_WEIGHT_GRAD_TILE.columns == 0
        tile = HOPPER_WEIGHT_GRAD_TILE if fits else WEIGHT_GRAD_TILE
    if tile.hopper:
        _launch_hopper(accumulator_EAC, micro_batches, turned, tile, gemm_sms)
        return
    operands: list[object] = []
    for left, right, layout in micro_batches:
        operands += [
            TensorDescriptor.from_tensor(left.data.view(-1, GROUP), [tile.rows, GROUP]),
            TensorDescriptor.from_tensor(right.data.view(-1, GROUP), [tile.columns, GROUP]),
            left.scale, right.scale, layout.start_E1,
        ]  # fmt: skip
    operands += [None] * (5 * (MOST_MICRO_BATCHES - len(micro_batches)))
    left, right, _ = micro_batches[0]
    num_tiles = num * (left_width // tile.rows) * (right_width // tile.columns)
    _grouped_weight_grad[(num_programs(num_tiles, tile, gemm_sms),)](
        accumulator_EAC, num, *operands,
        left_width, right_width, tile.rows, tile.columns, tile.group,
        left.scale.shape[1] != left_width, right.scale.shape[1] != right_width, len(micro_batches),
        turned, tile.prefetch,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        # Programs that stay are two on a multiprocessor, whatever they take.
        maxnreg=tile.max_registers if gemm_sms is None else None,
    )  # fmt: skip


def adds_by_tma(num: int, turned: bool, with_tiles: bool) -> bool:
    """Whether TMA adds the Gluon kernel's sums of so many micro-batches to the accumulator, through
    shared memory, and not the warps from registers. Numeric class: bitwise.

    `turned`: left and right are exchanged, the accumulator is not; `with_tiles`: scales of at least
    one side are tiles. By time alone: TMA works while the warpgroup is at its next products, but
    the sums pass through shared memory first, and each micro-batch waits until those before are
    added. From registers they go in part lines where turned.

    TFLOP/s from registers and by TMA (H200, a sweep without a record):

        by column                 W2    n = 1   681   589
        by column                 W2    n = 2   729   771
        by column                 W2    n = 4   711   792
        by column                 W13   n = 2   655   709
        with tiles, turned        W2    n = 2   756   838
        with tiles, not turned    W13   n = 2   836   791
    """
    return num >= 2 and (turned or not with_tiles)


def _launch_hopper(
    accumulator_EAC: Tensor,
    micro_batches: Sequence[WeightGradOperands],
    turned: bool,
    tile: Tile,
    gemm_sms: int | None,
) -> None:
    """The Gluon kernel; of turned micro-batches, whose left and right are exchanged, into the
    accumulator as it is."""
    hopper = importlib.import_module("ppruntime.models.kernels.grouped_gemm_hopper")
    left, right, _ = micro_batches[0]
    left_width, right_width = left.data.shape[1], right.data.shape[1]
    left_tiles, right_tiles = (q.scale.shape[1] != q.data.shape[1] for q in (left, right))
    columns = tile.columns if right_width % tile.columns == 0 else GROUP
    row_blocks = left_width // tile.rows
    # Groups of one size: where a tile lies then takes no division by a number read at run time.
    group = next(n for n in range(min(tile.group, row_blocks), 0, -1) if row_blocks % n == 0)
    operands: list[object] = []
    for left, right, layout in micro_batches:
        operands += [
            hopper.descriptor(left.data.view(-1, GROUP), tile.rows // 2),
            hopper.descriptor(right.data.view(-1, GROUP), columns),
            left.scale if left_tiles else hopper.descriptor(left.scale.view(-1), tile.rows // 2),
            right.scale if right_tiles else hopper.descriptor(right.scale.view(-1), columns),
            layout.start_E1,
        ]
    operands += [None] * (5 * (MOST_MICRO_BATCHES - len(micro_batches)))
    num_tiles = len(accumulator_EAC) * row_blocks * (right_width // columns)
    sms = gemm_sms or all_sms(accumulator_EAC)
    by_tma = adds_by_tma(len(micro_batches), turned, left_tiles or right_tiles)
    target: object = accumulator_EAC
    if by_tma:
        target = hopper.sums_descriptor(accumulator_EAC, columns, turned)
    hopper.weight_grad_kernel[(min(num_tiles, sms),)](
        target, num_tiles, *operands,
        left_width, right_width, tile.rows, columns, group, left_tiles, right_tiles,
        len(micro_batches), turned, by_tma, tile.num_stages,
        num_warps=tile.num_warps,
    )  # fmt: skip

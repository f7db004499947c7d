# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""FP8 operands of the expert GEMMs: what every quantiser means (in torch), and the Triton kernels.

Format E4M3, largest value 448. A scale is largest * (1/448), or the next power of two; a value is
stored as round(x * (1/scale)), to nearest, ties to even. Four groupings:

rows     one scale per 128 channels of a row: left operand of the forward and the data gradient
columns  one scale per 128 rows of a channel: operands of the weight gradient, whose K is rows
tiles    one scale per 128 rows x 128 channels: the cheaper grouping for weight gradients
blocks   the same for weights

Hopper's FP8 MMA reads both operands K-major, so columns are stored transposed, one 128-row block
after another: [P/128, C, 128]. Shape letters: N tokens, P rows of the padded pool (experts start at
multiples of 128), C channels, G = C/128, E experts, O and I output and input width of a weight.
Recipe: DeepSeek-V3 report, section 3.3.2.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.moe_layout import Layout
from ppruntime.models.kernels.rounding import (
    e4m3_words,
    reciprocal_of_scale,
    to_e4m3,
    to_e4m3_by_fours,
)
from ppruntime.models.quantize import power_of_two_ceiling

GROUP = 128
"""Values that share a scale along K, everywhere."""
E4M3_MAX = 448.0
_SMALLEST = 1e-10
"""Groups below it are scaled as if it were their largest value: no division by zero."""


class Quantized(NamedTuple):
    """FP8 bytes and their fp32 scales. The function that gives it says how both are laid out."""

    data: Tensor
    scale: Tensor


# What the quantisers mean, in torch.


def scale_of(largest: Tensor, *, power_of_two: bool) -> Tensor:
    """The scale of groups whose largest magnitudes are given, fp32."""
    scale = largest.float().clamp_min(_SMALLEST) * (1 / E4M3_MAX)
    return power_of_two_ceiling(scale) if power_of_two else scale


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    # Saturating like the hardware's conversion; torch's own gives NaN above 464.
    return (x.float() * scale.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_rows_reference(x_NC: Tensor, *, power_of_two: bool) -> Quantized:
    """Row groups: data [N, C], scale [N, G]."""
    num_rows, channels = x_NC.shape
    groups = x_NC.view(num_rows, channels // GROUP, GROUP)
    scale_NG = scale_of(groups.abs().amax(-1), power_of_two=power_of_two)
    return Quantized(_rounded(groups, scale_NG.unsqueeze(-1)).view(x_NC.shape), scale_NG)


def quantize_columns_reference(
    x_PC: Tensor, *, power_of_two: bool, tile_scales: bool = False
) -> Quantized:
    """Column groups: data [P/128, C, 128], scale [P/128, C]; tiles: scale [P/128, G]."""
    num_rows, channels = x_PC.shape
    blocks_BCR = x_PC.view(num_rows // GROUP, GROUP, channels).transpose(1, 2)
    largest_BC = blocks_BCR.abs().amax(-1)
    if tile_scales:
        largest_BG = largest_BC.view(num_rows // GROUP, channels // GROUP, GROUP).amax(-1)
        scale = scale_of(largest_BG, power_of_two=power_of_two)
        per_column = scale.repeat_interleave(GROUP, dim=1)
    else:
        scale = per_column = scale_of(largest_BC, power_of_two=power_of_two)
    return Quantized(_rounded(blocks_BCR, per_column.unsqueeze(-1)).contiguous(), scale)


def quantize_blocks_reference(weight_EOI: Tensor) -> Quantized:
    """Weight blocks: data [E, O, I], scale [E, O/128, I/128]."""
    num, outs, ins = weight_EOI.shape
    blocks = weight_EOI.view(num, outs // GROUP, GROUP, ins // GROUP, GROUP)
    scale = scale_of(blocks.abs().amax((2, 4)), power_of_two=False)
    return Quantized(_rounded(blocks, scale[:, :, None, :, None]).view_as(weight_EOI), scale)


def dequantize_rows(rows: Quantized) -> Tensor:
    """[N, C] fp32 from row groups with scale [N, G]."""
    return rows.data.float() * rows.scale.repeat_interleave(GROUP, dim=1)


def dequantize_columns(columns: Quantized) -> Tensor:
    """[P, C] fp32 from column groups or tiles."""
    data, scale = columns
    if scale.shape[1] != data.shape[1]:
        scale = scale.repeat_interleave(GROUP, dim=1)
    return (data.float() * scale.unsqueeze(-1)).transpose(1, 2).flatten(0, 1)


def dequantize_blocks(weights: Quantized) -> Tensor:
    """[E, O, I] fp32."""
    scale = weights.scale.repeat_interleave(GROUP, dim=1).repeat_interleave(GROUP, dim=2)
    return weights.data.float() * scale


# Device functions, shared with the other kernels of this folder.


@triton.jit
def group_scale(largest, POWER_OF_TWO: tl.constexpr):
    """`scale_of` on the device."""
    scale = tl.maximum(largest, 1e-10) * (1.0 / 448.0)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def store_rows(x, data_ptr, scale_ptr, rows, column, C: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Quantises x [R, 128], channels `column`... of `rows`, by row groups. `scale_ptr` points at
    this channel group's scales, one per row."""
    scale = group_scale(tl.max(tl.abs(x), axis=1), POWER_OF_TWO)
    columns = column + tl.arange(0, 128)
    offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
    tl.store(data_ptr + offsets, to_e4m3(x * reciprocal_of_scale(scale)[:, None]))
    tl.store(scale_ptr + rows, scale)


# A 128x128 tile is worked on as four [32, 128] parts, part j holding rows 4i + j: four FP8 values
# of one channel then make a 32-bit word without leaving their thread, and turning the tile moves
# words through shared memory instead of bytes.


@triton.jit
def part_rows(block, j, PARTS: tl.constexpr = 4):
    """The pool rows of part j of a 128-row block."""
    return block * 128 + PARTS * tl.arange(0, 128 // PARTS) + j


@triton.jit
def column_scale(
    largest, scale_ptr, block, column, C: tl.constexpr,
    TILE_SCALES: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Scales of 128 channels from the largest magnitudes [128]; stores them as columns or tiles."""
    scale = group_scale(largest, POWER_OF_TWO)
    if TILE_SCALES:
        tile = tl.max(scale, axis=0)
        tl.store(scale_ptr + block * (C // 128) + column // 128, tile)
        scale = tl.zeros_like(scale) + tile
    else:
        tl.store(scale_ptr + block * C + column + tl.arange(0, 128), scale)
    return scale


@triton.jit
def store_columns(words, data_ptr, first, distance, column, PARTS: tl.constexpr = 4):
    """Stores a tile's FP8 parts, as words [128 / PARTS, 128], with rows running fastest: channel c
    begins `first + c distance` bytes after `data_ptr`, a pointer to words of PARTS bytes."""
    columns = column + tl.arange(0, 128)
    offsets = columns[None, :] * (distance // PARTS) + tl.arange(0, 128 // PARTS)[:, None]
    tl.store(data_ptr + first // PARTS + offsets, words)


@triton.jit
def store_block(words, data_ptr, block, column, P, C: tl.constexpr, DENSE: tl.constexpr):
    """Stores a tile's words as columns of its block, or of one matrix [C, P] for all blocks."""
    if DENSE:
        store_columns(words, data_ptr, block * 128, tl.multiple_of(P, 128), column)
    else:
        store_columns(words, data_ptr, block.to(tl.int64) * (C * 128), 128, column)


# Rows of tokens.


@triton.jit
def _quantize_rows(
    x_ptr, data_ptr, scale_ptr, N, C: tl.constexpr,
    ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    offsets = rows.to(tl.int64)[:, None] * C + group * 128 + tl.arange(0, 128)[None, :]
    inside = rows < N
    x = tl.load(x_ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = group_scale(tl.max(tl.abs(x), axis=1), POWER_OF_TWO)
    tl.store(
        data_ptr + offsets, to_e4m3(x * reciprocal_of_scale(scale)[:, None]), mask=inside[:, None]
    )
    tl.store(scale_ptr + rows * (C // 128) + group, scale, mask=inside)


def quantize_rows(x_NC: Tensor, *, power_of_two: bool, out: Quantized | None = None) -> Quantized:
    """`quantize_rows_reference` in one pass: what a token's owner sends. x is bf16 or fp32. `out`:
    memory for it, dense."""
    num_rows, channels = x_NC.shape
    if out is None:
        out = Quantized(
            torch.empty(x_NC.shape, dtype=torch.float8_e4m3fn, device=x_NC.device),
            x_NC.new_empty(num_rows, channels // GROUP, dtype=torch.float32),
        )
    data, scale_NG = out
    if num_rows:
        grid = (triton.cdiv(num_rows, 32), channels // GROUP)
        _quantize_rows[grid](
            x_NC.contiguous(), data, scale_NG, num_rows, channels, 32, power_of_two, num_warps=4
        )
    return out


# Rows and columns of the pool, gathered on the way.


@triton.jit
def _routed_part(
    x_ptr, x_scale_ptr, pair_ptr, rows, column,
    C: tl.constexpr, PAIRS_PER_TOKEN: tl.constexpr, FP8_INPUT: tl.constexpr,
):  # fmt: skip
    pair = tl.load(pair_ptr + rows)
    routed = pair >= 0
    source = (pair // PAIRS_PER_TOKEN).to(tl.int64)
    offsets = source[:, None] * C + column + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + offsets, mask=routed[:, None], other=0.0).to(tl.float32)
    if FP8_INPUT:
        scale = tl.load(x_scale_ptr + source * (C // 128) + column // 128, mask=routed, other=0.0)
        x *= scale[:, None]
    return x


@triton.jit
def _quantize_routed(
    x_ptr, x_scale_ptr, pair_ptr, expert_ptr, P,
    rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr,
    C: tl.constexpr, PAIRS_PER_TOKEN: tl.constexpr, FP8_INPUT: tl.constexpr,
    WITH_ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr, DENSE: tl.constexpr,
    TILE_SCALES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    column = tl.program_id(0) * 128
    if tl.load(expert_ptr + block) < 0:
        return
    rows0, rows1 = part_rows(block, 0), part_rows(block, 1)
    rows2, rows3 = part_rows(block, 2), part_rows(block, 3)
    x0 = _routed_part(x_ptr, x_scale_ptr, pair_ptr, rows0, column, C, PAIRS_PER_TOKEN, FP8_INPUT)
    x1 = _routed_part(x_ptr, x_scale_ptr, pair_ptr, rows1, column, C, PAIRS_PER_TOKEN, FP8_INPUT)
    x2 = _routed_part(x_ptr, x_scale_ptr, pair_ptr, rows2, column, C, PAIRS_PER_TOKEN, FP8_INPUT)
    x3 = _routed_part(x_ptr, x_scale_ptr, pair_ptr, rows3, column, C, PAIRS_PER_TOKEN, FP8_INPUT)
    if WITH_ROWS:
        scales = row_scale_ptr + (column // 128) * P
        store_rows(x0, rows_ptr, scales, rows0, column, C, POWER_OF_TWO)
        store_rows(x1, rows_ptr, scales, rows1, column, C, POWER_OF_TWO)
        store_rows(x2, rows_ptr, scales, rows2, column, C, POWER_OF_TWO)
        store_rows(x3, rows_ptr, scales, rows3, column, C, POWER_OF_TWO)
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    scale = column_scale(
        tl.max(largest, axis=0), column_scale_ptr, block, column, C, TILE_SCALES, POWER_OF_TWO
    )
    inverse = reciprocal_of_scale(scale)[None, :]
    words = e4m3_words(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    store_block(words, columns_ptr, block, column, P, C, DENSE)


class RoutedTile(NamedTuple):
    """How `quantize_routed` works on its tiles of 128 rows and 128 channels."""

    hopper: bool = False
    """By the Gluon kernel of quantize_hopper.py, in which each of 8 or 16 warps has whole rows."""
    num_warps: int = 8
    max_registers: int | None = None
    """Per thread: 65,536 are shared by the threads that a multiprocessor is to hold."""


TRITON_ROUTED = RoutedTile()
HOPPER_ROUTED = RoutedTile(hopper=True, max_registers=80)
"""0.23 ms for 49,152 rows of 5,120 channels on an H200, with all registers 0.25; Triton's best
0.32 (a sweep without a record)."""
ROUTED_TO_TRY = (
    HOPPER_ROUTED,
    RoutedTile(hopper=True),
    RoutedTile(hopper=True, num_warps=16),
    TRITON_ROUTED,
    RoutedTile(max_registers=80),
    RoutedTile(num_warps=16, max_registers=64),
)
"""What a bench measures; all give the same bytes."""


@functools.cache
def _has_gluon() -> bool:
    return importlib.util.find_spec("triton.experimental.gluon") is not None


def on_hopper(x: Tensor) -> bool:
    """Whether Gluon kernels can take x."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9 and _has_gluon()


def _hopper() -> ModuleType:
    # Where Triton has no Gluon, nothing asks for this.
    return importlib.import_module("ppruntime.models.kernels.quantize_hopper")


def quantize_routed(
    x: Tensor | Quantized,
    layout: Layout,
    *,
    with_rows: bool,
    power_of_two: bool,
    tile_scales: bool = False,
    dense: bool = False,
    tile: RoutedTile | None = None,
) -> tuple[Quantized | None, Quantized]:
    """Gathers tokens into the pool and quantises them in one pass over 128x128 tiles.

    x [N, C] in bf16 or fp32, or row groups as `quantize_rows` gives them. Gives the pool's rows
    (data [P, C], scale [G, P]; only if `with_rows`) and columns (data [P/128, C, 128], scale
    [P/128, C] or, with `tile_scales`, [P/128, G]). Padding rows are zeros; blocks without an
    expert are not written. `dense`, for layouts of one group: the columns lie as one matrix
    [C, P], of which the data is a view by blocks. `tile` is for benches: without it, what is
    fastest here.
    """
    source, source_scale = x if isinstance(x, tuple) else (x, x)
    channels, num_rows = source.shape[1], layout.num_rows
    columns = columns_like(source, num_rows, channels, tile_scales=tile_scales, dense=dense)
    rows = pool_rows_like(source, num_rows, channels) if with_rows else None
    rows_out = rows or columns  # never written without `with_rows`
    if tile is None:
        fits = on_hopper(source) and not tile_scales
        tile = HOPPER_ROUTED if fits else TRITON_ROUTED
    if tile.hopper and tile_scales:
        raise ValueError("scales of whole tiles are the Triton kernel's alone")
    if num_rows:
        kernel = _hopper().quantize_routed_kernel if tile.hopper else _quantize_routed
        last = tile.num_warps if tile.hopper else tile_scales
        kernel[(channels // GROUP, num_rows // GROUP)](
            source.contiguous(), source_scale, layout.pair_P, layout.expert_B, num_rows,
            *rows_out, words_of(columns.data), columns.scale,
            channels, layout.experts_per_token, isinstance(x, tuple), with_rows, power_of_two,
            dense, last,
            num_warps=tile.num_warps, maxnreg=tile.max_registers,
        )  # fmt: skip
    return rows, columns


def is_dense(columns: Quantized) -> bool:
    """Whether columns lie as one matrix [C, P]; one block's do either way."""
    blocks, _, group = columns.data.shape
    return columns.data.stride(1) == blocks * group


def as_matrix(columns: Quantized) -> Tensor:
    """The data of dense columns, flat: channel after channel."""
    assert is_dense(columns), columns.data.stride()
    return columns.data.as_strided((columns.data.numel(),), (1,))


def words_of(data: Tensor) -> Tensor:
    """All bytes of columns as int32, in the order in which they lie."""
    return data.as_strided((data.numel(),), (1,)).view(torch.int32)


def pool_rows_like(x: Tensor, num_rows: int, channels: int) -> Quantized:
    """Uninitialised row groups of the pool: data [P, C], scale [G, P], as the GEMMs read them."""
    data = x.new_empty(num_rows, channels, dtype=torch.float8_e4m3fn)
    return Quantized(data, x.new_empty(channels // GROUP, num_rows, dtype=torch.float32))


def columns_like(
    x: Tensor, num_rows: int, channels: int, *, tile_scales: bool, dense: bool = False
) -> Quantized:
    """Uninitialised column groups (or tiles) of the pool; `dense`: as views of one matrix."""
    blocks = num_rows // GROUP
    num_scales = channels // GROUP if tile_scales else channels
    shape = (blocks, channels, GROUP)
    strides = (GROUP, num_rows, 1) if dense else (channels * GROUP, GROUP, 1)
    data = torch.empty_strided(shape, strides, dtype=torch.float8_e4m3fn, device=x.device)
    return Quantized(data, x.new_empty(blocks, num_scales, dtype=torch.float32))


# Weights.


@triton.jit
def _quantize_blocks(
    w_ptr, data_ptr, scale_ptr, data_t_ptr, scale_t_ptr, OUTS: tl.constexpr, INS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    column, row, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = expert.to(tl.int64) * (OUTS * INS)
    rows = row * 128 + tl.arange(0, 128)
    columns = column * 128 + tl.arange(0, 128)
    offsets = rows[:, None] * INS + columns[None, :]
    w = tl.load(w_ptr + base + offsets).to(tl.float32)
    scale = group_scale(tl.max(tl.max(tl.abs(w), axis=1), axis=0), False)
    quantized = to_e4m3_by_fours(w * tl.math.div_rn(1.0, scale))
    tl.store(data_ptr + base + offsets, quantized)
    tl.store(scale_ptr + (expert * (OUTS // 128) + row) * (INS // 128) + column, scale)
    if TRANSPOSED:
        tl.store(data_t_ptr + base + columns[None, :] * OUTS + rows[:, None], quantized)
        tl.store(scale_t_ptr + (expert * (INS // 128) + column) * (OUTS // 128) + row, scale)


def quantize_blocks(weight_EOI: Tensor, *, transposed: bool) -> tuple[Quantized, Quantized | None]:
    """`quantize_blocks_reference`, and with `transposed` also the [E, I, O] copy, in one pass."""
    num, outs, ins = weight_EOI.shape
    weights = _blocks_like(weight_EOI, num, outs, ins)
    copy = _blocks_like(weight_EOI, num, ins, outs) if transposed else None
    copy_out = copy or weights  # never written without `transposed`
    _quantize_blocks[(ins // GROUP, outs // GROUP, num)](
        weight_EOI.contiguous(), *weights, *copy_out, outs, ins, transposed, num_warps=8
    )
    return weights, copy


def _blocks_like(x: Tensor, num: int, outs: int, ins: int) -> Quantized:
    data = x.new_empty(num, outs, ins, dtype=torch.float8_e4m3fn)
    return Quantized(data, x.new_empty(num, outs // GROUP, ins // GROUP, dtype=torch.float32))


@triton.jit
def _transpose_bytes(data_ptr, data_t_ptr, OUTS: tl.constexpr, INS: tl.constexpr):
    column, row = tl.program_id(0) * 128, tl.program_id(1)
    base = tl.program_id(2).to(tl.int64) * (OUTS * INS)
    columns = column + tl.arange(0, 128)[None, :]
    q0 = tl.load(data_ptr + base + part_rows(row, 0)[:, None] * INS + columns)
    q1 = tl.load(data_ptr + base + part_rows(row, 1)[:, None] * INS + columns)
    q2 = tl.load(data_ptr + base + part_rows(row, 2)[:, None] * INS + columns)
    q3 = tl.load(data_ptr + base + part_rows(row, 3)[:, None] * INS + columns)
    words = q0.to(tl.int32) | q1.to(tl.int32) << 8 | q2.to(tl.int32) << 16 | q3.to(tl.int32) << 24
    store_columns(words, data_t_ptr, base + row * 128, OUTS, column)


def transpose_blocks(weights: Quantized) -> Quantized:
    """The transposed copy from the FP8 bytes: the bits that `quantize_blocks` would have given."""
    num, outs, ins = weights.data.shape
    copy = _blocks_like(weights.data, num, ins, outs)
    _transpose_bytes[(ins // GROUP, outs // GROUP, num)](
        weights.data.view(torch.uint8), copy.data.view(torch.int32), outs, ins, num_warps=8
    )
    copy.scale.copy_(weights.scale.transpose(1, 2))
    return copy

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""The grouped GEMMs of the package deep_gemm, with the signatures of our own.

It wants an expert per row rather than per block, and the columns of an expert as one matrix. One
launch for several micro-batches sums along all their rows at once: another order than one launch
each, unlike our own kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.expert_backends import deep_gemm_package
from ppruntime.models.kernels.grouped_gemm import HOPPER_WEIGHT_GRAD_TILE, WeightGradOperands
from ppruntime.models.kernels.grouped_gemm import grouped_weight_grad as own_weight_grad
from ppruntime.models.kernels.moe_layout import BLOCK, Layout
from ppruntime.models.kernels.quantize import GROUP, Quantized, as_matrix, is_dense, on_hopper


@contextmanager
def limited_to(gemm_sms: int | None) -> Iterator[None]:
    """deep_gemm keeps the number of multiprocessors as a setting of the process."""
    if gemm_sms is None:
        yield
        return
    package = deep_gemm_package()
    before = package.get_num_sms()
    package.set_num_sms(gemm_sms)
    try:
        yield
    finally:
        package.set_num_sms(before)


def grouped_gemm(
    x: Quantized, weights: Quantized, layout: Layout, *, gemm_sms: int | None = None
) -> Tensor:
    """[P, O] bf16; rows of blocks without an expert hold garbage."""
    num_rows = layout.num_rows
    y_PO = x.data.new_empty(num_rows, weights.data.shape[1], dtype=torch.bfloat16)
    if num_rows:
        expert_P = layout.expert_B.unsqueeze(1).expand(-1, BLOCK).reshape(-1)
        with limited_to(gemm_sms):
            deep_gemm_package().m_grouped_fp8_gemm_nt_contiguous(
                (x.data, x.scale.t()), tuple(weights), y_PO, expert_P
            )
    return y_PO


def grouped_weight_grad(
    accumulator_EAC: Tensor,
    micro_batches: Sequence[WeightGradOperands],
    *,
    gemm_sms: int | None = None,
) -> None:
    """Adds the micro-batches' weight gradients to the fp32 accumulator [E, A, C] in one launch."""
    layouts = [operands.layout for operands in micro_batches]
    num_rows = sum(layout.num_rows for layout in layouts)
    if not num_rows:
        return
    left = _matrix([operands.left for operands in micro_batches], layouts)
    right = _matrix([operands.right for operands in micro_batches], layouts)
    # The host does not know the counts: it names the room for all, the device has the real ones.
    host_rows = [num_rows] + [0] * (len(accumulator_EAC) - 1)
    rows_E = torch.stack([layout.start_E1 for layout in layouts]).sum(0, dtype=torch.int32).diff()
    with limited_to(gemm_sms):
        deep_gemm_package().k_grouped_fp8_gemm_nt_contiguous(
            (left.data, left.scale.t()), (right.data, right.scale.t()),
            accumulator_EAC, host_rows, rows_E, accumulator_EAC,
        )  # fmt: skip


def dense_weight_grad(
    accumulator_1AC: Tensor,
    micro_batches: Sequence[WeightGradOperands],
    *,
    gemm_sms: int | None = None,
) -> None:
    """`grouped_weight_grad` of one group by the package's plain product, whose tiles suit it better
    (0.69 ms to 0.73 at q_b's widths and 8,192 rows, 0.66 to 0.69 at o_b's; H200, a run
    without a record)."""
    layouts = [operands.layout for operands in micro_batches]
    if not sum(layout.num_rows for layout in layouts):
        return
    left = _matrix([operands.left for operands in micro_batches], layouts)
    right = _matrix([operands.right for operands in micro_batches], layouts)
    (sums,) = accumulator_1AC
    with limited_to(gemm_sms):
        deep_gemm_package().fp8_gemm_nt(
            (left.data.view(sums.shape[0], -1), left.scale.t()),
            (right.data.view(sums.shape[1], -1), right.scale.t()),
            sums, c=sums, recipe=(1, 1, GROUP),
        )  # fmt: skip


def expert_weight_grad(
    accumulator_EAC: Tensor,
    micro_batches: Sequence[WeightGradOperands],
    *,
    gemm_sms: int | None = None,
) -> None:
    """`grouped_weight_grad`, by the own kernel on a Hopper whose tiles fit: it takes the columns as
    they lie, and is as fast with four micro-batches and faster with fewer (H200,
    docs/bench/moe-experts.json)."""
    fits = accumulator_EAC.shape[2] % HOPPER_WEIGHT_GRAD_TILE.columns == 0
    is_own = on_hopper(accumulator_EAC) and fits
    add = own_weight_grad if is_own else grouped_weight_grad
    add(accumulator_EAC, micro_batches, gemm_sms=gemm_sms)


def _matrix(micro_batches: Sequence[Quantized], layouts: Sequence[Layout]) -> Quantized:
    """`dense_columns`, which those of one micro-batch and one group may be already."""
    if len(micro_batches) == 1 and len(layouts[0].start_E1) == 2 and is_dense(micro_batches[0]):
        return Quantized(as_matrix(micro_batches[0]), micro_batches[0].scale)
    return dense_columns(micro_batches, layouts)


@triton.jit
def _dense_columns(
    x_ptr, scale_ptr, start_ptr, first_ptr, total_ptr, expert_ptr, y_ptr, y_scale_ptr,
    C: tl.constexpr, TILE_SCALES: tl.constexpr,
):  # fmt: skip
    """Copies one 128-row block's columns into the matrix of its expert."""
    block = tl.program_id(1)
    columns = tl.program_id(0) * 128 + tl.arange(0, 128)
    expert = tl.load(expert_ptr + block)
    if expert < 0:
        return
    begin = tl.multiple_of(tl.load(total_ptr + expert), 128)
    length = tl.multiple_of(tl.load(total_ptr + expert + 1), 128) - begin
    row = tl.load(first_ptr + expert) + block * 128 - tl.load(start_ptr + expert)
    row = tl.multiple_of(row, 128)
    words = tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + block.to(tl.int64) * (C * 32) + columns[:, None] * 32 + words)
    place = begin.to(tl.int64) * (C // 4) + (row - begin) // 4
    tl.store(y_ptr + place + columns.to(tl.int64)[:, None] * (length // 4) + words, x)
    if TILE_SCALES:
        scale = tl.load(scale_ptr + block * (C // 128) + columns // 128)
    else:
        scale = tl.load(scale_ptr + block * C + columns)
    tl.store(y_scale_ptr + (row // 128) * C + columns, scale)


def dense_columns(micro_batches: Sequence[Quantized], layouts: Sequence[Layout]) -> Quantized:
    """Columns of several micro-batches as one matrix [C, rows] per expert, each expert's rows of
    all micro-batches after one another: flat data, scale [P/128, C], P the sum of all pools.
    What lies after the last expert is not written.
    """
    assert all(columns.data.is_contiguous() for columns in micro_batches), "columns by blocks"
    first = micro_batches[0].data
    channels = first.shape[1]
    num_blocks = sum(columns.data.shape[0] for columns in micro_batches)
    data = first.new_empty(num_blocks * channels * BLOCK)
    scale = first.new_empty(num_blocks, channels, dtype=torch.float32)
    starts_ME1 = torch.stack([layout.start_E1 for layout in layouts])
    total_E1 = starts_ME1.sum(0, dtype=torch.int32)
    rows_ME = starts_ME1.diff(dim=1)
    first_ME = total_E1[:-1] + rows_ME.cumsum(0, dtype=torch.int32) - rows_ME
    for columns, layout, first_E in zip(micro_batches, layouts, first_ME, strict=True):
        _dense_columns[(channels // GROUP, len(columns.data))](
            columns.data.view(torch.int32), columns.scale, layout.start_E1, first_E, total_E1,
            layout.expert_B, data.view(torch.int32), scale,
            channels, columns.scale.shape[1] != channels, num_warps=8,
        )  # fmt: skip
    return Quantized(data, scale)

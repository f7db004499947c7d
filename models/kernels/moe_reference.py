"""The FP8 experts' passes in torch, exact in what they round: the recipe that all backends follow.

Same names, arguments and results as the Triton kernels, so that a layer runs on it anywhere. GEMMs
sum in fp32 and give bf16; everything between them is fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppruntime.models.kernels.grouped_gemm import (
    WeightGradOperands,
    grouped_gemm_reference,
    grouped_weight_grad_reference,
)
from ppruntime.models.kernels.moe_layout import (
    Layout,
    expert_layout_reference,
    gather_rows_reference,
    gather_sum_reference,
)
from ppruntime.models.kernels.quantize import (
    Quantized,
    dequantize_rows,
    quantize_blocks_reference,
    quantize_columns_reference,
    quantize_rows_reference,
)
from ppruntime.models.kernels.swiglu import SwigluGrads, swiglu_reference, weight_of_rows

expert_layout = expert_layout_reference
gather_sum = gather_sum_reference
quantize_rows = quantize_rows_reference


def gather_rows(x_NC: Tensor, layout: Layout, scale_NG: Tensor | None = None) -> tuple[Tensor, ...]:
    """Pool rows, and their scales as [G, P]."""
    rows = gather_rows_reference(x_NC, layout)
    if scale_NG is None:
        return (rows,)
    return rows, gather_rows_reference(scale_NG, layout).t().contiguous()


def _pool_rows(x_PC: Tensor, *, power_of_two: bool) -> Quantized:
    rows = quantize_rows_reference(x_PC, power_of_two=power_of_two)
    return Quantized(rows.data, rows.scale.t().contiguous())


def quantize_routed(
    x: Tensor | Quantized,
    layout: Layout,
    *,
    with_rows: bool,
    power_of_two: bool,
    tile_scales: bool = False,
) -> tuple[Quantized | None, Quantized]:
    """Pool rows and columns of token rows."""
    x_PC = gather_rows_reference(dequantize_rows(x) if isinstance(x, tuple) else x, layout)
    columns = quantize_columns_reference(x_PC, power_of_two=power_of_two, tile_scales=tile_scales)
    return (_pool_rows(x_PC, power_of_two=power_of_two) if with_rows else None), columns


def quantize_blocks(weight_EOI: Tensor, *, transposed: bool) -> tuple[Quantized, Quantized | None]:
    """Weight blocks and, with `transposed`, their transposed copy."""
    weights = quantize_blocks_reference(weight_EOI)
    return weights, (transpose_blocks(weights) if transposed else None)


def transpose_blocks(weights: Quantized) -> Quantized:
    """The transposed copy: the same bytes and scales in another order."""
    return Quantized(*(t.transpose(1, 2).contiguous() for t in weights))


def grouped_gemm(
    x: Quantized, weights: Quantized, layout: Layout, *, gemm_sms: int | None = None
) -> Tensor:
    """[P, O] bf16."""
    del gemm_sms
    return grouped_gemm_reference(x, weights, layout).bfloat16()


def grouped_weight_grad(
    accumulator_EAC: Tensor,
    micro_batches: Sequence[WeightGradOperands],
    *,
    gemm_sms: int | None = None,
) -> None:
    """Adds the micro-batches' weight gradients in order."""
    del gemm_sms
    grouped_weight_grad_reference(accumulator_EAC, micro_batches)


def swiglu(
    z_PC: Tensor, weight_NK: Tensor, layout: Layout, limit: float, *, power_of_two: bool
) -> Quantized:
    """h in row groups."""
    inner_PF = swiglu_reference(z_PC, weight_of_rows(weight_NK, layout), limit)
    return _pool_rows(inner_PF, power_of_two=power_of_two)


def swiglu_backward(
    z_PC: Tensor,
    grad_PF: Tensor,
    weight_NK: Tensor,
    layout: Layout,
    limit: float,
    *,
    power_of_two: bool,
) -> SwigluGrads:
    """By autograd, so that the kernels' closed forms are checked against it."""
    routed_P1 = (layout.pair_P >= 0).unsqueeze(1)
    z = torch.where(routed_P1, z_PC.float(), 0).requires_grad_()
    weight = weight_NK.detach().requires_grad_()
    grad = torch.where(routed_P1, grad_PF.float(), 0)
    with torch.enable_grad():
        inner_PF = swiglu_reference(z, weight_of_rows(weight, layout), limit)
        grad_PC, grad_NK = torch.autograd.grad(inner_PF, (z, weight), grad)
    return SwigluGrads(
        _pool_rows(grad_PC, power_of_two=power_of_two),
        quantize_columns_reference(grad_PC, power_of_two=power_of_two),
        quantize_columns_reference(inner_PF.detach(), power_of_two=power_of_two),
        grad_NK,
    )

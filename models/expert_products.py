"""Products of rows with their expert's matrix: one by one, or all in one launch on a GPU.

The loop is the reference and runs everywhere. Its counts may go through the experts again for every
rank that sent rows, and it multiplies those parts by themselves. `torch.nn.functional.grouped_mm`
takes each expert's rows together; in bf16 on a GPU it is about as fast as one large product. Shape
letters: R rows in expert order, E experts, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

_ALIGNED_BYTES = 16
"""What a row's length has to be a multiple of for the grouped product."""


def can_group(x: Tensor, weight_EOI: Tensor) -> bool:
    """Whether products of such rows with such weights are computed in one launch: they then have to
    come with one count per expert."""
    return x.is_cuda and x.dtype is torch.bfloat16 and rows_are_aligned(weight_EOI)


def rows_are_aligned(weight_EOI: Tensor) -> bool:
    """Whether rows of both widths are multiples of 16 bytes, as the grouped product asks."""
    size = weight_EOI.element_size()
    return all(width * size % _ALIGNED_BYTES == 0 for width in weight_EOI.shape[1:])


def product(x_RI: Tensor, weight_EOI: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    """[R, O]: W_e x_r, e being the expert of row r."""
    if can_group(x_RI, weight_EOI) and len(rows_per_expert) == len(weight_EOI):
        return grouped_product(x_RI, weight_EOI, rows_per_expert)
    return looped_product(x_RI, weight_EOI, rows_per_expert)


def weight_grad(
    grad_RO: Tensor, x_RI: Tensor, rows_per_expert: Sequence[int], num_experts: int
) -> Tensor:
    """[E, O, I]: the sum of grad_r x_r^T over each expert's rows, zero for one without any."""
    if can_group(x_RI, grad_RO.new_empty(0, grad_RO.shape[1], x_RI.shape[1])) and (
        len(rows_per_expert) == num_experts
    ):
        return grouped_weight_grad(grad_RO, x_RI, rows_per_expert)
    return looped_weight_grad(grad_RO, x_RI, rows_per_expert, num_experts)


# One by one.


def looped_product(x_RI: Tensor, weight_EOI: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    """`product` by one `mm` per expert and source."""
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    for expert, rows in _slices(rows_per_expert, len(weight_EOI)):
        torch.mm(x_RI[rows], weight_EOI[expert].t(), out=y_RO[rows])
    return y_RO


def looped_weight_grad(
    grad_RO: Tensor, x_RI: Tensor, rows_per_expert: Sequence[int], num_experts: int
) -> Tensor:
    """`weight_grad` by one `mm` per expert and source, added in the sources' order."""
    grad_EOI, begun = grad_RO.new_zeros(num_experts, grad_RO.shape[1], x_RI.shape[1]), set[int]()
    for expert, rows in _slices(rows_per_expert, num_experts):
        if expert in begun:
            grad_EOI[expert] += torch.mm(grad_RO[rows].t(), x_RI[rows])
        else:
            torch.mm(grad_RO[rows].t(), x_RI[rows], out=grad_EOI[expert])
        begun.add(expert)
    return grad_EOI


def _slices(rows_per_expert: Sequence[int], num_experts: int) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, each with its rows."""
    start = 0
    for index, num_rows in enumerate(rows_per_expert):
        if num_rows:
            yield index % num_experts, slice(start, start + num_rows)
        start += num_rows


# In one launch.

_grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # older releases


def grouped_product(x_RI: Tensor, weight_EOI: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    """`product` by `grouped_mm`; one count per expert."""
    if not len(x_RI):
        return x_RI.new_empty(0, weight_EOI.shape[1])
    return _grouped_mm(x_RI, weight_EOI.mT, offs=_ends(rows_per_expert, x_RI.device))


def grouped_weight_grad(grad_RO: Tensor, x_RI: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    """`weight_grad` by `grouped_mm`; one count per expert."""
    if not len(x_RI):
        return x_RI.new_zeros(len(rows_per_expert), grad_RO.shape[1], x_RI.shape[1])
    return _grouped_mm(grad_RO.t(), x_RI, offs=_ends(rows_per_expert, x_RI.device))


def _ends(rows_per_expert: Sequence[int], device: torch.device) -> Tensor:
    """int32: one past each expert's last row."""
    counts = torch.tensor(rows_per_expert, dtype=torch.int32, pin_memory=device.type == "cuda")
    return counts.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)

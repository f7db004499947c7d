"""Muon's update of matrices: momentum, Newton-Schulz, one size of steps for all shapes.

Pure functions of whole matrices; `muon_optimizer` applies them to parameters that lie over ranks.
Sources: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv 2502.16982 (scale, decay); the V4 report,
section 2.4 (ten hybrid steps, 0.18, which matrices).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ppruntime.models.update_rules import NEWTON_SCHULZ

UPDATE_RMS = 0.18
"""Root mean square of an update at learning rate 1: about AdamW's, so that both share a rate."""

_TINY = torch.finfo(torch.float32).tiny


def newton_schulz(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrix to each of [..., R, C], in `dtype`; zeros stay zeros.

    In fp64, singular values from 1e-3 of the Frobenius norm on end within 1e-3 of 1, smaller ones
    below it; bf16 leaves them within a few hundredths. Products are made in `dtype`, with the
    smaller side in front.
    """
    y = matrices.to(dtype).reshape(-1, *matrices.shape[-2:])
    is_tall = y.shape[-2] > y.shape[-1]
    if is_tall:
        y = y.mT
    # Squares of small gradients are no fp32 numbers.
    norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    y = (y / norm.to(wide).clamp_min(_TINY)).to(dtype)
    for a, b, c in NEWTON_SCHULZ:
        square = y @ y.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return (y.mT if is_tall else y).reshape(matrices.shape)


def nesterov_(momentum: Tensor, grad: Tensor, mu: float) -> Tensor:
    """M <- mu M + G, in place; gives mu M + G. Element by element, with the same bits in any
    layout: a sum and a product each round once, whatever a fused kernel would do."""
    momentum.mul_(mu).add_(grad)
    return momentum.mul(mu).add_(grad)


def orthogonal_update(matrix: Tensor, heights: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What [sum(heights), C] steps by at learning rate 1, in `dtype`: its blocks of `heights` rows
    made orthogonal, each times 0.18 sqrt(max(rows, columns)), which has an RMS of 0.18.

    Neighbours of one height go as a batch: the bits depend on the shape and the kind of device, not
    on who asks.
    """
    assert matrix.shape[0] == sum(heights), f"{matrix.shape[0]} rows are not {heights}"
    width = matrix.shape[1]
    update = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    start = 0
    for height, group in groupby(heights):
        rows = slice(start, start := start + height * len(tuple(group)))
        blocks = newton_schulz(matrix[rows].view(-1, height, width), dtype)
        scale = UPDATE_RMS * math.sqrt(max(height, width))
        update[rows].view(blocks.shape).copy_(blocks * scale)
    return update


def step_(weight: Tensor, update: Tensor, *, lr: float, decay: float) -> None:
    """W <- W (1 - lr decay) - lr update, in place; `update` is used up."""
    weight.mul_(1 - lr * decay).sub_(update.to(weight.dtype).mul_(lr))

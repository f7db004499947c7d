"""Rows in expert order, and back to tokens: gathers in both directions, in the backward too.

Shape letters: N tokens, K experts per token, R = N K rows in expert order, D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppruntime.models.keep_inputs import named_op
from ppruntime.models.precision import widened


class Layout(NamedTuple):
    """Token-expert pairs in expert order; within an expert in token order."""

    token_R: Tensor
    """int64 token of each row."""
    row_NK: Tensor
    """int64 row of each token's k-th expert: the inverse."""


def expert_layout(experts_NK: Tensor) -> Layout:
    """Sorts the token-expert pairs by expert, keeping the order of tokens."""
    pair_R = experts_NK.flatten().argsort(stable=True)
    row_NK = torch.empty_like(pair_R)
    row_NK[pair_R] = torch.arange(len(pair_R), device=pair_R.device)
    return Layout(pair_R // experts_NK.shape[1], row_NK.view_as(experts_NK))


def to_rows(x_ND: Tensor, layout: Layout) -> Tensor:
    """x[token_R]. The gradient gathers the K rows of each token and sums them in fp32."""
    x_RD: Tensor = _ToRows.apply(x_ND, *layout)  # type: ignore[no-untyped-call]
    return x_RD


def weighted_sum(y_RD: Tensor, weights_NK: Tensor, layout: Layout) -> Tensor:
    """sum_k weight_nk y[row_nk] in fp32."""
    total_ND: Tensor = _FromRows.apply(y_RD, weights_NK, *layout)  # type: ignore[no-untyped-call]
    return total_ND


def sum_rows(y_RD: Tensor, layout: Layout) -> Tensor:
    """sum_k y[row_nk] in fp32, of rows that have their weights."""
    total_ND: Tensor = _SumRows.apply(y_RD, *layout)  # type: ignore[no-untyped-call]
    return total_ND


def by_row(weights_NK: Tensor, layout: Layout) -> Tensor:
    """Each pair's weight at its row."""
    weight_R: Tensor = _ByRow.apply(weights_NK, layout.row_NK)  # type: ignore[no-untyped-call]
    return weight_R


@named_op("expert_rows(Tensor x, Tensor token) -> Tensor")
def _expert_rows(x_ND: Tensor, token_R: Tensor) -> Tensor:
    return x_ND[token_R]


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_R: Tensor, row_NK: Tensor) -> Tensor:
        ctx.save_for_backward(row_NK)
        return _expert_rows(x_ND, token_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_NK,) = ctx.saved_tensors
        return widened(grad_RD[row_NK]).sum(1).to(grad_RD.dtype), None, None


class _FromRows(torch.autograd.Function):
    """The gradient gathers too: nothing is scattered."""

    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weights_NK: Tensor, token_R: Tensor, row_NK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_RD, weights_NK, token_R, row_NK)
        weighted_NKD = widened(y_RD[row_NK]) * weights_NK.unsqueeze(-1)
        return weighted_NKD.sum(1)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_RD, weights_NK, token_R, row_NK = ctx.saved_tensors
        weight_R = torch.empty_like(token_R, dtype=weights_NK.dtype)
        weight_R[row_NK] = weights_NK
        grad_y_RD = (grad_ND[token_R] * weight_R.unsqueeze(-1)).to(y_RD.dtype)
        grad_weights_NK = (widened(y_RD[row_NK]) * grad_ND.unsqueeze(1)).sum(-1)
        return grad_y_RD, grad_weights_NK, None, None


class _SumRows(torch.autograd.Function):
    """The gradient gathers."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_NK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        ctx.dtype = y_RD.dtype
        return widened(y_RD[row_NK]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (token_R,) = ctx.saved_tensors
        return grad_ND[token_R].to(ctx.dtype), None, None


class _ByRow(torch.autograd.Function):
    """Entry (n, k) to row row_nk: a permutation, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, weights_NK: Tensor, row_NK: Tensor) -> Tensor:
        ctx.save_for_backward(row_NK)
        weight_R = weights_NK.new_empty(weights_NK.numel())
        weight_R[row_NK] = weights_NK
        return weight_R

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        (row_NK,) = ctx.saved_tensors
        return grad_R[row_NK], None

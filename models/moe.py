"""Mixture of experts: route, gather rows by expert, compute, sum back; plus the shared expert.

Shape letters: B sequences, T tokens, N = B T, K experts per token, R = N K rows in expert order,
E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppruntime.models.dims import ModelDims
from ppruntime.models.experts import Experts, SharedExpert
from ppruntime.models.keep_inputs import named_op
from ppruntime.models.precision import widened
from ppruntime.models.router import Router, Routing, expert_counts, sequence_balance_loss


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


@named_op("expert_rows(Tensor x, Tensor token) -> Tensor")
def _expert_rows(x_ND: Tensor, token_R: Tensor) -> Tensor:
    return x_ND[token_R]


class _ToRows(torch.autograd.Function):
    """x[token_R]. The gradient gathers the K rows of each token and sums them in fp32."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_R: Tensor, row_NK: Tensor) -> Tensor:
        ctx.save_for_backward(row_NK)
        return _expert_rows(x_ND, token_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_NK,) = ctx.saved_tensors
        return widened(grad_RD[row_NK]).sum(1).to(grad_RD.dtype), None, None


class _FromRows(torch.autograd.Function):
    """sum_k weight_nk y[row_nk] in fp32. The gradient gathers too: nothing is scattered."""

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


def _rows_per_expert(counts_BE: Tensor) -> Sequence[int]:
    """Host counts. The readable path waits for the device here; grouped kernels do not need to."""
    if counts_BE.is_meta:
        return [0] * counts_BE.shape[1]  # shapes are all that is asked there
    counts: list[int] = counts_BE.sum(0).tolist()
    return counts


class MoEOutput(NamedTuple):
    """What a MoE layer gives."""

    y_BTD: Tensor
    balance_loss: Tensor | None
    """fp32 scalar, weighted, summed over sequences; None if the weight is 0."""
    loads_E: Tensor
    """int64: tokens that each expert received."""


class MoE(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        by_token_id: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims = dims
        self.router = Router(dims, by_token_id=by_token_id, device=device, dtype=dtype)
        self.experts = Experts(dims, device=device, dtype=dtype)
        self.shared = SharedExpert(dims, device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor, ids_BT: Tensor) -> MoEOutput:
        x_ND = x_BTD.flatten(0, 1)
        routing: Routing = self.router(x_ND, ids_BT.flatten())
        counts_BE = expert_counts(routing.experts_NK, x_BTD.shape[0], self.dims.num_experts)
        routed_ND = self._routed(x_ND, routing, counts_BE)
        y_ND = (routed_ND + widened(self.shared(x_ND))).to(x_BTD.dtype)
        return MoEOutput(
            y_ND.view_as(x_BTD), self._balance_loss(routing, counts_BE), counts_BE.sum(0)
        )

    def _routed(self, x_ND: Tensor, routing: Routing, counts_BE: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs, fp32."""
        layout = expert_layout(routing.experts_NK)
        x_RD = _ToRows.apply(x_ND, *layout)  # type: ignore[no-untyped-call]
        y_RD = self.experts(x_RD, _rows_per_expert(counts_BE))
        routed_ND: Tensor = _FromRows.apply(  # type: ignore[no-untyped-call]
            y_RD, routing.weights_NK, *layout
        )
        return routed_ND

    def _balance_loss(self, routing: Routing, counts_BE: Tensor) -> Tensor | None:
        weight = self.dims.balance_loss_weight
        if weight == 0:
            return None
        per_token = self.dims.experts_per_token
        return weight * sequence_balance_loss(routing.scores_NE, counts_BE, per_token)

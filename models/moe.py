"""Mixture of experts: route, gather rows by expert, compute, sum back; plus the shared expert.

Shape letters: B sequences, T tokens, N = B T, K experts per token, R = N K rows in expert order,
E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ppruntime.models.dims import ModelDims
from ppruntime.models.dispatch import ExpertGroup, combine, dispatch, make_routes
from ppruntime.models.experts import Experts, SharedExpert
from ppruntime.models.keep_inputs import named_op
from ppruntime.models.precision import widened
from ppruntime.models.router import Router, Routing, expert_counts, sequence_balance_loss

if TYPE_CHECKING:
    from ppruntime.models.fp8_experts import Fp8Options


@dataclass(frozen=True, slots=True)
class MoEOptions:
    """How a layer's routed experts are computed, and where they are."""

    fp8: Fp8Options | None = None
    """None: in the compute dtype, by torch."""
    group: ExpertGroup | None = None
    """The ranks over which the experts lie; None: all are here."""


HERE = MoEOptions()
"""All experts, in the compute dtype."""


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


class _SumRows(torch.autograd.Function):
    """sum_k y[row_nk] in fp32, of rows that have their weights. The gradient gathers."""

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
        options: MoEOptions = HERE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.options = dims, options
        self.router = Router(dims, by_token_id=by_token_id, device=device, dtype=dtype)
        self.experts = _experts(dims, options, device=device, dtype=dtype)
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
        fp8, group = self.options.fp8 is not None, self.options.group
        experts_NK, weights_NK = routing.experts_NK, routing.weights_NK
        if fp8 and group is None:
            return widened(self._compute(x_ND, experts_NK, weights_NK))
        layout = expert_layout(experts_NK)
        x_RD = _ToRows.apply(x_ND, *layout)  # type: ignore[no-untyped-call]
        if group is None:
            y_RD = self._compute(x_RD, _rows_per_expert(counts_BE))
            return _weighted_sum(y_RD, weights_NK, layout)
        routes = make_routes(counts_BE.sum(0), group)
        if not fp8:
            x_SD, _ = dispatch(x_RD, None, routes, group)
            y_RD = combine(self._compute(x_SD, routes.rows_per_expert), routes, group)
            return _weighted_sum(y_RD, weights_NK, layout)
        # There the weights go in before rounding, and so they travel.
        weight_R = _ByRow.apply(weights_NK, layout.row_NK)  # type: ignore[no-untyped-call]
        x_SD, weight_S = dispatch(x_RD, weight_R, routes, group)
        assert weight_S is not None
        expert_S1 = routes.expert_S.to(x_ND.device, non_blocking=True).unsqueeze(1)
        y_RD = combine(self._compute(x_SD, expert_S1, weight_S.unsqueeze(1)), routes, group)
        # Rounded as the FP8 experts themselves round where all are here.
        return widened(_SumRows.apply(y_RD, *layout).to(x_ND.dtype))  # type: ignore[no-untyped-call]

    def _compute(self, *rows: Any) -> Tensor:
        """The experts, past any hook: FSDP's, where it shards them by themselves, would run again
        in a recompute. Who shards them gathers them before the whole unit runs."""
        y: Tensor = self.experts.forward(*rows)
        return y

    def _balance_loss(self, routing: Routing, counts_BE: Tensor) -> Tensor | None:
        weight = self.dims.balance_loss_weight
        if weight == 0:
            return None
        per_token = self.dims.experts_per_token
        return weight * sequence_balance_loss(routing.scores_NE, counts_BE, per_token)


def _experts(
    dims: ModelDims,
    options: MoEOptions,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    held = options.group.held(dims.num_experts) if options.group else None
    if options.fp8 is None:
        return Experts(dims, held=held, device=device, dtype=dtype)
    from ppruntime.models.fp8_experts import Fp8Experts  # needs Triton

    return Fp8Experts(dims, options.fp8, held=held, device=device, dtype=dtype)


def _weighted_sum(y_RD: Tensor, weights_NK: Tensor, layout: Layout) -> Tensor:
    total_ND: Tensor = _FromRows.apply(y_RD, weights_NK, *layout)  # type: ignore[no-untyped-call]
    return total_ND

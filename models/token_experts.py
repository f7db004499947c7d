"""Experts over tokens that may go to several of them, without autograd: what a dispatcher that
overlaps chunks of tokens with their transfers calls inside its op.

`TokenExperts` is the interface; `Fp8Experts` has it itself, `InComputeDtype` gives it to the plain
experts. Shape letters: S tokens received, K experts per token, R rows in expert order, E experts
held here, D model width, F inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ppruntime.models.expert_products import product, weight_grad
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_wire import WireRows, from_wire
from ppruntime.models.linear import accumulate_grad
from ppruntime.models.precision import widened


class TokenExperts(Protocol):
    """Experts as functions of tensors."""

    def prepared(self) -> Any:
        """What a forward and its backward read of the weights."""

    def over_tokens(
        self,
        x: WireRows,
        experts_SK: Tensor,
        weights_SK: Tensor,
        weights: Any,
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """[y, *kept]: y = sum_k weight_sk expert_sk(x_s), [S, D] in `dtype`, and what the backward
        takes. Experts are counted from the first one held, -1 for none; counts: rows of each."""

    def over_tokens_backward(
        self,
        grad: WireRows,
        experts_SK: Tensor,
        weights_SK: Tensor,
        weights: Any,
        kept: Sequence[Tensor],
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Any]:
        """Gradients of x, in `dtype`, and of the routing weights (0 where the expert is -1), and
        the operands of the weights' gradients."""

    def put_weight_grads(self, operands: Any) -> None:
        """Adds weight gradients to `.grad`: now, or in the layer's queue while that is deferring.
        Exchanges nothing."""


class _Rows(NamedTuple):
    """Rows in expert order, those of one expert in token order."""

    pair_R: Tensor
    """s K + k of each row."""
    token_R: Tensor
    row_SK: Tensor
    """-1: nowhere."""


class _Operands(NamedTuple):
    x_RD: Tensor
    gate_up_grad_RF: Tensor
    inner_RF: Tensor
    grad_RD: Tensor
    counts: Sequence[int]


class InComputeDtype:
    """The plain experts. One gather into expert order, one weighted gather-sum back, fp32 sums."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    def prepared(self) -> tuple[Tensor, Tensor]:
        return self.experts.gate_up.weight.detach(), self.experts.down.weight.detach()

    def over_tokens(
        self,
        x: WireRows,
        experts_SK: Tensor,
        weights_SK: Tensor,
        weights: tuple[Tensor, Tensor],
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        gate_up, down = weights
        x_SD = from_wire(x, dtype)
        rows = _rows(experts_SK, counts)
        z_RF = product(x_SD[rows.token_R], gate_up, counts)
        y_RD = product(self.experts.swiglu(z_RF, self.experts.limit), down, counts)
        y_SD = _sum(y_RD, rows, weights_SK).to(dtype)
        # FP8 rows are kept as they came: half the bytes, and exact.
        kept = [x] if isinstance(x, Tensor) else [*x]
        return [y_SD, z_RF, *kept]

    def over_tokens_backward(
        self,
        grad: WireRows,
        experts_SK: Tensor,
        weights_SK: Tensor,
        weights: tuple[Tensor, Tensor],
        kept: Sequence[Tensor],
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, _Operands]:
        gate_up, down = weights
        z_RF, *rows_of_x = kept
        data, *scale = rows_of_x
        x_SD = from_wire((data, scale[0]) if scale else data, dtype)
        rows = _rows(experts_SK, counts)
        x_RD = x_SD[rows.token_R]
        weight_R1 = weights_SK.flatten()[rows.pair_R].unsqueeze(1)
        grad_RD = from_wire(grad, dtype)[rows.token_R]
        inner_grad_RF = widened(product(grad_RD, down.mT, counts))
        with torch.enable_grad():
            z = z_RF.detach().requires_grad_()
            inner_RF = self.experts.swiglu(z, self.experts.limit)
            weighted = (inner_grad_RF * weight_R1).to(dtype)
            (z_grad_RF,) = torch.autograd.grad(inner_RF, z, weighted)
        inner_RF = inner_RF.detach()
        weight_grad_SK = torch.zeros_like(weights_SK)
        weight_grad_R = (inner_grad_RF * widened(inner_RF)).sum(-1)
        weight_grad_SK.view(-1)[rows.pair_R] = weight_grad_R.to(weights_SK.dtype)
        grad_x_RD = product(z_grad_RF, gate_up.mT, counts)
        grad_x_SD = _sum(grad_x_RD, rows, None).to(dtype)
        weighted_RD = (widened(grad_RD) * weight_R1).to(dtype)
        operands = _Operands(x_RD, z_grad_RF, inner_RF, weighted_RD, counts)
        return grad_x_SD, weight_grad_SK, operands

    def put_weight_grads(self, operands: _Operands) -> None:
        queue = self.experts.gate_up.queue
        if queue is not None and queue.deferring:
            queue.add(lambda: self._add(operands))
        else:
            self._add(operands)

    @torch.no_grad()
    def _add(self, operands: _Operands) -> None:
        x_RD, z_grad_RF, inner_RF, grad_RD, counts = operands
        for layer, grad, x in (
            (self.experts.gate_up, z_grad_RF, x_RD),
            (self.experts.down, grad_RD, inner_RF),
        ):
            if layer.weight.requires_grad:
                accumulate_grad(layer.weight, weight_grad(grad, x, counts, len(layer.weight)))


def _rows(experts_SK: Tensor, counts: Sequence[int]) -> _Rows:
    """The layout of the pairs that have an expert here; the host knows how many: no wait."""
    num_rows = sum(counts)
    expert_of_pair = experts_SK.flatten()
    last = torch.where(expert_of_pair >= 0, expert_of_pair, len(counts))
    pair_R = last.argsort(stable=True)[:num_rows]
    row_of_pair = torch.full_like(expert_of_pair, -1)
    row_of_pair[pair_R] = torch.arange(num_rows, device=pair_R.device)
    return _Rows(pair_R, pair_R // experts_SK.shape[1], row_of_pair.view_as(experts_SK))


def _sum(y_RD: Tensor, rows: _Rows, weights_SK: Tensor | None) -> Tensor:
    """sum_k (weight_sk) y[row_sk] in fp32, k ascending, [S, D]."""
    num_tokens, per_token = rows.row_SK.shape
    total = widened(y_RD.new_zeros(num_tokens, y_RD.shape[1]))
    if not len(y_RD):
        return total
    for k in range(per_token):
        row_S1 = rows.row_SK[:, k : k + 1]
        y_SD = widened(y_RD[row_S1.flatten().clamp_min(0)])
        if weights_SK is not None:
            y_SD = y_SD * weights_SK[:, k : k + 1]
        total += torch.where(row_S1 >= 0, y_SD, 0)
    return total

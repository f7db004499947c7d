"""The experts' SwiGLU, for rows grouped by expert and for the shared expert.

This is the readable path: one product per expert. Shape letters: R rows (token-expert pairs in
expert order), E experts, I input width, O output width, F inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.dims import ModelDims
from ppruntime.models.keep_inputs import keep_inputs, named_op
from ppruntime.models.linear import Deferrable, Linear, WeightGradQueue, now_or_later
from ppruntime.models.precision import widened


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); gate is the first half of the channels."""

    def compute(gate_up: Tensor) -> Tensor:
        gate, up = widened(gate_up).chunk(2, dim=-1)
        return (functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(gate_up.dtype)

    return keep_inputs(compute, gate_up)


def _slices(rows_per_expert: Sequence[int], num_experts: int) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, each with its rows; the counts may go through the experts again for
    every rank that sent some."""
    start = 0
    for index, num_rows in enumerate(rows_per_expert):
        if num_rows:
            yield index % num_experts, slice(start, start + num_rows)
        start += num_rows


@named_op("expert_linear(Tensor x, Tensor weight, int[] rows_per_expert) -> Tensor")
def _expert_linear(x_RI: Tensor, weight_EOI: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    for expert, rows in _slices(rows_per_expert, len(weight_EOI)):
        torch.mm(x_RI[rows], weight_EOI[expert].t(), out=y_RO[rows])
    return y_RO


class _DeferrableExpertLinear(torch.autograd.Function):
    """y_r = W_e x_r^T, e being the expert of row r."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        weight_EOI: Tensor,
        rows_per_expert: Sequence[int],
        queue: WeightGradQueue | None,
    ) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI)
        ctx.rows_per_expert, ctx.queue, ctx.parameter = rows_per_expert, queue, weight_EOI
        return _expert_linear(x_RI, weight_EOI, rows_per_expert)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RI, weight_EOI = ctx.saved_tensors
        rows_per_expert: Sequence[int] = ctx.rows_per_expert
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x_RI)
            for expert, rows in _slices(rows_per_expert, len(weight_EOI)):
                torch.mm(grad_RO[rows], weight_EOI[expert], out=grad_x[rows])
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None
        inputs_RI = x_RI.detach()

        def weight_grad() -> Tensor:
            grad_EOI, begun = torch.zeros_like(weight_EOI), set[int]()
            for expert, rows in _slices(rows_per_expert, len(weight_EOI)):
                if expert in begun:
                    grad_EOI[expert] += torch.mm(grad_RO[rows].t(), inputs_RI[rows])
                else:
                    torch.mm(grad_RO[rows].t(), inputs_RI[rows], out=grad_EOI[expert])
                begun.add(expert)
            return grad_EOI

        return grad_x, now_or_later(ctx.queue, ctx.parameter, weight_grad), None, None


class ExpertLinear(Deferrable):
    """One weight matrix per expert: [R, I] -> [R, O]; weight [E, O, I].

    `first_row`: the expert, in the whole layer, of the weight's first matrix.
    """

    first_row = 0

    def __init__(
        self,
        num_experts: int,
        num_in: int,
        num_out: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(num_experts, num_out, num_in, device=device, dtype=dtype)
        )

    def forward(self, x_RI: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        y_RO: Tensor = _DeferrableExpertLinear.apply(  # type: ignore[no-untyped-call]
            x_RI, self.weight, rows_per_expert, self.queue
        )
        return y_RO


def expert_linears(
    dims: ModelDims,
    held: range | None,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[ExpertLinear, ExpertLinear]:
    """The two layers of the experts `held`, None for all; the first has gate rows, then up rows."""
    held = range(dims.num_experts) if held is None else held
    hidden, width = dims.hidden_size, dims.expert_width
    gate_up = ExpertLinear(len(held), hidden, 2 * width, device=device, dtype=dtype)
    down = ExpertLinear(len(held), width, hidden, device=device, dtype=dtype)
    gate_up.first_row = down.first_row = held.start
    return gate_up, down


class Experts(nn.Module):
    """The routed experts of one layer, or those `held` here, applied to rows in expert order."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        held: range | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.limit = dims.swiglu_limit
        self.gate_up, self.down = expert_linears(dims, held, device=device, dtype=dtype)

    def forward(self, x_RD: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        """[R, D] -> [R, D]; the first rows_per_expert[0] rows go through expert 0, and so on, after
        the last expert from expert 0 again."""
        inner_RF = clamped_swiglu(self.gate_up(x_RD, rows_per_expert), self.limit)
        y_RD: Tensor = self.down(inner_RF, rows_per_expert)
        return y_RD


class SharedExpert(nn.Module):
    """The expert that every token goes through."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.limit = dims.swiglu_limit
        hidden, width = dims.hidden_size, dims.num_shared_experts * dims.expert_width
        self.gate_up = Linear(hidden, 2 * width, device=device, dtype=dtype)
        self.down = Linear(width, hidden, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(clamped_swiglu(self.gate_up(x), self.limit))
        return y

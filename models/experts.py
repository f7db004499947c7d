"""The experts' SwiGLU, for rows grouped by expert and for the shared expert.

In the compute dtype, by torch: `expert_products` says how rows and experts are multiplied. Shape
letters: R rows (token-expert pairs in expert order), E experts, I input width, O output width,
F inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.dims import ModelDims
from ppruntime.models.expert_products import product, weight_grad
from ppruntime.models.keep_inputs import keep_inputs, named_op
from ppruntime.models.linear import Deferrable, Linear, WeightGradQueue, now_or_later
from ppruntime.models.precision import widened

Swiglu: TypeAlias = Callable[[Tensor, float], Tensor]
"""(gate and up [..., 2 F], limit) -> [..., F]: `clamped_swiglu`, or what takes its place."""


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); gate is the first half of the channels.

    A row has the same bits whatever rows lie beside it.
    """

    def compute(gate_up: Tensor) -> Tensor:
        gate, up = widened(gate_up).chunk(2, dim=-1)
        return (_silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(gate_up.dtype)

    return keep_inputs(compute, gate_up)


def _silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)). On a CPU torch's own, and its sigmoid, have other last bits for what a
    tensor's length leaves over from its vectors; torch's exp has not."""
    if x.is_cuda:
        return functional.silu(x)
    x = x.clamp(min=-80.0)  # where it is zero to 33 digits; below, the exponential would overflow
    return x / (1 + torch.exp(-x))


@named_op("expert_linear(Tensor x, Tensor weight, int[] rows_per_expert) -> Tensor")
def _expert_linear(x_RI: Tensor, weight_EOI: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    return product(x_RI, weight_EOI, rows_per_expert)


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
            grad_x = product(grad_RO, weight_EOI.mT, rows_per_expert)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None
        inputs_RI, num_experts = x_RI.detach(), len(weight_EOI)

        def compute() -> Tensor:
            return weight_grad(grad_RO, inputs_RI, rows_per_expert, num_experts)

        return grad_x, now_or_later(ctx.queue, ctx.parameter, compute), None, None


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
        self.swiglu: Swiglu = clamped_swiglu
        self.gate_up, self.down = expert_linears(dims, held, device=device, dtype=dtype)

    def forward(self, x_RD: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        """[R, D] -> [R, D]; the first rows_per_expert[0] rows go through expert 0, and so on, after
        the last expert from expert 0 again."""
        inner_RF = self.swiglu(self.gate_up(x_RD, rows_per_expert), self.limit)
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
        self.swiglu: Swiglu = clamped_swiglu
        hidden, width = dims.hidden_size, dims.num_shared_experts * dims.expert_width
        self.gate_up = Linear(hidden, 2 * width, device=device, dtype=dtype)
        self.down = Linear(width, hidden, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.swiglu(self.gate_up(x), self.limit))
        return y

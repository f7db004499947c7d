"""Linear layers whose weight gradient can be put off: `I` now, `W` when the order says so.

Shape letters: N rows, I input width, O output width, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.keep_inputs import named_op
from ppruntime.models.precision import widened


class WeightGradQueue:
    """Weight-gradient work of one stage. The stage owns it, the layers that can wait share it.

    While `deferring` is False, layers compute weight gradients at once, inside autograd. While it
    is True they add a task instead; `pop` gives the tasks so far, in order of the backward.
    """

    def __init__(self) -> None:
        self.deferring = False
        self._tasks: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Callable[[], None]) -> None:
        """Puts off a task that adds one weight gradient to its parameter's `.grad`."""
        self._tasks.append(task)

    def pop(self) -> list[Callable[[], None]]:
        """All tasks gathered since the last call; they keep their operands alive."""
        tasks, self._tasks = self._tasks, []
        return tasks


class Deferrable(nn.Module):
    """A layer whose weight gradient may wait in `queue`; None: it never waits."""

    queue: WeightGradQueue | None = None


def set_queue(unit: nn.Module, queue: WeightGradQueue | None) -> None:
    """Hands one queue to every layer inside `unit` whose weight gradient can wait."""
    for module in unit.modules():
        if isinstance(module, Deferrable):
            module.queue = queue


def accumulate_grad(weight: Tensor, grad: Tensor) -> None:
    """Adds `grad` to `weight.grad` as autograd would: bitwise the same sum in the same order."""
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad.add_(grad)


def now_or_later(
    queue: WeightGradQueue | None, weight: Tensor, compute: Callable[[], Tensor]
) -> Tensor | None:
    """The weight gradient that `compute` gives, for autograd; or None: it waits in the queue.

    `weight` is the parameter that the forward was given, not what autograd saved of it: under
    activation checkpointing that is a copy's alias, and a gradient left there is lost.
    `compute` should hold detached operands: a task must not keep the autograd graph alive.
    """
    if queue is None or not queue.deferring:
        return compute()

    def task() -> None:
        with torch.no_grad():
            accumulate_grad(weight, compute())

    queue.add(task)
    return None


Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""x [..., in], weight [out, in] -> x W^T [..., out]."""


class _DeferrableLinear(torch.autograd.Function):
    """y = x W^T. The weight's gradient is computed in the backward, or by a queued task."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        queue: WeightGradQueue | None,
        fp32_output: bool,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue, ctx.parameter = queue, weight
        if not fp32_output or x.dtype in (torch.float32, torch.float64):
            return product(x, weight)
        if x.is_cuda:
            y_NO = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
            return y_NO.view(*x.shape[:-1], -1)
        return functional.linear(widened(x), widened(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None, None
        grad_NO, x_NI = grad.reshape(-1, grad.shape[-1]), x.detach().reshape(-1, x.shape[-1])
        grad_weight = now_or_later(ctx.queue, ctx.parameter, lambda: grad_NO.t() @ x_NI)
        return grad_x, grad_weight, None, None, None


class Linear(Deferrable):
    """y = x W^T without bias; weight [out, in]. `fp32_output`: sums and result in fp32.

    `product` computes it; a named op in its place lets checkpointing save this layer by name.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fp32_output: bool = False,
        product: Product = functional.linear,
    ) -> None:
        super().__init__()
        self.fp32_output = fp32_output
        self.product = product
        self.weight = nn.Parameter(torch.empty(num_out, num_in, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _DeferrableLinear.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.queue, self.fp32_output, self.product
        )
        return y


@named_op("grouped_linear(Tensor x, Tensor weight) -> Tensor")
def _grouped_linear(x_NGI: Tensor, weight_GOI: Tensor) -> Tensor:
    return torch.einsum("ngi,goi->ngo", x_NGI, weight_GOI)


class _DeferrableGroupedLinear(torch.autograd.Function):
    """y_g = x_g W_g^T for every group g."""

    @staticmethod
    def forward(
        ctx: Any, x_NGI: Tensor, weight_GOI: Tensor, queue: WeightGradQueue | None
    ) -> Tensor:
        ctx.save_for_backward(x_NGI, weight_GOI)
        ctx.queue, ctx.parameter = queue, weight_GOI
        return _grouped_linear(x_NGI, weight_GOI)

    @staticmethod
    def backward(ctx: Any, grad_NGO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NGI, weight_GOI = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.einsum("ngo,goi->ngi", grad_NGO, weight_GOI)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        inputs_NGI = x_NGI.detach()
        grad_weight = now_or_later(
            ctx.queue,
            ctx.parameter,
            lambda: torch.einsum("ngo,ngi->goi", grad_NGO, inputs_NGI),
        )
        return grad_x, grad_weight, None


class GroupedLinear(Deferrable):
    """A block-diagonal linear: [..., G, I] -> [..., G, O], one weight matrix per group."""

    def __init__(
        self,
        num_groups: int,
        num_in: int,
        num_out: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(num_groups, num_out, num_in, device=device, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        y_NGO: Tensor = _DeferrableGroupedLinear.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, *x.shape[-2:]), self.weight, self.queue
        )
        return y_NGO.view(*x.shape[:-1], -1)

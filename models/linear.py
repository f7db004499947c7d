"""A linear layer whose weight gradient can be put off: `I` now, `W` when the order says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional



class WeightGradQueue:
    """Weight-gradient work of one stage. The stage owns it and hands it to the layers that can wait.

    While `deferring` is False, layers compute weight gradients at once, inside autograd. While it is
    True they add a task instead; `pop` gives the tasks gathered so far, in the order of the backward.
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


def accumulate_grad(weight: Tensor, grad: Tensor) -> None:
    """Adds `grad` to `weight.grad` as autograd would: bitwise the same sum in the same order."""
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad.add_(grad)


def _weight_grad(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    return grad_NO.t() @ x_NI


class _DeferrableLinear(torch.autograd.Function):
    """y = x W^T. The weight's gradient is computed in the backward, or by a queued task."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightGradQueue | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        grad_NO, x_NI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        queue: WeightGradQueue | None = ctx.queue
        if queue is None or not queue.deferring:
            return grad_x, _weight_grad(grad_NO, x_NI), None
        queue.add(lambda: accumulate_grad(weight, _weight_grad(grad_NO, x_NI)))
        return grad_x, None, None


class Linear(nn.Module):
    """y = x W^T without bias; weight [out, in]. Set `queue` to let a stage put the weight gradient off."""

    queue: WeightGradQueue | None = None

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _DeferrableLinear.apply(x, self.weight, self.queue)  # type: ignore[no-untyped-call]
        return y

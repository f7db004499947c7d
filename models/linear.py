"""Linear layers whose weight gradient can be put off: `I` now, `W` when the order says so.

The gradient of a weight in bf16 goes straight into an fp32 `.grad`: the product is added to the sum
where it is made, autograd never sees it, and no step's sum is rounded on the way. FSDP, which would
widen and add each micro-batch's gradient itself, takes such a `.grad` as it is. Those of fp32 and
fp64 weights stay autograd's.

Numeric class: bitwise in fp32 and fp64. In bf16 it changes numerics: products are no longer rounded
to bf16 before they are added, but for routed experts', which torch's grouped product rounds. Put
off or not, recomputed or not, the bits are the same.

Shape letters: N rows, I input width, O output width, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.keep_inputs import named_op
from ppruntime.models.precision import add_product, is_low, widened


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


AddGrad: TypeAlias = Callable[[Tensor | None], Tensor]
"""An fp32 sum, or None for a sum of nothing -> the same with a gradient added, in place."""


def accumulate_grad(weight: Tensor, grad: Tensor) -> None:
    """Adds `grad` to `weight.grad`. fp32 and fp64 weights: as autograd would, bitwise the same sum
    in the same order. Weights in bf16: to an fp32 sum."""
    if is_low(weight.dtype):
        _add_to_fp32_grad(weight, partial(_add, grad))
    elif weight.grad is None:
        weight.grad = grad
    else:
        weight.grad.add_(grad)


def _add(grad: Tensor, sums: Tensor | None) -> Tensor:
    return widened(grad) if sums is None else sums.add_(grad)


def _add_to_fp32_grad(weight: Tensor, add: AddGrad) -> None:
    """Lets `add` add to `weight.grad`, in fp32 while the weight is in bf16."""
    sums = weight.grad
    if sums is None or sums.dtype is not torch.float32:  # none yet, or autograd's
        weight.grad = None  # with one of another dtype `grad_dtype` cannot change
        weight.grad_dtype = torch.float32
        sums = None if sums is None else widened(sums)
    weight.grad = add(sums)


def now_or_later(
    queue: WeightGradQueue | None,
    weight: Tensor,
    compute: Callable[[], Tensor],
    add: AddGrad | None = None,
) -> Tensor | None:
    """The weight gradient that `compute` gives, for autograd; or None: it is in `weight.grad`, as
    that of a weight in bf16 always is, or it waits in the queue.

    `add` is used in place of `compute` for weights in bf16, whose sum is fp32; without it, what
    `compute` gives is added to the sum. Either is called once.

    `weight` is the parameter that the forward was given, not what autograd saved of it: under
    activation checkpointing that is a copy's alias, and a gradient left there is lost.
    Both should hold detached operands: a task must not keep the autograd graph alive.
    """
    # What is not a parameter has no `.grad` of its own, and a compiler traces no writing to one.
    is_direct = is_low(weight.dtype) and weight.is_leaf and not torch.compiler.is_compiling()

    def task() -> None:
        with torch.no_grad():
            if is_direct and add is not None:
                _add_to_fp32_grad(weight, add)
            else:
                accumulate_grad(weight, compute())

    if queue is not None:
        break_graph()
        if queue.deferring:
            queue.add(task)
            return None
    if not is_direct:
        return compute()
    task()
    return None


def break_graph() -> None:
    """Leaves the op whose gradient this is to autograd where a compiler traces it: whether a weight
    gradient waits changes from call to call, which no graph knows of."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()


def product_now_or_later(
    queue: WeightGradQueue | None, weight: Tensor, grad_NO: Tensor, x_NI: Tensor
) -> Tensor | None:
    """`now_or_later` of a plain linear's weight gradient [O, I], grad^T x."""
    grad_NO, x_NI = grad_NO.detach(), x_NI.detach()
    return now_or_later(
        queue,
        weight,
        lambda: grad_NO.t() @ x_NI,
        lambda sum_OI: add_product(sum_OI, grad_NO.t(), x_NI),
    )


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
        grad_NO, x_NI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_weight = product_now_or_later(ctx.queue, ctx.parameter, grad_NO, x_NI)
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
            partial(add_group_products, grad_NGO=grad_NGO, x_NGI=inputs_NGI),
        )
        return grad_x, grad_weight, None


def add_group_products(sum_GOI: Tensor | None, grad_NGO: Tensor, x_NGI: Tensor) -> Tensor:
    """sum_g + grad_g^T x_g for every group g, in place and in fp32; None is a sum of nothing."""
    if sum_GOI is None:
        shape = (*grad_NGO.shape[1:], x_NGI.shape[-1])
        sum_GOI = x_NGI.new_zeros(shape, dtype=torch.float32)
    for sum_OI, grad_NO, x_NI in zip(sum_GOI, grad_NGO.unbind(1), x_NGI.unbind(1), strict=True):
        add_product(sum_OI, grad_NO.t(), x_NI)
    return sum_GOI


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

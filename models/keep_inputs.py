"""Two tools of the readable path for activation memory: ops with a name, local recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ppruntime", "FRAGMENT")  # type: ignore[no-untyped-call]


def named_op(schema: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers a function as the op `ppruntime::NAME`, for every device and without a gradient.

    `schema` is "NAME(Tensor x, ...) -> Tensor"; the result shares no memory with what came in.
    Selective checkpointing sees and may save the op as a whole (`save_points`). A tenth of the cost
    per call of `torch.library.custom_op`, which is made for what torch cannot look into.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(  # type: ignore[no-untyped-call]
            name, function, "CompositeExplicitAutograd"
        )
        return cast(Callable[..., Tensor], getattr(torch.ops.ppruntime, name).default)

    return register


class _KeepInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.compute = compute
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            inputs = [
                tensor.detach().requires_grad_(is_needed)
                for tensor, is_needed in zip(ctx.saved_tensors, needed, strict=True)
            ]
            result = ctx.compute(*inputs)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, grad))
        return None, *(next(found) if is_needed else None for is_needed in needed)


def keep_inputs(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """compute(*tensors), of which autograd keeps `tensors` alone: the backward runs it once more.

    The gradients are autograd's own, bit for bit. For cheap functions with many intermediate
    tensors. `compute` reads no other tensor that needs a gradient.
    """
    result: Tensor = _KeepInputs.apply(compute, *tensors)  # type: ignore[no-untyped-call]
    return result

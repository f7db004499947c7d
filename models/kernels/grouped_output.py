"""The grouped half of the output projection without copies: one matrix product per group.

A group's columns of the input and of the output are strided slices, which BLAS takes and gives as
they are. The plain form (`linear.GroupedLinear`) is one batched product, whose result lies group by
group and has to be copied into rows of tokens: of V4.1's 8,192 tokens 134 MB more are read and
written, and as much again in the backward.

Numeric class: bitwise on the CPU, but for a single token, which BLAS multiplies as a vector; on a
GPU the library may sum a single product in another order.

Shape letters: N tokens, G groups, I input width of a group, O output width of a group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppruntime.models.linear import (
    GroupedLinear,
    WeightGradQueue,
    add_group_products,
    now_or_later,
)


def grouped_output(linear: GroupedLinear, x_BTGI: Tensor) -> Tensor:
    """[B, T, G O], every group by its own matrix. Weight gradients can wait."""
    y_NX: Tensor = _GroupedOutput.apply(  # type: ignore[no-untyped-call]
        x_BTGI.reshape(-1, *x_BTGI.shape[-2:]), linear.weight, linear.queue
    )
    return y_NX.view(*x_BTGI.shape[:-2], -1)


class _GroupedOutput(torch.autograd.Function):
    """One node, whose weight gradient may wait in the queue."""

    @staticmethod
    def forward(
        ctx: Any, x_NGI: Tensor, weight_GOI: Tensor, queue: WeightGradQueue | None
    ) -> Tensor:
        ctx.save_for_backward(x_NGI, weight_GOI)
        ctx.queue, ctx.parameter = queue, weight_GOI
        y_NX: Tensor = _grouped_product(x_NGI, weight_GOI.transpose(1, 2))
        return y_NX

    @staticmethod
    def backward(ctx: Any, grad_NX: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NGI, weight_GOI = ctx.saved_tensors
        grad_NGO = grad_NX.to(x_NGI.dtype).reshape(-1, *weight_GOI.shape[:2])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_product(grad_NGO, weight_GOI).view_as(x_NGI)
        if ctx.needs_input_grad[1]:
            inputs_NGI = x_NGI.detach()
            grad_weight = now_or_later(
                ctx.queue,
                ctx.parameter,
                lambda: _weight_grad(grad_NGO, inputs_NGI),
                partial(add_group_products, grad_NGO=grad_NGO, x_NGI=inputs_NGI),
            )
        return grad_x, grad_weight, None


@torch.library.custom_op("ppruntime::grouped_columns_linear", mutates_args=())
def _grouped_product(x_NGI: Tensor, matrices_GIO: Tensor) -> Tensor:
    """[N, G O]: the columns of group g are x[:, g] times its matrix. No gradient of its own."""
    num_groups, _, width = matrices_GIO.shape
    y_NGO = x_NGI.new_empty(len(x_NGI), num_groups, width)
    for x_NI, matrix_IO, y_NO in zip(
        x_NGI.unbind(1), matrices_GIO.unbind(0), y_NGO.unbind(1), strict=True
    ):
        torch.mm(x_NI, matrix_IO, out=y_NO)
    return y_NGO.flatten(1)


@_grouped_product.register_fake
def _(x_NGI: Tensor, matrices_GIO: Tensor) -> Tensor:
    return x_NGI.new_empty(x_NGI.shape[0], matrices_GIO.shape[0] * matrices_GIO.shape[2])


def _weight_grad(grad_NGO: Tensor, x_NGI: Tensor) -> Tensor:
    """[G, O, I]"""
    _, num_groups, width = grad_NGO.shape
    grad_GOI = x_NGI.new_empty(num_groups, width, x_NGI.shape[-1])
    for grad_NO, x_NI, grad_OI in zip(
        grad_NGO.unbind(1), x_NGI.unbind(1), grad_GOI.unbind(0), strict=True
    ):
        torch.mm(grad_NO.t(), x_NI, out=grad_OI)
    return grad_GOI

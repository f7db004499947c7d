"""fp32 weights on bf16 rows by bf16 products: the compressor's values and gates, on tensor cores.

An fp32 product of a GPU runs at a tenth of the bf16 rate. A weight is the sum of three bf16 numbers
and a row of the compressor's input is bf16, so that its products are sums of exact ones:

    y  = x (W1 + W2 + W3)^T                one product with 3 O columns
    dx = g W ~ g1 W1 + g1 W2 + g2 W1       one product over 3 O; what is left out is 2^-16 of it,
                                           and dx is rounded to bf16
    dW = (g1 + g2 + g3)^T x                one product with 3 O rows

Kept for the backward: x, as it is; the plain form keeps a copy in fp32.

Numeric class: summation order. A Hopper's tensor cores cut what they add instead of rounding it:
y of 5,120 terms is 6e-6 off, an fp32 product's 7e-7 (H200).
Shape letters: N rows, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppruntime.models.attention_kernels import REFERENCE
from ppruntime.models.kernels import is_interpreted
from ppruntime.models.linear import Linear, WeightGradQueue, now_or_later
from ppruntime.models.precision import fp32_product


def wide_products(linears: Sequence[Linear], x: Tensor) -> list[Tensor]:
    """[..., O] fp32 of each linear, whose weights are fp32. Weight gradients can wait. Rows that
    are not bf16 take the plain form."""
    if x.dtype is not torch.bfloat16:
        return REFERENCE.wide_products(linears, x)
    weights = [linear.weight for linear in linears]
    y_NO: Tensor = _WideProducts.apply(  # type: ignore[no-untyped-call]
        x.reshape(-1, x.shape[-1]), [linear.queue for linear in linears], *weights
    )
    widths = [len(weight) for weight in weights]
    return list(torch.split(y_NO.view(*x.shape[:-1], sum(widths)), widths, -1))


class _WideProducts(torch.autograd.Function):
    """One node for all linears, whose weight gradients may wait in their queues."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, queues: Sequence[WeightGradQueue | None], *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_NI, *weights)
        ctx.queues, ctx.parameters = queues, weights
        y_NO: Tensor = _products(x_NI, list(weights))
        return y_NO

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *weights = ctx.saved_tensors
        large, middle, small = _parts(grad_NO.float(), 3, as_op=True)
        grad_x = None
        if ctx.needs_input_grad[0]:
            first, second = _parts(_joined(weights), 2, as_op=True)
            left = torch.cat((large, large, middle), 1)
            grad_x = fp32_product(left, torch.cat((first, second, first))).to(x_NI.dtype)
        grads: list[Tensor | None] = []
        held_NI, start = x_NI.detach(), 0
        for weight, queue, parameter, is_needed in zip(
            weights, ctx.queues, ctx.parameters, ctx.needs_input_grad[2:], strict=True
        ):
            mine = slice(start, start := start + len(weight))
            operands = [part[:, mine] for part in (large, middle, small)]

            def compute(operands: list[Tensor] = operands) -> Tensor:
                return _sum(fp32_product(torch.cat(operands, 1).t(), held_NI).chunk(3))

            grads.append(now_or_later(queue, parameter, compute) if is_needed else None)
        return grad_x, None, *grads


@torch.library.custom_op("ppruntime::wide_linear", mutates_args=())
def _products(x_NI: Tensor, weights: list[Tensor]) -> Tensor:
    """[N, all O] fp32. No gradient of its own."""
    parts = _parts(_joined(weights), 3).flatten(0, 1)
    return _sum(fp32_product(x_NI, parts.t()).chunk(3, 1))


@_products.register_fake
def _(x_NI: Tensor, weights: list[Tensor]) -> Tensor:
    return x_NI.new_empty(len(x_NI), sum(map(len, weights)), dtype=torch.float32)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat([*weights])


def _parts(x: Tensor, count: int, *, as_op: bool = False) -> Tensor:
    """[count, ...]: bf16 numbers of which x, fp32, is the sum, but for what is below the last;
    largest first. `as_op`: where a compiler may look on."""
    if x.is_cuda or is_interpreted():
        from ppruntime.models.kernels.split import split, split_parts

        found: Tensor = (split if as_op else split_parts)(x, count, torch.bfloat16)
        return found
    parts: list[Tensor] = []
    for _ in range(count):
        parts.append(x.bfloat16())
        x = x - parts[-1]
    return torch.stack(parts)


def _sum(three: Sequence[Tensor]) -> Tensor:
    """Of what came of the large, the middle and the small part, the small ones first."""
    large, middle, small = three
    total: Tensor = small + middle + large
    return total

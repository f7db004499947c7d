"""RMSNorm, computed in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ppruntime.models.precision import in_dtype, widened


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean x^2 + eps) over the last axis, fp32, that axis kept with extent 1."""
    return torch.rsqrt(widened(x).square().mean(-1, keepdim=True) + eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and 1 / rms; the gradients are those that autograd gives for the formula, to the bit.

    With n = x r, r = 1 / rms: dw = sum g n, dx = g w r - r^3 / width x sum (g w x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return in_dtype(widened(x) * inverse * widened(weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, grad = widened(x), widened(grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            products = grad * (wide * inverse)
            grad_weight = products.sum(tuple(range(x.dim() - 1))).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            grad_normed = grad * widened(weight)
            grad_inverse = (grad_normed * wide).sum(-1, keepdim=True)
            grad_mean = -0.5 * grad_inverse * inverse.pow(3)
            through_rms = grad_mean.expand_as(wide) / x.shape[-1] * (2 * wide)
            # x is widened for the product and for its square: two casts back, then the sum.
            grad_x = (grad_normed * inverse).to(x.dtype) + through_rms.to(x.dtype)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis [..., W], in x's dtype."""
    y: Tensor = _RMSNorm.apply(x, weight_W, eps)  # type: ignore[no-untyped-call]
    return y


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the weight is applied before the cast back."""

    function: Callable[[Tensor, Tensor, float], Tensor] = staticmethod(rms_norm)
    """Who computes it: `attention_kernels.set_kernels` hands it another."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.eps)

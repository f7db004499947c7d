"""Manifold-constrained hyper-connections: several residual streams, mixed by each sublayer.

A sublayer reads a weighted sum of the streams and writes back to all of them while it mixes them by
a doubly stochastic matrix. In V4.1 the weights of the sum come from the sublayer before ("single
pass"), so the streams are read once; in V4 a sublayer uses its own.

Shape letters: B sequences, T tokens, S streams (i read, j written), D model width.
Source: DeepSeek-V4.1 report, section 2.4.1; Xie et al. 2025 (mHC), section 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.dims import ModelDims
from ppruntime.models.keep_inputs import keep_inputs
from ppruntime.models.linear import Linear, WeightGradQueue, now_or_later
from ppruntime.models.norm import inverse_rms
from ppruntime.models.precision import holder_dtype, widened


class Coefficients(NamedTuple):
    """What one sublayer's hyper-connection computes from the streams, fp32."""

    pre_BTS: Tensor
    """Weights with which a sublayer collapses the streams: this one in V4, the next one in V4.1."""
    post_BTS: Tensor
    """Weights with which the sublayer's output is added to each stream, 0 to 2."""
    comb_BTSS: Tensor
    """Mixing matrix [read i, written j]; columns sum to 1, rows almost."""


class _Sinkhorn(torch.autograd.Function):
    """Alternating column and row normalisations of softmax(logits) + eps.

    A step is y = x / s with s = sum(x) + eps; its gradient is (g - sum(g y)) / s, same axis.
    Written out, as autograd would put six nodes per step into the graph of every sublayer.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_iters: int, eps: float) -> Tensor:
        shares = logits.softmax(-1)
        matrix = shares + eps
        saved = [shares]
        for axis in _sinkhorn_axes(num_iters):
            total = matrix.sum(axis, keepdim=True) + eps
            matrix = matrix / total
            saved += [total, matrix]
        ctx.save_for_backward(*saved)
        ctx.num_iters = num_iters
        return matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shares, *steps = ctx.saved_tensors
        axes = _sinkhorn_axes(ctx.num_iters)
        for axis, total, matrix in zip(reversed(axes), steps[-2::-2], steps[-1::-2], strict=True):
            grad = (grad - (grad * matrix).sum(axis, keepdim=True)) / total
        grad = shares * (grad - (grad * shares).sum(-1, keepdim=True))
        return grad, None, None


def _sinkhorn_axes(num_iters: int) -> tuple[int, ...]:
    """Axes over which the steps sum: columns (-2); the softmax stands for the first rows (-1)."""
    return (-2,) + (-1, -2) * (num_iters - 1)


def sinkhorn(logits: Tensor, num_iters: int, eps: float) -> Tensor:
    """A nearly doubly stochastic matrix from logits [..., S, S]; the last step is over columns."""
    matrix: Tensor = _Sinkhorn.apply(logits, num_iters, eps)  # type: ignore[no-untyped-call]
    return matrix


def collapse(streams_BTSD: Tensor, mix_BTS: Tensor) -> Tensor:
    """The sublayer's input [B, T, D]: sum_i mix_i X_i, summed in fp32."""
    return keep_inputs(_collapse, streams_BTSD, mix_BTS)


def _collapse(streams_BTSD: Tensor, mix_BTS: Tensor) -> Tensor:
    weighted = mix_BTS.unsqueeze(-1) * widened(streams_BTSD)
    return weighted.sum(-2).to(streams_BTSD.dtype)


def write_back(streams_BTSD: Tensor, y_BTD: Tensor, coefficients: Coefficients) -> Tensor:
    """The streams after the sublayer: X'_j = post_j y + sum_i comb_ij X_i, in fp32, then cast."""
    _, post_BTS, comb_BTSS = coefficients
    return keep_inputs(_write_back, streams_BTSD, y_BTD, post_BTS, comb_BTSS)


def _write_back(streams_BTSD: Tensor, y_BTD: Tensor, post_BTS: Tensor, comb_BTSS: Tensor) -> Tensor:
    mixed = comb_BTSS.transpose(-1, -2) @ widened(streams_BTSD)
    added = post_BTS.unsqueeze(-1) * widened(y_BTD).unsqueeze(-2)
    return (added + mixed).to(streams_BTSD.dtype)


class _Projection(torch.autograd.Function):
    """The flattened streams, widened, times the weights; and their 1 / rms. Keeps the streams as
    they came, and widens them again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, streams_BTSD: Tensor, weight: Tensor, queue: WeightGradQueue | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(streams_BTSD, weight)
        ctx.queue, ctx.parameter, ctx.eps = queue, weight, eps
        flat = widened(streams_BTSD).flatten(-2)
        return functional.linear(flat, weight), inverse_rms(flat, eps)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_inverse: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        streams_BTSD, weight = ctx.saved_tensors
        grad_streams = grad_weight = None
        if ctx.needs_input_grad[0]:
            with torch.enable_grad():
                flat = widened(streams_BTSD.detach()).flatten(-2).requires_grad_()
                inverse = inverse_rms(flat, ctx.eps)
            (through_rms,) = torch.autograd.grad(inverse, flat, grad_inverse)
            grad_flat = through_rms + grad @ weight
            grad_streams = grad_flat.view_as(streams_BTSD).to(streams_BTSD.dtype)
        if ctx.needs_input_grad[1]:
            grad_NO, streams = grad.reshape(-1, grad.shape[-1]), streams_BTSD.detach()

            def compute() -> Tensor:
                return grad_NO.t() @ widened(streams).reshape(grad_NO.shape[0], -1)

            grad_weight = now_or_later(ctx.queue, ctx.parameter, compute)
        return grad_streams, grad_weight, None, None


def project(streams_BTSD: Tensor, projection: Linear, eps: float) -> Tensor:
    """The flattened streams through fp32 weights, then divided by their rms: [B, T, outputs]."""
    product, inverse = _Projection.apply(  # type: ignore[no-untyped-call]
        streams_BTSD, projection.weight, projection.queue, eps
    )
    projected: Tensor = product * inverse
    return projected


class HyperConnection(nn.Module):
    """Streams -> the coefficients of one sublayer. All parameters stay fp32."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims = dims
        num_streams = dims.num_streams
        num_coefficients = 2 * num_streams + num_streams**2
        dtype = holder_dtype(dtype)
        width = num_streams * dims.hidden_size
        self.projection = Linear(width, num_coefficients, device=device, dtype=dtype)
        self.base = nn.Parameter(torch.empty(num_coefficients, device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        """One factor each for pre, post and comb."""

    def forward(self, streams_BTSD: Tensor) -> Coefficients:
        dims, num_streams = self.dims, self.dims.num_streams
        sizes = [num_streams, num_streams, num_streams**2]
        projected = project(streams_BTSD, self.projection, dims.norm_eps)
        scale = torch.cat([s.expand(n) for s, n in zip(self.scale, sizes, strict=True)])
        pre, post, comb = torch.split(self.base + projected * scale, sizes, dim=-1)
        comb = comb.view(*comb.shape[:-1], num_streams, num_streams)
        return Coefficients(
            pre_BTS=pre.sigmoid() + dims.mhc_eps,
            post_BTS=2 * post.sigmoid(),
            comb_BTSS=sinkhorn(comb, dims.sinkhorn_iters, dims.mhc_eps),
        )

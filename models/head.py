"""The output head: logits and the summed cross-entropy, at once or in chunks of tokens.

A head's loss is a function (hidden, projection, labels) -> fp32 scalar: `whole_loss` is the
yardstick, `chunked_loss` keeps no logits, models/kernels/head.py holds the fast one for GPUs.

Shape letters: N tokens of a micro-batch, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ppruntime.models.carry import IGNORED_LABEL
from ppruntime.models.head_bytes import CHUNK_TOKENS
from ppruntime.models.kernels import unavailable_reason
from ppruntime.models.linear import Linear, WeightGradQueue, now_or_later
from ppruntime.models.precision import add_product, fp32_product, holder_dtype

HeadLoss: TypeAlias = Callable[[Tensor, Linear, Tensor], Tensor]
"""(hidden [..., D], projection, labels [...]) -> the summed cross-entropy, fp32 scalar."""


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """fp32 scalar: -log softmax(logits)[label], summed over labels that are not IGNORED_LABEL.

    A sum, not a mean: the trainer divides by the valid labels of the whole step, so that the loss
    and its gradient do not depend on how tokens fall into micro-batches.
    """
    return functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def whole_loss(hidden: Tensor, projection: Linear, labels: Tensor) -> Tensor:
    """The loss from all logits at once; autograd keeps their logarithmic probabilities."""
    return summed_cross_entropy(projection(hidden), labels)


def chunked_loss(
    hidden: Tensor, projection: Linear, labels: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """The same loss from `chunk_tokens` tokens' logits at a time, on any device.

    For the backward stay the hidden states and one number a token; the logits are computed again
    there, and once more by a weight gradient that is put off. So memory comes first: 4 products of
    N x V x D for a forward and a whole backward (5 with the backward split), where `whole_loss` has
    3. Numeric class: summation order (chunks' losses are added up, and so are their weight
    gradients). Raises IndexError or a device assertion for a label that is no token id, as
    `whole_loss` does.
    """
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2),
        projection.weight,
        labels.flatten(),
        projection.queue,
        chunk_tokens,
    )
    return loss


def head_loss(kernel: str, device: torch.device) -> HeadLoss:
    """The loss that the config's `kernels.head` names: reference, chunked, triton or auto, which is
    triton on a GPU that can run it and chunked elsewhere.

    Raises RuntimeError, with the reason, for triton where its kernels cannot run.
    """
    if kernel == "reference":
        return whole_loss
    reason = unavailable_reason("triton")
    if kernel == "chunked" or (kernel == "auto" and (reason or device.type != "cuda")):
        return chunked_loss
    if reason:
        raise RuntimeError(f'kernels.head = "{kernel}": {reason}; "chunked" runs anywhere')
    from ppruntime.models.kernels.head import fused_loss

    return fused_loss


class _ChunkedLoss(torch.autograd.Function):
    """Keeps hidden states and their log-sum-exp; the gradient of a logit is softmax - one-hot."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        queue: WeightGradQueue | None,
        chunk_tokens: int,
    ) -> Tensor:
        loss = torch.zeros((), dtype=holder_dtype(x_ND.dtype), device=x_ND.device)
        lse_N = torch.empty_like(labels_N, dtype=loss.dtype)
        for rows in chunks(len(labels_N), chunk_tokens):
            logits_CV = fp32_logits(x_ND[rows], weight_VD)
            is_valid_C, label_C = _split(labels_N[rows])
            of_label_C = logits_CV.gather(1, label_C.unsqueeze(1)).squeeze(1)
            top_C1 = logits_CV.amax(1, keepdim=True)
            # In place: one chunk of logits is all the memory there is to be.
            total_C = logits_CV.sub_(top_C1).exp_().sum(1)
            del logits_CV  # else two chunks' are there once the next one's are made
            lse_N[rows] = top_C1.squeeze(1) + total_C.log()
            loss += torch.where(is_valid_C, lse_N[rows] - of_label_C, 0).sum()
        ctx.save_for_backward(x_ND, weight_VD, labels_N, lse_N)
        ctx.queue, ctx.parameter, ctx.chunk_tokens = queue, weight_VD, chunk_tokens
        return loss

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_ND, weight_VD, labels_N, lse_N = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_x = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None

        def pass_back(
            grad_x: Tensor | None, to_weight: bool, sums: Tensor | None = None
        ) -> Tensor | None:
            """Fills grad_x and gives the sums with the weight's gradient added, if wanted."""
            for rows in chunks(len(labels_N), ctx.chunk_tokens):
                grad_CV = fp32_logits(x_ND[rows], weight_VD)
                grad_CV.sub_(lse_N[rows].unsqueeze(1)).exp_()
                is_valid_C, label_C = _split(labels_N[rows])
                grad_CV.scatter_add_(1, label_C.unsqueeze(1), -torch.ones_like(grad_CV[:, :1]))
                grad_CV.mul_(torch.where(is_valid_C, seed, 0).unsqueeze(1))
                low_CV = grad_CV.to(x_ND.dtype)
                del grad_CV
                if grad_x is not None:
                    torch.mm(low_CV, weight_VD, out=grad_x[rows])
                if to_weight:
                    sums = add_product(sums, low_CV.t(), x_ND[rows])
                del low_CV
            return sums

        # A gradient of the weight that is computed now shares its logits with that of x.
        waits = ctx.queue is not None and ctx.queue.deferring
        shared = None if waits else grad_x

        def add(sums: Tensor | None) -> Tensor:
            added = pass_back(shared, True, sums)
            return torch.zeros_like(weight_VD, dtype=lse_N.dtype) if added is None else added

        if grad_x is not None and (waits or not ctx.needs_input_grad[1]):
            pass_back(grad_x, False)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = now_or_later(
                ctx.queue, ctx.parameter, lambda: add(None).to(weight_VD.dtype), add
            )
        return grad_x, grad_weight, None, None, None


def chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Runs of at most `chunk_tokens` tokens; together all of them."""
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))


def fp32_logits(x_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """[C, V] fp32 (fp64 stays) whatever the dtype of the operands."""
    return fp32_product(x_CD, weight_VD.t())


def _split(labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels count, and the labels with 0 in place of those that do not."""
    is_valid_C = labels_C != IGNORED_LABEL
    return is_valid_C, torch.where(is_valid_C, labels_C, 0)

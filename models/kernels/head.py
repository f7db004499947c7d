# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""The head's loss with time first: three products, and softmax with its gradient in one kernel.

`models.head.chunked_loss` computes the logits again in the backward, which costs a fourth product.
Here the forward makes, of each chunk of fp32 logits, the loss and the logits' gradient but for the
seed, softmax - one-hot, in the compute dtype. It stays for the backward, whole: N V 2 bytes (2.1 GB
for 8,192 tokens of V4.1), half of what `whole_loss` keeps. Forward, input gradient and weight
gradient then are one product each, so a split backward costs nothing; sums over chunks of tokens
would read and write the weight gradient's fp32 sums once per chunk, 43 GB for 16,384 tokens. The
seed, known in the backward, multiplies fp32 products before they are rounded or, those of a weight
in bf16, added to its fp32 sum.

Peak beside hidden states, weights and their fp32 sums, N = 16,384: the gradient 4.24 GB, one chunk
of logits 1.06 GB (or a block of the weight gradient in fp32, 0.87 GB): 5.3 GB.

Numeric class: summation order. Shape letters: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.carry import IGNORED_LABEL
from ppruntime.models.head import chunks, fp32_logits
from ppruntime.models.head_bytes import CHUNK_TOKENS, VOCAB_BLOCK
from ppruntime.models.kernels.rounding import INTERPRETED, to_bf16
from ppruntime.models.linear import Linear, WeightGradQueue, now_or_later
from ppruntime.models.precision import fp32_product

_PART = 8192
"""Most logits of a row that one program holds: 32 in a thread's registers."""
_WARPS = 8


def fused_loss(
    hidden: Tensor, projection: Linear, labels: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """As `models.head.whole_loss`: fp32 scalar. A label that is no token id makes the loss NaN.

    Raises RuntimeError off CUDA without the interpreter, ValueError for hidden states and weights
    of different dtypes or another dtype than bf16 (fp32 in the interpreter).
    """
    loss: Tensor = _FusedLoss.apply(
        hidden.flatten(0, -2),
        projection.weight,
        labels.flatten(),
        projection.queue,
        chunk_tokens,
        torch.is_grad_enabled(),
    )
    return loss


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        queue: WeightGradQueue | None,
        chunk_tokens: int,
        keeps_gradient: bool,
    ) -> Tensor:
        _check(x_ND, weight_VD)
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        grad_NV = x_ND.new_empty(len(x_ND), len(weight_VD) if keeps_gradient else 0)
        for rows in chunks(len(labels_N), chunk_tokens):
            logits_CV = fp32_logits(x_ND[rows], weight_VD)
            loss_C = _softmax_grad(logits_CV, labels_N[rows], grad_NV[rows])
            del logits_CV
            loss += loss_C.sum()
        ctx.save_for_backward(x_ND, weight_VD, grad_NV)
        ctx.queue, ctx.parameter = queue, weight_VD
        return loss

    @staticmethod
    def backward(
        ctx: Any, seed: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x_ND, weight_VD, grad_NV = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _scaled(fp32_product(grad_NV, weight_VD), seed, torch.empty_like(x_ND))
        grad_weight = None
        if ctx.needs_input_grad[1]:

            def compute() -> Tensor:
                return _weight_grad(grad_NV, x_ND, seed)

            def add(sum_VD: Tensor | None) -> Tensor:
                return _add_weight_grad(sum_VD, grad_NV, x_ND, seed)

            grad_weight = now_or_later(ctx.queue, ctx.parameter, compute, add)
        return grad_x, grad_weight, None, None, None, None


def _weight_grad(grad_NV: Tensor, x_ND: Tensor, seed: Tensor) -> Tensor:
    """seed * gradient^T hidden [V, D], summed in fp32, a block of its rows at a time."""
    grad_VD = x_ND.new_empty(grad_NV.shape[1], x_ND.shape[1])
    for block in chunks(len(grad_VD), VOCAB_BLOCK):
        _scaled(fp32_product(grad_NV[:, block].t(), x_ND), seed, grad_VD[block])
    return grad_VD


def _add_weight_grad(sum_VD: Tensor | None, grad_NV: Tensor, x_ND: Tensor, seed: Tensor) -> Tensor:
    """The fp32 sum plus what `_weight_grad` gives, not rounded, in place; None is a sum of
    nothing."""
    if sum_VD is None:
        return fp32_product(grad_NV.t(), x_ND).mul_(seed)
    for block in chunks(len(sum_VD), VOCAB_BLOCK):
        sum_VD[block].addcmul_(fp32_product(grad_NV[:, block].t(), x_ND), seed)
    return sum_VD


def _scaled(sums: Tensor, seed: Tensor, out: Tensor) -> Tensor:
    """seed * sums, rounded once, into `out`."""
    return torch.mul(sums, seed, out=out)


@torch.library.custom_op("ppruntime::head_softmax_grad", mutates_args=("grad_CV",))
def _softmax_grad(logits_CV: Tensor, labels_C: Tensor, grad_CV: Tensor) -> Tensor:
    """The loss [C] fp32; softmax - one-hot [C, V] into grad_CV, unless that is [C, 0]. Both are 0
    where a label is ignored."""
    num_rows, num_logits = logits_CV.shape
    assert grad_CV.is_contiguous(), "the kernel writes whole rows one after another"
    loss_C = torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device)
    num_parts = triton.next_power_of_2(triton.cdiv(num_logits, _PART))
    if INTERPRETED.value:
        num_parts = 1  # its programs run one after another: none can wait for a later one
    if num_rows:
        # Of a multiple of 16 logits, so that accesses are wide.
        part_size = 16 * triton.cdiv(num_logits, 16 * num_parts)
        sums_CP = torch.empty(num_rows, num_parts, 2, dtype=torch.float32, device=loss_C.device)
        counts = torch.zeros(num_rows + 1, dtype=torch.int32, device=loss_C.device)
        _softmax_grad_kernel[(num_rows * num_parts,)](
            logits_CV, labels_C, loss_C, grad_CV, sums_CP, counts, num_rows, num_logits,
            IGNORED_LABEL, grad_CV.shape[1] > 0, num_parts, part_size,
            triton.next_power_of_2(part_size), num_warps=_WARPS,
        )  # fmt: skip
    return loss_C


@_softmax_grad.register_fake
def _(logits_CV: Tensor, labels_C: Tensor, grad_CV: Tensor) -> Tensor:
    return logits_CV.new_empty(logits_CV.shape[0], dtype=torch.float32)


@triton.jit
def _softmax_grad_kernel(
    logits_ptr, labels_ptr, loss_ptr, grad_ptr, sums_ptr, counts_ptr, num_rows, num_logits,
    IGNORED: tl.constexpr, WITH_GRAD: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row per program: it keeps its logits, as powers, in registers, tells the row's
    other programs their maximum and sum, and waits for theirs. So logits are read once.

    Rows and parts are given out in the order in which programs start: those that wait for one that
    has not started are of one row, fewer than a device runs at once. `counts` begins as zeros.
    """
    ticket = tl.atomic_add(counts_ptr + num_rows, 1, sem="relaxed")
    row = (ticket // PARTS).to(tl.int64)
    part = ticket % PARTS
    label = tl.load(labels_ptr + row)
    is_valid = label != IGNORED
    logits_ptr += row * num_logits
    grad_ptr += row * num_logits
    places = part * SIZE + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < SIZE) & (places < num_logits)
    logits = tl.load(logits_ptr + places, mask=inside, other=float("-inf"))
    own_top = tl.maximum(tl.max(logits, 0), -1e38)
    powers = tl.exp(logits - own_top)
    top = own_top
    total = tl.sum(powers, 0)
    if PARTS > 1:
        sums_ptr += row * PARTS * 2
        tl.store(sums_ptr + part * 2, own_top)
        tl.store(sums_ptr + part * 2 + 1, total)
        tl.debug_barrier()
        there = 1 + tl.atomic_add(counts_ptr + row, 1, sem="acq_rel", scope="gpu")
        while there < PARTS:
            there = tl.atomic_add(counts_ptr + row, 0, sem="acquire", scope="gpu")
        parts = sums_ptr + tl.arange(0, PARTS) * 2
        tops = tl.load(parts, volatile=True)
        top = tl.max(tops, 0)
        total = tl.sum(tl.load(parts + 1, volatile=True) * tl.exp(tops - top), 0)
    lse = top + tl.log(total)
    if part == 0:
        is_token = (label >= 0) & (label < num_logits)
        of_label = tl.load(logits_ptr + label, mask=is_token, other=float("nan"))
        tl.store(loss_ptr + row, tl.where(is_valid, lse - of_label, 0.0))
    if WITH_GRAD:
        grad = powers * tl.exp(own_top - lse) - tl.where(places == label, 1.0, 0.0)
        grad = tl.where(is_valid, grad, 0.0)
        if grad_ptr.dtype.element_ty == tl.bfloat16:
            grad = to_bf16(grad)
        tl.store(grad_ptr + places, grad, mask=inside)


def _check(x_ND: Tensor, weight_VD: Tensor) -> None:
    place = "head"
    if not x_ND.is_cuda and not INTERPRETED.value:
        raise RuntimeError(
            f"{place}: the kernels need a CUDA device, hidden states are on {x_ND.device}; use "
            'kernels.head = "chunked", or set TRITON_INTERPRET=1 before the first import'
        )
    allowed = (torch.bfloat16,) if x_ND.is_cuda else (torch.bfloat16, torch.float32)
    if x_ND.dtype not in allowed or x_ND.dtype != weight_VD.dtype:
        raise ValueError(
            f"{place}: hidden states are {x_ND.dtype} and weights {weight_VD.dtype}; both have to "
            'be bfloat16 (or float32 in the interpreter); kernels.head = "chunked" takes any'
        )

"""Attention of each query to a short list of keys, with a sink; the reference for the kernels.

Shape letters: B sequences, T queries, H heads, K head width, N keys, W slots.
Source: DeepSeek-V4.1 report, section 2.2; the sink as in gpt-oss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ppruntime.models.documents import take_rows
from ppruntime.models.keep_inputs import named_op
from ppruntime.models.kernel_limits import queries_at_once
from ppruntime.models.precision import widened


def sparse_attention(q_BTHK: Tensor, keys_BNK: Tensor, slots_BTW: Tensor, sink_H: Tensor) -> Tensor:
    """[B, T, H, K] in q's dtype: softmax-weighted sum of the listed keys, which are values too.

    slots_BTW (int) lists rows of keys_BNK in any order; -1 is empty. The sink is a logit in every
    head's softmax that brings no value. Scores (scaled by K^-1/2), softmax and sums are fp32.
    As in the kernels, the inputs alone are kept and the backward computes the softmax again. Long
    lists are worked through in blocks of queries: no more than one block's gathered keys exist at
    a time.
    """
    out_BTHK: Tensor = _SparseAttention.apply(  # type: ignore[no-untyped-call]
        q_BTHK, keys_BNK, slots_BTW, sink_H
    )
    return out_BTHK


@named_op("sparse_attention_reference(Tensor q, Tensor keys, Tensor slots, Tensor sink) -> Tensor")
def _in_blocks(q_BTHK: Tensor, keys_BNK: Tensor, slots_BTW: Tensor, sink_H: Tensor) -> Tensor:
    parts = [
        _attend(q_BTHK[:, block_T], keys_BNK, slots_BTW[:, block_T], sink_H)
        for block_T in _blocks(q_BTHK, slots_BTW)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BTHK: Tensor, keys_BNK: Tensor, slots_BTW: Tensor, sink_H: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q_BTHK, keys_BNK, slots_BTW, sink_H)
        return _in_blocks(q_BTHK, keys_BNK, slots_BTW, sink_H)

    @staticmethod
    def backward(ctx: Any, grad_BTHK: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        q_BTHK, keys_BNK, slots_BTW, sink_H = ctx.saved_tensors
        grad_q_BTHK = torch.empty_like(q_BTHK)
        sums: tuple[Tensor, ...] = ()
        for block_T in reversed(list(_blocks(q_BTHK, slots_BTW))):
            with torch.enable_grad():
                inputs = [
                    tensor.detach().requires_grad_()
                    for tensor in (q_BTHK[:, block_T], keys_BNK, sink_H)
                ]
                q, keys, sink = inputs
                out = _attend(q, keys, slots_BTW[:, block_T], sink)
            grad_q, *shared = torch.autograd.grad(out, inputs, grad_BTHK[:, block_T])
            grad_q_BTHK[:, block_T] = grad_q
            sums = tuple(map(torch.add, sums, shared)) if sums else tuple(shared)
        return grad_q_BTHK, sums[0], None, sums[1]


def _blocks(q_BTHK: Tensor, slots_BTW: Tensor) -> Iterator[slice]:
    """Queries that are done at once; one empty block where there are none."""
    size = queries_at_once(slots_BTW.shape[0], slots_BTW.shape[2], q_BTHK.shape[3])
    for start in range(0, max(1, q_BTHK.shape[1]), size):
        yield slice(start, start + size)


def _attend(q_BTHK: Tensor, keys_BNK: Tensor, slots_BTW: Tensor, sink_H: Tensor) -> Tensor:
    is_empty_BT1W = (slots_BTW < 0).unsqueeze(2)
    gathered_BTWK = widened(take_rows(keys_BNK, slots_BTW.clamp_min(0).long()))
    scores_BTHW = widened(q_BTHK) @ gathered_BTWK.transpose(-1, -2) * q_BTHK.shape[-1] ** -0.5
    scores_BTHW = scores_BTHW.masked_fill(is_empty_BT1W, -torch.inf)
    sink_BTH1 = sink_H.expand(scores_BTHW.shape[:-1]).unsqueeze(-1)
    weights = torch.cat((scores_BTHW, sink_BTH1), dim=-1).softmax(-1)[..., :-1]
    return (weights @ gathered_BTWK).to(q_BTHK.dtype)

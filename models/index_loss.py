"""What teaches the indexer: how far its scores are from the attention that its picks get.

For query t and the entries S that it picked, with p the attention's probabilities of S, summed over
heads and divided by their sum, and I the index scores:

    KL_t = sum over S of p (log p - log softmax_S(I))

The probabilities are of the layer's one softmax, over window, picks and sink; only their sum over
the heads is divided again, so that a head which looks elsewhere counts for little. They are fixed:
the gradient goes into queries, head weights and keys of the indexer alone. The picks themselves
have none.

Shape letters: B sequences, T queries, Q indexer heads, I indexer head width, C compressed entries,
H heads, K head width, N keys, W slots, k picks.
Source: DeepSeek-V3.2 report, section 2.1 (sparse training stage).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppruntime.models.documents import take_rows
from ppruntime.models.linear import break_graph
from ppruntime.models.precision import widened

_MAX_GATHERED = 1 << 25
"""Elements of gathered keys of one chunk of queries (128 MiB in fp32)."""


class Scoring(NamedTuple):
    """What index scores are made of."""

    q_BTQI: Tensor
    weights_BTQ: Tensor
    keys_BCI: Tensor


class Attended(NamedTuple):
    """What the layer's attention had; the indexer's teacher."""

    q_BTHK: Tensor
    keys_BNK: Tensor
    """Own keys of the T tokens first, then the compressed entries."""
    slots_BTW: Tensor
    """Rows of keys, -1 where empty; the picks are the last of them."""
    sink_H: Tensor


def index_loss(scoring: Scoring, attended: Attended, num_picks: int) -> Tensor:
    """fp32 scalar: the mean of KL_t over a sequence's tokens, summed over sequences. A query that
    picked nothing adds nothing.

    Works through chunks of queries, whose picks alone are scored: nothing of size T x C or T x T
    is ever made, and of attention no more than one chunk's [queries, H, W]. The gradients are made
    at once, beside the teacher, and kept in place of all inputs.
    """
    loss: Tensor = _IndexLoss.apply(  # type: ignore[no-untyped-call]
        *scoring, *(tensor.detach() for tensor in attended), num_picks
    )
    return loss


class _IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTQI: Tensor,
        weights_BTQ: Tensor,
        keys_BCI: Tensor,
        *attended_and_picks: Any,
    ) -> Tensor:
        *tensors, num_picks = attended_and_picks
        attended, scoring = Attended(*tensors), Scoring(q_BTQI, weights_BTQ, keys_BCI)
        num_tokens, num_own = q_BTQI.shape[1], attended.keys_BNK.shape[1] - keys_BCI.shape[1]
        total = widened(q_BTQI).new_zeros(())
        grad_q, grad_weights = torch.zeros_like(q_BTQI), torch.zeros_like(weights_BTQ)
        grad_keys = torch.zeros_like(widened(keys_BCI))
        for chunk in _chunks(scoring, attended) if keys_BCI.numel() else ():
            picks_BTk = attended.slots_BTW[:, chunk, -num_picks:].long() - num_own
            found = _of_queries(
                Scoring(q_BTQI[:, chunk], weights_BTQ[:, chunk], keys_BCI),
                picks_BTk,
                _teacher(attended, chunk, num_picks),
                num_tokens,
            )
            total += found.loss
            grad_q[:, chunk], grad_weights[:, chunk] = found.grad_q_BTQI, found.grad_weights_BTQ
            grad_keys += found.grad_keys_BCI
        ctx.save_for_backward(grad_q, grad_weights, grad_keys.to(keys_BCI.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        break_graph()  # of a forward that adds up in place torch 2.11's compiler drops the gradient
        needed = ctx.needs_input_grad
        found = (
            (grad * saved).to(saved.dtype) if is_needed else None
            for saved, is_needed in zip(ctx.saved_tensors, needed[:3], strict=True)
        )
        return *found, *[None] * (len(needed) - 3)


class _OfQueries(NamedTuple):
    """Some queries' part of the loss, and its gradients. All fp32."""

    loss: Tensor
    grad_q_BTQI: Tensor
    grad_weights_BTQ: Tensor
    grad_keys_BCI: Tensor


def _of_queries(
    scoring: Scoring, picks_BTk: Tensor, teacher_BTk: Tensor, num_tokens: int
) -> _OfQueries:
    """By hand: a graph inside a forward would meet the hooks of checkpointing and offload."""
    keys_BCI = scoring.keys_BCI
    q_BTQI, weights_BTQ1 = widened(scoring.q_BTQI), widened(scoring.weights_BTQ).unsqueeze(-1)
    gathered_BTkI = widened(take_rows(keys_BCI, picks_BTk.clamp_min(0)))
    products_BTQk = q_BTQI @ gathered_BTkI.transpose(-1, -2)
    scores_BTk = (weights_BTQ1 * products_BTQk.relu()).sum(2)
    is_pick_BTk = picks_BTk >= 0
    scores_BTk = scores_BTk.masked_fill(~is_pick_BTk, -torch.inf)
    # A query without picks gets scores all the same, so that nothing is 0 / 0.
    has_none_BT1 = ~is_pick_BTk.any(-1, keepdim=True)
    log_student_BTk = scores_BTk.masked_fill(has_none_BT1, 0.0).log_softmax(-1)
    student_BTk = log_student_BTk.exp().masked_fill(has_none_BT1, 0.0)
    terms_BTk = torch.special.xlogy(teacher_BTk, teacher_BTk)
    terms_BTk -= teacher_BTk * log_student_BTk.masked_fill(~is_pick_BTk, 0.0)

    grad_BT1k = ((student_BTk - teacher_BTk) / num_tokens).unsqueeze(2)
    grad_products_BTQk = weights_BTQ1 * grad_BT1k * (products_BTQk > 0)
    grad_gathered_BTkI = grad_products_BTQk.transpose(-1, -2) @ q_BTQI
    return _OfQueries(
        terms_BTk.sum() / num_tokens,
        grad_products_BTQk @ gathered_BTkI,
        (products_BTQk.relu() * grad_BT1k).sum(-1),
        _added_to_rows(grad_gathered_BTkI, picks_BTk.clamp_min(0), keys_BCI.shape[1]),
    )


def _added_to_rows(grad_BTkI: Tensor, rows_BTk: Tensor, num_rows: int) -> Tensor:
    """[B, num_rows, I] what each row got, in a fixed order on every device: as an embedding's
    gradient."""
    batch, width = grad_BTkI.shape[0], grad_BTkI.shape[-1]
    first_B11 = torch.arange(batch, device=rows_BTk.device).view(-1, 1, 1) * num_rows
    sums: Tensor = torch.ops.aten.embedding_dense_backward(
        grad_BTkI.reshape(-1, width), (rows_BTk + first_B11).flatten(), batch * num_rows, -1, False
    )
    return sums.view(batch, num_rows, width)


def _teacher(attended: Attended, chunk: slice, num_picks: int) -> Tensor:
    """[B, T, k] the attention's probabilities of the picks, summed over heads, then divided by
    their sum; 0 without picks."""
    q_BTHK, slots_BTW = widened(attended.q_BTHK[:, chunk]), attended.slots_BTW[:, chunk]
    gathered_BTWK = widened(take_rows(attended.keys_BNK, slots_BTW.clamp_min(0).long()))
    scores_BTHW = q_BTHK @ gathered_BTWK.transpose(-1, -2) * q_BTHK.shape[-1] ** -0.5
    scores_BTHW = scores_BTHW.masked_fill((slots_BTW < 0).unsqueeze(2), -torch.inf)
    sink_BTH1 = widened(attended.sink_H).expand(scores_BTHW.shape[:-1]).unsqueeze(-1)
    shares_BTHW = torch.cat((sink_BTH1, scores_BTHW), dim=-1).softmax(-1)
    summed_BTk = shares_BTHW[..., -num_picks:].sum(2)
    total_BT1 = summed_BTk.sum(-1, keepdim=True)
    return torch.where(total_BT1 > 0, summed_BTk / total_BT1, 0.0)


def _chunks(scoring: Scoring, attended: Attended) -> Iterator[slice]:
    """Queries that are done at once."""
    batch, num_tokens, num_slots = attended.slots_BTW.shape
    width = max(attended.q_BTHK.shape[-1], scoring.q_BTQI.shape[-1])
    heads = max(attended.q_BTHK.shape[2], scoring.q_BTQI.shape[2])
    size = max(1, _MAX_GATHERED // max(1, batch * num_slots * max(width, heads)))
    for start in range(0, num_tokens, size):
        yield slice(start, start + size)

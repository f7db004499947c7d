"""Attention of each query to a short list of keys, with a sink; the reference for the kernels.

Shape letters: B sequences, T queries, H heads, K head width, N keys, W slots.
Source: DeepSeek-V4.1 report, section 2.2; the sink as in gpt-oss.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ppruntime.models.documents import take_rows
from ppruntime.models.precision import widened

_MAX_GATHERED = 1 << 26
"""Elements of gathered keys up to which all queries are done at once (256 MiB in fp32)."""


def sparse_attention(q_BTHK: Tensor, keys_BNK: Tensor, slots_BTW: Tensor, sink_H: Tensor) -> Tensor:
    """[B, T, H, K] in q's dtype: softmax-weighted sum of the listed keys, which are values too.

    slots_BTW (int) lists rows of keys_BNK in any order; -1 is empty. The sink is a logit in every
    head's softmax that brings no value. Scores (scaled by K^-1/2), softmax and sums are fp32.
    Long lists are worked through in blocks of queries, which are computed again in the backward: no
    more than one block's gathered keys exist at a time.
    """
    per_query = slots_BTW.shape[0] * slots_BTW.shape[2] * q_BTHK.shape[3]
    block = max(1, _MAX_GATHERED // per_query)
    if q_BTHK.shape[1] <= block:
        return _attend(q_BTHK, keys_BNK, slots_BTW, sink_H)
    parts = [
        checkpoint(_attend, q, keys_BNK, slots, sink_H, use_reentrant=False)
        for q, slots in zip(
            torch.split(q_BTHK, block, 1), torch.split(slots_BTW, block, 1), strict=True
        )
    ]
    return torch.cat(parts, dim=1)


def _attend(q_BTHK: Tensor, keys_BNK: Tensor, slots_BTW: Tensor, sink_H: Tensor) -> Tensor:
    is_empty_BT1W = (slots_BTW < 0).unsqueeze(2)
    gathered_BTWK = widened(take_rows(keys_BNK, slots_BTW.clamp_min(0).long()))
    scores_BTHW = widened(q_BTHK) @ gathered_BTWK.transpose(-1, -2) * q_BTHK.shape[-1] ** -0.5
    scores_BTHW = scores_BTHW.masked_fill(is_empty_BT1W, -torch.inf)
    sink_BTH1 = sink_H.expand(scores_BTHW.shape[:-1]).unsqueeze(-1)
    weights = torch.cat((scores_BTHW, sink_BTH1), dim=-1).softmax(-1)[..., :-1]
    return (weights @ gathered_BTWK).to(q_BTHK.dtype)

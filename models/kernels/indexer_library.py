"""The indexer's selection by an optional package: scores and top-k of cuDNN's frontend, for Hopper.

The same function as models/selection.py and indexer.py beside this file, for bf16, 16, 32 or 64
heads of 128 channels. The package knows of no packed documents:

- it scores whatever lies before a query in its row; of that, entries of earlier documents are put
  to -inf here, and taken out again where they were chosen for want of others;
- its order has +0 before -0, which a negative head weight makes: zeros lose their sign first;
- its top-k gives ties to the smaller number, ascending, as everywhere here.

Scores are dense, but of no more queries at a time than `MAX_SCORES` allows.

Numeric class: bitwise on equal scores; scores are sums in another order than the reference's.
Source: `DSA.indexer_forward_wrapper` and `DSA.indexer_top_k_wrapper` of cudnn-frontend.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ppruntime.models.dims import ModelDims
from ppruntime.models.selection import (
    Selection,
    candidate_blocks,
    restrict,
    select_by,
    to_local,
)

MAX_SCORES = 1 << 25
"""Scores that are held at a time (128 MiB in fp32)."""
_INSTALL = "pip install 'ppruntime[attention]'"
_REMEDY = 'or use kernels.indexer = "triton"'


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the package cannot run there, and what to do; None if it can. Imports it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"cuDNN's indexer needs a Hopper GPU (sm_90); {_REMEDY[3:]}"
    if dtype is not torch.bfloat16:
        return f"the package takes bfloat16, the model is in {dtype}"
    if find_spec("cudnn") is None:
        return f"the package nvidia-cudnn-frontend is not installed; {_INSTALL} {_REMEDY}"
    try:
        package = importlib.import_module("cudnn").DSA
    except Exception as error:  # whatever a binary of another build raises
        return f"importing cudnn failed with: {error}; {_INSTALL} {_REMEDY}"
    missing = [name for name in _NEEDED if not hasattr(package, name)]
    if missing:
        return f"the installed cudnn has no DSA.{', DSA.'.join(missing)}; {_INSTALL} {_REMEDY}"
    return None


_NEEDED = ("indexer_forward_wrapper", "indexer_top_k_wrapper")


def _dsa() -> Any:  # the package has no types
    return importlib.import_module("cudnn").DSA


def select_entries(
    dims: ModelDims,
    q_BTHI: Tensor,
    weights_BTH: Tensor,
    keys_BCI: Tensor,
    positions_BT: Tensor,
    ratio: int,
    *,
    finds_candidates: bool = False,
    candidates: Tensor | None = None,
) -> Selection:
    """As `selection.select_entries`, but entries are int32."""

    def select(*arguments: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _select(*arguments, ratio)
        return found

    return select_by(
        select, dims, q_BTHI, weights_BTH, keys_BCI, positions_BT, ratio,
        finds_candidates=finds_candidates, candidates=candidates,
    )  # fmt: skip


@torch.library.custom_op("ppruntime::index_select_library", mutates_args=())
def _select(
    q_BTHI: Tensor,
    weights_BTH: Tensor,
    keys_BCI: Tensor,
    first_BT: Tensor,
    num_visible_BT: Tensor,
    candidates_BTN: Tensor | None,
    num_selected: int,
    block_size: int,
    num_kept: int,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    """(entries [B, T, k] int32, candidate blocks [B, T, N] bool; N is 0 if num_kept is).

    Entry c of the row is visible to a query if first <= c < first + num_visible.
    """
    batch, num_queries = q_BTHI.shape[:2]
    num_entries = keys_BCI.shape[1]
    num_blocks = -(-num_entries // block_size) if num_kept else 0
    entries_BTk = first_BT.new_full((batch, num_queries, num_selected), -1, dtype=torch.int32)
    kept_BTN = first_BT.new_zeros((batch, num_queries, num_blocks), dtype=torch.bool)
    if entries_BTk.numel() == 0 or num_entries == 0:
        return entries_BTk, kept_BTN
    step = max(1, MAX_SCORES // (batch * num_entries))
    for start in range(0, num_queries, step):
        block = slice(start, start + step)
        scores_BTC = _scores(q_BTHI[:, block], weights_BTH[:, block], keys_BCI, start, ratio)
        first, num_visible = first_BT[:, block], num_visible_BT[:, block]
        if num_kept or candidates_BTN is not None:
            scores_BTL = to_local(scores_BTC, first.long(), num_visible)
            if num_kept:
                kept_BTN[:, block] = candidate_blocks(scores_BTL, num_visible, block_size, num_kept)
            if candidates_BTN is not None:
                scores_BTL = restrict(scores_BTL, candidates_BTN[:, block], block_size)
            local_BTk = _best(scores_BTL, num_visible, num_selected)
            entries_BTk[:, block] = torch.where(local_BTk >= 0, local_BTk + first.unsqueeze(-1), -1)
        else:
            entries_C = torch.arange(num_entries, device=scores_BTC.device)
            scores_BTC.masked_fill_(entries_C < first.unsqueeze(-1), -torch.inf)
            entries_BTk[:, block] = _best(scores_BTC, first + num_visible, num_selected)
    return entries_BTk, kept_BTN


@_select.register_fake
def _(
    q_BTHI: Tensor,
    weights_BTH: Tensor,
    keys_BCI: Tensor,
    first_BT: Tensor,
    num_visible_BT: Tensor,
    candidates_BTN: Tensor | None,
    num_selected: int,
    block_size: int,
    num_kept: int,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    num_blocks = -(-keys_BCI.shape[1] // block_size) if num_kept else 0
    shape = q_BTHI.shape[:2]
    return (
        first_BT.new_empty((*shape, num_selected), dtype=torch.int32),
        first_BT.new_empty((*shape, num_blocks), dtype=torch.bool),
    )


def _scores(
    q_BTHI: Tensor, weights_BTH: Tensor, keys_BCI: Tensor, start: int, ratio: int
) -> Tensor:
    """[B, T, C] fp32 for queries from row place `start` on; of entries behind a query, anything."""
    offsets_B = torch.full((q_BTHI.shape[0],), start, dtype=torch.int32, device=q_BTHI.device)
    scores_BTC: Tensor = _dsa().indexer_forward_wrapper(
        q_BTHI.contiguous(),
        keys_BCI.unsqueeze(2).contiguous(),
        weights_BTH.contiguous(),
        ratio=ratio,
        q_causal_offsets=offsets_B,
    )["scores"]
    return scores_BTC.add_(0.0)  # -0 becomes +0


def _best(scores_BTC: Tensor, lengths_BT: Tensor, num_selected: int) -> Tensor:
    """[B, T, k] int32 numbers of the highest of each query's first `lengths` scores above -inf,
    ascending, then -1."""
    num_entries = scores_BTC.shape[-1]
    picks_Nk = _dsa().indexer_top_k_wrapper(
        scores_BTC.reshape(-1, num_entries).contiguous(),
        lengths_BT.flatten().to(torch.int32),
        min(num_selected, num_entries),
        return_val=False,
        tie_break=1,
        deterministic=True,
    )["indices"]
    picks_BTk = picks_Nk.unflatten(0, lengths_BT.shape)
    found_BTk = scores_BTC.gather(-1, picks_BTk.clamp_min(0).long())
    is_none = (picks_BTk < 0) | (found_BTk == -torch.inf)
    ascending = picks_BTk.masked_fill(is_none, num_entries).sort(-1).values
    ascending = ascending.masked_fill(ascending == num_entries, -1)
    return functional.pad(ascending, (0, num_selected - ascending.shape[-1]), value=-1)

"""Which compressed entries each query attends to: the highest scores among those that it sees.

The reference for the kernels. Nothing here has a gradient: the choice is not differentiable.
Entries are numbered within the query's document ("local") until the end, so that a document is
treated alike wherever it lies in a row.

Shape letters: B sequences, T queries, H indexer heads, I indexer head width, C compressed entries,
L local entries (as many as C), N candidate blocks.
Source: DeepSeek-V4.1 report, section 2.2.2 (CSA2, hierarchical candidates).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ppruntime.models.dims import ModelDims, num_candidate_blocks
from ppruntime.models.documents import first_entries, num_visible_entries
from ppruntime.models.precision import widened
from ppruntime.models.topk import top_k

_MAX_PRODUCTS = 1 << 26
"""Head-wise scores that are held at a time (256 MiB in fp32)."""


class Selection(NamedTuple):
    """What an index source chooses."""

    entries_BTk: Tensor
    """int64 numbers of the chosen entries within the row, ascending, then -1 to the full width."""
    candidates: Tensor | None
    """[B, T, blocks] bool from the candidate source, else as given."""


def index_scores(q_BTHI: Tensor, weights_BTH: Tensor, keys_BCI: Tensor) -> Tensor:
    """[B, T, C]: sum_h w_h relu(q_h . k), summed in fp32."""
    products_BTHC = torch.einsum("bthi,bci->bthc", widened(q_BTHI), widened(keys_BCI))
    return (products_BTHC.relu() * widened(weights_BTH).unsqueeze(-1)).sum(2)


def to_local(scores_BTC: Tensor, first_BT: Tensor, num_visible_BT: Tensor) -> Tensor:
    """[B, T, L] scores of the query's own document from its first entry on; -inf if not visible."""
    num_entries = scores_BTC.shape[-1]
    local_L = torch.arange(num_entries, device=scores_BTC.device)
    index_BTL = (first_BT.unsqueeze(-1) + local_L).clamp_max(num_entries - 1)
    is_hidden_BTL = local_L >= num_visible_BT.unsqueeze(-1)
    return scores_BTC.gather(-1, index_BTL).masked_fill(is_hidden_BTL, -torch.inf)


def candidate_blocks(
    scores_BTL: Tensor, num_visible_BT: Tensor, block_size: int, num_kept: int
) -> Tensor:
    """[B, T, blocks] bool: the blocks of consecutive entries that later layers may choose from.

    The num_kept blocks with the highest best score; the newest visible block always, hidden ones
    never.
    """
    padded = functional.pad(scores_BTL, (0, -scores_BTL.shape[-1] % block_size), value=-torch.inf)
    best_BTN = padded.view(*padded.shape[:-1], -1, block_size).amax(-1)
    blocks_N = torch.arange(best_BTN.shape[-1], device=best_BTN.device)
    newest_BT1 = ((num_visible_BT - 1) // block_size).unsqueeze(-1)
    best_BTN = best_BTN.masked_fill(blocks_N == newest_BT1, torch.inf)
    is_high_BTN = torch.zeros_like(best_BTN, dtype=torch.bool)
    is_high_BTN.scatter_(-1, top_k(best_BTN, num_kept), True)
    return is_high_BTN & (best_BTN > -torch.inf)


def restrict(scores_BTL: Tensor, candidates_BTN: Tensor, block_size: int) -> Tensor:
    """-inf outside the candidate blocks."""
    allowed = candidates_BTN.repeat_interleave(block_size, dim=-1)[..., : scores_BTL.shape[-1]]
    return scores_BTL.masked_fill(~allowed, -torch.inf)


def best_entries(scores_BTL: Tensor, k: int) -> Tensor:
    """[B, T, k] the k highest entries above -inf, ascending by number; -1 fills up the end."""
    num_entries = scores_BTL.shape[-1]
    picks = top_k(scores_BTL, k)
    is_hidden = scores_BTL.gather(-1, picks) == -torch.inf
    ascending = picks.masked_fill(is_hidden, num_entries).sort(-1).values
    ascending = ascending.masked_fill(ascending == num_entries, -1)
    return functional.pad(ascending, (0, k - ascending.shape[-1]), value=-1)


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
    """The index_topk best visible entries of every query, by scores in fp32.

    `candidates` restricts the choice; if it has no blocks, it excludes nothing. `finds_candidates`:
    the mask for later layers is made here. Works through blocks of queries to bound memory.
    """
    first_BT = first_entries(positions_BT, ratio)
    num_visible_BT = num_visible_entries(positions_BT, ratio)
    products_per_query = keys_BCI.shape[0] * keys_BCI.shape[1] * q_BTHI.shape[2]
    block = max(1, _MAX_PRODUCTS // max(1, products_per_query))
    parts = [
        _select(
            dims,
            index_scores(q_BTHI[:, block_T], weights_BTH[:, block_T], keys_BCI),
            first_BT[:, block_T],
            num_visible_BT[:, block_T],
            finds_candidates,
            None if candidates is None else candidates[:, block_T],
        )
        for block_T in (slice(t, t + block) for t in range(0, positions_BT.shape[1], block))
    ]
    masks = [part.candidates for part in parts if part.candidates is not None]
    return Selection(
        torch.cat([part.entries_BTk for part in parts], dim=1),
        torch.cat(masks, dim=1) if masks else None,
    )


def select_by(
    op: Callable[..., tuple[Tensor, Tensor]],
    dims: ModelDims,
    q_BTHI: Tensor,
    weights_BTH: Tensor,
    keys_BCI: Tensor,
    positions_BT: Tensor,
    ratio: int,
    *,
    finds_candidates: bool,
    candidates: Tensor | None,
) -> Selection:
    """As `select_entries`, by a kernel's op.

    The op gets queries, weights, keys, the first and the number of visible entries, the candidates
    if they restrict, and three numbers: of entries to choose, of entries in a candidate block, of
    candidate blocks to keep (0: none are wanted). It gives entries and blocks.
    """
    num_kept = 0
    if finds_candidates:
        candidates = None
        if num_candidate_blocks(dims, keys_BCI.shape[1]) > 0:
            num_kept = dims.candidate_blocks
    restriction = candidates if candidates is not None and candidates.shape[-1] > 0 else None
    entries_BTk, kept_BTN = op(
        q_BTHI,
        weights_BTH,
        keys_BCI,
        first_entries(positions_BT, ratio),
        num_visible_entries(positions_BT, ratio),
        restriction,
        dims.index_topk,
        dims.candidate_block_size,
        num_kept,
    )
    return Selection(entries_BTk, kept_BTN if finds_candidates else candidates)


def _select(
    dims: ModelDims,
    scores_BTC: Tensor,
    first_BT: Tensor,
    num_visible_BT: Tensor,
    finds_candidates: bool,
    candidates: Tensor | None,
) -> Selection:
    scores_BTL = to_local(scores_BTC, first_BT, num_visible_BT)
    block_size = dims.candidate_block_size
    if finds_candidates and num_candidate_blocks(dims, scores_BTL.shape[-1]) == 0:
        candidates = scores_BTL.new_zeros((*scores_BTL.shape[:2], 0), dtype=torch.bool)
    elif finds_candidates:
        candidates = candidate_blocks(scores_BTL, num_visible_BT, block_size, dims.candidate_blocks)
    elif candidates is not None and candidates.shape[-1] > 0:
        scores_BTL = restrict(scores_BTL, candidates, block_size)
    local_BTk = best_entries(scores_BTL, dims.index_topk)
    entries_BTk = torch.where(local_BTk >= 0, local_BTk + first_BT.unsqueeze(-1), -1)
    return Selection(entries_BTk, candidates)

"""The indexer's selection in Triton: scores and exact top-k, as models/selection.py has it.

Some hundred queries at a time: their scores against all entries go into one small buffer, which
stays in the GPU's second-level cache, and are read from there by one program per query, which
writes the chosen entries. So the [T, C] scores of a whole sequence never exist.

scores      sum_h w_h relu(q_h . k) of a tile of queries and entries; tiles that no query of theirs
            sees are skipped
selection   the k-th highest score is found bit by bit, from counts of the scores at or above a
            value; of those equal to it the first are taken, by a running count. Exact, ties to the
            smaller number, ascending, without a sort.
candidates  the same on the best scores of blocks of entries

Numeric class: bitwise on equal scores; scores are sums in another order than the reference's.

Shape letters: B sequences, T queries, H indexer heads, I indexer head width, C compressed entries,
N candidate blocks.
Source: DeepSeek-V4.1 report, section 2.2.2.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ppruntime.models.dims import ModelDims
from ppruntime.models.kernels.indexer_kernels import (
    INTERPRETED,
    candidate_kernel,
    score_kernel,
    select_kernel,
)
from ppruntime.models.selection import Selection, select_by

_ROWS = 32 if INTERPRETED.value else 1
"""Queries of one program of the selection."""
MAX_SCORES = 1 << 22
"""Scores that are held at a time: 16 MiB in fp32, a third of a Hopper's second-level cache."""
_QUERIES, _ENTRIES = 64, 128
"""A tile of scores."""
_IN_REGISTERS = 1 << 13
"""Entries of a query that its program holds at once; longer lists are read again for each count."""
_WRITTEN = 1 << 11
"""Entries whose places in the result are worked out at once."""


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
    return select_by(
        _select, dims, q_BTHI, weights_BTH, keys_BCI, positions_BT, ratio,
        finds_candidates=finds_candidates, candidates=candidates,
    )  # fmt: skip


@torch.library.custom_op("ppruntime::index_select", mutates_args=())
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
) -> tuple[Tensor, Tensor]:
    """(entries [B, T, k] int32, candidate blocks [B, T, N] bool; N is 0 if num_kept is).

    Entry c of the row is visible to a query if first <= c < first + num_visible.
    """
    return run_select(
        q_BTHI,
        weights_BTH,
        keys_BCI,
        first_BT,
        num_visible_BT,
        candidates_BTN,
        num_selected,
        block_size,
        num_kept,
    )


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
) -> tuple[Tensor, Tensor]:
    num_blocks = -(-keys_BCI.shape[1] // block_size) if num_kept else 0
    shape = q_BTHI.shape[:2]
    return (
        first_BT.new_empty((*shape, num_selected), dtype=torch.int32),
        first_BT.new_empty((*shape, num_blocks), dtype=torch.bool),
    )


def run_select(
    q_BTHI: Tensor,
    weights_BTH: Tensor,
    keys_BCI: Tensor,
    first_BT: Tensor,
    num_visible_BT: Tensor,
    candidates_BTN: Tensor | None,
    num_selected: int,
    block_size: int,
    num_kept: int,
) -> tuple[Tensor, Tensor]:
    """As the op gives it. Launches two or three kernels per block of queries."""
    _check(q_BTHI, weights_BTH, keys_BCI, first_BT, num_visible_BT, candidates_BTN, block_size)
    batch, num_queries, num_heads, width = q_BTHI.shape
    num_entries = keys_BCI.shape[1]
    num_blocks = -(-num_entries // block_size) if num_kept else 0
    entries_BTk = first_BT.new_full((batch, num_queries, num_selected), -1, dtype=torch.int32)
    kept_BTN = first_BT.new_zeros((batch, num_queries, num_blocks), dtype=torch.bool)
    if entries_BTk.numel() == 0 or num_entries == 0:
        return entries_BTk, kept_BTN
    q_BTHI, weights_BTH = q_BTHI.contiguous(), weights_BTH.contiguous()
    keys_BCI = keys_BCI.contiguous()
    first_BT = first_BT.to(torch.int32).contiguous()
    num_visible_BT = num_visible_BT.to(torch.int32).contiguous()
    if candidates_BTN is not None:
        candidates_BTN = candidates_BTN.contiguous().view(torch.uint8)

    # No query sees more entries than this; a program's tile holds them all, or it goes in steps.
    all_entries = triton.next_power_of_2(num_entries)
    step = min(all_entries, _IN_REGISTERS)
    num_together = max(_QUERIES, MAX_SCORES // num_entries // _QUERIES * _QUERIES)
    num_together = min(num_together, triton.cdiv(num_queries, _QUERIES) * _QUERIES)
    scores = torch.empty(num_together, num_entries, dtype=torch.float32, device=q_BTHI.device)
    for row in range(batch):
        for start in range(0, num_queries, num_together):
            end = min(start + num_together, num_queries)
            score_kernel[(triton.cdiv(end - start, _QUERIES), triton.cdiv(num_entries, _ENTRIES))](
                q_BTHI[row], weights_BTH[row], keys_BCI[row], first_BT[row], num_visible_BT[row],
                scores, start, end, num_entries,
                num_heads, width, _QUERIES, _ENTRIES,
                num_warps=8, num_stages=3,
            )  # fmt: skip
            if num_kept:
                candidate_kernel[(triton.cdiv(end - start, _ROWS),)](
                    scores, first_BT[row], num_visible_BT[row], kept_BTN[row].view(torch.uint8),
                    start, end, num_entries, num_kept, num_blocks,
                    _ROWS, block_size, triton.next_power_of_2(num_blocks),
                    num_warps=8,
                )  # fmt: skip
            select_kernel[(triton.cdiv(end - start, _ROWS),)](
                scores, first_BT[row], num_visible_BT[row],
                None if candidates_BTN is None else candidates_BTN[row], entries_BTk[row],
                start, end, num_entries, num_selected,
                0 if candidates_BTN is None else candidates_BTN.shape[-1],
                _ROWS, block_size, step, all_entries <= step, min(step, _WRITTEN),
                num_warps=8,
            )  # fmt: skip
    return entries_BTk, kept_BTN


def _check(
    q_BTHI: Tensor,
    weights_BTH: Tensor,
    keys_BCI: Tensor,
    first_BT: Tensor,
    num_visible_BT: Tensor,
    candidates_BTN: Tensor | None,
    block_size: int,
) -> None:
    """Raises ValueError unless the kernels take these tensors."""
    place = "indexer"
    if q_BTHI.dim() != 4 or keys_BCI.dim() != 3:
        raise ValueError(
            f"{place}: q is {list(q_BTHI.shape)} and keys {list(keys_BCI.shape)}; they are "
            "[B, T, H, I] and [B, C, I]"
        )
    batch, num_queries, num_heads, width = q_BTHI.shape
    expected = (
        ("weights", weights_BTH, (batch, num_queries, num_heads)),
        ("keys", keys_BCI, (batch, keys_BCI.shape[1], width)),
        ("first entries", first_BT, (batch, num_queries)),
        ("visible entries", num_visible_BT, (batch, num_queries)),
    )
    for name, tensor, shape in expected:
        if tensor.shape != shape:
            raise ValueError(
                f"{place}: {name} is {list(tensor.shape)}, but with q {list(q_BTHI.shape)} it has "
                f"to be {list(shape)}"
            )
        if tensor.device != q_BTHI.device:
            raise ValueError(f"{place}: {name} is on {tensor.device}, q on {q_BTHI.device}")
    if width < 16 or width & (width - 1):
        raise ValueError(
            f"{place}: heads of {width} channels; the kernel takes a power of two from 16"
        )
    if q_BTHI.dtype != keys_BCI.dtype or q_BTHI.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"{place}: q is {q_BTHI.dtype} and keys {keys_BCI.dtype}; both have to be bfloat16 or "
            "both float32"
        )
    if candidates_BTN is None:
        return
    num_blocks = -(-keys_BCI.shape[1] // block_size)
    if candidates_BTN.shape != (batch, num_queries, num_blocks):
        raise ValueError(
            f"{place}: candidates are {list(candidates_BTN.shape)}, but with "
            f"{keys_BCI.shape[1]} entries in blocks of {block_size} they have to be "
            f"{[batch, num_queries, num_blocks]}"
        )

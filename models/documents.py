"""Documents packed into rows: where each starts, its groups of tokens, what a token may see.

A row holds documents of any lengths, one after another; each starts at position 0.
Compressed entries are made of `ratio` consecutive tokens of one document, counted from its start;
an incomplete last group gives none. The entry whose first token is in row place t has the number
t // ratio within the row: first tokens of two groups are at least `ratio` apart, so numbers never
clash, and the entries of one document are consecutive. Numbers that no group takes belong to none.

Shape letters: B rows, T tokens, C entries = T // ratio, R tokens of a group, W window, N any.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def document_starts(positions_BT: Tensor) -> Tensor:
    """[B, T] row place where each token's document starts."""
    places_T = torch.arange(positions_BT.shape[1], device=positions_BT.device)
    return places_T - positions_BT


def first_entries(positions_BT: Tensor, ratio: int) -> Tensor:
    """[B, T] number of the first compressed entry of each token's document."""
    return document_starts(positions_BT) // ratio


def num_visible_entries(positions_BT: Tensor, ratio: int) -> Tensor:
    """[B, T] how many entries of its document a token sees: those that end at or before it."""
    return (positions_BT + 1) // ratio


def group_places(positions_BT: Tensor, ratio: int) -> Tensor:
    """[B, C, R] int64 row places of the tokens of each entry.

    A number that no group takes gets some tokens of the row; nobody sees its entry.
    """
    num_entries = positions_BT.shape[1] // ratio
    num_places = num_entries * ratio
    if num_entries == 0:
        return positions_BT.new_zeros(positions_BT.shape[0], 0, ratio)
    steps_R = torch.arange(ratio, device=positions_BT.device)
    entries_C1 = torch.arange(num_entries, device=positions_BT.device).unsqueeze(-1) * ratio
    if ratio == 1:
        return entries_C1.expand(positions_BT.shape[0], -1, -1)
    # A group starts at place t if its position is a multiple of the ratio and its document goes on
    # for `ratio` tokens. Of the `ratio` places that share a number at most one is such a start.
    last_BT = functional.pad(positions_BT[:, ratio - 1 :], (0, ratio - 1), value=-1)
    is_start_BT = (positions_BT % ratio == 0) & (last_BT == positions_BT + ratio - 1)
    offset_BC = is_start_BT[:, :num_places].view(-1, num_entries, ratio).int().argmax(-1)
    first_BC1 = entries_C1 + offset_BC.unsqueeze(-1)
    places_BCR: Tensor = first_BC1 + steps_R
    return places_BCR.clamp_max(positions_BT.shape[1] - 1)


def window_slots(positions_BT: Tensor, window: int) -> Tensor:
    """[B, T, W] int64 row places of the document's last `window` tokens, oldest first; -1: none."""
    num_tokens = positions_BT.shape[1]
    back_W = torch.arange(window - 1, -1, -1, device=positions_BT.device)
    places_T1 = torch.arange(num_tokens, device=positions_BT.device).unsqueeze(-1)
    return torch.where(back_W <= positions_BT.unsqueeze(-1), places_T1 - back_W, -1)


def take_rows(x_BND: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, ...]] -> [B, ..., D]; rows may be taken many times.

    As an embedding lookup, since the gradient of that is summed in a fixed order on every device.
    """
    batch, num_rows, width = x_BND.shape
    rows = torch.arange(batch, device=index.device).view(-1, *[1] * (index.dim() - 1)) * num_rows
    return functional.embedding(index + rows, x_BND.reshape(batch * num_rows, width))

"""The indexer of CSA2: which compressed entries each query attends to.

Nothing here has a gradient: the choice is not differentiable, so the indexer's weights stay as they
are (the V4.1 report gives no loss for them). Entries are numbered within the query's document ("local") until
the end, so a document is treated alike wherever it lies in a row.

Shape letters: B sequences, T queries, H indexer heads, I indexer head width, C compressed entries,
L local entries (as many as C), Q query bottleneck, D model width.
Source: DeepSeek-V4.1 report, section 2.2.2 (CSA2, hierarchical candidates).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.dims import ModelDims, num_candidate_blocks
from ppruntime.models.documents import first_entries, num_visible_entries
from ppruntime.models.linear import Linear
from ppruntime.models.norm import RMSNorm
from ppruntime.models.precision import widened
from ppruntime.models.quantize import CacheFormat, through_cache
from ppruntime.models.rope import Rotation, rotate
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
    return (widened(weights_BTH).unsqueeze(2) @ products_BTHC.relu()).squeeze(2)


def to_local(scores_BTC: Tensor, first_BT: Tensor, num_visible_BT: Tensor) -> Tensor:
    """Scores [B, T, L] of the query's own document, from its first entry on; -inf if not visible."""
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
    best_BTN = padded.unflatten(-1, (-1, block_size)).amax(-1)
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
    picks = top_k(scores_BTL, min(k, num_entries))
    is_hidden = scores_BTL.gather(-1, picks) == -torch.inf
    ascending = picks.masked_fill(is_hidden, num_entries).sort(-1).values
    ascending = ascending.masked_fill(ascending == num_entries, -1)
    return functional.pad(ascending, (0, k - ascending.shape[-1]), value=-1)


class Indexer(nn.Module):
    """Scores compressed entries and selects the best. A Full layer makes the index keys as well."""

    def __init__(
        self,
        dims: ModelDims,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims = dims
        self.finds_candidates = layer == dims.candidate_source
        num_heads, width = dims.index_heads, dims.index_head_dim
        self.query = Linear(dims.q_lora_rank, num_heads * width, device=device, dtype=dtype)
        self.head_weights = Linear(dims.hidden_size, num_heads, device=device, dtype=dtype)
        if layer in dims.kv_sources:
            self.key = Linear(dims.head_dim, width, device=device, dtype=dtype)
            self.key_norm = RMSNorm(width, dims.norm_eps, device=device, dtype=dtype)
        self.requires_grad_(False)

    @torch.no_grad()
    def make_keys(self, latent_BCK: Tensor, rotation: Rotation) -> Tensor:
        """[B, C, I] index keys from the compressed keys before their rotation."""
        keys_BCI = rotate(self.key_norm(self.key(latent_BCK)), rotation)
        return self._cached(keys_BCI)

    @torch.no_grad()
    def forward(
        self,
        x_BTD: Tensor,
        q_latent_BTQ: Tensor,
        rotation: Rotation,
        keys_BCI: Tensor,
        candidates: Tensor | None,
        *,
        positions_BT: Tensor,
        ratio: int,
    ) -> Selection:
        """Selects entries for every query. `candidates` (from the candidate source, if there is one
        before) restricts the choice; without blocks in it, it excludes nothing."""
        dims = self.dims
        q_BTHI = self.query(q_latent_BTQ).unflatten(-1, (dims.index_heads, dims.index_head_dim))
        q_BTHI = self._cached(rotate(q_BTHI, rotation))
        scale = (dims.index_head_dim * dims.index_heads) ** -0.5
        weights_BTH = self.head_weights(x_BTD) * scale
        first_BT = first_entries(positions_BT, ratio)
        num_visible_BT = num_visible_entries(positions_BT, ratio)
        block = max(1, _MAX_PRODUCTS // max(1, keys_BCI.shape[:2].numel() * dims.index_heads))
        parts: list[Selection] = []
        for start in range(0, x_BTD.shape[1], block):
            queries = slice(start, start + block)
            scores_BTC = index_scores(q_BTHI[:, queries], weights_BTH[:, queries], keys_BCI)
            parts.append(
                self._select(
                    scores_BTC,
                    first_BT[:, queries],
                    num_visible_BT[:, queries],
                    None if candidates is None else candidates[:, queries],
                )
            )
        entries_BTk = torch.cat([part.entries_BTk for part in parts], dim=1)
        if candidates is None and not self.finds_candidates:
            return Selection(entries_BTk, None)
        found = [part.candidates for part in parts if part.candidates is not None]
        return Selection(entries_BTk, torch.cat(found, dim=1))

    def _select(
        self,
        scores_BTC: Tensor,
        first_BT: Tensor,
        num_visible_BT: Tensor,
        candidates: Tensor | None,
    ) -> Selection:
        dims = self.dims
        num_entries = scores_BTC.shape[-1]
        if num_entries == 0:
            shape = (*scores_BTC.shape[:2], dims.index_topk)
            return Selection(first_BT.new_full(shape, -1), candidates)
        scores_BTL = to_local(scores_BTC, first_BT, num_visible_BT)
        if self.finds_candidates:
            candidates = self._candidates(scores_BTL, num_visible_BT)
        elif candidates is not None and candidates.shape[-1] > 0:
            scores_BTL = restrict(scores_BTL, candidates, dims.candidate_block_size)
        local_BTk = best_entries(scores_BTL, dims.index_topk)
        return Selection(
            torch.where(local_BTk >= 0, local_BTk + first_BT.unsqueeze(-1), -1), candidates
        )

    def _candidates(self, scores_BTL: Tensor, num_visible_BT: Tensor) -> Tensor:
        """The candidate mask; without blocks if it could not exclude any."""
        dims = self.dims
        if num_candidate_blocks(dims, scores_BTL.shape[-1]) == 0:
            return scores_BTL.new_zeros((*scores_BTL.shape[:2], 0), dtype=torch.bool)
        return candidate_blocks(
            scores_BTL, num_visible_BT, dims.candidate_block_size, dims.candidate_blocks
        )

    def _cached(self, x: Tensor) -> Tensor:
        return through_cache(x, CacheFormat.MXFP4) if self.dims.quantize_cache else x

"""V4's attention: every layer with compressed keys makes its own, so only the streams go on.

One softmax runs over a window of the layer's own keys and over compressed entries: those that the
layer's indexer picks (CSA), all visible ones (HCA), or none (SWA).

Shape letters: B rows, T tokens, D model width, Q query bottleneck, H heads, K head width = key
width, C compressed entries, W slots, k picked entries, G groups of heads, I width of an indexer
head.
Source: DeepSeek-V4 report, section 2.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppruntime.models.attention import AttentionBase
from ppruntime.models.attention_kernels import UsesKernels
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.compressor_v4 import CompressorV4
from ppruntime.models.dims import ModelDims, Role
from ppruntime.models.documents import first_entries, num_visible_entries, window_slots
from ppruntime.models.index_loss import Attended, Scoring
from ppruntime.models.indexer import gradients_to
from ppruntime.models.linear import Linear
from ppruntime.models.norm import inverse_rms
from ppruntime.models.precision import widened
from ppruntime.models.rope import Rope, Rotation


def visible_entries(positions_BT: Tensor, ratio: int) -> Tensor:
    """[B, T, C] int64 numbers of all entries that a query sees, ascending; -1 fills up the end."""
    local_C = torch.arange(positions_BT.shape[1] // ratio, device=positions_BT.device)
    is_visible_BTC = local_C < num_visible_entries(positions_BT, ratio).unsqueeze(-1)
    first_BT1 = first_entries(positions_BT, ratio).unsqueeze(-1)
    return torch.where(is_visible_BTC, first_BT1 + local_C, -1)


class IndexerV4(UsesKernels):
    """Scores the layer's compressed entries and picks the best for each query. Learns as V4.1's
    does (indexer.py), or not at all.

    The score is sum_h w_h relu(q_h . k), with keys from a narrower compressor of its own over the
    same groups of tokens. The released code turns q and k by one orthogonal (Hadamard) matrix
    before it quantises them; their products are the same without.
    """

    def __init__(
        self,
        dims: ModelDims,
        ratio: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.ratio = dims, ratio
        num_heads, width = dims.index_heads, dims.index_head_dim
        self.query = Linear(dims.q_lora_rank, num_heads * width, device=device, dtype=dtype)
        self.head_weights = Linear(dims.hidden_size, num_heads, device=device, dtype=dtype)
        self.compressor = CompressorV4(
            dims, width, ratio, overlaps=True, device=device, dtype=dtype
        )
        self.requires_grad_(dims.indexer_learns)

    def scoring(
        self,
        x_BTD: Tensor,
        q_latent_BTQ: Tensor,
        rotation: Rotation,
        *,
        positions_BT: Tensor,
        rope: Rope,
    ) -> Scoring:
        """What the queries' scores are made of."""
        dims = self.dims
        with gradients_to(self):
            x_BTD = x_BTD.detach()
            keys_BCI = self.compressor(x_BTD, positions_BT, rope)
            q_BTHI = self.kernels.project_rotated(
                self.query, q_latent_BTQ.detach(), rotation, dims.index_heads
            )
            scale = (dims.index_head_dim * dims.index_heads) ** -0.5
            return Scoring(q_BTHI, self.head_weights(x_BTD) * scale, keys_BCI)

    @torch.no_grad()
    def forward(self, scoring: Scoring, positions_BT: Tensor) -> Tensor:
        """[B, T, index_topk] int64 numbers of the chosen entries, ascending, then -1."""
        selection = self.kernels.select(self.dims, *scoring, positions_BT, self.ratio)
        return selection.entries_BTk


class AttentionV4(AttentionBase):
    """One layer's attention. Reads and makes nothing of the carry: keys and picks stay in here."""

    def __init__(
        self,
        dims: ModelDims,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dims, layer, device=device, dtype=dtype)
        if self.role is not Role.SWA:
            self.compressor = CompressorV4(
                dims,
                dims.head_dim,
                self.ratio,
                overlaps=self.role is Role.CSA,
                device=device,
                dtype=dtype,
            )
        if self.role is Role.CSA:
            self.indexer = IndexerV4(dims, self.ratio, device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor, carry: Carry, batch: MicroBatch) -> tuple[Tensor, Carry]:
        """The sublayer's output [B, T, D], and the carry, but for the indexer's loss as it came."""
        positions_BT = batch.positions
        rotation = self.rope(positions_BT)
        q_latent_BTQ = self.q_norm(self.q_a(x_BTD))
        q_BTHK = self.kernels.rotate(self._query(q_latent_BTQ), rotation)
        window_BTK = self.window_keys(x_BTD, rotation)
        keys_BNK, slots_BTW = window_BTK, window_slots(positions_BT, self.dims.window)
        scoring = None
        if self.role is not Role.SWA:
            entries_BCK = self.compressor(x_BTD, positions_BT, self.rope)
            if self.role is Role.HCA:
                picked_BTk = visible_entries(positions_BT, self.ratio)
            else:
                scoring = self.indexer.scoring(
                    x_BTD, q_latent_BTQ, rotation, positions_BT=positions_BT, rope=self.rope
                )
                picked_BTk = self.indexer(scoring, positions_BT)
            # Compressed entries follow the row's own T keys in the list of keys.
            picked_BTk = torch.where(picked_BTk >= 0, picked_BTk + x_BTD.shape[1], -1)
            keys_BNK = torch.cat((window_BTK, entries_BCK), dim=1)
            slots_BTW = torch.cat((slots_BTW, picked_BTk), dim=-1)
        slots_BTW = slots_BTW.int()
        if scoring is not None and self.dims.indexer_learns and torch.is_grad_enabled():
            carry = self.taught(carry, scoring, Attended(q_BTHK, keys_BNK, slots_BTW, self.sink))
        o_BTHK = self.kernels.attend(q_BTHK, keys_BNK, slots_BTW, self.sink, rotation)
        return self.output(o_BTHK), carry

    def _query(self, q_latent_BTQ: Tensor) -> Tensor:
        """Heads before rotation, each divided by its own rms (no weight)."""
        heads, width = self.dims.num_heads, self.dims.head_dim
        q_BTHK: Tensor = self.q_b(q_latent_BTQ).unflatten(-1, (heads, width))
        normed_BTHK = widened(q_BTHK) * inverse_rms(q_BTHK, self.dims.norm_eps)
        return normed_BTHK.to(q_BTHK.dtype)

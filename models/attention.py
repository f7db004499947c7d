"""V4.1's attention, CSA2: a window of own keys plus a few compressed entries shared across layers.

A Full layer compresses the keys and selects entries; Reindex layers select anew among the same
keys; Reuse layers take both as they are. Layers with ratio 0 have their window only.

Shape letters: B sequences, T tokens, D model width, Q query bottleneck, H heads, K head width = key
width, C compressed entries, R tokens per entry, W slots, G groups of heads.
Source: DeepSeek-V4.1 report, section 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppruntime.models.attention_kernels import UsesKernels
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import ModelDims, Role, attention_role
from ppruntime.models.documents import group_places, take_rows, window_slots
from ppruntime.models.index_loss import Attended, Scoring, index_loss
from ppruntime.models.indexer import Indexer
from ppruntime.models.linear import GroupedLinear, Linear
from ppruntime.models.norm import RMSNorm
from ppruntime.models.precision import holder_dtype
from ppruntime.models.quantize import CacheFormat, through_cache
from ppruntime.models.rope import Rope, Rotation


class Compressor(UsesKernels):
    """Tokens -> compressed entries, before rotation.

    Ratio 1 is a projection. Above, the tokens of a group are averaged per channel with softmax
    weights, in fp32 and with fp32 parameters.
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
        self.ratio = ratio
        wide = holder_dtype(dtype) if ratio > 1 else dtype
        self.value = Linear(dims.hidden_size, dims.head_dim, device=device, dtype=wide)
        if ratio > 1:
            self.gate = Linear(dims.hidden_size, dims.head_dim, device=device, dtype=wide)
        self.norm = RMSNorm(dims.head_dim, dims.norm_eps, device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor, places_BCR: Tensor) -> Tensor:
        """[B, C, K]; entry c is made of the tokens at places_BCR[:, c]."""
        if self.ratio == 1:
            latent_BCK: Tensor = self.norm(self.value(x_BTD))
            return latent_BCK
        values_BTK, gates_BTK = self.kernels.wide_products((self.value, self.gate), x_BTD)
        values_BCRK = take_rows(values_BTK, places_BCR)
        weights_BCRK = take_rows(gates_BTK, places_BCR).softmax(2)
        pooled_BCK = (weights_BCRK * values_BCRK).sum(2).to(x_BTD.dtype)
        normed_BCK: Tensor = self.norm(pooled_BCK)
        return normed_BCK


class AttentionBase(UsesKernels):
    """What all attentions have: query and key projections, sink, grouped output, rotation."""

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
        self.role = attention_role(dims, layer)
        self.ratio = dims.compress_ratios[layer]
        hidden, heads, width = dims.hidden_size, dims.num_heads, dims.head_dim
        self.q_a = Linear(hidden, dims.q_lora_rank, device=device, dtype=dtype)
        self.q_norm = RMSNorm(dims.q_lora_rank, dims.norm_eps, device=device, dtype=dtype)
        self.q_b = Linear(dims.q_lora_rank, heads * width, device=device, dtype=dtype)
        self.kv = Linear(hidden, width, device=device, dtype=dtype)
        self.kv_norm = RMSNorm(width, dims.norm_eps, device=device, dtype=dtype)
        self.sink = nn.Parameter(torch.empty(heads, device=device, dtype=holder_dtype(dtype)))
        per_group = heads // dims.o_groups * width
        self.o_a = GroupedLinear(
            dims.o_groups, per_group, dims.o_lora_rank, device=device, dtype=dtype
        )
        self.o_b = Linear(dims.o_groups * dims.o_lora_rank, hidden, device=device, dtype=dtype)
        self.rope = Rope(dims, compressed=self.ratio > 0, device=device)

    def window_keys(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        """[B, T, K] one key, which is its own value, for every token."""
        return self.kernels.rotate(self.kv_norm(self.kv(x_BTD)), rotation)

    def taught(self, carry: Carry, scoring: Scoring, attended: Attended) -> Carry:
        """The carry with this layer's loss of the indexer, weighted, in its sum."""
        loss = index_loss(scoring, attended, self.dims.index_topk) * self.dims.indexer_loss_weight
        if carry.index_loss is not None:
            loss = carry.index_loss + loss
        return carry.changed(index_loss=loss)

    def output(self, o_BTHK: Tensor) -> Tensor:
        """[B, T, D] by two projections; the first keeps groups of heads apart."""
        o_BTGX = o_BTHK.reshape(*o_BTHK.shape[:2], self.dims.o_groups, -1)
        y_BTD: Tensor = self.o_b(self.kernels.grouped(self.o_a, o_BTGX))
        return y_BTD


class Attention(AttentionBase):
    """One layer's attention. What layers share comes in and goes out by the carry."""

    def __init__(
        self,
        dims: ModelDims,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dims, layer, device=device, dtype=dtype)
        if self.role is Role.FULL:
            self.compressor = Compressor(dims, self.ratio, device=device, dtype=dtype)
        if self.role in (Role.FULL, Role.REINDEX):
            self.indexer = Indexer(dims, layer, device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor, carry: Carry, batch: MicroBatch) -> tuple[Tensor, Carry]:
        """The sublayer's output [B, T, D], and the carry with what this layer made anew.

        `carry.kv` is read by one operation, so that its gradient is a sum with one term per layer.
        """
        rotation = self.rope(batch.positions)
        q_latent_BTQ = self.q_norm(self.q_a(x_BTD))
        q_BTHK = self.kernels.project_rotated(self.q_b, q_latent_BTQ, rotation, self.dims.num_heads)
        window_BTK = self._cached(self.window_keys(x_BTD, rotation), CacheFormat.FP8)
        scoring = None
        if self.role is Role.SWA:
            keys_BNK, slots_BTW = window_BTK, window_slots(batch.positions, self.dims.window)
        else:
            carry, scoring = self._share(x_BTD, q_latent_BTQ, rotation, carry, batch)
            assert carry.kv is not None, "a layer with compressed keys has none in its carry"
            assert carry.slots is not None, "a layer with compressed keys has no slot list"
            keys_BNK, slots_BTW = torch.cat((window_BTK, carry.kv), dim=1), carry.slots
        if scoring is not None and self.dims.indexer_learns and torch.is_grad_enabled():
            carry = self.taught(carry, scoring, Attended(q_BTHK, keys_BNK, slots_BTW, self.sink))
        o_BTHK = self.kernels.attend(q_BTHK, keys_BNK, slots_BTW, self.sink, rotation)
        return self.output(o_BTHK), carry

    def _share(
        self,
        x_BTD: Tensor,
        q_latent_BTQ: Tensor,
        rotation: Rotation,
        carry: Carry,
        batch: MicroBatch,
    ) -> tuple[Carry, Scoring | None]:
        """The carry after this layer's part in making shared keys and selections, and what it
        scored entries with if it did."""
        if self.role is Role.REUSE:
            return carry, None
        if self.role is Role.FULL:
            carry = self._compress(x_BTD, carry, batch)
        keys_BCI = carry.trained_index_keys if self.dims.indexer_learns else carry.index_keys
        assert keys_BCI is not None, "an index source has no index keys in its carry"
        scoring = self.indexer.scoring(x_BTD, q_latent_BTQ, rotation, keys_BCI)
        selection = self.indexer(scoring, batch.positions, carry.candidates)
        # Compressed entries follow the row's own T keys in the list of keys.
        entries_BTk = selection.entries_BTk
        compressed_BTk = torch.where(entries_BTk >= 0, entries_BTk + x_BTD.shape[1], -1)
        window_BTW = window_slots(batch.positions, self.dims.window)
        slots_BTW = torch.cat((window_BTW, compressed_BTk), dim=-1).int()
        return carry.changed(slots=slots_BTW, candidates=selection.candidates), scoring

    def _compress(self, x_BTD: Tensor, carry: Carry, batch: MicroBatch) -> Carry:
        """The carry with new compressed keys and index keys, to which no old candidates apply."""
        places_BCR = group_places(batch.positions, self.ratio)
        latent_BCK = self.compressor(x_BTD, places_BCR)
        first_positions_BC = batch.positions.gather(1, places_BCR[..., 0])
        rotation = self.rope(first_positions_BC)
        kv_BCK = self._cached(self.kernels.rotate(latent_BCK, rotation), CacheFormat.NVFP4)
        index_keys = self.indexer.make_keys(latent_BCK, rotation)
        carry = carry.changed(kv=kv_BCK, candidates=None)
        if self.dims.indexer_learns:
            return carry.changed(trained_index_keys=index_keys)
        return carry.changed(index_keys=index_keys)

    def _cached(self, x: Tensor, cache_format: CacheFormat) -> Tensor:
        return through_cache(x, cache_format) if self.dims.quantize_cache else x

"""The indexer of CSA2: scores compressed entries and selects those that each query attends to.

The choice is not differentiable, and the V4.1 report gives no loss for the indexer: its weights
stay as they are, unless `dims.indexer_loss_weight` lets them learn (index_loss.py). Then gradients
end here, at what comes in.

Shape letters: B sequences, T queries, I indexer head width, C compressed entries, K key width, Q
query bottleneck, D model width.
Source: DeepSeek-V4.1 report, section 2.2.2 (CSA2, hierarchical candidates).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ppruntime.models.attention_kernels import UsesKernels
from ppruntime.models.dims import ModelDims
from ppruntime.models.index_loss import Scoring
from ppruntime.models.linear import Linear
from ppruntime.models.norm import RMSNorm
from ppruntime.models.quantize import CacheFormat, through_cache
from ppruntime.models.rope import Rotation
from ppruntime.models.selection import Selection


class Indexer(UsesKernels):
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
        self.ratio = dims.compress_ratios[layer]
        self.finds_candidates = layer == dims.candidate_source
        num_heads, width = dims.index_heads, dims.index_head_dim
        self.query = Linear(dims.q_lora_rank, num_heads * width, device=device, dtype=dtype)
        self.head_weights = Linear(dims.hidden_size, num_heads, device=device, dtype=dtype)
        if layer in dims.kv_sources:
            self.key = Linear(dims.head_dim, width, device=device, dtype=dtype)
            self.key_norm = RMSNorm(width, dims.norm_eps, device=device, dtype=dtype)
        self.requires_grad_(dims.indexer_learns)

    def make_keys(self, latent_BCK: Tensor, rotation: Rotation) -> Tensor:
        """[B, C, I] index keys from the compressed keys before their rotation."""
        with gradients_to(self):
            latent_BCK = latent_BCK.detach()
            keys_BCI = self.kernels.rotate(self.key_norm(self.key(latent_BCK)), rotation)
            return self._cached(keys_BCI)

    def scoring(
        self, x_BTD: Tensor, q_latent_BTQ: Tensor, rotation: Rotation, keys_BCI: Tensor
    ) -> Scoring:
        """What the queries' scores are made of."""
        dims = self.dims
        with gradients_to(self):
            q_BTHI = self.kernels.project_rotated(
                self.query, q_latent_BTQ.detach(), rotation, dims.index_heads
            )
            scale = (dims.index_head_dim * dims.index_heads) ** -0.5
            weights_BTH = self.head_weights(x_BTD.detach()) * scale
            return Scoring(self._cached(q_BTHI), weights_BTH, keys_BCI)

    @torch.no_grad()
    def forward(
        self, scoring: Scoring, positions_BT: Tensor, candidates: Tensor | None
    ) -> Selection:
        """Selects entries for every query, within the `candidates` of an earlier layer if given."""
        return self.kernels.select(
            self.dims,
            *scoring,
            positions_BT,
            self.ratio,
            finds_candidates=self.finds_candidates,
            candidates=candidates,
        )

    def _cached(self, x: Tensor) -> Tensor:
        return through_cache(x, CacheFormat.MXFP4) if self.dims.quantize_cache else x


def gradients_to(indexer: nn.Module) -> AbstractContextManager[None]:
    """Inside, gradients are noted if they are anyway and the indexer learns."""
    learns = any(parameter.requires_grad for parameter in indexer.parameters())
    found: AbstractContextManager[None] = torch.set_grad_enabled(learns and torch.is_grad_enabled())
    return found

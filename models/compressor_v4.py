"""V4's compressed keys: groups of tokens pooled per channel by a learned softmax.

Shape letters: B rows, T tokens, D model width, C entries, R pooled slots, K width of an entry.
Source: DeepSeek-V4 report, section 2.3.1 (CSA, overlapping groups) and 2.3.2 (HCA).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppruntime.models.attention_kernels import UsesKernels
from ppruntime.models.dims import ModelDims
from ppruntime.models.documents import group_places, take_rows
from ppruntime.models.linear import Linear
from ppruntime.models.norm import RMSNorm
from ppruntime.models.precision import holder_dtype
from ppruntime.models.rope import Rope


class CompressorV4(UsesKernels):
    """Pools each whole group of `ratio` tokens of a document into one key.

    With `overlaps` (CSA) a token has two sets of channels: the second goes to its own group's
    entry, the first to the next group's, so an entry pools 2 x ratio slots. A document's first
    entry has no group before it and pools `ratio` slots. Projections, softmax and sum are fp32.
    """

    def __init__(
        self,
        dims: ModelDims,
        width: int,
        ratio: int,
        *,
        overlaps: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ratio = ratio
        self.overlaps = overlaps
        channels = 2 * width if overlaps else width
        fp32 = holder_dtype(dtype)
        self.value = Linear(dims.hidden_size, channels, device=device, dtype=fp32)
        self.gate = Linear(dims.hidden_size, channels, device=device, dtype=fp32)
        self.position_bias = nn.Parameter(torch.empty(ratio, channels, device=device, dtype=fp32))
        """Added to the gates, by place within the group."""
        self.norm = RMSNorm(width, dims.norm_eps, device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, rope: Rope) -> Tensor:
        """entries_BCK, C = T // ratio, numbered as in `documents`, rotated to their first token's
        position. Numbers that no group takes hold something finite that nobody may see."""
        if positions_BT.shape[1] < self.ratio:  # no group fits into the row
            return x_BTD.new_empty(x_BTD.shape[0], 0, self.norm.weight.shape[0])
        places_BCR = group_places(positions_BT, self.ratio)
        first_BC = positions_BT.gather(1, places_BCR[..., 0])
        values, gates = self.kernels.wide_products((self.value, self.gate), x_BTD)
        if self.overlaps:
            values_BCRK, gates_BCRK = self._overlapping(values, gates, places_BCR, first_BC)
        else:
            values_BCRK = take_rows(values, places_BCR)
            gates_BCRK = take_rows(gates, places_BCR) + self.position_bias
        pooled_BCK = (gates_BCRK.softmax(-2) * values_BCRK).sum(-2)
        latent_BCK = self.norm(pooled_BCK.to(x_BTD.dtype))
        return self.kernels.rotate(latent_BCK, rope(first_BC))

    def _overlapping(
        self, values: Tensor, gates: Tensor, places_BCR: Tensor, first_BC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values and gates of the 2 x ratio slots: the group before with its first channels, then
        the entry's own with its second."""
        before_BCR = (places_BCR - self.ratio).clamp_min(0)
        value_before, value_own = values.chunk(2, dim=-1)
        gate_before, gate_own = gates.chunk(2, dim=-1)
        bias_before, bias_own = self.position_bias.chunk(2, dim=-1)
        gates_before = take_rows(gate_before, before_BCR) + bias_before
        is_document_start = (first_BC < self.ratio)[..., None, None]
        gates_before = gates_before.masked_fill(is_document_start, -torch.inf)
        gates_own = take_rows(gate_own, places_BCR) + bias_own
        values_both = take_rows(value_before, before_BCR), take_rows(value_own, places_BCR)
        return torch.cat(values_both, dim=-2), torch.cat((gates_before, gates_own), dim=-2)

"""What V4's hyper-connections have that V4.1's lack: a head that collapses the streams by itself.

Between sublayers V4 uses `mhc.HyperConnection` too, but each sublayer collapses the streams with
its own weights (`units`), so nothing but the streams goes on to the next.

Shape letters: B sequences, T tokens, S streams, D model width.
Source: DeepSeek-V4 report, section 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppruntime.models.dims import ModelDims
from ppruntime.models.linear import Linear
from ppruntime.models.norm import inverse_rms
from ppruntime.models.precision import holder_dtype, widened


class HeadCollapse(nn.Module):
    """Streams [B, T, S, D] -> the weights [B, T, S] of their sum that the head reads. All fp32."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims = dims
        num_streams, wide = dims.num_streams, holder_dtype(dtype)
        width = num_streams * dims.hidden_size
        self.projection = Linear(width, num_streams, device=device, dtype=wide)
        self.base = nn.Parameter(torch.empty(num_streams, device=device, dtype=wide))
        self.scale = nn.Parameter(torch.empty(1, device=device, dtype=wide))

    def forward(self, streams_BTSD: Tensor) -> Tensor:
        flat = widened(streams_BTSD).flatten(-2)
        projected_BTS: Tensor = self.projection(flat) * inverse_rms(flat, self.dims.norm_eps)
        return (projected_BTS * self.scale + self.base).sigmoid() + self.dims.mhc_eps

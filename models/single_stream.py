"""One residual stream in place of mHC's: a sublayer reads it normed and adds its output, weighed.

gated       X' = X + C y with mHC's post gate for one stream, a number a token: C = 2 sigmoid(s m +
            b), m the stream's projection over its rms
layerscale  X' = X + c y with a learned gain a channel

Nothing but the stream goes on to the next sublayer: a quarter of mHC's bytes at a boundary. Another
function than mHC's, with other parameters: a checkpoint is of one residual type.

Shape letters: B sequences, T tokens, D model width; the stream is [B, T, 1, D].
Source: DeepSeek-V4.1 report, section 2.4.1, for the gate; Touvron et al. 2021 (CaiT), section 2.1,
for the gain.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppruntime.models.dims import ModelDims
from ppruntime.models.keep_inputs import keep_inputs
from ppruntime.models.linear import Linear
from ppruntime.models.mhc import project
from ppruntime.models.norm import RMSNorm
from ppruntime.models.precision import holder_dtype, widened


class PostGate(nn.Module):
    """Stream -> the factor of a sublayer's output, 0 to 2, for every token. All fp32."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = dims.norm_eps
        wide = holder_dtype(dtype)
        self.projection = Linear(dims.hidden_size, 1, device=device, dtype=wide)
        self.base = nn.Parameter(torch.empty(1, device=device, dtype=wide))
        self.scale = nn.Parameter(torch.empty(1, device=device, dtype=wide))

    def forward(self, stream_BT1D: Tensor) -> Tensor:
        """[B, T, 1]."""
        projected = project(stream_BT1D, self.projection, self.eps)
        return 2 * (self.base + projected * self.scale).sigmoid()


class LayerScale(nn.Module):
    """The factor of a sublayer's output, fp32, for every channel."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = dims.hidden_size
        self.scale = nn.Parameter(torch.empty(width, device=device, dtype=holder_dtype(dtype)))

    def forward(self, stream_BT1D: Tensor) -> Tensor:
        """[D], whatever the stream."""
        del stream_BT1D
        return self.scale


def read(
    connection: PostGate | LayerScale, norm: RMSNorm, stream_BT1D: Tensor, mix: None
) -> tuple[Tensor, Tensor, Tensor]:
    """(the sublayer's input [B, T, D], the stream, the factor [B, T, 1] or [D])."""
    assert mix is None, "one stream is not mixed"
    factor = connection(stream_BT1D)
    return norm(stream_BT1D.squeeze(-2)), stream_BT1D, factor


def write(stream_BT1D: Tensor, y_BTD: Tensor, factor: Tensor) -> Tensor:
    """The stream after the sublayer: X + factor y, in fp32, then cast."""
    return keep_inputs(_write, stream_BT1D, y_BTD, factor)


def _write(stream_BT1D: Tensor, y_BTD: Tensor, factor: Tensor) -> Tensor:
    added_BTD = factor * widened(y_BTD)
    return (widened(stream_BT1D) + added_BTD.unsqueeze(-2)).to(stream_BT1D.dtype)

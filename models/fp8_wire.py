"""Rows in FP8 on their way between ranks: E4M3, one power-of-two scale per 128 values.

With such scales what arrives is exact in bf16, and rounding it once more the same way gives the
same values: experts that compute in FP8 with power-of-two scales get from it what they would have
made of the row itself, bit for bit. Shape letters: R rows, D width, G = D/128.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

GROUP = 128
_SCALE_BYTES = 4

WireRows: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Rows [R, D] as they are, or FP8 data [R, D] with fp32 scales [R, G]."""


def to_wire(rows_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scales of rows."""
    from ppruntime.models.kernels import quantize, unavailable_reason  # needs Triton's package

    rows_RD = rows_RD.contiguous()
    if rows_RD.is_cuda and unavailable_reason("triton") is None:
        return quantize.quantize_rows(rows_RD, power_of_two=True)
    return quantize.quantize_rows_reference(rows_RD, power_of_two=True)


def from_wire(rows: WireRows, dtype: torch.dtype) -> Tensor:
    """[R, D] in `dtype`, bf16 or wider: exact."""
    if isinstance(rows, Tensor):
        return rows
    data_RD, scale_RG = rows
    groups = data_RD.to(dtype).view(*scale_RG.shape, GROUP) * scale_RG.to(dtype).unsqueeze(-1)
    return groups.view(data_RD.shape)


def packed(rows: tuple[Tensor, Tensor]) -> Tensor:
    """uint8 [R, D + 4 G]: one message for both."""
    return torch.cat([as_bytes(part) for part in rows], dim=1)


def unpacked(bytes_RB: Tensor) -> tuple[Tensor, Tensor]:
    """What `packed` was given."""
    width = bytes_RB.shape[1] * GROUP // (GROUP + _SCALE_BYTES)
    data, scale = bytes_RB[:, :width], bytes_RB[:, width:]
    return data.contiguous().view(torch.float8_e4m3fn), scale.contiguous().view(torch.float32)


def as_bytes(rows: Tensor) -> Tensor:
    """[R, C] as uint8 [R, C times the bytes of an entry]."""
    width = rows.shape[1] * rows.element_size()
    return rows.contiguous().flatten().view(torch.uint8).view(len(rows), width)


def misfit(width: int) -> str | None:
    """Why rows of that width cannot travel in FP8; None if they can."""
    return None if width % GROUP == 0 else f"{width} is no multiple of {GROUP}"

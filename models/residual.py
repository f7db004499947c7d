"""What stands around a sublayer on the residual streams, as one record of two functions.

A unit calls `read` before its sublayer and `write` after it, and does not ask who they are:
`REFERENCE` is plain PyTorch (mhc.py), models/kernels/mhc.py has the fused ones.

Shape letters: B sequences, T tokens, S streams, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppruntime.models.kernels import unavailable_reason
from ppruntime.models.mhc import Coefficients, HyperConnection, collapse, write_back
from ppruntime.models.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Residual:
    """How a sublayer reads the streams and writes to them."""

    read: Callable[
        [HyperConnection, RMSNorm, Tensor, Tensor | None], tuple[Tensor, Tensor, Coefficients]
    ]
    """(connection, norm, streams [B, T, S, D], mix [B, T, S] or None for the connection's own) ->
    (the sublayer's input [B, T, D], what `write` takes for the streams, coefficients)."""
    write: Callable[[Tensor, Tensor, Coefficients], Tensor]
    """(what `read` gave, the sublayer's output [B, T, D], coefficients) -> streams."""


def _read(
    connection: HyperConnection, norm: RMSNorm, streams_BTSD: Tensor, mix_BTS: Tensor | None
) -> tuple[Tensor, Tensor, Coefficients]:
    coefficients: Coefficients = connection(streams_BTSD)
    mix_BTS = coefficients.pre_BTS if mix_BTS is None else mix_BTS
    return norm(collapse(streams_BTSD, mix_BTS)), streams_BTSD, coefficients


REFERENCE = Residual(read=_read, write=write_back)


def residual(kernel: str, device: torch.device) -> Residual:
    """The functions that the config's `kernels.mhc` names: reference, triton or auto, which is
    triton on a GPU that can run it.

    Raises RuntimeError, with the reason, for triton where its kernels cannot run.
    """
    reason = unavailable_reason("triton")
    if kernel == "reference" or (kernel == "auto" and (reason or device.type != "cuda")):
        return REFERENCE
    if reason:
        raise RuntimeError(f'kernels.mhc = "{kernel}": {reason}; "reference" runs anywhere')
    from ppruntime.models.kernels import mhc

    return Residual(read=mhc.read, write=mhc.write)


class UsesResidual(nn.Module):
    """A unit that calls the functions of `residual`."""

    residual: Residual = REFERENCE

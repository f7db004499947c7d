"""What stands around a sublayer on the residual streams, as one record of two functions.

A unit calls `read` before its sublayer and `write` after it, and does not ask who they are:
`reference` gives plain PyTorch (mhc.py, single_stream.py), `residual` the fused ones of the folder
kernels as well.

Shape letters: B sequences, T tokens, S streams, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ppruntime.models import single_stream
from ppruntime.models.dims import ModelDims
from ppruntime.models.kernels import unavailable_reason
from ppruntime.models.mhc import Coefficients, HyperConnection, collapse, write_back
from ppruntime.models.norm import RMSNorm

Connection: TypeAlias = HyperConnection | single_stream.PostGate | single_stream.LayerScale
"""A sublayer's parameters on the residual: (streams) -> what `write` weighs with."""


@dataclass(frozen=True, slots=True)
class Residual:
    """How a sublayer reads the streams and writes to them."""

    read: Callable[..., tuple[Tensor, Tensor, Any]]
    """(connection, norm, streams [B, T, S, D], mix [B, T, S] or None for the connection's own) ->
    (the sublayer's input [B, T, D], what `write` takes for the streams, the weights of `write`:
    mHC's `Coefficients`, or one stream's factor)."""
    write: Callable[[Tensor, Tensor, Any], Tensor]
    """(what `read` gave, the sublayer's output [B, T, D], the weights) -> streams."""


def _read(
    connection: HyperConnection, norm: RMSNorm, streams_BTSD: Tensor, mix_BTS: Tensor | None
) -> tuple[Tensor, Tensor, Coefficients]:
    coefficients: Coefficients = connection(streams_BTSD)
    mix_BTS = coefficients.pre_BTS if mix_BTS is None else mix_BTS
    return norm(collapse(streams_BTSD, mix_BTS)), streams_BTSD, coefficients


REFERENCE = Residual(read=_read, write=write_back)
ONE_STREAM = Residual(read=single_stream.read, write=single_stream.write)


def reference(residual_type: str) -> Residual:
    """The readable functions of a model's `residual_type`."""
    return REFERENCE if residual_type == "mhc" else ONE_STREAM


def residual(kernel: str, device: torch.device, residual_type: str = "mhc") -> Residual:
    """The functions that the config's `kernels.mhc` names: reference, triton or auto, which is
    triton on a GPU that can run it.

    Raises RuntimeError, with the reason, for triton where its kernels cannot run.
    """
    reason = unavailable_reason("triton")
    if kernel == "reference" or (kernel == "auto" and (reason or device.type != "cuda")):
        return reference(residual_type)
    if reason:
        raise RuntimeError(f'kernels.mhc = "{kernel}": {reason}; "reference" runs anywhere')
    if residual_type == "mhc":
        from ppruntime.models.kernels import mhc

        return Residual(read=mhc.read, write=mhc.write)
    from ppruntime.models.kernels.single_stream import read, write

    return Residual(read=read, write=write)


class UsesResidual(nn.Module):
    """A unit that calls the functions of `residual`.

    Its connection is a child with the residual type's name, which its parameters' names begin with.
    """

    residual: Residual
    dims: ModelDims

    def add_connection(
        self,
        dims: ModelDims,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the connection, and takes the readable functions until it gets others."""
        self.residual = reference(dims.residual_type)
        connection = _CONNECTIONS[dims.residual_type](dims, device=device, dtype=dtype)
        self.add_module(dims.residual_type, connection)

    @property
    def connection(self) -> Connection:
        found: Connection = getattr(self, self.dims.residual_type)
        return found


_CONNECTIONS: dict[str, type[Connection]] = {
    "mhc": HyperConnection,
    "gated": single_stream.PostGate,
    "layerscale": single_stream.LayerScale,
}

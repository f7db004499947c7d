"""What Engram leaves to others: the operations for which there are kernels, as one record.

An Engram and its table's rows call the functions of their record and do not ask who they are.
`REFERENCE` is plain PyTorch, models/kernels/engram.py has those in Triton, and `engram_kernels`
chooses.

Shape letters: B sequences, T tokens, S streams, D model width, N row numbers of a micro-batch,
U different ones among them, R rows held, W row width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppruntime.models.kernels import unavailable_reason
from ppruntime.models.norm import inverse_rms
from ppruntime.models.precision import widened


@dataclass(frozen=True, slots=True)
class EngramKernels:
    """One function per operation. All have the reference's meaning and shapes."""

    gated: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
    """(streams [B, T, S, D], keys and value [B, T, (S + 1) D], query [S, D], key [S, D], masked
    [B, T] or None, norm eps) -> streams, each with its gate times the value added."""
    sum_rows: Callable[[Tensor, Tensor, int], Tensor]
    """(x [N, W], places [N], U) -> fp32 [U, W]: the sum of all x_n with places_n = u, in order."""
    gather: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    """(table [R, W], rows [N], dtype) -> [N, W] in that dtype, where `rows` are."""
    add: Callable[[Tensor, Tensor, Tensor], None]
    """(sums [R, W], rows [N], x [N, W]): adds x_n to sums[rows_n], in place; no row comes twice."""


def gated(
    streams_BTSD: Tensor,
    projected: Tensor,
    query_SD: Tensor,
    key_SD: Tensor,
    masked_BT: Tensor | None,
    eps: float,
) -> Tensor:
    """X_i + gate_i value, in fp32; masked tokens stay as they are."""
    num_streams, hidden = streams_BTSD.shape[-2:]
    keys, value_BTD = torch.split(projected, [num_streams * hidden, hidden], dim=-1)
    keys_BTSD = keys.view(streams_BTSD.shape)
    gate_BTS1 = _gate(streams_BTSD, keys_BTSD, query_SD, key_SD, eps)
    if masked_BT is not None:
        gate_BTS1 = gate_BTS1.masked_fill(masked_BT[..., None, None], 0)
    added = gate_BTS1 * widened(value_BTD).unsqueeze(-2)
    return (widened(streams_BTSD) + added).to(streams_BTSD.dtype)


def _gate(
    streams_BTSD: Tensor, keys_BTSD: Tensor, query_SD: Tensor, key_SD: Tensor, eps: float
) -> Tensor:
    """[B, T, S, 1]: sigmoid of the signed root of the normalised product of stream and key."""
    streams, keys = widened(streams_BTSD), widened(keys_BTSD)
    weights = widened(query_SD) * widened(key_SD)
    product = (streams * weights * keys).sum(-1, keepdim=True)
    scale = inverse_rms(streams, eps) * inverse_rms(keys, eps) * streams.shape[-1] ** -0.5
    match = product * scale
    return torch.copysign(match.abs().clamp_min(1e-6).sqrt(), match).sigmoid()


def sum_rows(x_NW: Tensor, places_N: Tensor, num_rows: int) -> Tensor:
    """Needs N W numbers beside the result; nothing waits for the device."""
    order_N = places_N.argsort(stable=True)
    counts_U = places_N.new_zeros(num_rows)
    counts_U.index_add_(0, places_N, torch.ones_like(places_N))
    return torch.segment_reduce(
        widened(x_NW)[order_N], "sum", lengths=counts_U, unsafe=True, initial=0
    )


def _gather(table: Tensor, rows_N: Tensor, dtype: torch.dtype) -> Tensor:
    return table.index_select(0, rows_N).to(dtype)


def _add(sums: Tensor, rows_N: Tensor, x_NW: Tensor) -> None:
    sums.index_add_(0, rows_N, x_NW)


REFERENCE = EngramKernels(gated=gated, sum_rows=sum_rows, gather=_gather, add=_add)


def engram_kernels(
    kernel: str, device: torch.device, *, tables_on_host: bool = False
) -> EngramKernels:
    """The functions that the config's `kernels.engram` names: reference, triton or auto, which is
    triton on a GPU that can run it. Tables on the host of a GPU need Triton in any case: nothing
    else reads single rows across the link without the host's help.

    Raises RuntimeError, with the reason, where Triton is needed and cannot run.
    """
    reason = unavailable_reason("triton")
    is_reached = tables_on_host and device.type == "cuda"
    wanted = kernel == "triton" or (kernel == "auto" and not reason and device.type == "cuda")
    if reason and is_reached:
        raise RuntimeError(f'engram.tables = "host": {reason}; "device" needs no kernels')
    if reason and wanted:
        raise RuntimeError(f'kernels.engram = "{kernel}": {reason}; "reference" runs anywhere')
    chosen = REFERENCE
    if wanted or is_reached:
        from ppruntime.models.kernels import engram

        if wanted:
            chosen = replace(chosen, gated=engram.gated, sum_rows=engram.sum_rows)
        if is_reached:
            chosen = replace(chosen, gather=engram.gather_from_host, add=engram.add_on_host)
    return chosen

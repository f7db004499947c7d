"""Engram in Triton: its gate, sums of row gradients, and a table in the host's memory.

`gated` goes once over streams, keys and value forward, twice backward. Bytes at N = 8,192 tokens of
V4.1 in bf16 (four streams 335.5 MB, keys and value 419.4 MB):

    forward     streams, keys and value, streams out                               1.090 GB
    backward    gradient and value; gradient, streams, keys, both gradients out    2.181 GB

(the second reading of the gradient is what sums over all channels of a token cost). The weights'
gradient is summed over 64 tokens in registers, then over these parts: repeatable. For the backward
stay streams, keys and value as they came, and three numbers a stream and token.

`sum_rows` adds the gradients of one row in one program, without a sorted copy of them; where a row
has more than 128, in a program for each 128 in the sorted order, and then these. `gather_from_host`
and `add_on_host` read and write single rows of host memory that is open to the device
(`engram_rows.open_to_device`): only these rows cross the link, and the host does not wait.

Numeric class: summation order; a gradient that the reference rounds twice is rounded once.
Shape letters: B sequences, T tokens, N = B T, S streams, D model width; of rows as in
models/engram_kernels.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppruntime.models.kernels import engram_kernels as kernels
from ppruntime.models.kernels.rounding import INTERPRETED

_ROW_BLOCK = 1024
"""Channels that one program works on at a time where a token is its own."""
_CHANNELS = 1024
"""Channels of a program in the backward."""
_TOKENS = 4 if INTERPRETED.value else 32
"""Tokens whose part of the weights' gradient is added up in registers."""
_CHUNK = 8 if INTERPRETED.value else 128
"""Gradients of one row that one program adds."""
_STAGES = 3
"""Tokens of which such a program has read the next when it works on one."""


def gated(
    streams_BTSD: Tensor,
    projected: Tensor,
    query_SD: Tensor,
    key_SD: Tensor,
    masked_BT: Tensor | None,
    eps: float,
) -> Tensor:
    """As `models.engram_kernels.gated`. Raises ValueError for dtypes, shapes or a number of streams
    that the kernels do not take, RuntimeError where they cannot run."""
    _check(streams_BTSD, projected, query_SD, key_SD)
    out: Tensor = _Gated.apply(  # type: ignore[no-untyped-call]
        streams_BTSD.flatten(0, 1),
        projected.flatten(0, 1),
        query_SD,
        key_SD,
        None if masked_BT is None else masked_BT.flatten(),
        eps,
    )
    return out.view(streams_BTSD.shape)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        projected: Tensor,
        query: Tensor,
        key: Tensor,
        masked: Tensor | None,
        eps: float,
    ) -> Tensor:
        out: Tensor
        out, stats = _gate(streams, projected, query, key, masked, eps)
        ctx.save_for_backward(streams, projected, query, key, masked, stats)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        streams, projected, query, key, masked, stats = ctx.saved_tensors
        dstreams, dprojected, dweight = _gate_backward(
            dout, streams, projected, query, key, masked, stats
        )
        dquery = (dweight * key).to(query.dtype)
        dkey = (dweight * query).to(key.dtype)
        return dstreams, dprojected, dquery, dkey, None, None


# Not `engram_...`: what is named so is kept through a recompute, see `save_points`.
@torch.library.custom_op("ppruntime::gate_engram", mutates_args=())
def _gate(
    streams: Tensor,
    projected: Tensor,
    query: Tensor,
    key: Tensor,
    masked: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(streams [N, S, D] with what the gates let in, stats [N, 3, S] fp32 for the backward)."""
    num_tokens, num_streams, width = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    stats = streams.new_empty(num_tokens, 3, num_streams, dtype=torch.float32)
    if num_tokens:
        kernels.gate_kernel[(num_tokens,)](
            streams.contiguous(), projected.contiguous(), query.contiguous(), key.contiguous(),
            _flags(masked), out, stats, eps, num_streams, width, _row_block(width), num_warps=4,
        )  # fmt: skip
    return out, stats


@_gate.register_fake
def _(
    streams: Tensor,
    projected: Tensor,
    query: Tensor,
    key: Tensor,
    masked: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_streams, _ = streams.shape
    stats = streams.new_empty(num_tokens, 3, num_streams, dtype=torch.float32)
    return torch.empty_like(streams, memory_format=torch.contiguous_format), stats


@torch.library.custom_op("ppruntime::gate_engram_backward", mutates_args=())
def _gate_backward(
    dout: Tensor,
    streams: Tensor,
    projected: Tensor,
    query: Tensor,
    key: Tensor,
    masked: Tensor | None,
    stats: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of streams, of keys and value, and of query times key, [S, D] fp32."""
    num_tokens, num_streams, width = streams.shape
    dstreams = torch.empty_like(streams, memory_format=torch.contiguous_format)
    dprojected = torch.empty_like(projected, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return dstreams, dprojected, stats.new_zeros(num_streams, width)
    dout, projected, flags = dout.contiguous(), projected.contiguous(), _flags(masked)
    factors = stats.new_empty(num_tokens, 4, num_streams)
    kernels.factors_kernel[(num_tokens,)](
        dout, projected, flags, stats, factors, num_streams, width, _row_block(width), num_warps=4
    )
    num_parts, block = -(-num_tokens // _TOKENS), min(_CHANNELS, _row_block(width))
    dweights = stats.new_empty(num_parts, num_streams, width)
    kernels.gate_backward_kernel[(num_parts, -(-width // block))](
        dout, streams.contiguous(), projected, query.contiguous(), key.contiguous(), factors,
        dstreams, dprojected, dweights, num_tokens, num_streams, width, _TOKENS, block, _STAGES,
        num_warps=4,
    )  # fmt: skip
    return dstreams, dprojected, dweights.sum(0)


@_gate_backward.register_fake
def _(
    dout: Tensor,
    streams: Tensor,
    projected: Tensor,
    query: Tensor,
    key: Tensor,
    masked: Tensor | None,
    stats: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(streams, memory_format=torch.contiguous_format),
        torch.empty_like(projected, memory_format=torch.contiguous_format),
        stats.new_empty(streams.shape[1:]),
    )


def sum_rows(x_NW: Tensor, places_N: Tensor, num_rows: int) -> Tensor:
    """As `models.engram_kernels.sum_rows`. Raises as `gated`."""
    _check_device("sum_rows", x_NW)
    if x_NW.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"engram: sum_rows takes bfloat16 or float32, got {x_NW.dtype}")
    # In 32 bits: half the passes of the sort. There are no more places than rows of x.
    sorted_N, order_N = places_N.to(torch.int32).sort(stable=True)
    every_U = torch.arange(num_rows, dtype=torch.int32, device=sorted_N.device)
    ends_U = torch.searchsorted(sorted_N, every_U, right=True, out_int32=True)
    sums: Tensor = _sum_rows(x_NW, sorted_N, order_N, ends_U)
    return sums


@torch.library.custom_op("ppruntime::sum_engram_rows", mutates_args=())
def _sum_rows(x_NW: Tensor, sorted_N: Tensor, order_N: Tensor, ends_U: Tensor) -> Tensor:
    """[U, W] fp32: sum u is over x[order[ends[u - 1]:ends[u]]]; `sorted_N` says which u that is."""
    num_rows, width = x_NW.shape
    sums_UW = x_NW.new_empty(len(ends_U), width, dtype=torch.float32)
    if not num_rows:
        return sums_UW.zero_()
    if sums_UW.numel():
        x_NW, num_chunks, block = x_NW.contiguous(), -(-num_rows // _CHUNK), _row_block(width)
        block = min(256, block)
        num_blocks = -(-width // block)
        partial = x_NW.new_empty(num_chunks, 2, width, dtype=torch.float32)
        kernels.sum_chunks_kernel[(num_chunks, num_blocks)](
            x_NW, sorted_N, order_N, ends_U, partial, num_rows, width, 8, _CHUNK, block,
            num_warps=1,
        )  # fmt: skip
        # A warp a row: most rows have one or two gradients, and wait for them alone.
        kernels.sum_rows_kernel[(len(ends_U), num_blocks)](
            x_NW, order_N, ends_U, partial, sums_UW, width, 4, _CHUNK, block, num_warps=1
        )
    return sums_UW


@_sum_rows.register_fake
def _(x_NW: Tensor, sorted_N: Tensor, order_N: Tensor, ends_U: Tensor) -> Tensor:
    return x_NW.new_empty(ends_U.shape[0], x_NW.shape[1], dtype=torch.float32)


def gather_from_host(table: Tensor, rows_N: Tensor, dtype: torch.dtype) -> Tensor:
    """As the reference's `gather`; `table`, fp32, lies on the host, rows and result on the
    device."""
    _check_device("gather_from_host", rows_N)
    width = table.shape[1]
    found_NW = rows_N.new_empty(len(rows_N), width, dtype=dtype)
    if found_NW.numel():
        block = min(256, _row_block(width))
        kernels.gather_kernel[(len(rows_N), -(-width // block))](
            table, rows_N, found_NW, width, block, num_warps=2
        )
    return found_NW


def add_on_host(sums: Tensor, rows_N: Tensor, x_NW: Tensor) -> None:
    """As the reference's `add`; `sums`, fp32, lies on the host, rows and x on the device."""
    _check_device("add_on_host", rows_N)
    width = sums.shape[1]
    if x_NW.numel():
        block = min(256, _row_block(width))
        kernels.add_kernel[(len(rows_N), -(-width // block))](
            sums, rows_N, x_NW.contiguous(), width, block, num_warps=2
        )


def _flags(masked: Tensor | None) -> Tensor | None:
    return None if masked is None else masked.contiguous().view(torch.uint8)


def _row_block(width: int) -> int:
    return min(_ROW_BLOCK, max(16, 1 << (width - 1).bit_length()))


def _check(streams_BTSD: Tensor, projected: Tensor, query_SD: Tensor, key_SD: Tensor) -> None:
    place = "engram"
    num_streams, width = streams_BTSD.shape[2:]
    if num_streams not in (1, 2, 4, 8):
        raise ValueError(
            f"{place}: {num_streams} streams; the kernels take 1, 2, 4 or 8, the reference any"
            " number"
        )
    shapes = (tuple(projected.shape), tuple(query_SD.shape), tuple(key_SD.shape))
    wanted = (*streams_BTSD.shape[:2], (num_streams + 1) * width)
    if shapes != (wanted, (num_streams, width), (num_streams, width)):
        raise ValueError(
            f"{place}: keys and value are {list(shapes[0])}, query {list(shapes[1])} and key"
            f" {list(shapes[2])}; streams {list(streams_BTSD.shape)} need {list(wanted)} and twice"
            f" {[num_streams, width]}"
        )
    dtypes = {t.dtype for t in (streams_BTSD, projected, query_SD, key_SD)}
    if not dtypes <= {torch.bfloat16, torch.float32} or streams_BTSD.dtype != projected.dtype:
        raise ValueError(
            f"{place}: streams are {streams_BTSD.dtype}, keys and value {projected.dtype}, query"
            f" {query_SD.dtype} and key {key_SD.dtype}; they have to be bfloat16 or float32, the"
            ' first two alike; kernels.engram = "reference" takes any'
        )
    _check_device("gated", streams_BTSD)


def _check_device(what: str, tensor: Tensor) -> None:
    if not tensor.is_cuda and not INTERPRETED.value and not tensor.is_meta:
        raise RuntimeError(
            f"engram: {what} needs a CUDA device, its operands are on {tensor.device}; use"
            ' kernels.engram = "reference", or set TRITON_INTERPRET=1 before the first import'
        )

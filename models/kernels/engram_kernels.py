"""Triton kernels of engram.py beside this file, which says what they compute.

Every kernel goes along the channels of a token; the gate's stays in one program, so that a token's
streams, keys and value come from the cache when they are read again.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, assignment"
# ruff: noqa: RUF005 (Triton adds tuples, but unpacks none)

from __future__ import annotations

import triton
import triton.language as tl

from ppruntime.models.kernels.rounding import to_bf16

SIZES = ("num_tokens",)
"""Arguments for whose values nothing is compiled anew."""


@triton.jit
def _cast(x, like_ptr):
    """fp32 to the type behind a pointer, to nearest."""
    return to_bf16(x) if like_ptr.dtype.element_ty == tl.bfloat16 else x


@triton.jit
def _gate_of(match):
    root = tl.sqrt(tl.maximum(tl.abs(match), 1e-6))
    return 1.0 / (1.0 + tl.exp(tl.where(match < 0, root, -root)))


@triton.jit
def gate_kernel(
    streams_ptr, projected_ptr, query_ptr, key_ptr, masked_ptr, out_ptr, stats_ptr, eps,
    S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a program. stats [N, 3, S]: match, 1 / rms of the stream, 1 / rms of the key."""
    token = tl.program_id(0).to(tl.int64)
    streams_ptr += token * (S * D)
    out_ptr += token * (S * D)
    projected_ptr += token * ((S + 1) * D)
    stats_ptr += token * (3 * S)
    places = tl.arange(0, BLOCK)
    for i in tl.static_range(S):
        xx = tl.zeros([BLOCK], tl.float32)
        kk = tl.zeros([BLOCK], tl.float32)
        xk = tl.zeros([BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            at = i * D + start + places
            inside = start + places < D
            x = tl.load(streams_ptr + at, mask=inside, other=0.0).to(tl.float32)
            k = tl.load(projected_ptr + at, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(query_ptr + at, mask=inside, other=0.0).to(tl.float32)
            weight *= tl.load(key_ptr + at, mask=inside, other=0.0).to(tl.float32)
            xx += x * x
            kk += k * k
            xk += x * weight * k
        inverse_x = tl.rsqrt(tl.sum(xx, 0) / D + eps)
        inverse_k = tl.rsqrt(tl.sum(kk, 0) / D + eps)
        match = tl.sum(xk, 0) * (inverse_x * inverse_k * D**-0.5)
        tl.store(stats_ptr + i, match)
        tl.store(stats_ptr + S + i, inverse_x)
        tl.store(stats_ptr + 2 * S + i, inverse_k)
        gate = _gate_of(match)
        if masked_ptr is not None:
            gate = tl.where(tl.load(masked_ptr + token) != 0, 0.0, gate)
        for start in range(0, D, BLOCK):
            inside = start + places < D
            at = i * D + start + places
            x = tl.load(streams_ptr + at, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(projected_ptr + S * D + start + places, mask=inside, other=0.0)
            out = _cast(x + gate * value.to(tl.float32), out_ptr)
            tl.store(out_ptr + at, out, mask=inside)


@triton.jit
def factors_kernel(
    dout_ptr, projected_ptr, masked_ptr, stats_ptr, factors_ptr,
    S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a program: the numbers that weigh its channels in the backward, [N, 4, S]: gate,
    d of the product, and what takes stream and key through their rms."""
    token = tl.program_id(0).to(tl.int64)
    dout_ptr += token * (S * D)
    projected_ptr += token * ((S + 1) * D) + S * D
    stats_ptr += token * (3 * S)
    factors_ptr += token * (4 * S)
    places = tl.arange(0, BLOCK)
    for i in tl.static_range(S):
        dots = tl.zeros([BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            inside = start + places < D
            dout = tl.load(dout_ptr + i * D + start + places, mask=inside, other=0.0)
            value = tl.load(projected_ptr + start + places, mask=inside, other=0.0)
            dots += dout.to(tl.float32) * value.to(tl.float32)
        match = tl.load(stats_ptr + i)
        inverse_x = tl.load(stats_ptr + S + i)
        inverse_k = tl.load(stats_ptr + 2 * S + i)
        gate = _gate_of(match)
        size = tl.abs(match)
        # Below the clamp the root does not move.
        slope = tl.where(size >= 1e-6, 0.5 / tl.sqrt(tl.maximum(size, 1e-6)), 0.0)
        dmatch = tl.sum(dots, 0) * gate * (1.0 - gate) * slope
        if masked_ptr is not None:
            is_masked = tl.load(masked_ptr + token) != 0
            gate = tl.where(is_masked, 0.0, gate)
            dmatch = tl.where(is_masked, 0.0, dmatch)
        tl.store(factors_ptr + i, gate)
        tl.store(factors_ptr + S + i, dmatch * (inverse_x * inverse_k * D**-0.5))
        tl.store(factors_ptr + 2 * S + i, dmatch * match * inverse_x * inverse_x / D)
        tl.store(factors_ptr + 3 * S + i, dmatch * match * inverse_k * inverse_k / D)


@triton.jit(do_not_specialize=SIZES)
def gate_backward_kernel(
    dout_ptr, streams_ptr, projected_ptr, query_ptr, key_ptr, factors_ptr,
    dstreams_ptr, dprojected_ptr, dweights_ptr, num_tokens,
    S: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens times BLOCK channels a program, tokens in order: gradients of streams, keys and
    value, and of the gates' weights the part [S, BLOCK] of these tokens."""
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < D
    dweights = ()
    for _i in tl.static_range(S):
        dweights = dweights + (tl.zeros([BLOCK], tl.float32),)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    # Stream by stream: one tile of all of them would be summed through shared memory.
    for token in tl.range(first, min(first + TOKENS, num_tokens), num_stages=STAGES):
        factors = factors_ptr + token * (4 * S)
        row = token * (S * D) + channels
        wide_row = token * ((S + 1) * D) + channels
        dvalue = tl.zeros([BLOCK], tl.float32)
        sums = ()
        for i in tl.static_range(S):
            gate, dproduct = tl.load(factors + i), tl.load(factors + S + i)
            through_x, through_k = tl.load(factors + 2 * S + i), tl.load(factors + 3 * S + i)
            weight = tl.load(query_ptr + i * D + channels, mask=inside, other=0.0).to(tl.float32)
            key = tl.load(key_ptr + i * D + channels, mask=inside, other=0.0).to(tl.float32)
            weight = weight * key * dproduct
            dout = tl.load(dout_ptr + row + i * D, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(streams_ptr + row + i * D, mask=inside, other=0.0).to(tl.float32)
            k = tl.load(projected_ptr + wide_row + i * D, mask=inside, other=0.0).to(tl.float32)
            dx = dout + weight * k - through_x * x
            tl.store(dstreams_ptr + row + i * D, _cast(dx, dstreams_ptr), mask=inside)
            dk = weight * x - through_k * k
            tl.store(dprojected_ptr + wide_row + i * D, _cast(dk, dprojected_ptr), mask=inside)
            dvalue += gate * dout
            sums = sums + (dweights[i] + dproduct * x * k,)
        dweights = sums
        tl.store(dprojected_ptr + wide_row + S * D, _cast(dvalue, dprojected_ptr), mask=inside)
    part = dweights_ptr + tl.program_id(0).to(tl.int64) * (S * D) + channels
    for i in tl.static_range(S):
        tl.store(part + i * D, dweights[i], mask=inside)


@triton.jit
def sum_chunks_kernel(
    x_ptr, sorted_ptr, order_ptr, ends_ptr, partial_ptr, N,
    W: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Parts of sums with more than CHUNK rows, of one chunk of the sorted rows a program: of the
    sum that the chunk begins in, and of the one that begins in it and goes on behind it."""
    chunk = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = chunk * CHUNK
    stop = tl.minimum(begin + CHUNK, N)
    first, last = tl.load(sorted_ptr + begin), tl.load(sorted_ptr + stop - 1)
    start, end = _span(ends_ptr, first)
    place = partial_ptr + chunk.to(tl.int64) * (2 * W) + channels
    if end - start > CHUNK:
        total = _sum(x_ptr, order_ptr, begin, tl.minimum(end, stop), channels, W, ROWS, BLOCK)
        tl.store(place, total, mask=channels < W)
    if last != first:
        start, end = _span(ends_ptr, last)
        if end - start > CHUNK:
            total = _sum(x_ptr, order_ptr, start, stop, channels, W, ROWS, BLOCK)
            tl.store(place + W, total, mask=channels < W)


@triton.jit
def sum_rows_kernel(
    x_ptr, order_ptr, ends_ptr, partial_ptr, sums_ptr,
    W: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sum a program: the rows of x that `order` lists from the end of the sum before, or, where
    these are many, their parts by chunk."""
    row = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = _span(ends_ptr, row)
    if end - start <= CHUNK:
        total = _sum(x_ptr, order_ptr, start, end, channels, W, ROWS, BLOCK)
    else:
        places = tl.arange(0, ROWS)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(start // CHUNK, tl.cdiv(end, CHUNK), ROWS):
            chunks = first + places
            # In the chunk that it begins in, unless that begins with it, it is the second sum.
            second = chunks * CHUNK < start
            mask = (chunks * CHUNK < end)[:, None] & (channels < W)[None, :]
            part = (2 * chunks + second.to(tl.int32)).to(tl.int64)
            x = tl.load(partial_ptr + part[:, None] * W + channels[None, :], mask=mask, other=0.0)
            total += tl.sum(x, 0)
    tl.store(sums_ptr + row.to(tl.int64) * W + channels, total, mask=channels < W)


@triton.jit
def _span(ends_ptr, row):
    """(where a sum's rows begin, where they end) in the sorted order."""
    return tl.load(ends_ptr + row - 1, mask=row > 0, other=0), tl.load(ends_ptr + row)


@triton.jit
def _sum(
    x_ptr, order_ptr, start, end, channels,
    W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, end, ROWS):
        inside = first + places < end
        n = tl.load(order_ptr + first + places, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & (channels < W)[None, :]
        x = tl.load(x_ptr + n[:, None] * W + channels[None, :], mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    return total


@triton.jit
def gather_kernel(table_ptr, rows_ptr, found_ptr, W: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < W
    row = tl.load(rows_ptr + n).to(tl.int64)
    x = tl.load(table_ptr + row * W + channels, mask=inside, other=0.0)
    tl.store(found_ptr + n * W + channels, _cast(x, found_ptr), mask=inside)


@triton.jit
def add_kernel(sums_ptr, rows_ptr, x_ptr, W: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < W
    place = sums_ptr + tl.load(rows_ptr + n).to(tl.int64) * W + channels
    x = tl.load(x_ptr + n * W + channels, mask=inside, other=0.0)
    tl.store(place, tl.load(place, mask=inside, other=0.0) + x, mask=inside)

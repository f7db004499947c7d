"""Triton kernels of single_stream.py beside this file, which says what they compute.

A program has one token, all channels at once, where a sum over channels is wanted, and some tokens
where a sum over tokens is: of that it writes its part.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from ppruntime.models.kernels.rounding import to_bf16

SIZES = ("num_tokens", "tokens")
"""Arguments for whose values nothing is compiled anew."""


@triton.jit
def _cast(x, like_ptr):
    """fp32 to the type behind a pointer, to nearest."""
    return to_bf16(x) if like_ptr.dtype.element_ty == tl.bfloat16 else x


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def read_kernel(
    stream_ptr, gain_ptr, weight_ptr, base_ptr, scale_ptr,
    x_ptr, inverse_ptr, projected_ptr, gate_ptr, eps,
    D: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """One token: 1 / rms, the normed channels and, where there is a gate's weight, the gate."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, D_PADDED)
    mask = channels < D
    stream = tl.load(stream_ptr + token * D + channels, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(stream * stream, 0) / D + eps)
    tl.store(inverse_ptr + token, inverse)
    gain = tl.load(gain_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + token * D + channels, _cast(stream * inverse * gain, x_ptr), mask=mask)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + channels, mask=mask, other=0.0)
        projected = tl.sum(stream * weight, 0)
        tl.store(projected_ptr + token, projected)
        raw = tl.load(base_ptr) + projected * inverse * tl.load(scale_ptr)
        tl.store(gate_ptr + token, 2.0 * _sigmoid(raw))


@triton.jit
def write_kernel(
    stream_ptr, y_ptr, factor_ptr, out_ptr,
    D: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Some channels of one token. The factor is the token's, or each channel's."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < D
    places = token * D + channels
    y = tl.load(y_ptr + places, mask=mask, other=0.0).to(tl.float32)
    stream = tl.load(stream_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if PER_TOKEN:
        out = stream + tl.load(factor_ptr + token) * y
    else:
        out = stream + tl.load(factor_ptr + channels, mask=mask, other=0.0) * y
    tl.store(out_ptr + places, _cast(out, out_ptr), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def write_backward_kernel(
    dout_ptr, y_ptr, factor_ptr, dy_ptr, dfactor_ptr, num_tokens, tokens,
    D: tl.constexpr, D_PADDED: tl.constexpr, PER_TOKEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tokens: the gradient of y, and of the factor each token's or the tokens' part of each
    channel's."""
    channels = tl.arange(0, D_PADDED)
    mask = channels < D
    first = tl.program_id(0).to(tl.int64) * tokens
    if not PER_TOKEN:
        factors = tl.load(factor_ptr + channels, mask=mask, other=0.0)
        dfactors = tl.zeros([D_PADDED], tl.float32)
    for token in tl.range(first, min(first + tokens, num_tokens), num_stages=STAGES):
        places = token * D + channels
        dout = tl.load(dout_ptr + places, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + places, mask=mask, other=0.0).to(tl.float32)
        if PER_TOKEN:
            tl.store(dfactor_ptr + token, tl.sum(dout * y, 0))
            dy = tl.load(factor_ptr + token) * dout
        else:
            dfactors += dout * y
            dy = factors * dout
        tl.store(dy_ptr + places, _cast(dy, dy_ptr), mask=mask)
    if not PER_TOKEN:
        tl.store(dfactor_ptr + tl.program_id(0).to(tl.int64) * D + channels, dfactors, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def read_backward_kernel(
    dx_ptr, dhandle_ptr, stream_ptr, gain_ptr, inverse_ptr,
    weight_ptr, base_ptr, scale_ptr, projected_ptr, dgate_ptr,
    dstream_ptr, dgains_ptr, dweights_ptr, draw_ptr, num_tokens, tokens,
    D: tl.constexpr, D_PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tokens: the gradient of the stream, all ways into one sum; the tokens' part of those of
    the norm's gain and the gate's weight; each token's of what its sigmoid got."""
    channels = tl.arange(0, D_PADDED)
    mask = channels < D
    gain = tl.load(gain_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    dgain = tl.zeros([D_PADDED], tl.float32)
    if weight_ptr is not None:
        dweight = tl.zeros([D_PADDED], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tokens
    for token in tl.range(first, min(first + tokens, num_tokens), num_stages=STAGES):
        places = token * D + channels
        inverse = tl.load(inverse_ptr + token)
        stream = tl.load(stream_ptr + places, mask=mask, other=0.0).to(tl.float32)
        dx = tl.load(dx_ptr + places, mask=mask, other=0.0).to(tl.float32)
        normed = stream * inverse
        dgain += dx * normed
        weighted = dx * gain
        dstream = inverse * (weighted - normed * (tl.sum(weighted * normed, 0) / D))
        if weight_ptr is not None:
            scale = tl.load(scale_ptr)
            through = tl.load(projected_ptr + token) * inverse
            sigmoid = _sigmoid(tl.load(base_ptr) + through * scale)
            draw = tl.load(dgate_ptr + token) * 2.0 * sigmoid * (1.0 - sigmoid)
            tl.store(draw_ptr + token, draw)
            dprojected = draw * scale * inverse
            dweight += dprojected * stream
            # Read for each token: held through the loop it would not fit beside the sums.
            weight = tl.load(weight_ptr + channels, mask=mask, other=0.0)
            # through = projected r: its gradient times itself is r times that of r.
            dstream += dprojected * weight - draw * scale * through * inverse / D * normed
        if dhandle_ptr is not None:
            dstream += tl.load(dhandle_ptr + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(dstream_ptr + places, _cast(dstream, dstream_ptr), mask=mask)
    part = tl.program_id(0).to(tl.int64) * D + channels
    tl.store(dgains_ptr + part, dgain, mask=mask)
    if weight_ptr is not None:
        tl.store(dweights_ptr + part, dweight, mask=mask)

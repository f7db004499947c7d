"""Triton kernels of mhc.py beside this file, which says what they compute.

Two shapes of work: blocks of tokens times blocks of channels where streams meet the projection's
weights on the tensor cores, and one token a program where each stream is only weighed and summed.

fp32 weights against bf16 streams: a weight is the sum of three bf16 numbers, a gradient of two, and
every product of two bf16 numbers is exact in fp32.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, assignment"
# ruff: noqa: RUF005 (Triton adds tuples, but unpacks none)

from __future__ import annotations

import triton
import triton.language as tl

from ppruntime.models.kernels.rounding import INTERPRETED, to_bf16

SIZES = ("num_tokens",)
"""Arguments for whose values nothing is compiled anew."""


@triton.jit
def _cast(x, like_ptr):
    """fp32 to the type behind a pointer, to nearest."""
    return to_bf16(x) if like_ptr.dtype.element_ty == tl.bfloat16 else x


@triton.jit
def _part(x):
    """The bf16 number next to x. The interpreter takes bf16 products for integers': wide there."""
    y = to_bf16(x)
    return y.to(tl.float32) if INTERPRETED else y


@triton.jit
def _times_fp32(x, weight_CK, acc):
    """acc + x [M, K] weight^T, exact but for fp32 sums; x is bf16 or fp32."""
    if x.dtype == tl.bfloat16:
        first = _part(weight_CK)
        rest = weight_CK - first.to(tl.float32)
        second = _part(rest)
        third = _part(rest - second.to(tl.float32))
        if INTERPRETED:
            x = x.to(tl.float32)
        acc = tl.dot(x, tl.trans(third), acc, input_precision="ieee")
        acc = tl.dot(x, tl.trans(second), acc, input_precision="ieee")
        acc = tl.dot(x, tl.trans(first), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight_CK), acc, input_precision="ieee")
    return acc


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _raw(
    projected_ptr, inverse_ptr, base_ptr, scale_ptr, tokens, places, inside, group, C: tl.constexpr
):
    """(projection over rms, the same scaled and moved) of some coefficients of [BT] tokens."""
    inverse = tl.load(inverse_ptr + 2 * tokens, mask=inside, other=0.0)
    normed = tl.load(projected_ptr + tokens * C + places, mask=inside, other=0.0) * inverse
    return normed, tl.load(base_ptr + places) + normed * tl.load(scale_ptr + group)


@triton.jit
def _shares(logits, eps):
    """Softmax over the last axis, plus eps."""
    powers = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    return powers / tl.sum(powers, 2, keep_dims=True) + eps


@triton.jit
def _coefficients(
    projected_ptr, inverse_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr,
    tokens, num_tokens, mhc_eps, S: tl.constexpr, C: tl.constexpr, ITERS: tl.constexpr,
):  # fmt: skip
    """Sigmoids and Sinkhorn for [BT] tokens, from the stored projection."""
    streams = tl.arange(0, S)
    token, inside = tokens[:, None], (tokens < num_tokens)[:, None]
    place = streams[None, :]
    _, raw = _raw(projected_ptr, inverse_ptr, base_ptr, scale_ptr, token, place, inside, 0, C)
    tl.store(pre_ptr + token * S + place, _sigmoid(raw) + mhc_eps, mask=inside)
    _, raw = _raw(projected_ptr, inverse_ptr, base_ptr, scale_ptr, token, S + place, inside, 1, C)
    tl.store(post_ptr + token * S + place, 2.0 * _sigmoid(raw), mask=inside)

    token, inside = tokens[:, None, None], (tokens < num_tokens)[:, None, None]
    place = streams[None, :, None] * S + streams[None, None, :]
    _, raw = _raw(
        projected_ptr, inverse_ptr, base_ptr, scale_ptr, token, 2 * S + place, inside, 2, C
    )
    matrix = _shares(raw, mhc_eps)
    matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + mhc_eps)
    for _ in range(ITERS - 1):
        matrix = matrix / (tl.sum(matrix, 2, keep_dims=True) + mhc_eps)
        matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + mhc_eps)
    tl.store(comb_ptr + token * (S * S) + place, matrix, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def project_kernel(
    streams_ptr, mix_ptr, weight_ptr, z_ptr, partial_ptr, squares_ptr, num_tokens,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Some tokens, SHARE channels of each stream: their part of the projection and of the sum of
    squares, and with a mix their collapse."""
    tokens = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = tokens < num_tokens
    coefficients = tl.arange(0, C_PADDED)
    acc = tl.zeros([BT, C_PADDED], tl.float32)
    squares = tl.zeros([BT, BK], tl.float32)
    first = tl.program_id(1) * SHARE
    for start in range(0, SHARE, BK):
        channels = first + start + tl.arange(0, BK)
        in_row = channels < D
        mask = inside[:, None] & in_row[None, :]
        z = tl.zeros([BT, BK], tl.float32)
        for i in tl.static_range(S):
            x = tl.load(
                streams_ptr + tokens[:, None] * (S * D) + i * D + channels[None, :],
                mask=mask, other=0.0,
            )  # fmt: skip
            weight = tl.load(
                weight_ptr + coefficients[:, None] * (S * D) + i * D + channels[None, :],
                mask=(coefficients < C)[:, None] & in_row[None, :], other=0.0,
            )  # fmt: skip
            acc = _times_fp32(x, weight, acc)
            wide = x.to(tl.float32)
            squares += wide * wide
            if mix_ptr is not None:
                mix = tl.load(mix_ptr + tokens * S + i, mask=inside, other=0.0)
                z += mix[:, None] * wide
        if mix_ptr is not None:
            tl.store(z_ptr + tokens[:, None] * D + channels[None, :], _cast(z, z_ptr), mask=mask)
    part = tl.program_id(1) * num_tokens.to(tl.int64) + tokens
    tl.store(squares_ptr + part, tl.sum(squares, 1), mask=inside)
    tl.store(
        partial_ptr + part[:, None] * C + coefficients[None, :], acc,
        mask=inside[:, None] & (coefficients < C)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def coefficients_kernel(
    partial_ptr, squares_ptr, base_ptr, scale_ptr, projected_ptr, inverse_ptr,
    pre_ptr, post_ptr, comb_ptr, num_tokens, norm_eps, mhc_eps,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    ITERS: tl.constexpr, BT: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Some tokens: the parts of the projection summed in order, and the coefficients."""
    tokens = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = tokens < num_tokens
    coefficients = tl.arange(0, C_PADDED)
    mask = inside[:, None] & (coefficients < C)[None, :]
    acc = tl.zeros([BT, C_PADDED], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for share in range(SHARES):
        part = share * num_tokens.to(tl.int64) + tokens
        acc += tl.load(
            partial_ptr + part[:, None] * C + coefficients[None, :], mask=mask, other=0.0
        )
        squares += tl.load(squares_ptr + part, mask=inside, other=0.0)
    inverse = tl.rsqrt(squares / (S * D) + norm_eps)
    tl.store(inverse_ptr + 2 * tokens, inverse, mask=inside)
    tl.store(projected_ptr + tokens[:, None] * C + coefficients[None, :], acc, mask=mask)
    # By way of memory: the coefficients of a token then lie where the sums want them.
    tl.debug_barrier()
    _coefficients(
        projected_ptr, inverse_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr,
        tokens, num_tokens, mhc_eps, S, C, ITERS,
    )  # fmt: skip


@triton.jit
def norm_kernel(
    streams_ptr, pre_ptr, z_ptr, norm_ptr, x_ptr, inverse_ptr, norm_eps,
    S: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """One token: the norm of z; with `pre`, z is its streams' collapse by it."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, D_PADDED)
    mask = channels < D
    if pre_ptr is not None:
        z = tl.zeros([D_PADDED], tl.float32)
        for i in tl.static_range(S):
            x = tl.load(streams_ptr + token * (S * D) + i * D + channels, mask=mask, other=0.0)
            z += tl.load(pre_ptr + token * S + i) * x.to(tl.float32)
        rounded = _cast(z, z_ptr)
        tl.store(z_ptr + token * D + channels, rounded, mask=mask)
        z = rounded.to(tl.float32)
    else:
        z = tl.load(z_ptr + token * D + channels, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(z * z, 0) / D + norm_eps)
    tl.store(inverse_ptr + 2 * token + 1, inverse)
    gain = tl.load(norm_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + token * D + channels, _cast(z * inverse * gain, x_ptr), mask=mask)


@triton.jit
def _tiles(ptr, offsets, mask, D: tl.constexpr, S: tl.constexpr):
    """The same channels of every stream, as a tuple."""
    tiles = ()
    for i in tl.static_range(S):
        tiles = tiles + (tl.load(ptr + i * D + offsets, mask=mask, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def write_kernel(
    streams_ptr, y_ptr, post_ptr, comb_ptr, out_ptr,
    S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < D
    y = tl.load(y_ptr + token * D + channels, mask=mask, other=0.0).to(tl.float32)
    streams = _tiles(streams_ptr + token * (S * D), channels, mask, D, S)
    for j in tl.static_range(S):
        written = tl.load(post_ptr + token * S + j) * y
        for i in tl.static_range(S):
            written += tl.load(comb_ptr + token * (S * S) + i * S + j) * streams[i]
        tl.store(out_ptr + token * (S * D) + j * D + channels, _cast(written, out_ptr), mask=mask)


@triton.jit
def write_backward_kernel(
    dout_ptr, streams_ptr, y_ptr, post_ptr, dy_ptr, dpost_ptr, dcomb_ptr,
    S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: the gradient of y, and all products of a stream with a stream's gradient."""
    token = tl.program_id(0).to(tl.int64)
    # Eight neighbours a thread, whose products it adds up by itself.
    ROWS: tl.constexpr = BLOCK // 8
    in_block = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    dpost, dcomb = (), ()
    for _j in tl.static_range(S):
        dpost = dpost + (tl.zeros([ROWS], tl.float32),)
        for _i in tl.static_range(S):
            dcomb = dcomb + (tl.zeros([ROWS], tl.float32),)
    for block in tl.static_range((D + BLOCK - 1) // BLOCK):
        channels = block * BLOCK + in_block
        mask = channels < D
        y = tl.load(y_ptr + token * D + channels, mask=mask, other=0.0).to(tl.float32)
        streams = _tiles(streams_ptr + token * (S * D), channels, mask, D, S)
        dy = tl.zeros([ROWS, 8], tl.float32)
        new_dpost, new_dcomb = (), ()
        for j in tl.static_range(S):
            dout = tl.load(dout_ptr + token * (S * D) + j * D + channels, mask=mask, other=0.0).to(
                tl.float32
            )
            dy += tl.load(post_ptr + token * S + j) * dout
            new_dpost = new_dpost + (dpost[j] + tl.sum(dout * y, 1),)
            for i in tl.static_range(S):
                new_dcomb = new_dcomb + (dcomb[j * S + i] + tl.sum(dout * streams[i], 1),)
        dpost, dcomb = new_dpost, new_dcomb
        tl.store(dy_ptr + token * D + channels, _cast(dy, dy_ptr), mask=mask)
    for j in tl.static_range(S):
        tl.store(dpost_ptr + token * S + j, tl.sum(dpost[j], 0))
        for i in tl.static_range(S):
            tl.store(dcomb_ptr + token * (S * S) + i * S + j, tl.sum(dcomb[j * S + i], 0))


@triton.jit(do_not_specialize=SIZES)
def norm_backward_kernel(
    dx_ptr, z_ptr, inverse_ptr, norm_ptr, dz_ptr, dnorm_ptr, num_tokens,
    D: tl.constexpr, D_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some tokens, one by one: the gradient before the norm, and their part of its gain's."""
    channels = tl.arange(0, D_PADDED)
    mask = channels < D
    gain = tl.load(norm_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    dgain = tl.zeros([D_PADDED], tl.float32)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for step in range(TOKENS):
        token = first + step
        inside = mask & (token < num_tokens)
        inverse = tl.load(inverse_ptr + 2 * token + 1, mask=token < num_tokens, other=0.0)
        dx = tl.load(dx_ptr + token * D + channels, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + token * D + channels, mask=inside, other=0.0).to(tl.float32)
        normed = z * inverse
        dgain += dx * normed
        weighted = dx * gain
        dz = inverse * (weighted - normed * (tl.sum(weighted * normed, 0) / D))
        tl.store(dz_ptr + token * D + channels, _cast(dz, dz_ptr), mask=inside)
    tl.store(dnorm_ptr + tl.program_id(0).to(tl.int64) * D + channels, dgain, mask=mask)


@triton.jit
def mix_backward_kernel(
    dz_ptr, streams_ptr, dmix_ptr, S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """One token: the gradient of the weights with which its streams were collapsed."""
    token = tl.program_id(0).to(tl.int64)
    ROWS: tl.constexpr = BLOCK // 8
    in_block = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    for i in tl.static_range(S):
        dmix = tl.zeros([ROWS], tl.float32)
        for start in range(0, D, BLOCK):
            channels = start + in_block
            mask = channels < D
            dz = tl.load(dz_ptr + token * D + channels, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(streams_ptr + token * (S * D) + i * D + channels, mask=mask, other=0.0)
            dmix += tl.sum(dz * x.to(tl.float32), 1)
        tl.store(dmix_ptr + token * S + i, tl.sum(dmix, 0))


@triton.jit(do_not_specialize=SIZES)
def coefficients_backward_kernel(
    projected_ptr, inverse_ptr, base_ptr, scale_ptr, dpre_ptr, dpost_ptr, dcomb_ptr,
    totals_ptr, draw_ptr, dprojected_ptr, through_rms_ptr, num_tokens, mhc_eps,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ITERS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """From gradients of the coefficients to those of base (`draw`), of the projection, and the
    factor with which a stream takes part in its own rms.

    A Sinkhorn step y = x / s is undone as x = y s: only the sums s are kept, in `totals`.
    """
    tokens = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    streams = tl.arange(0, S)
    token, inside = tokens[:, None], (tokens < num_tokens)[:, None]
    inverse = tl.load(inverse_ptr + 2 * token, mask=inside, other=0.0)
    place = streams[None, :]

    scale = tl.load(scale_ptr)
    normed, raw = _raw(projected_ptr, inverse_ptr, base_ptr, scale_ptr, token, place, inside, 0, C)
    sigmoid = _sigmoid(raw)
    draw = tl.zeros([BT, S], tl.float32)
    if dpre_ptr is not None:
        draw = tl.load(dpre_ptr + token * S + place, mask=inside, other=0.0)
        draw = draw * sigmoid * (1.0 - sigmoid)
    tl.store(draw_ptr + token * C + place, draw, mask=inside)
    tl.store(dprojected_ptr + token * C + place, draw * scale * inverse, mask=inside)
    dinverse = tl.sum(draw * scale * normed, 1)

    scale = tl.load(scale_ptr + 1)
    normed, raw = _raw(
        projected_ptr, inverse_ptr, base_ptr, scale_ptr, token, S + place, inside, 1, C
    )
    sigmoid = _sigmoid(raw)
    draw = tl.load(dpost_ptr + token * S + place, mask=inside, other=0.0)
    draw = draw * 2.0 * sigmoid * (1.0 - sigmoid)
    tl.store(draw_ptr + token * C + S + place, draw, mask=inside)
    tl.store(dprojected_ptr + token * C + S + place, draw * scale * inverse, mask=inside)
    dinverse += tl.sum(draw * scale * normed, 1)

    token, inside = tokens[:, None, None], (tokens < num_tokens)[:, None, None]
    inverse = tl.load(inverse_ptr + 2 * token, mask=inside, other=0.0)
    place = streams[None, :, None] * S + streams[None, None, :]
    scale = tl.load(scale_ptr + 2)
    normed, raw = _raw(
        projected_ptr, inverse_ptr, base_ptr, scale_ptr, token, 2 * S + place, inside, 2, C
    )
    shares = _shares(raw, 0.0)
    matrix = shares + mhc_eps
    of_column = totals_ptr + token * S + streams[None, None, :]
    of_row = totals_ptr + token * S + streams[None, :, None]
    per_step = num_tokens.to(tl.int64) * S
    total = tl.sum(matrix, 1, keep_dims=True) + mhc_eps
    tl.store(of_column, total, mask=inside)
    matrix = matrix / total
    for step in range(ITERS - 1):
        row_total = tl.sum(matrix, 2, keep_dims=True) + mhc_eps
        tl.store(of_row + (2 * step + 1) * per_step, row_total, mask=inside)
        matrix = matrix / row_total
        total = tl.sum(matrix, 1, keep_dims=True) + mhc_eps
        tl.store(of_column + (2 * step + 2) * per_step, total, mask=inside)
        matrix = matrix / total
    tl.debug_barrier()
    grad = tl.load(dcomb_ptr + token * (S * S) + place, mask=inside, other=0.0)
    for back in range(ITERS - 1):
        step = ITERS - 2 - back
        total = tl.load(of_column + (2 * step + 2) * per_step, mask=inside, other=1.0)
        grad = (grad - tl.sum(grad * matrix, 1, keep_dims=True)) / total
        matrix = matrix * total
        row_total = tl.load(of_row + (2 * step + 1) * per_step, mask=inside, other=1.0)
        grad = (grad - tl.sum(grad * matrix, 2, keep_dims=True)) / row_total
        matrix = matrix * row_total
    total = tl.load(of_column, mask=inside, other=1.0)
    grad = (grad - tl.sum(grad * matrix, 1, keep_dims=True)) / total
    draw = shares * (grad - tl.sum(grad * shares, 2, keep_dims=True))
    tl.store(draw_ptr + token * C + 2 * S + place, draw, mask=inside)
    tl.store(dprojected_ptr + token * C + 2 * S + place, draw * scale * inverse, mask=inside)
    dinverse += tl.sum(tl.sum(draw * scale * normed, 2), 1)

    # normed = projected r: the sum above is r times the gradient of r = (mean + eps)^-1/2.
    in_range = tokens < num_tokens
    inverse = tl.load(inverse_ptr + 2 * tokens, mask=in_range, other=0.0)
    tl.store(through_rms_ptr + tokens, -dinverse * inverse * inverse / (S * D), mask=in_range)


@triton.jit(do_not_specialize=SIZES)
def read_backward_kernel(
    dhandle_ptr, dz_ptr, streams_ptr, mix_ptr, comb_ptr, dprojected_ptr, through_rms_ptr,
    weight_ptr, dstreams_ptr, dmix_ptr, num_tokens,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Some tokens, SHARE channels of each stream: the gradient of the streams, all four ways into
    one sum; and their part of the mix's, where wanted."""
    tokens = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = tokens < num_tokens
    coefficients = tl.arange(0, C_PADDED)
    dprojected = tl.load(
        dprojected_ptr + tokens[:, None] * C + coefficients[None, :],
        mask=inside[:, None] & (coefficients < C)[None, :], other=0.0,
    )  # fmt: skip
    first = _part(dprojected)
    second = _part(dprojected - first.to(tl.float32))
    through_rms = tl.load(through_rms_ptr + tokens, mask=inside, other=0.0)[:, None]
    dmix = tl.zeros([BT, S], tl.float32)
    first_channel = tl.program_id(1) * SHARE
    for start in range(0, SHARE, BK):
        channels = first_channel + start + tl.arange(0, BK)
        in_row = channels < D
        mask = inside[:, None] & in_row[None, :]
        dz = tl.load(dz_ptr + tokens[:, None] * D + channels[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        offsets = tokens[:, None] * (S * D) + channels[None, :]
        dhandle = _tiles(dhandle_ptr, offsets, mask, D, S)
        for i in tl.static_range(S):
            x = tl.load(streams_ptr + i * D + offsets, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(
                weight_ptr + coefficients[:, None] * (S * D) + i * D + channels[None, :],
                mask=(coefficients < C)[:, None] & in_row[None, :], other=0.0,
            )  # fmt: skip
            if dstreams_ptr.dtype.element_ty == tl.bfloat16:
                heavy = _part(weight)
                light = _part(weight - heavy.to(tl.float32))
                dx = tl.dot(second, heavy, through_rms * x, input_precision="ieee")
                dx = tl.dot(first, light, dx, input_precision="ieee")
                dx = tl.dot(first, heavy, dx, input_precision="ieee")
            else:
                dx = tl.dot(dprojected, weight, through_rms * x, input_precision="ieee")
            mix = tl.load(mix_ptr + tokens * S + i, mask=inside, other=0.0)
            dx += mix[:, None] * dz
            for j in tl.static_range(S):
                comb = tl.load(comb_ptr + tokens * (S * S) + i * S + j, mask=inside, other=0.0)
                dx += comb[:, None] * dhandle[j]
            tl.store(dstreams_ptr + i * D + offsets, _cast(dx, dstreams_ptr), mask=mask)
            if dmix_ptr is not None:
                of_stream = (tl.arange(0, S) == i)[None, :]
                dmix += tl.where(of_stream, tl.sum(dz * x, 1)[:, None], 0.0)
    if dmix_ptr is not None:
        part = tl.program_id(1) * num_tokens.to(tl.int64) + tokens
        places = part[:, None] * S + tl.arange(0, S)[None, :]
        tl.store(dmix_ptr + places, dmix, mask=inside[:, None])


@triton.jit(do_not_specialize=SIZES)
def weight_grad_kernel(
    dprojected_ptr, streams_ptr, dweight_ptr, num_tokens,
    WIDTH: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Some channels of the projection's weight gradient, over SHARE tokens in order."""
    channels = tl.program_id(0) * BK + tl.arange(0, BK)
    in_row = channels < WIDTH
    coefficients = tl.arange(0, C_PADDED)
    acc = tl.zeros([C_PADDED, BK], tl.float32)
    first_token = tl.program_id(1).to(tl.int64) * SHARE
    for start in range(0, SHARE, BT):
        tokens = first_token + start + tl.arange(0, BT)
        inside = tokens < num_tokens
        dprojected = tl.load(
            dprojected_ptr + tokens[:, None] * C + coefficients[None, :],
            mask=inside[:, None] & (coefficients < C)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.load(
            streams_ptr + tokens[:, None] * WIDTH + channels[None, :],
            mask=inside[:, None] & in_row[None, :], other=0.0,
        )  # fmt: skip
        if x.dtype == tl.bfloat16:
            first = _part(dprojected)
            second = _part(dprojected - first.to(tl.float32))
            if INTERPRETED:
                x = x.to(tl.float32)
            acc = tl.dot(tl.trans(second), x, acc, input_precision="ieee")
            acc = tl.dot(tl.trans(first), x, acc, input_precision="ieee")
        else:
            acc = tl.dot(tl.trans(dprojected), x, acc, input_precision="ieee")
    dweight_ptr += tl.program_id(1) * C * WIDTH
    tl.store(
        dweight_ptr + coefficients[:, None] * WIDTH + channels[None, :], acc,
        mask=(coefficients < C)[:, None] & in_row[None, :],
    )  # fmt: skip

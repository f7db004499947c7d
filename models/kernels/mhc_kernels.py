"""Triton kernels of mhc.py beside this file, which says what they compute.

Two shapes of work: blocks of tokens times blocks of channels where streams meet the projection's
weights on the tensor cores, and one token a program where each stream is only weighed and summed.

fp32 weights against bf16 streams: a weight is the sum of three bf16 numbers, a gradient of two, and
every product of two bf16 numbers is exact in fp32. The parts lie side by side as further rows of
one operand, so that one product has them all: 3 C = 72 rows, which are taken as 64 and 16.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, assignment"
# ruff: noqa: RUF005 (Triton adds tuples, but unpacks none)

from __future__ import annotations

import triton
import triton.language as tl

from ppruntime.models.kernels.rounding import INTERPRETED, to_bf16
from ppruntime.models.kernels.split import store_split

SIZES = ("num_tokens", "tokens")
"""Arguments for whose values nothing is compiled anew."""


@triton.jit
def _cast(x, like_ptr):
    """fp32 to the type behind a pointer, to nearest."""
    return to_bf16(x) if like_ptr.dtype.element_ty == tl.bfloat16 else x


@triton.jit
def _operand(x):
    """What a product takes. The interpreter takes bf16 products for integers': wide there."""
    return x.to(tl.float32) if INTERPRETED else x


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
    streams_ptr, mix_ptr, parts_ptr, z_ptr, partial_ptr, squares_ptr, num_tokens, one,
    S: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Some tokens, each SHARES-th block of BK channels: their part of the products with the ROWS
    parts of the weights and of the sum of squares, and with a mix their collapse.

    Programs that run at the same time read neighbouring channels, longer pieces of memory together
    than each by itself. Three fit a multiprocessor, at 168 registers: so squares are summed at each
    step, addresses have 32 bits from the first token's, and rows' ends cost nothing if there are
    none.

    `one` is 1.0. A product that only goes into the next one would run on while the next steps'
    streams are loaded, and Triton 3.6 has them written over those that it still reads, because the
    squares read them too; what is multiplied first is waited for."""
    share = tl.program_id(0)
    before = (tl.program_id(1) * BT).to(tl.int64)
    tokens = tl.arange(0, BT)
    inside = tokens < num_tokens - tl.program_id(1) * BT
    streams_ptr += before * (S * D)
    z_ptr += before * D
    if mix_ptr is not None:
        mix_ptr += before * S
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    all_in_row: tl.constexpr = D % (SHARES * BK) == 0
    acc_low = tl.zeros([BT, LOW], tl.float32)
    acc_high = tl.zeros([BT, HIGH], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    z = tl.zeros([BT, BK], tl.float32)
    # One loop over channels and streams: every step loads a tile of each operand ahead.
    for step in range((D + SHARES * BK - 1) // (SHARES * BK) * S):
        i = step % S
        channels = (step // S * SHARES + share) * BK + tl.arange(0, BK)
        in_row = channels < D
        mask, of_low, of_high = inside[:, None], (low < ROWS)[None, :], (high < ROWS)[None, :]
        if not all_in_row:
            mask = mask & in_row[None, :]
            of_low, of_high = of_low & in_row[:, None], of_high & in_row[:, None]
        x = tl.load(
            streams_ptr + tokens[:, None] * (S * D) + i * D + channels[None, :],
            mask=mask, other=0.0,
        )  # fmt: skip
        weights = parts_ptr + i * D + channels[:, None]
        weight = tl.load(weights + low[None, :] * (S * D), mask=of_low, other=0.0)
        acc_low += one * tl.dot(_operand(x), _operand(weight), input_precision="ieee")
        weight = tl.load(weights + high[None, :] * (S * D), mask=of_high, other=0.0)
        acc_high += one * tl.dot(_operand(x), _operand(weight), input_precision="ieee")
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        if mix_ptr is not None:
            mix = tl.load(mix_ptr + tokens * S + i, mask=inside, other=0.0)
            z += mix[:, None] * wide
            if i == S - 1:
                places = tokens[:, None] * D + channels[None, :]
                tl.store(z_ptr + places, _cast(z, z_ptr), mask=mask)
                z = tl.zeros([BT, BK], tl.float32)
    part = share * num_tokens.to(tl.int64) + before + tokens
    tl.store(squares_ptr + part, squares, mask=inside)
    rows = partial_ptr + part[:, None] * ROWS
    tl.store(rows + low[None, :], acc_low, mask=inside[:, None] & (low < ROWS)[None, :])
    tl.store(rows + high[None, :], acc_high, mask=inside[:, None] & (high < ROWS)[None, :])


@triton.jit
def _of_parts(
    block, partial_ptr, squares_ptr, base_ptr, scale_ptr, projected_ptr, inverse_ptr,
    pre_ptr, post_ptr, comb_ptr, num_tokens, norm_eps, mhc_eps,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    ITERS: tl.constexpr, BT: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """A block of tokens: the parts of the projection summed in order, and the coefficients."""
    tokens = (block * BT + tl.arange(0, BT)).to(tl.int64)
    inside = tokens < num_tokens
    coefficients = tl.arange(0, C_PADDED)
    mask = inside[:, None] & (coefficients < C)[None, :]
    acc = tl.zeros([BT, C_PADDED], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for share in range(SHARES):
        part = share * num_tokens.to(tl.int64) + tokens
        # Of the weight's three parts, the smallest product first.
        for n in tl.static_range(3):
            place = part[:, None] * (3 * C) + (2 - n) * C + coefficients[None, :]
            acc += tl.load(partial_ptr + place, mask=mask, other=0.0)
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
def _norm(
    token, streams_ptr, pre_ptr, z_ptr, norm_ptr, x_ptr, inverse_ptr, norm_eps,
    S: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """One token: the norm of z; with `pre`, z is its streams' collapse by it."""
    token = token.to(tl.int64)
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


@triton.jit(do_not_specialize=SIZES)
def coefficients_kernel(
    partial_ptr, squares_ptr, base_ptr, scale_ptr, projected_ptr, inverse_ptr,
    pre_ptr, post_ptr, comb_ptr, streams_ptr, z_ptr, norm_ptr, x_ptr,
    num_tokens, norm_eps, mhc_eps,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    D_PADDED: tl.constexpr, ITERS: tl.constexpr, BT: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """A block of tokens a program: their coefficients. With z, more programs follow, one a token,
    that norm it: Sinkhorn is a long chain of short steps, behind which they read and write."""
    first = tl.cdiv(num_tokens, BT)
    program = tl.program_id(0)
    if program < first:
        _of_parts(
            program, partial_ptr, squares_ptr, base_ptr, scale_ptr, projected_ptr, inverse_ptr,
            pre_ptr, post_ptr, comb_ptr, num_tokens, norm_eps, mhc_eps,
            S, D, C, C_PADDED, ITERS, BT, SHARES,
        )  # fmt: skip
    elif z_ptr is not None:
        _norm(
            program - first, streams_ptr, None, z_ptr, norm_ptr, x_ptr, inverse_ptr, norm_eps,
            S, D, D_PADDED,
        )  # fmt: skip


@triton.jit
def norm_kernel(
    streams_ptr, pre_ptr, z_ptr, norm_ptr, x_ptr, inverse_ptr, norm_eps,
    S: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """One token whose mix is its own `pre`: the collapse of its streams, and the norm of it."""
    _norm(
        tl.program_id(0), streams_ptr, pre_ptr, z_ptr, norm_ptr, x_ptr, inverse_ptr, norm_eps,
        S, D, D_PADDED,
    )  # fmt: skip


@triton.jit
def _tiles(ptr, offsets, mask, D: tl.constexpr, S: tl.constexpr):
    """The same channels of every stream, as a tuple."""
    ptrs = ptr + offsets  # what is added to it is part of the instruction, not of more pointers
    tiles = ()
    for i in tl.static_range(S):
        tiles = tiles + (tl.load(ptrs + i * D, mask=mask, other=0.0),)
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
            comb = tl.load(comb_ptr + token * (S * S) + i * S + j)
            written += comb * streams[i].to(tl.float32)
        tl.store(out_ptr + token * (S * D) + j * D + channels, _cast(written, out_ptr), mask=mask)


@triton.jit
def write_backward_kernel(
    dout_ptr, streams_ptr, y_ptr, post_ptr, comb_ptr, dstreams_ptr, dy_ptr, dpost_ptr, dcomb_ptr,
    S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token: the gradients of the streams and of y, and all products of a stream with a
    stream's gradient."""
    token = tl.program_id(0).to(tl.int64)
    # Eight neighbours a thread, whose products it adds up by itself.
    ROWS: tl.constexpr = BLOCK // 8
    in_block = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    dpost, dcomb = (), ()
    for _j in tl.static_range(S):
        dpost = dpost + (tl.zeros([ROWS], tl.float32),)
        for _i in tl.static_range(S):
            dcomb = dcomb + (tl.zeros([ROWS], tl.float32),)
    for start in tl.range(0, D, BLOCK, num_stages=STAGES):
        channels = start + in_block
        mask = channels < D
        y = tl.load(y_ptr + token * D + channels, mask=mask, other=0.0).to(tl.float32)
        streams = _tiles(streams_ptr + token * (S * D), channels, mask, D, S)
        dy = tl.zeros([ROWS, 8], tl.float32)
        dstreams, new_dpost, new_dcomb = (), (), ()
        for _i in tl.static_range(S):
            dstreams = dstreams + (tl.zeros([ROWS, 8], tl.float32),)
        for j in tl.static_range(S):
            at = token * (S * D) + j * D + channels
            dout = tl.load(dout_ptr + at, mask=mask, other=0.0).to(tl.float32)
            dy += tl.load(post_ptr + token * S + j) * dout
            new_dpost = new_dpost + (dpost[j] + tl.sum(dout * y, 1),)
            mixed = ()
            for i in tl.static_range(S):
                mixed = mixed + (
                    dstreams[i] + tl.load(comb_ptr + token * (S * S) + i * S + j) * dout,
                )
                product = tl.sum(dout * streams[i].to(tl.float32), 1)
                new_dcomb = new_dcomb + (dcomb[j * S + i] + product,)
            dstreams = mixed
        for i in tl.static_range(S):
            at = token * (S * D) + i * D + channels
            tl.store(dstreams_ptr + at, _cast(dstreams[i], dstreams_ptr), mask=mask)
        tl.store(dy_ptr + token * D + channels, _cast(dy, dy_ptr), mask=mask)
        dpost, dcomb = new_dpost, new_dcomb
    for j in tl.static_range(S):
        tl.store(dpost_ptr + token * S + j, tl.sum(dpost[j], 0))
        for i in tl.static_range(S):
            tl.store(dcomb_ptr + token * (S * S) + i * S + j, tl.sum(dcomb[j * S + i], 0))


@triton.jit(do_not_specialize=SIZES)
def norm_backward_kernel(
    dx_ptr, z_ptr, inverse_ptr, norm_ptr, dz_ptr, dnorm_ptr, num_tokens, tokens,
    D: tl.constexpr, D_PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tokens, one by one: the gradient before the norm, and their part of its gain's."""
    channels = tl.arange(0, D_PADDED)
    mask = channels < D
    gain = tl.load(norm_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    dgain = tl.zeros([D_PADDED], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tokens
    for token in tl.range(first, min(first + tokens, num_tokens), num_stages=STAGES):
        inverse = tl.load(inverse_ptr + 2 * token + 1)
        dx = tl.load(dx_ptr + token * D + channels, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + token * D + channels, mask=mask, other=0.0).to(tl.float32)
        normed = z * inverse
        dgain += dx * normed
        weighted = dx * gain
        dz = inverse * (weighted - normed * (tl.sum(weighted * normed, 0) / D))
        tl.store(dz_ptr + token * D + channels, _cast(dz, dz_ptr), mask=mask)
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
    totals_ptr, draw_ptr, operand_ptr, through_rms_ptr, num_tokens, mhc_eps,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ITERS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """From gradients of the coefficients to those of base (`draw`), of the projection as an operand
    of products (two parts, [N, 2 C]), and the factor with which a stream takes part in its own rms.

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
    operands = operand_ptr + token * (2 * C) + place
    store_split(operands, draw * scale * inverse, C, inside, 2)
    dinverse = tl.sum(draw * scale * normed, 1)

    scale = tl.load(scale_ptr + 1)
    normed, raw = _raw(
        projected_ptr, inverse_ptr, base_ptr, scale_ptr, token, S + place, inside, 1, C
    )
    sigmoid = _sigmoid(raw)
    draw = tl.load(dpost_ptr + token * S + place, mask=inside, other=0.0)
    draw = draw * 2.0 * sigmoid * (1.0 - sigmoid)
    tl.store(draw_ptr + token * C + S + place, draw, mask=inside)
    operands = operand_ptr + token * (2 * C) + S + place
    store_split(operands, draw * scale * inverse, C, inside, 2)
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
    operands = operand_ptr + token * (2 * C) + 2 * S + place
    store_split(operands, draw * scale * inverse, C, inside, 2)
    dinverse += tl.sum(tl.sum(draw * scale * normed, 2), 1)

    # normed = projected r: the sum above is r times the gradient of r = (mean + eps)^-1/2. Several
    # threads have it, each with last bits of its own: a thread does not round its own product
    # before it adds another's, which is rounded. The first one stores it, at the first of S places,
    # so that this tile lies as the sum does: stored as [BT], the sum would go through shared
    # memory, and they would all write to one word.
    token, place = tokens[:, None], streams[None, :]
    inside = (tokens < num_tokens)[:, None]
    inverse = tl.load(inverse_ptr + 2 * token, mask=inside, other=0.0)
    through_rms = -dinverse[:, None] * inverse * inverse / (S * D)
    tl.store(through_rms_ptr + token * S + place, through_rms, mask=inside & (place == 0))


@triton.jit
def _left(operand_ptr, tokens, inside, rows, C: tl.constexpr):
    """The projection's gradient as left operand: C columns its small part, 2 C its large one."""
    column = tl.where(rows < C, rows + C, tl.where(rows < 2 * C, rows - C, rows - 2 * C))
    return tl.load(
        operand_ptr + tokens[:, None] * (2 * C) + column[None, :],
        mask=inside[:, None] & (rows < 3 * C)[None, :], other=0.0,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def read_backward_kernel(
    dhandle_ptr, dz_ptr, streams_ptr, mix_ptr, operand_ptr, through_rms_ptr,
    parts_ptr, dstreams_ptr, dmix_ptr, num_tokens,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Some tokens, SHARE channels of one stream: its gradient, all four ways into one sum; and
    their part of the mix's, where wanted."""
    tokens = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    stream = tl.program_id(1)
    inside = tokens < num_tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    # gradient = large + small, weight = heavy + light: the product is small heavy + large light +
    # large heavy, one sum over 3 C rows.
    left_low = _operand(_left(operand_ptr, tokens, inside, low, C))
    left_high = _operand(_left(operand_ptr, tokens, inside, high, C))
    weight_low = tl.where(low < 2 * C, low, low - 2 * C)[:, None] * (S * D)
    weight_high = tl.where(high < 2 * C, high, high - 2 * C)[:, None] * (S * D)
    through_rms = tl.load(through_rms_ptr + tokens * S, mask=inside, other=0.0)[:, None]
    mix = tl.load(mix_ptr + tokens * S + stream, mask=inside, other=0.0)[:, None]
    dmix = tl.zeros([BT, BK], tl.float32)
    first_channel = tl.program_id(2) * SHARE
    for start in range(0, SHARE, BK):
        channels = first_channel + start + tl.arange(0, BK)
        in_row = channels < D
        mask = inside[:, None] & in_row[None, :]
        offsets = tokens[:, None] * (S * D) + stream * D + channels[None, :]
        dhandle = tl.load(dhandle_ptr + offsets, mask=mask, other=0.0)
        x = tl.load(streams_ptr + offsets, mask=mask, other=0.0)
        dz = tl.load(dz_ptr + tokens[:, None] * D + channels[None, :], mask=mask, other=0.0)
        weights = parts_ptr + stream * D + channels[None, :]
        weight = tl.load(
            weights + weight_low, mask=(low < 3 * C)[:, None] & in_row[None, :], other=0.0
        )
        product = tl.dot(left_low, _operand(weight), input_precision="ieee")
        weight = tl.load(
            weights + weight_high, mask=(high < 3 * C)[:, None] & in_row[None, :], other=0.0
        )
        product = tl.dot(left_high, _operand(weight), product, input_precision="ieee")
        wide, dwide = x.to(tl.float32), dz.to(tl.float32)
        dx = dhandle.to(tl.float32) + through_rms * wide + mix * dwide + product
        tl.store(dstreams_ptr + offsets, _cast(dx, dstreams_ptr), mask=mask)
        if dmix_ptr is not None:
            dmix += dwide * wide
    if dmix_ptr is not None:
        part = tl.program_id(2) * num_tokens.to(tl.int64) + tokens
        tl.store(dmix_ptr + part * S + stream, tl.sum(dmix, 1), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def weight_grad_kernel(
    operand_ptr, streams_ptr, dweight_ptr, num_tokens,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Some channels of the projection's weight gradient by both parts of the projection's, over
    SHARE tokens in order."""
    channels = tl.program_id(0) * BK + tl.arange(0, BK)
    in_row = channels < WIDTH
    rows = tl.arange(0, ROWS_PADDED)
    acc = tl.zeros([ROWS_PADDED, BK], tl.float32)
    first_token = tl.program_id(1).to(tl.int64) * SHARE
    for start in range(0, SHARE, BT):
        tokens = first_token + start + tl.arange(0, BT)
        inside = tokens < num_tokens
        gradient = tl.load(
            operand_ptr + tokens[:, None] * ROWS + rows[None, :],
            mask=inside[:, None] & (rows < ROWS)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.load(
            streams_ptr + tokens[:, None] * WIDTH + channels[None, :],
            mask=inside[:, None] & in_row[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(tl.trans(_operand(gradient)), _operand(x), acc, input_precision="ieee")
    dweight_ptr += tl.program_id(1) * ROWS * WIDTH
    tl.store(
        dweight_ptr + rows[:, None] * WIDTH + channels[None, :], acc,
        mask=(rows < ROWS)[:, None] & in_row[None, :],
    )  # fmt: skip

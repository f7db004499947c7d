"""Triton kernels of sparse_attention.py beside this file, which says what they compute.

One program per query. Rows of a tile are heads, columns are channels or slots.

`if num_keys > 0` is always true. Triton gives all warps to the rows of a product whose result
another product reads; of 64 rows both halves of 8 warps would then compute the same numbers. It
does not look through branches, so what leads from one product to the next stands in one.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import math

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter multiplies bf16 tiles as if they were integers: there they are widened first."""

SIZES = ("num_queries", "num_keys", "num_slots")
"""Arguments for whose values nothing is compiled anew."""

_LOG2_E = tl.constexpr(math.log2(math.e))
_NO_SINK = tl.constexpr(-1e30)


@triton.jit
def _used_slots(slots_ptr, num_slots, num_keys, BLOCK: tl.constexpr, ALL_SLOTS: tl.constexpr):
    """(first, end) of the used part of a query's list, first in whole blocks; is one too high?"""
    places = tl.arange(0, ALL_SLOTS)
    slots = tl.load(slots_ptr + places, mask=places < num_slots, other=-1)
    first = tl.min(tl.where(slots >= 0, places, ALL_SLOTS))
    end = tl.max(tl.where(slots >= 0, places + 1, 0))
    return first // BLOCK * BLOCK, end, tl.max(slots) >= num_keys


@triton.jit
def _turn(x, cos_ptr, sin_ptr, K: tl.constexpr, P: tl.constexpr, SIGN: tl.constexpr):
    """Rotates the last 2P of a tile's K channels by SIGN times the angles; fp32."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], K // 2, 2]))
    pairs = tl.arange(0, K // 2) - (K // 2 - P)
    cos = tl.load(cos_ptr + pairs, mask=pairs >= 0, other=1.0)[None, :]
    sin = tl.load(sin_ptr + pairs, mask=pairs >= 0, other=0.0)[None, :] * SIGN
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, [x.shape[0], K])


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_ptr,
    keys_ptr,
    slots_ptr,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    lse_ptr,
    num_queries,
    num_keys,
    num_slots,
    scale_log2,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, H)
    channels = tl.arange(0, K)
    slots_ptr += query * num_slots
    keys_ptr += query // num_queries * num_keys * K
    tile = query * H * K + heads[:, None] * K + channels[None, :]

    first, end, is_bad = _used_slots(slots_ptr, num_slots, num_keys, BLOCK, ALL_SLOTS)
    q = tl.load(q_ptr + tile)
    if INTERPRETED:
        q = q.to(tl.float32)
    # The sink is the first logit. The maximum stays finite, so that -inf - -inf never arises.
    top = tl.maximum(tl.load(sink_ptr + heads) * _LOG2_E, _NO_SINK)
    total = tl.full([H], 1.0, tl.float32)
    acc = tl.zeros([H, K], tl.float32)
    for start in tl.range(first, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        slots = tl.load(slots_ptr + places, mask=places < num_slots, other=-1)
        is_full = (slots >= 0) & (slots < num_keys)
        keys = tl.load(
            keys_ptr + slots[:, None] * K + channels[None, :], mask=is_full[:, None], other=0.0
        )
        if INTERPRETED:
            keys = keys.to(tl.float32)
        scores = tl.dot(q, keys.T, input_precision="ieee") * scale_log2
        scores = tl.where(is_full[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
        cast = tl.zeros([H, BLOCK], keys.dtype)
        if num_keys > 0:
            cast = weights.to(keys.dtype)
            acc = acc * shrink[:, None]
        acc = tl.dot(cast, keys, acc, input_precision="ieee")
    total = tl.where(is_bad, float("nan"), total)
    acc = acc / total[:, None]
    if P > 0:
        acc = _turn(acc, cos_ptr + query * P, sin_ptr + query * P, K, P, -1.0)
    tl.store(out_ptr + tile, acc.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + query * H + heads, (top + tl.log2(total)) / _LOG2_E)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    dout_ptr,
    q_ptr,
    keys_ptr,
    slots_ptr,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    lse_ptr,
    unit_ptr,
    dq_ptr,
    sums_ptr,
    dsink_ptr,
    num_queries,
    num_keys,
    num_slots,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, H)
    slots_ptr += query * num_slots
    keys_ptr += query // num_queries * num_keys * K
    sums_ptr += query // num_queries * num_keys * K
    if unit_ptr is not None:
        per_unit = 1.0 / tl.load(unit_ptr)

    # dout . out, equal before and after the rotation.
    tile = query * H * K + heads[:, None] * K + tl.arange(0, K)[None, :]
    wide_dout = tl.load(dout_ptr + tile).to(tl.float32)
    delta = tl.sum(wide_dout * tl.load(out_ptr + tile).to(tl.float32), 1)
    lse = tl.load(lse_ptr + query * H + heads) * _LOG2_E
    sink = tl.load(sink_ptr + heads) * _LOG2_E
    tl.store(dsink_ptr + query * H + heads, -delta * tl.exp2(sink - lse))

    # Channels in two halves: the gradients of all at once would not fit into the registers.
    HALF: tl.constexpr = K // 2
    channels = tl.arange(0, HALF)
    tile = query * H * K + heads[:, None] * K + channels[None, :]
    q_0 = tl.load(q_ptr + tile)
    q_1 = tl.load(q_ptr + tile + HALF)
    dout_0 = tl.load(dout_ptr + tile)
    dout_1 = tl.load(dout_ptr + tile + HALF)
    if P > 0:
        # By way of memory (dq's, not yet in use): products read loaded tiles in shared memory, but
        # would keep a computed one twice.
        turned = _turn(
            dout_1.to(tl.float32), cos_ptr + query * P, sin_ptr + query * P, HALF, P, 1.0
        )
        tl.store(dq_ptr + tile + HALF, turned.to(dq_ptr.dtype.element_ty))
        tl.debug_barrier()
        dout_1 = tl.load(dq_ptr + tile + HALF)
    if INTERPRETED:
        q_0, q_1 = q_0.to(tl.float32), q_1.to(tl.float32)
        dout_0, dout_1 = dout_0.to(tl.float32), dout_1.to(tl.float32)
    dq_0 = tl.zeros([H, HALF], tl.float32)
    dq_1 = tl.zeros([H, HALF], tl.float32)
    first, end, _ = _used_slots(slots_ptr, num_slots, num_keys, BLOCK, ALL_SLOTS)
    for start in tl.range(first, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        slots = tl.load(slots_ptr + places, mask=places < num_slots, other=-1)
        is_full = (slots >= 0) & (slots < num_keys)
        rows = slots[:, None] * K + channels[None, :]
        keys_0 = tl.load(keys_ptr + rows, mask=is_full[:, None], other=0.0)
        keys_1 = tl.load(keys_ptr + rows + HALF, mask=is_full[:, None], other=0.0)
        if INTERPRETED:
            keys_0, keys_1 = keys_0.to(tl.float32), keys_1.to(tl.float32)
        scores = tl.dot(q_0, keys_0.T, input_precision="ieee")
        if num_keys > 0:
            scores += 0.0
        scores = tl.dot(q_1, keys_1.T, scores, input_precision="ieee")
        dweights = tl.dot(dout_0, keys_0.T, input_precision="ieee")
        if num_keys > 0:
            dweights += 0.0
        dweights = tl.dot(dout_1, keys_1.T, dweights, input_precision="ieee")
        weights = tl.zeros([H, BLOCK], keys_0.dtype)
        dscores = tl.zeros([H, BLOCK], keys_0.dtype)
        if num_keys > 0:
            wide = tl.exp2(scores * (scale * _LOG2_E) - lse[:, None])
            wide = tl.where(is_full[None, :], wide, 0.0)
            weights = wide.to(keys_0.dtype)
            dscores = (wide * (dweights - delta[:, None]) * scale).to(keys_0.dtype)
        dq_0 = tl.dot(dscores, keys_0, dq_0, input_precision="ieee")
        dq_1 = tl.dot(dscores, keys_1, dq_1, input_precision="ieee")
        dkeys = tl.dot(weights.T, dout_0, input_precision="ieee")
        if num_keys > 0:
            dkeys += 0.0
        dkeys = tl.dot(dscores.T, q_0, dkeys, input_precision="ieee")
        if unit_ptr is not None:
            dkeys = (dkeys * per_unit).to(tl.int64)
        tl.atomic_add(sums_ptr + rows, dkeys, mask=is_full[:, None], sem="relaxed")
        dkeys = tl.dot(weights.T, dout_1, input_precision="ieee")
        if num_keys > 0:
            dkeys += 0.0
        dkeys = tl.dot(dscores.T, q_1, dkeys, input_precision="ieee")
        if unit_ptr is not None:
            dkeys = (dkeys * per_unit).to(tl.int64)
        tl.atomic_add(sums_ptr + rows + HALF, dkeys, mask=is_full[:, None], sem="relaxed")
    tl.store(dq_ptr + tile, dq_0.to(dq_ptr.dtype.element_ty))
    tl.store(dq_ptr + tile + HALF, dq_1.to(dq_ptr.dtype.element_ty))

"""Gluon kernels of sparse_attention.py beside this file: for Hopper, 64 heads of 512 channels.

The same functions with the same arguments as in sparse_attention_kernels.py. Gluon (the lower half
of Triton) lets one say what Triton decides: where tiles lie, which warps take which part of a
product, and when copies start. So the next keys are on their way while the softmax and the products
run, and products read their operands where they are.

forward     two buffers of keys; the next are fetched as soon as the previous value product is done
backward    one product for scores and weight gradients: rows of q above rows of dout; keys are
            fetched while the keys' gradients are worked out and added, a quarter of channels a time

Gluon has no interpreter: these run on a GPU only. The compiler puts a barrier between what writes
shared memory and what reads it, but counts a product as done when it starts, and leaves fences
towards the tensor cores to us.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import math

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ppruntime.models.kernels.sparse_attention_kernels import SIZES

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # newer and older Triton
_LOG2_E = gl.constexpr(math.log2(math.e))
_NO_SINK = gl.constexpr(-1e30)

_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
"""A warp reads 512 contiguous bytes of a row, 16 a thread."""
_LIST = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def _used_slots(slots_ptr, num_slots, num_keys, ALL_SLOTS: gl.constexpr):
    """(end of the used part of a query's list, is a slot too high?)"""
    places = gl.arange(0, ALL_SLOTS, layout=_LIST)
    slots = gl.load(slots_ptr + places, mask=places < num_slots, other=-1)
    end = gl.max(gl.where(slots >= 0, places + 1, 0), 0)
    return end, gl.max(slots, 0) >= num_keys


@gluon.jit
def _fetch_keys(target, keys_ptr, slots_ptr, start, end, num_keys, K: gl.constexpr):
    """Starts copying the keys of one block of the list; empty slots become zeros."""
    BLOCK: gl.constexpr = target.shape[0]
    places = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, _ROWS))
    channels = gl.arange(0, K, layout=gl.SliceLayout(0, _ROWS))
    slots = gl.load(slots_ptr + places, mask=places < end, other=-1)
    is_full = (slots >= 0) & (slots < num_keys)
    source = keys_ptr + gl.where(is_full, slots, 0)[:, None] * K + channels[None, :]
    async_copy.async_copy_global_to_shared(target, source, mask=is_full[:, None])
    async_copy.commit_group()


@gluon.jit
def _turn(x, cos_ptr, sin_ptr, K: gl.constexpr, P: gl.constexpr, SIGN: gl.constexpr):
    """Rotates the last 2P of a tile's K channels by SIGN times the angles; fp32."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], K // 2, 2]))
    places: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    pairs = gl.arange(0, K // 2, layout=places) - (K // 2 - P)
    cos = gl.load(cos_ptr + pairs, mask=pairs >= 0, other=1.0)[None, :]
    sin = gl.load(sin_ptr + pairs, mask=pairs >= 0, other=0.0)[None, :] * SIGN
    turned = gl.join(even * cos - odd * sin, even * sin + odd * cos)
    return gl.reshape(turned, [x.shape[0], K])


@gluon.jit(do_not_specialize=SIZES)
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
    H: gl.constexpr,
    K: gl.constexpr,
    P: gl.constexpr,
    BLOCK: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK // 2, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    query = gl.program_id(0).to(gl.int64)
    slots_ptr += query * num_slots
    keys_ptr += query // num_queries * num_keys * K
    rows = gl.arange(0, H, layout=gl.SliceLayout(1, _ROWS))
    channels = gl.arange(0, K, layout=gl.SliceLayout(0, _ROWS))
    tile = query * H * K + rows[:, None] * K + channels[None, :]

    q_shared = gl.allocate_shared_memory(gl.bfloat16, [H, K], SHARED)
    keys_shared = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, K], SHARED)
    async_copy.async_copy_global_to_shared(q_shared, q_ptr + tile)
    _fetch_keys(keys_shared.index(0), keys_ptr, slots_ptr, 0, num_slots, num_keys, K)
    end, is_bad = _used_slots(slots_ptr, num_slots, num_keys, ALL_SLOTS)

    heads = gl.arange(0, H, layout=gl.SliceLayout(1, SCORES))
    top = gl.maximum(gl.load(sink_ptr + heads) * _LOG2_E, _NO_SINK)
    total = gl.full([H], 1.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    acc = warpgroup_mma_init(gl.zeros([H, K], gl.float32, layout=ACC))
    stage = 0
    for start in range(0, end, BLOCK):
        keys = keys_shared.index(stage)
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        scores = warpgroup_mma(
            q_shared,
            keys.permute((1, 0)),
            gl.zeros([H, BLOCK], gl.float32, layout=SCORES),
            use_acc=False,
            is_async=True,
        )
        places = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
        slots = gl.load(slots_ptr + places, mask=places < end, other=-1)
        is_full = (slots >= 0) & (slots < num_keys)
        scores, wide = warpgroup_mma_wait(0, deps=(scores, acc))
        # All warps' value products of the block before are done too: its keys may be overwritten.
        _barrier()
        stage = 1 - stage
        _fetch_keys(keys_shared.index(stage), keys_ptr, slots_ptr, start + BLOCK, end, num_keys, K)
        scores = gl.where(is_full[None, :], scores * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        shrink = gl.exp2(top - new_top)
        weights = gl.exp2(scores - new_top[:, None])
        total = total * shrink + gl.sum(weights, 1)
        top = new_top
        wide = wide * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
        operand = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
        acc = warpgroup_mma(operand, keys, wide, is_async=True)
    async_copy.wait_group(0)
    wide = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.where(is_bad, float("nan"), total)
    wide = wide / gl.convert_layout(total, gl.SliceLayout(1, ACC))[:, None]
    gl.store(lse_ptr + query * H + heads, (top + gl.log2(total)) / _LOG2_E)
    if P > 0:
        turned = _turn(wide, cos_ptr + query * P, sin_ptr + query * P, K, P, -1.0)
        gl.store(out_ptr + tile, gl.convert_layout(turned.to(gl.bfloat16), _ROWS))
    else:
        gl.store(out_ptr + tile, gl.convert_layout(wide.to(gl.bfloat16), _ROWS))


@gluon.jit
def _key_gradients(weights, dscores, dout, q, START: gl.constexpr, DKEYS: gl.constexpr):
    """Starts the products of a block's keys' gradients, a quarter of the channels."""
    BLOCK: gl.constexpr = weights.shape[1]
    PART: gl.constexpr = q.shape[1] // 4
    dkeys = warpgroup_mma(
        weights.permute((1, 0)),
        dout.slice(START, PART, dim=1),
        gl.zeros([BLOCK, PART], gl.float32, layout=DKEYS),
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(dscores.permute((1, 0)), q.slice(START, PART, dim=1), dkeys, is_async=True)


@gluon.jit(do_not_specialize=SIZES)
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
    H: gl.constexpr,
    K: gl.constexpr,
    P: gl.constexpr,
    BLOCK: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
):
    PART: gl.constexpr = K // 4
    # Rows 0..H-1 are scores, the others gradients of weights: one warpgroup each.
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    DKEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, PART // 2, 16])
    PAIRED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    query = gl.program_id(0).to(gl.int64)
    slots_ptr += query * num_slots
    keys_ptr += query // num_queries * num_keys * K
    sums_ptr += query // num_queries * num_keys * K
    rows = gl.arange(0, H, layout=gl.SliceLayout(1, _ROWS))
    channels = gl.arange(0, K, layout=gl.SliceLayout(0, _ROWS))
    tile = query * H * K + rows[:, None] * K + channels[None, :]

    both_shared = gl.allocate_shared_memory(gl.bfloat16, [2 * H, K], SHARED)
    keys_shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, K], SHARED)
    pair_shared = gl.allocate_shared_memory(gl.bfloat16, [2 * H, BLOCK], SHARED)
    q_shared, dout_shared = both_shared.slice(0, H), both_shared.slice(H, H)
    weights_shared, dscores_shared = pair_shared.slice(0, H), pair_shared.slice(H, H)
    async_copy.async_copy_global_to_shared(q_shared, q_ptr + tile)
    async_copy.async_copy_global_to_shared(dout_shared, dout_ptr + tile)
    async_copy.commit_group()
    _fetch_keys(keys_shared, keys_ptr, slots_ptr, 0, num_slots, num_keys, K)
    end, _ = _used_slots(slots_ptr, num_slots, num_keys, ALL_SLOTS)

    # dout . out, equal before and after the rotation.
    delta = gl.zeros([H], gl.float32, layout=gl.SliceLayout(1, _ROWS))
    half = gl.arange(0, K // 2, layout=gl.SliceLayout(0, _ROWS))
    for part in gl.static_range(2):
        places = query * H * K + rows[:, None] * K + half[None, :] + part * (K // 2)
        dout = gl.load(dout_ptr + places).to(gl.float32)
        delta += gl.sum(dout * gl.load(out_ptr + places).to(gl.float32), 1)
    lse = gl.load(lse_ptr + query * H + rows) * _LOG2_E
    sink = gl.load(sink_ptr + rows) * _LOG2_E
    gl.store(dsink_ptr + query * H + rows, -delta * gl.exp2(sink - lse))
    heads = gl.arange(0, 2 * H, layout=gl.SliceLayout(1, BOTH))
    is_score = heads < H
    lse_both = gl.load(lse_ptr + query * H + heads % H) * _LOG2_E
    twice = gl.reshape(gl.permute(gl.join(delta, delta), (1, 0)), [2 * H])
    delta_both = gl.convert_layout(twice, gl.SliceLayout(1, BOTH))

    async_copy.wait_group(1)
    if P > 0:
        TAIL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        tail = dout_shared.slice(K - 2 * P, 2 * P, dim=1)
        turned = _turn(
            tail.load(TAIL).to(gl.float32),
            cos_ptr + query * P,
            sin_ptr + query * P,
            2 * P,
            P,
            1.0,
        )
        tail.store(gl.convert_layout(turned.to(gl.bfloat16), TAIL))

    per_unit = 1.0
    if unit_ptr is not None:
        per_unit = 1.0 / gl.load(unit_ptr)
    dq = warpgroup_mma_init(gl.zeros([H, K], gl.float32, layout=DQ))
    for start in range(0, end, BLOCK):
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        both = warpgroup_mma(
            both_shared,
            keys_shared.permute((1, 0)),
            gl.zeros([2 * H, BLOCK], gl.float32, layout=BOTH),
            use_acc=False,
            is_async=True,
        )
        columns = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, BOTH))
        slots = gl.load(slots_ptr + columns, mask=columns < end, other=-1)
        is_full = (slots >= 0) & (slots < num_keys)
        targets = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, DKEYS))
        slots = gl.load(slots_ptr + targets, mask=targets < end, other=-1)
        is_target = (slots >= 0) & (slots < num_keys)
        both = warpgroup_mma_wait(0, deps=(both,))
        weights = gl.exp2(both * (scale * _LOG2_E) - lse_both[:, None])
        weights = gl.where(is_full[None, :], weights, 0.0)
        dweights = (both - delta_both[:, None]) * scale
        pair_shared.store(gl.where(is_score[:, None], weights, dweights).to(gl.bfloat16))
        weights = weights_shared.load(PAIRED).to(gl.float32)
        dscores = weights * dscores_shared.load(PAIRED).to(gl.float32)
        dscores_shared.store(dscores.to(gl.bfloat16))
        fence_async_shared()
        _barrier()
        dq = warpgroup_mma(dscores_shared, keys_shared, dq, is_async=True)
        sums = sums_ptr + gl.where(is_target, slots, 0)[:, None] * K
        sums += gl.arange(0, PART, layout=gl.SliceLayout(0, DKEYS))[None, :]
        dkeys = _key_gradients(weights_shared, dscores_shared, dout_shared, q_shared, 0, DKEYS)
        for part in gl.static_range(4):
            if part == 0:
                done, dq_wide = warpgroup_mma_wait(0, deps=(dkeys, dq))
                dq = warpgroup_mma_init(dq_wide)
                # dq has read these keys.
                _barrier()
                _fetch_keys(keys_shared, keys_ptr, slots_ptr, start + BLOCK, end, num_keys, K)
            else:
                done = warpgroup_mma_wait(0, deps=(dkeys,))
            if part < 3:
                # Works while this part is added.
                dkeys = _key_gradients(
                    weights_shared,
                    dscores_shared,
                    dout_shared,
                    q_shared,
                    (part + 1) * PART,
                    DKEYS,
                )
            if unit_ptr is not None:
                done = (done * per_unit).to(gl.int64)
            gl.atomic_add(sums + part * PART, done, mask=is_target[:, None], sem="relaxed")
    async_copy.wait_group(0)
    dq_wide = warpgroup_mma_wait(0, deps=(dq,))
    gl.store(dq_ptr + tile, gl.convert_layout(dq_wide.to(gl.bfloat16), _ROWS))

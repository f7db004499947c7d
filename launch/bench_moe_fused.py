"""Phases of the fused MoE layer by themselves, for `bench_moe_ranks`: what its parts cost alone
says how much of a transfer the whole layer hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ppruntime.launch.bench_moe_parts import Part, put_weight_grads
from ppruntime.models.dispatch import AnyExperts
from ppruntime.models.fp8_experts import Fp8Experts, MicroBatch
from ppruntime.models.kernels.mega_moe import empty_pool, find_rows, push_values
from ppruntime.models.kernels.mega_moe_gemm import mega_gemm
from ppruntime.models.kernels.mega_moe_swiglu import swiglu_bf16
from ppruntime.models.kernels.moe_layout import expert_layout
from ppruntime.models.kernels.quantize import (
    GROUP,
    Quantized,
    quantize_routed,
    transpose_blocks,
)
from ppruntime.models.kernels.swiglu import swiglu, swiglu_backward
from ppruntime.models.mega_moe import MegaMoe
from ppruntime.models.mega_moe_passes import Matrices
from ppruntime.models.mega_moe_plan import unpacked
from ppruntime.models.router import Routing


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of a forward."""

    name: str
    flops: float
    num_bytes: float
    """That cross between GPUs, one way."""
    run: Callable[[], object]


def fused_phases(
    dispatcher: MegaMoe, experts: AnyExperts, x_ND: Tensor, routing: Routing
) -> Iterator[Phase]:
    """Each part on the operands that one forward leaves behind. All ranks run the same; a part that
    reads or writes other ranks' memory does so in every run."""
    limit, fp8 = float(experts.limit), isinstance(experts, Fp8Experts)
    matrices: Matrices = (experts.gate_up.weight.detach(), experts.down.weight.detach())
    if isinstance(experts, Fp8Experts):
        copies = experts.quantized()
        matrices = (copies.gate_up, copies.down)
    gate_up, down = matrices
    with torch.no_grad():
        _, kept = dispatcher.run(
            dispatcher.forward_steps(
                x_ND, routing.experts_NK, routing.weights_NK, matrices, limit, power_of_two=fp8
            )
        )
    home_R, pool = kept.home_R, empty_pool(kept.home_R, x_ND.shape[1], fp8=fp8)
    layout = dispatcher.pool_layout(kept.packed, kept.pair_R, len(kept.rows_L))
    rows: Quantized | Tensor = kept.rows
    if fp8:
        rows = Quantized(kept.rows, kept.scale_RG.t().contiguous())
    assert kept.z_RC is not None
    activate: Callable[[], Quantized | Tensor]
    if fp8:
        weight_R1 = kept.weight_R.unsqueeze(1)
        activate = partial(swiglu, kept.z_RC, weight_R1, layout, limit, power_of_two=False)
    else:
        activate = partial(swiglu_bf16, kept.z_RC, kept.weight_R, kept.pair_R, limit)
    inner = activate()
    source_R = torch.where(home_R >= 0, home_R // dispatcher.arena.shape.most_pairs, -1)
    num_live = int((source_R >= 0).sum())
    num_away = int(((source_R >= 0) & (source_R != dispatcher.exchange.rank)).sum())
    hidden, width = x_ND.shape[1], kept.z_RC.shape[1] // 2
    row_bytes = hidden + 4 * (hidden // GROUP) if fp8 else 2 * hidden
    first, second = (2.0 * num_live * hidden * columns for columns in (2 * width, width))
    pulled, pushed = float(num_away * row_bytes), 2.0 * num_away * hidden
    sms, homes = dispatcher.options.gemm_sms.now, dispatcher.homes(home_R)
    yield Phase("meet", 0.0, 0.0, dispatcher.arena.meet)
    yield Phase("plan", 0.0, 0.0, partial(dispatcher.arena.plan, len(home_R)))
    yield Phase("pull", 0.0, pulled, partial(dispatcher.pull, home_R, layout, pool))
    yield Phase("L1", first, 0.0, partial(mega_gemm, rows, gate_up, layout, gemm_sms=sms))
    yield Phase(
        "pull + L1",
        first,
        pulled,
        partial(dispatcher.pull_beside, home_R, gate_up, layout, fp8=fp8),
    )
    yield Phase("activation", 0.0, 0.0, activate)
    yield Phase("L2", second, 0.0, partial(mega_gemm, inner, down, layout, gemm_sms=sms))
    yield Phase(
        "L2 + push",
        second,
        pushed,
        partial(mega_gemm, inner, down, layout, homes=homes, gemm_sms=sms),
    )
    yield Phase("combine", 0.0, 0.0, partial(dispatcher.summed, kept.place_NK, torch.bfloat16))


def fused_parts(
    dispatcher: MegaMoe, experts: Fp8Experts, x_ND: Tensor, routing: Routing, grad_ND: Tensor
) -> Iterator[Part]:
    """All of a forward and a backward in FP8, by the phases that the layer does together."""
    arena, shape, limit = dispatcher.arena, dispatcher.arena.shape, float(experts.limit)
    copies, options, dtype = experts.quantized(), experts.options, x_ND.dtype
    assert not dispatcher.options.fp8_grad, "gradients that travel in FP8 are quantised elsewhere"
    weights_NK, grad_ND = routing.weights_NK.detach(), grad_ND.to(dtype)
    power_of_two = options.power_of_two_scales
    matrices = (copies.gate_up, copies.down)
    with torch.no_grad():
        _, kept = dispatcher.run(
            dispatcher.forward_steps(
                x_ND, routing.experts_NK, weights_NK, matrices, limit, power_of_two=power_of_two
            )
        )
    home_R, room, here = kept.home_R, len(kept.home_R), len(kept.rows_L)
    layout = dispatcher.pool_layout(kept.packed, kept.pair_R, here)
    homes, sms = dispatcher.homes(home_R), dispatcher.options.gemm_sms.now
    weight_R1 = kept.weight_R.unsqueeze(1)

    def come() -> object:
        lists = expert_layout(routing.experts_NK, shape.num_experts)
        arena.order(lists.num_rows).copy_(lists.pair_P)
        arena.weights(len(x_ND)).copy_(weights_NK)
        dispatcher._write(x_ND, fp8=True, power_of_two=power_of_two)
        arena.tell(lists.count_E, room)
        arena.meet()
        packed = arena.plan(room).packed
        found = find_rows(
            arena.peers,
            unpacked(packed, dispatcher.exchange.num_ranks, here),
            order_offset=shape.offset("order"),
            weights_offset=shape.offset("weights"),
            most_pairs=shape.most_pairs,
        )
        pool = dispatcher.pool_layout(packed, found.pair_R, here)
        return dispatcher.pull_beside(found.home_R, copies.gate_up, pool, fp8=True)

    yield Part("dispatch + L1", come)
    assert kept.z_RC is not None
    act = partial(swiglu, kept.z_RC, weight_R1, layout, limit, power_of_two=False)
    yield Part("act", act)
    inner = act()

    def go() -> None:
        mega_gemm(inner, copies.down, layout, homes=homes, gemm_sms=sms)
        arena.meet()
        dispatcher.summed(kept.place_NK, dtype)

    yield Part("L2 + combine", go)
    down_t = copies.down_t or transpose_blocks(copies.down)
    gate_up_t = copies.gate_up_t or transpose_blocks(copies.gate_up)

    def come_back() -> tuple[Tensor, Quantized]:
        dispatcher._write(grad_ND, fp8=False, power_of_two=True)
        arena.meet()
        inner_grad_RF, pool = dispatcher.pull_beside(
            home_R, down_t, layout, fp8=False, quantize=True
        )
        _, columns = quantize_routed(
            pool.data_RC, layout, with_rows=False, power_of_two=False,
            tile_scales=options.wgrad_tile_scales,
        )  # fmt: skip
        return inner_grad_RF, columns

    inner_grad_RF, grad_columns = come_back()
    yield Part("dispatch back + dgrad L2", come_back)
    act_back = partial(
        swiglu_backward, kept.z_RC, inner_grad_RF, weight_R1, layout, limit, power_of_two=False
    )
    grads = act_back()
    yield Part("act back", act_back)

    def go_back() -> None:
        mega_gemm(grads.rows, gate_up_t, layout, homes=homes, gemm_sms=sms)
        push_values(
            arena.peers, home_R, grads.weight_NK.flatten(),
            offset=shape.offset("values"), most_pairs=shape.most_pairs,
        )  # fmt: skip
        arena.meet()
        dispatcher.summed(kept.place_NK, dtype)

    yield Part("dgrad L1 + combine back", go_back)
    x8 = Quantized(kept.rows, kept.scale_RG)
    operands = MicroBatch(x8, grad_columns, grads.inner_columns, grads.columns, layout)
    yield Part("wgrad", partial(put_weight_grads, experts, operands))

"""Phases of the fused MoE layer by themselves, for `bench_moe_ranks`: what its parts cost alone
says how much of a transfer the whole layer hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ppruntime.models.dispatch import AnyExperts
from ppruntime.models.fp8_experts import Fp8Experts
from ppruntime.models.kernels.mega_moe import empty_pool
from ppruntime.models.kernels.mega_moe_gemm import mega_gemm
from ppruntime.models.kernels.mega_moe_swiglu import swiglu_bf16
from ppruntime.models.kernels.quantize import GROUP, Quantized
from ppruntime.models.kernels.swiglu import swiglu
from ppruntime.models.mega_moe import MegaMoe
from ppruntime.models.mega_moe_passes import Matrices
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

"""What offloading will move, hold on the host and ask of the link, read off config and order. Pure.

Sizes are `memory.activation_bytes` of one micro-batch; what was received stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ppruntime.config.keys import Config
from ppruntime.memory import activation_bytes, compute_dtype_name, sharded_master_bytes
from ppruntime.models.dims import DTYPE_BYTES
from ppruntime.order import Order
from ppruntime.plan import StagePlan, train_flops_per_token
from ppruntime.schedules.ops import Kind
from ppruntime.text_table import short_bytes

LINK_BYTES_PER_SECOND = 45e9
"""What one direction between host and device is asked to do: pinned copies over PCIe 5 x16."""
_FP8_BYTES = 1 + 4 / 128
"""Of one value: itself and its share of a scale."""


def leaving_bytes(config: Config, stage: StagePlan) -> int:
    """Bytes by which an offloaded micro-batch is lighter on the device while it is away. With
    target fp8 as if all of it were in the compute dtype: the most that can be saved."""
    pp = config.pp
    if not pp.activation_offload:
        return 0
    moved = activation_bytes(config, stage)
    if pp.offload_target == "fp8":
        return round(moved * (1 - _FP8_BYTES / DTYPE_BYTES[compute_dtype_name(config)]))
    return moved


def master_bytes(config: Config, stage: StagePlan) -> int:
    """Bytes of the stage's sharded fp32 masters; 0 where they are not offloaded."""
    return sharded_master_bytes(config, stage) if config.pp.offload_masters else 0


def host_bytes(
    config: Config, order: Order, leaving: Mapping[int, int], masters: Mapping[int, int]
) -> int:
    """The most that the offloaded micro-batches of some stages of one rank take up on the host,
    from OFFLOAD to RELOAD, and all their masters. Less than a page each comes on top."""
    rank = order.computations.stage_to_rank[min(leaving)]
    held = peak = sum(masters.values())
    if config.pp.offload_target != "host":
        return peak
    for op in order.lowered.ops(rank):
        if op.stage in leaving and op.kind is Kind.OFFLOAD:
            held += leaving[op.stage]
            peak = max(peak, held)
        elif op.stage in leaving and op.kind is Kind.RELOAD:
            held -= leaving[op.stage]
    return peak


def flops_to_hide_behind(config: Config, order: Order, plan: Sequence[StagePlan]) -> float:
    """FLOP/s of a device above which the link holds some rank up: in a long step every
    micro-batch's computations have one copy in each direction to hide. Infinite without copies."""
    pp, train = config.pp, config.train
    tokens, moving, worst = train.micro_batch_size * train.seq_len, _moving(config, order), math.inf
    for rank in range(pp.size):
        own = [stage for stage in plan if stage.rank == rank]
        moved = sum(leaving_bytes(config, s) for s in own if s.index in moving)
        if moved and pp.offload_target == "host":
            flops = tokens * sum(
                train_flops_per_token(config.model.dims, unit, train.seq_len)
                for stage in own
                for unit in stage.units
            )
            worst = min(worst, flops * pp.offload_every / moved * LINK_BYTES_PER_SECOND)
    return worst


def _moving(config: Config, order: Order) -> set[int]:
    """Stages of which some micro-batch moves."""
    ops = (op for rank in range(config.pp.size) for op in order.lowered.ops(rank))
    return {op.stage for op in ops if op.kind is Kind.OFFLOAD}


def offload_text(config: Config, order: Order, plan: Sequence[StagePlan]) -> str | None:
    """One line on what is moved, and how fast the device may be before the link holds it up; None
    if nothing is. In a long step every micro-batch's computations have one copy in each direction
    to hide; masters have the whole step."""
    pp = config.pp
    if not pp.activation_offload:
        return "offload: masters" if pp.offload_masters else None
    if pp.offload_target == "fp8":
        return "offload: activations wait as FP8 on the device; changes numerics"
    moving = _moving(config, order)
    if not moving:
        return "offload: no micro-batch is in flight long enough for anything to move"
    most = max(
        sum(leaving_bytes(config, s) for s in plan if s.rank == rank and s.index in moving)
        for rank in range(pp.size)
    )
    worst = flops_to_hide_behind(config, order, plan)
    which = f"one in {pp.offload_every}" if pp.offload_every > 1 else "every one"
    return (
        f"offload: up to {short_bytes(most)} a micro-batch, {which}, go to the host"
        f" and back; at {LINK_BYTES_PER_SECOND / 1e9:g} GB/s a direction that is hidden unless a"
        f" device does more than {worst / 1e12:.4g} TFLOP/s"
    )

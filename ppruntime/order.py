"""Config -> the pipeline's order of work, lowered and checked. Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppruntime.config.keys import Config
from ppruntime.schedules import make
from ppruntime.schedules.check import check
from ppruntime.schedules.counts import Edge, slots_held
from ppruntime.schedules.ops import Schedule
from ppruntime.schedules.passes import (
    add_frees,
    add_offload,
    add_transfers,
    defer_weight_grads,
    split_pairs,
)


@dataclass(frozen=True, slots=True)
class Order:
    """What the whole pipeline does in a step."""

    computations: Schedule
    lowered: Schedule
    """With offloads, transfers and frees: what the executor runs."""
    slots: Mapping[Edge, int]
    """Receive buffers of each channel with which no receive is ever late."""


def make_order(config: Config) -> Order:
    """The run's order. Raises ScheduleError where a definition does not allow the numbers."""
    pp = config.pp
    computations = make(
        pp.schedule,
        pp.size,
        config.train.num_micro_batches,
        stages_per_rank=pp.num_chunks,
        warmup_step=pp.warmup_step,
    )
    if pp.defer_weight_grads:
        computations = defer_weight_grads(computations)
    slots = slots_held(computations)
    moved = computations
    if pp.activation_offload:
        overlapped = 0 if pp.offload_target == "fp8" else 1 if pp.offload_paced else None
        # Pairs are taken apart first: "one op ahead" is half a pair.
        moved = add_offload(split_pairs(moved), every=pp.offload_every, overlapped=overlapped)
    lowered = add_frees(add_transfers(moved, slots=slots))
    check(lowered, slots=slots)
    return Order(computations, lowered, slots)

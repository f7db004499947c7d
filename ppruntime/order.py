"""Config -> the pipeline's order of work, lowered and checked. Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppruntime.config.keys import Config
from ppruntime.schedules import make
from ppruntime.schedules.check import check, check_progress
from ppruntime.schedules.counts import Edge, slots_held
from ppruntime.schedules.ops import Pair, Schedule, ScheduleError
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
    pairs: tuple[Pair, ...] = ()
    """Those whose halves run at once, of all ranks; none unless the config wants it."""


def make_order(config: Config) -> Order:
    """The run's order. Raises ScheduleError where a definition does not allow the numbers, or gives
    no pair that could overlap."""
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
    pairs = _overlapping_pairs(config, computations)
    moved = computations
    if pp.activation_offload:
        paced = pp.offload_every if pp.offload_paced else None
        overlapped = 0 if pp.offload_target == "fp8" else paced
        # Pairs that do not overlap are taken apart first: "one op ahead" is half a pair.
        apart = moved if pairs else split_pairs(moved)
        moved = add_offload(apart, every=pp.offload_every, overlapped=overlapped)
    lowered = add_frees(add_transfers(moved, slots=slots))
    check(lowered, slots=slots)
    if pairs:
        # Also where the host holds a forward back until its backward has had its input (`lanes`).
        fused = add_frees(add_transfers(computations, slots=slots, fuse_pairs=True))
        check_progress(fused, slots=slots, fuse_pairs=True)
    return Order(computations, lowered, slots, pairs)


def _overlapping_pairs(config: Config, computations: Schedule) -> tuple[Pair, ...]:
    if not config.pp.overlap_pairs:
        return ()
    pairs = tuple(step for o in computations.orders for step in o if isinstance(step, Pair))
    if not pairs:
        raise ScheduleError(
            f"pp.overlap_pairs = true, but {computations.name} has no pairs on {config.pp.size}"
            f" ranks with train.num_micro_batches = {config.train.num_micro_batches}; leave it out,"
            f" or use more than {config.pp.size} micro-batches"
        )
    return pairs

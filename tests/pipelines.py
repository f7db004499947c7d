"""Runs a whole pipeline of toy stages in this process: one thread per rank, `local` channels."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from toy_units import live_after, toy_units

from ppruntime.activation_offload import ActivationOffload
from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock, OpTimes
from ppruntime.executor import Executor
from ppruntime.models.carry import MicroBatch
from ppruntime.models.linear import Linear, WeightGradQueue
from ppruntime.schedules.counts import Edge
from ppruntime.schedules.ops import Schedule
from ppruntime.stage import Stage
from ppruntime.transports.base import Boundary, TensorSpec
from ppruntime.transports.local import open_ranks

LOSS_SEED = torch.tensor(1 / 37)
BALANCE_SEED = torch.tensor(1 / 3)


def toy_stages(num_halves: int, cuts: Sequence[int], seed: int) -> list[Stage]:
    """Stages of the toy model, cut after the units numbered `cuts`; a repeated cut is a stage
    without units."""
    units, live = toy_units(num_halves, seed), live_after(num_halves + 2)
    stages, start = [], 0
    for index, end in enumerate([*cuts, len(units) - 1]):
        queue = WeightGradQueue()
        own = units[start : end + 1]
        for module in (m for unit in own for m in unit.modules()):
            if isinstance(module, Linear):
                module.queue = queue
        inputs = live[start - 1] if start else ()
        stages.append(Stage(index, own, inputs=inputs, outputs=live[end], queue=queue))
        start = end + 1
    return stages


def toy_boundaries(stages: Sequence[Stage], batch: MicroBatch) -> list[Boundary]:
    """The forward boundary after each stage but the last, from a run without gradients."""
    boundaries, received = [], tuple[Tensor, ...]()
    for stage in stages[:-1]:
        received = stage.evaluate(0, received, batch)
        boundaries.append(
            Boundary(
                tuple(
                    TensorSpec(name, tuple(tensor.shape), tensor.dtype)
                    for name, tensor in zip(stage.outputs, received, strict=True)
                )
            )
        )
    return boundaries


def run_local(
    lowered: Schedule,
    stages: Sequence[Stage],
    batches: Sequence[MicroBatch],
    slots: Mapping[Edge, int],
    *,
    training: bool = True,
    timeout_seconds: float = 20,
    offloads: Mapping[int, ActivationOffload] | None = None,
) -> list[list[OpTimes[int]]]:
    """One step of the whole pipeline; the op times of each rank. Raises what a rank raised
    first. `offloads` are by rank."""
    for stage in stages:
        stage.reset(loss_seed=LOSS_SEED, balance_seed=BALANCE_SEED)
    boundaries = toy_boundaries(stages, batches[0])
    for stage in stages:
        stage.reset(loss_seed=LOSS_SEED, balance_seed=BALANCE_SEED)
    channels = make_channels(boundaries, lowered.stage_to_rank, slots)
    transports = open_ranks(
        channels,
        lowered.num_ranks,
        device=torch.device("cpu"),
        timeout_seconds=timeout_seconds,
    )
    times: list[list[OpTimes[int]]] = [[] for _ in transports]
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            own = {s: stages[s] for s in lowered.stages_of(rank)}
            executor = Executor(
                lowered,
                rank,
                own,
                channels,
                transports[rank],
                clock=HostClock(),
                training=training,
                offload=offloads[rank] if offloads else None,
            )
            executor.run(batches)
            times[rank] = executor.op_times()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(lowered.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return times

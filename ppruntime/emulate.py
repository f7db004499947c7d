"""Some stages of a deeper pipeline, run for real: executor, stages and transport are the true ones.

What is not there is replayed (`emulate_transport`), with the true number of micro-batches in
flight and the delays that the absent stages would take. What comes out are the present stages'
times, in the steady part of the step, and what transfers between them took.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ppruntime.boundaries import expected_boundaries
from ppruntime.build import build_stage, warm_up_stage
from ppruntime.channels import make_channels
from ppruntime.clocks import CudaClock, HostClock
from ppruntime.config import Config, one_transport
from ppruntime.connect import compute_dtype, open_beside
from ppruntime.data.batches import open_data
from ppruntime.emulate_replays import Blanks, Recorder
from ppruntime.emulate_transport import ReplayTransport, split_channels
from ppruntime.engram_tables import EngramLookups
from ppruntime.executor import Executor
from ppruntime.experts.dispatch import open_dispatcher
from ppruntime.experts.options import choose_experts
from ppruntime.gemm_budget import with_gemm_budget
from ppruntime.linear_options import choose_linears
from ppruntime.messages import gather_bytes
from ppruntime.models.dispatch import Dispatcher, check_waits
from ppruntime.op_samples import (
    Times,
    cycle_seconds,
    gather_peaks,
    gather_times,
    mean_seconds,
    stage_times,
    waited_for,
)
from ppruntime.order import Order, make_order
from ppruntime.plan import StagePlan, cut
from ppruntime.projection.calibrate import on_device, refuse_zero_weights
from ppruntime.projection.calibration import (
    StagePeak,
    StageTimes,
    TransferTimes,
)
from ppruntime.projection.projector import ProjectionError
from ppruntime.ranks import Ranks
from ppruntime.schedules.absent import AbsentRanks
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.counts import backward_kinds, peak_in_flight
from ppruntime.stage import Stage
from ppruntime.transports.base import Boundary, Transport
from ppruntime.wrap import hold_gradients, reduce_grads

_WARM_UP_STEPS = 1


@dataclass(frozen=True, slots=True)
class Emulation:
    """What the present stages gave, on every rank alike."""

    stages: tuple[StageTimes, ...]
    mean_s: tuple[tuple[float, float, float], ...]
    """Per present stage the mean seconds of F, I and W over the steady part: what a sum of ops is
    predicted from, where `stages` has medians."""
    transfers: tuple[TransferTimes, ...]
    """Between present ranks, by bytes; empty where none was waited for."""
    peaks: tuple[StagePeak, ...]
    """Empty on a CPU."""
    cycle_s: tuple[float, ...]
    """Per present stage: seconds from one backward's end to the next, in the steady part."""
    step_s: tuple[float, ...]
    """The measured steps, over the slowest present rank, without the absent ranks' own end."""


def check_emulation(config: Config, present: range) -> tuple[Order, tuple[StagePlan, ...]]:
    """The whole pipeline's order and cut. Raises ProjectionError for what cannot be emulated."""
    order = make_order(config)
    stage_to_rank = order.computations.stage_to_rank
    if stage_to_rank != tuple(range(config.pp.size)):
        raise ProjectionError(
            f"pp.schedule={config.pp.schedule} has {config.pp.num_chunks} stages a rank; only "
            "orders with one stage a rank can be emulated in part, such as 1f1b_w"
        )
    if not 0 <= present.start < present.stop <= config.pp.size:
        raise ProjectionError(
            f"stages {present.start} to {present.stop - 1} are not a part of pp.size "
            f"{config.pp.size}; name stages of 0 to {config.pp.size - 1}"
        )
    held = max(peak_in_flight(order.computations)[r] for r in present)
    if config.train.num_micro_batches < 3 * held:
        raise ProjectionError(
            f"{config.train.num_micro_batches} micro-batches leave no steady part of one pipe-full "
            f"between two ends of {held}; set train.num_micro_batches to {3 * held} or more"
        )
    plan = cut(
        config.model.dims,
        stage_to_rank,
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )
    return order, plan


def emulate(
    config: Config,
    ranks: Ranks,
    present: range,
    *,
    costs: Costs,
    hop_s: float,
    num_steps: int,
    replays: Recorder | Blanks,
) -> Emulation:
    """Runs this rank's stage of `present`, `present.start + ranks.pp_rank`. A collective.

    `costs` are the absent stages' seconds (the present stages' entries are not looked at), `hop_s`
    what a transfer to or from them takes, one way.
    """
    order, plan = check_emulation(config, present)
    config = with_gemm_budget(config, ranks.device)
    device, train = ranks.device, config.train
    rank = present.start + ranks.pp_rank
    shape = {"batch": train.micro_batch_size, "seq_len": train.seq_len}
    boundaries = expected_boundaries(config.model.dims, plan, dtype=compute_dtype(config), **shape)
    on_cuda = device.type == "cuda"
    if on_cuda:
        gc.collect()  # an emulation before this one may lie in cycles, and would count in the peak
    dispatcher = open_dispatcher(config, ranks, timeout_seconds=config.pp.timeout_seconds)
    stage = _build(config, plan[rank], ranks, dispatcher)
    refuse_zero_weights(stage, f"stage {rank}", ranks)
    if on_cuda:
        received = boundaries[rank - 1] if rank else None
        backwards = backward_kinds(order.computations, rank)
        batch, seq_len = train.micro_batch_size, train.seq_len
        warm_up_stage(stage, received, ranks, backwards=backwards, batch=batch, seq_len=seq_len)
    channels = make_channels(boundaries, order.computations.stage_to_rank, order.slots)
    inner_channels, edges = split_channels(channels, present, rank)
    inner: Transport | None = None
    if inner_channels:
        inner = open_beside(config, ranks, list(inner_channels.values()))
    transport = ReplayTransport(inner, inner_channels, edges, rank, replays, device=device)
    executor = Executor(
        order.lowered,
        rank,
        {rank: stage},
        channels,
        transport,
        clock=CudaClock() if on_cuda else HostClock(),
        lookups=EngramLookups({rank: stage.units}, ahead=config.engram.lookups_ahead),
    )
    data = open_data(config)
    all_times: list[list[Times]] = []
    step_s: list[float] = []
    for step in range(_WARM_UP_STEPS + num_steps):
        batches = [
            on_device(data.micro_batch(0, m, ranks.data_rank), device)
            for m in range(train.num_micro_batches)
        ]
        _reset(stage, device)
        _settle(ranks)
        if step == _WARM_UP_STEPS and on_cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        transport.begin(
            AbsentRanks(order.computations, costs, Hops.both(hop_s), present, start=start)
        )
        executor.run(batches)
        if on_cuda:
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        check_waits([dispatcher])
        times = executor.op_times()
        stage.flush_weight_grads()
        reduce_grads(list(stage.units), ranks.data_group)
        stage.units.zero_grad(set_to_none=True)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if step >= _WARM_UP_STEPS:
            step_s.append(float(took))
            all_times.append(gather_times(times, ranks))
    source = "torch.cuda, over the measured steps, where no optimizer is"
    peaks = gather_peaks(ranks, rank, source) if on_cuda else ()
    transport.close()
    replayed = [
        part.decode() for part in gather_bytes(replays.describe().encode(), ranks.pipeline_group)
    ]
    return _emulation(config, order, present, boundaries, all_times, replayed, peaks, step_s)


def _build(config: Config, plan: StagePlan, ranks: Ranks, dispatcher: Dispatcher) -> Stage:
    """As `build.build_pipeline` does: with the run's backends, experts over its expert ranks.
    Weights are drawn on the device: times do not depend on their bits."""
    return build_stage(
        config,
        plan,
        ranks,
        experts=choose_experts(config),
        dispatcher=dispatcher,
        linears=choose_linears(config),
        draw_on_device=True,
    )


def _reset(stage: Stage, device: torch.device) -> None:
    one = torch.ones((), device=device)
    stage.reset(loss_seed=one, balance_seed=one)
    hold_gradients(list(stage.units))


def _settle(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


# --- reading -------------------------------------------------------------------------------------


def _emulation(
    config: Config,
    order: Order,
    present: range,
    boundaries: Sequence[Boundary],
    all_times: Sequence[Sequence[Times]],
    replayed: Sequence[str],
    peaks: tuple[StagePeak, ...],
    step_s: Sequence[float],
) -> Emulation:
    in_flight = peak_in_flight(order.computations)
    count = config.train.num_micro_batches
    transport = one_transport(config)
    what = (
        f"emulated stages {present.start}-{present.stop - 1} of {config.pp.size} on {transport}"
        if len(present) > 1
        else f"emulated stage {present.start} of {config.pp.size} alone, no transfer in flight"
    )
    stages, means, cycles = [], [], []
    for place, stage in enumerate(present):
        held = in_flight[stage]
        steps = [times[place] for times in all_times]
        source = what + replayed[place]
        window = range(held, count - held)
        stages.append(stage_times(stage, steps, window, source))
        means.append(mean_seconds(stage, steps, window))
        cycles.append(cycle_seconds(steps, window))
    return Emulation(
        stages=tuple(stages),
        mean_s=tuple(means),
        transfers=waited_for(present, boundaries, all_times, transport, what),
        peaks=peaks,
        cycle_s=tuple(cycles),
        step_s=tuple(step_s),
    )

"""Training steps of a real run, measured: what a prediction rests on, or is held against.

Everything of a run is there: pipeline, reduction of gradients, norm, update, routing. What a step
takes beside its pipeline hardly depends on the number of micro-batches, so that one run's serves a
prediction of another's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from ppruntime.boundaries import expected_boundaries
from ppruntime.build import build_pipeline
from ppruntime.config import Config
from ppruntime.connect import compute_dtype
from ppruntime.data.batches import open_data
from ppruntime.emulate import check_emulation
from ppruntime.memory_meter import outside_bytes
from ppruntime.op_samples import (
    Times,
    cycle_seconds,
    gather_peaks,
    gather_times,
    mean_seconds,
    waited_for,
)
from ppruntime.projection.calibrate import refuse_zero_weights
from ppruntime.projection.calibration import StagePeak, TransferTimes
from ppruntime.ranks import Ranks
from ppruntime.schedules.counts import peak_in_flight
from ppruntime.trainer import Trainer

_WARM_UP_STEPS = 1


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What training steps gave, on every rank alike. A rank has one stage."""

    mean_s: tuple[tuple[float, float, float], ...]
    """Per stage the mean seconds of F, I and W over the steady part; see `mean_seconds`."""
    cycle_s: tuple[float, ...]
    """Per stage: seconds from one backward's end to the next, in the steady part."""
    transfers: tuple[TransferTimes, ...]
    """Between ranks, by bytes; empty where none was waited for."""
    peaks: tuple[StagePeak, ...]
    """Over whole steps; empty on a CPU."""
    pipeline_s: tuple[float, ...]
    """Per step: from the first op's start to the last one's end, over all ranks."""
    step_s: tuple[float, ...]
    """Per step: from its first micro-batch's data until the update is done, on the last rank."""

    @property
    def rest_s(self) -> float:
        """What a step takes beside its pipeline; the median over the steps."""
        return median(s - p for s, p in zip(self.step_s, self.pipeline_s, strict=True))


def measure_run(config: Config, ranks: Ranks, num_steps: int) -> MeasuredRun:
    """Trains so many steps behind one that does not count. A collective of all ranks.

    Raises ProjectionError for a run with several stages a rank, or with weights of zeros.
    """
    stages = range(config.pp.size)
    order, plan = check_emulation(config, stages)
    on_cuda = ranks.device.type == "cuda"
    gc.collect()  # a run before this one may lie in cycles, and would count in the peak
    if on_cuda:
        torch.cuda.empty_cache()
    pipeline = build_pipeline(config, ranks, draw_on_device=True)
    for index, stage in pipeline.stages.items():
        refuse_zero_weights(stage, f"stage {index}", ranks)
    trainer, data = Trainer(config, ranks, pipeline), open_data(config)
    all_times: list[list[Times]] = []
    step_s: list[float] = []
    for step in range(_WARM_UP_STEPS + num_steps):
        if on_cuda:
            torch.cuda.synchronize()
        if step == _WARM_UP_STEPS and on_cuda:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        start = time.perf_counter()
        trainer.step(step, data)
        if on_cuda:
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times = gather_times(pipeline.training.op_times(), ranks)
        if step >= _WARM_UP_STEPS:
            step_s.append(float(took))
            all_times.append(times)
    source = "torch.cuda, over whole training steps"
    peaks: tuple[StagePeak, ...] = ()
    if on_cuda:
        outside = outside_bytes(pipeline)
        peaks = gather_peaks(ranks, ranks.pp_rank, source, outside_bytes=outside)
    pipeline.transport.close()
    train = config.train
    boundaries = expected_boundaries(
        config.model.dims,
        plan,
        batch=train.micro_batch_size,
        seq_len=train.seq_len,
        dtype=compute_dtype(config),
    )
    held, count = peak_in_flight(order.computations), train.num_micro_batches
    windows = [range(held[stage], count - held[stage]) for stage in stages]
    by_stage = [[times[stage] for times in all_times] for stage in stages]
    name = f"{config.model.name}, {config.pp.schedule}, M {count}"
    link = " and ".join(dict.fromkeys(config.pp.transport_names))
    return MeasuredRun(
        mean_s=tuple(mean_seconds(s, by_stage[s], windows[s]) for s in stages),
        cycle_s=tuple(cycle_seconds(by_stage[s], windows[s]) for s in stages),
        transfers=waited_for(stages, boundaries, all_times, link, name),
        peaks=peaks,
        pipeline_s=tuple(_span(times) for times in all_times),
        step_s=tuple(step_s),
    )


def _span(times: Sequence[Times]) -> float:
    begin = min(t.start for row in times for t in row)
    end = max(t.end for row in times for t in row)
    return (end - begin) / 1e9

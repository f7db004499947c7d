"""Bench of whole pipeline steps on GPUs, without an optimizer: orders and transports on one model.

    torchrun --nproc-per-node 2 -m ppruntime.launch.bench_pipeline RUN.toml [KEY=VALUE] --out FILE

The stages are built once per placement. Each case (order x transport) then runs `--steps` steps;
the record has the step time, the busiest rank's compute, what the timeline predicts from the run's
own op times, and a digest of all gradients, which has to be the same in every case.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # see `boundaries.warm_up`

import torch
import torch.distributed as dist

from ppruntime.boundaries import expected_boundaries
from ppruntime.build import build_stage, compute_dtype, warm_up_stage
from ppruntime.channels import make_channels
from ppruntime.clocks import CudaClock, HostClock
from ppruntime.config import Config, load
from ppruntime.data import open_data
from ppruntime.executor import Executor
from ppruntime.messages import gather_bytes
from ppruntime.models.carry import MicroBatch
from ppruntime.order import make_order
from ppruntime.plan import cut
from ppruntime.profiling import align_clocks, gather_step, planned_step, split_times
from ppruntime.ranks import Layout, Ranks, join, leave
from ppruntime.stage import Stage
from ppruntime.transports import open_transport
from ppruntime.transports.base import TransportError
from ppruntime.wrap import hold_gradients, reduce_grads

_WARM_UP_STEPS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every case on this rank; rank 0 prints a line each and writes the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--orders", default="1f1b,async_1f1b,1f1b_w")
    parser.add_argument("--transports", default="nccl,copy_engine,put")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--nccl-library")
    args = parser.parse_args(arguments)
    base = load([args.config], args.overrides)
    ranks = join(
        Layout(base.pp.size, 1, 1), use_cuda=torch.cuda.is_available(), timeout_seconds=300
    )
    records: list[dict[str, Any]] = []
    stages: dict[int, Stage] = {}
    for order in args.orders.split(","):
        config = load([args.config], [*args.overrides, f"pp.schedule={order}"])
        schedule = make_order(config).computations
        if sorted(stages) != list(schedule.stages_of(ranks.pp_rank)):
            stages.clear()
            gc.collect()
            stages = _build(config, ranks)
        for kind in args.transports.split(","):
            library = {"nccl_library": args.nccl_library} if kind == "put" else {}
            options = {name: value for name, value in library.items() if value}
            records.append(_case(config, ranks, stages, kind, options, args.steps))
            if ranks.rank == 0:
                print(_line(records[-1]), flush=True)
    if ranks.rank == 0:
        _write(args.out, base, records)
    leave()
    return 0


def _build(config: Config, ranks: Ranks) -> dict[int, Stage]:
    stage_to_rank = make_order(config).computations.stage_to_rank
    plan = cut(
        config.model.dims, stage_to_rank, config.pp.layers_per_stage, seq_len=config.train.seq_len
    )
    shape = {"batch": config.train.micro_batch_size, "seq_len": config.train.seq_len}
    boundaries = expected_boundaries(config.model.dims, plan, dtype=compute_dtype(config), **shape)
    stages = {s.index: build_stage(config, s, ranks) for s in plan if s.rank == ranks.pp_rank}
    for index, stage in stages.items():
        warm_up_stage(stage, boundaries[index - 1] if index else None, ranks, **shape)
    return stages


def _case(
    config: Config,
    ranks: Ranks,
    stages: dict[int, Stage],
    kind: str,
    options: dict[str, Any],
    num_steps: int,
) -> dict[str, Any]:
    """One order over one transport."""
    order, train, dims = make_order(config), config.train, config.model.dims
    stage_to_rank = order.computations.stage_to_rank
    plan = cut(dims, stage_to_rank, config.pp.layers_per_stage, seq_len=train.seq_len)
    boundaries = expected_boundaries(
        dims,
        plan,
        batch=train.micro_batch_size,
        seq_len=train.seq_len,
        dtype=compute_dtype(config),
    )
    channels = make_channels(boundaries, stage_to_rank, order.slots)
    record: dict[str, Any] = {
        "order": order.computations.name,
        "transport": kind,
        "num_micro_batches": train.num_micro_batches,
        "boundary_bytes": [b.num_bytes for b in boundaries],
    }
    try:
        transport = open_transport(
            kind,
            channels,
            ranks.pp_rank,
            device=ranks.device,
            timeout_seconds=60,
            store=ranks.pipeline_store(),
            **options,
        )
    except TransportError as error:
        return record | {"refused": str(error)}
    clock = CudaClock() if ranks.device.type == "cuda" else HostClock()
    executor = Executor(order.lowered, ranks.pp_rank, stages, channels, transport, clock=clock)
    data = open_data(config)
    batches = [
        MicroBatch(*(t.to(ranks.device) for t in data.micro_batch(0, m)[:3]))
        for m in range(train.num_micro_batches)
    ]
    seconds, predicted, computes = [], [], []
    digest = ""
    for step in range(_WARM_UP_STEPS + num_steps):
        took = _step(ranks, stages, executor, batches)
        digest = _gradient_digest(ranks, stages)
        measured = gather_step(
            order.computations,
            executor.op_times(),
            offset=align_clocks(ranks.pipeline_group),
            group=ranks.pipeline_group,
        )
        if step >= _WARM_UP_STEPS:
            seconds.append(took)
            predicted.append(planned_step(measured).makespan / 1e3)
            computes.append(max(t.compute for t in split_times(measured)) / 1e9)
    transport.close()
    median = statistics.median(seconds)
    return record | {
        "step_seconds": seconds,
        "step_seconds_median": median,
        "predicted_seconds_median": statistics.median(predicted),
        "predicted_over_measured": statistics.median(predicted) / median,
        "busiest_compute_seconds_median": statistics.median(computes),
        "bubble_fraction": 1 - statistics.median(computes) / median,
        "gradient_digest": digest,
    }


def _step(
    ranks: Ranks, stages: dict[int, Stage], executor: Executor, batches: Sequence[MicroBatch]
) -> float:
    """Seconds of one step's ops, over the slowest rank; gradients are reduced and left there."""
    for stage in stages.values():
        one = torch.ones((), device=ranks.device)
        stage.reset(loss_seed=one / len(batches), balance_seed=one)
        hold_gradients(list(stage.units))
    _settle(ranks)
    start = time.perf_counter()
    executor.run(batches)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    for stage in stages.values():
        reduce_grads(list(stage.units), ranks.data_group)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _settle(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _gradient_digest(ranks: Ranks, stages: dict[int, Stage]) -> str:
    """A digest of the bits of all gradients of the pipeline; clears them."""
    found = []
    for index in sorted(stages):
        for unit in stages[index].units:
            for name, param in unit.named_parameters():
                if param.grad is None:
                    continue
                grad = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
                bits = grad.contiguous().view(torch.int32)
                spec: Any = unit.spec
                found.append(f"{spec.name}.{name} {int(bits.sum(dtype=torch.int64))}")
                param.grad = None
    parts = gather_bytes("\n".join(found).encode(), ranks.pipeline_group)
    lines = sorted(line for part in parts for line in part.decode().splitlines())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _line(record: dict[str, Any]) -> str:
    head = f"{record['order']:>16} {record['transport']:>12} M {record['num_micro_batches']:>3}"
    if "refused" in record:
        return f"{head}  refused: {record['refused']}"
    return (
        f"{head}  step {record['step_seconds_median'] * 1e3:9.2f} ms  predicted"
        f" {record['predicted_over_measured']:.4f} of it  bubble {record['bubble_fraction']:.2%}"
        f"  gradients {record['gradient_digest']}"
    )


def _write(path: Path, config: Config, records: list[dict[str, Any]]) -> None:
    cuda = torch.cuda.is_available()
    version: Any = torch.cuda.nccl.version() if cuda else ()  # type: ignore[no-untyped-call]
    nccl = ".".join(map(str, version))
    record = {
        "command": f"torchrun -m ppruntime.launch.bench_pipeline {' '.join(sys.argv[1:])}",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {"torch": torch.__version__, "nccl": nccl, "python": sys.version.split()[0]},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": config.model.name,
        "seq_len": config.train.seq_len,
        "cases": records,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

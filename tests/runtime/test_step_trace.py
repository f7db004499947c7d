"""What a profiler sees of a step: ops by their text, and no wait of the host for the device."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch
from pipelines import BALANCE_SEED, LOSS_SEED, toy_stages
from small_runs import CONFIG, SMALL
from toy_units import micro_batches
from trace_scan import Wait, labels, waits
from transport_cases import GPU_KINDS

from ppruntime.clocks import HostClock
from ppruntime.executor import Executor
from ppruntime.schedules import make
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.transports.local import open_ranks

NUM_GPUS = torch.cuda.device_count()


def _event(category, name, start, length, thread=1, **arguments):
    event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": thread}
    return event | {"args": arguments}


def _trace(*events):
    ops = [("0F0", 10, 20), ("0SEND_F0", 30, 2), ("0B0", 40, 30)]
    return {"traceEvents": [_event("user_annotation", *op) for op in ops] + list(events)}


TEXTS = ("0F0", "0SEND_F0", "0B0")


@pytest.mark.parametrize(
    "call",
    ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"],
)
def test_a_wait_inside_the_step_is_found_with_its_op_and_operator(call):
    trace = _trace(
        _event("cpu_op", "aten::item", 12, 10),
        _event("cpu_op", "aten::_local_scalar_dense", 13, 8),
        _event("cuda_runtime", call, 14, 5),
    )
    assert waits(trace, TEXTS) == [Wait(call, "0F0", "aten::_local_scalar_dense")]


def test_a_wait_on_autograds_thread_and_one_of_the_driver_are_found():
    trace = _trace(
        _event("cpu_op", "aten::mm", 0, 100, thread=1),
        _event("cuda_driver", "cuStreamSynchronize", 50, 1, thread=2),
        _event("cuda_runtime", "cudaFree", 35, 1),
    )
    assert waits(trace, TEXTS) == [
        Wait("cuStreamSynchronize", "0B0", ""),
        Wait("cudaFree", "", "aten::mm"),  # between two ops
    ]


def test_copies_to_pageable_memory_are_waits_and_to_pinned_memory_are_not():
    trace = _trace(
        _event("cuda_runtime", "cudaMemcpyAsync", 12, 1, correlation=7),
        _event("cuda_runtime", "cudaMemcpyAsync", 13, 1, correlation=8),
        _event("cuda_runtime", "cudaMemcpyAsync", 14, 1, correlation=9),
        _event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 500, 1, correlation=7),
        _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 501, 1, correlation=8),
        _event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 502, 1, correlation=9),
    )
    assert waits(trace, TEXTS) == [Wait("cudaMemcpyAsync to pageable memory", "0F0", "")]


def test_before_the_first_op_and_after_the_last_the_host_may_wait():
    trace = _trace(
        _event("cuda_runtime", "cudaDeviceSynchronize", 5, 1),
        _event("cuda_runtime", "cudaDeviceSynchronize", 71, 1),
        _event("cuda_runtime", "cudaEventQuery", 50, 1),
        _event("cuda_runtime", "cudaLaunchKernel", 50, 1),
    )
    assert waits(trace, TEXTS) == []
    assert waits({"traceEvents": []}, TEXTS) == []


def test_a_profiler_sees_every_op_under_its_text_in_the_orders_turn(tmp_path):
    warnings.simplefilter("default")  # torch's profiler warns of its own doings
    schedule = make("1f1b_w", 1, 3)
    lowered = add_frees(add_transfers(schedule, slots=slots_held(schedule)))
    (stage,), batches = toy_stages(2, (), seed=3), micro_batches(3, 1, 5, seed=3)
    stage.reset(loss_seed=LOSS_SEED, balance_seed=BALANCE_SEED)
    (transport,) = open_ranks((), 1, device=torch.device("cpu"), timeout_seconds=20)
    executor = Executor(lowered, 0, {0: stage}, (), transport, clock=HostClock())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        executor.run(batches)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    texts = [str(op) for op in lowered.ops(0)]
    assert labels(trace, texts) == texts


# On GPUs


def _traced_step(rank, kind, folder):
    """The trace of a rank's step, the texts of its ops, and how many MoE units it runs."""
    warnings.simplefilter("default")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    from ppruntime.build import build_pipeline
    from ppruntime.config import load
    from ppruntime.data.batches import open_data
    from ppruntime.models.carry import MicroBatch
    from ppruntime.ranks import Layout, join, leave

    size = int(os.environ["WORLD_SIZE"])
    keys = [f"pp.size={size}", f"pp.transport={kind}"]
    library = os.environ.get("PPRUNTIME_NCCL_LIBRARY")
    if kind == "put" and library:
        keys.append(f"pp.nccl_library={library}")
    config = load([CONFIG], [*SMALL, *keys])
    ranks = join(Layout(size, 1, 1), use_cuda=True, timeout_seconds=120)
    pipeline = build_pipeline(config, ranks)
    data, one = open_data(config), torch.ones((), device=ranks.device)
    batches = [
        MicroBatch(*(t.to(ranks.device) for t in data.micro_batch(0, m)[:3]))
        for m in range(config.train.num_micro_batches)
    ]

    def step():
        for stage in pipeline.stages.values():
            stage.reset(loss_seed=one, balance_seed=one)
        pipeline.training.run(batches)
        torch.cuda.synchronize()

    for _ in range(3):  # memory and kernels are there after these
        step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    profile.export_chrome_trace(f"{folder}/{kind}{rank}.json")
    pipeline.transport.close()
    leave()
    texts = [str(op) for op in pipeline.order.lowered.ops(ranks.pp_rank)]
    return texts, sum("moe" in spec.name for spec, _ in pipeline.units) * len(batches)


@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("kind", [pytest.param(k, id=f"over_{k}") for k in GPU_KINDS])
def test_no_op_of_a_step_holds_the_host_until_the_device_is_done(run_ranks, kind, tmp_path):
    """Allowed: the reference experts read how many tokens each got, once a MoE unit and forward
    (`counts.tolist()` in models/moe.py: a copy to the host and its wait). Nothing else."""
    found = run_ranks(2, _traced_step, kind, str(tmp_path), timeout_seconds=180)
    for rank, (texts, num_moes) in enumerate(found):
        trace = json.loads((tmp_path / f"{kind}{rank}.json").read_text())
        assert labels(trace, texts) == texts
        others, counts = [], []
        for wait in waits(trace, texts):
            reads_counts = "F" in wait.op and "SEND" not in wait.op and "copy" in wait.within
            (counts if reads_counts else others).append(wait)
        assert not others, others
        assert len(counts) <= 2 * num_moes, counts

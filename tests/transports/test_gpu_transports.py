"""The GPU transports on two GPUs: what runs on the device, and every fault. The contract and the
stress are those of all kinds, in test_transport_contract.py and test_transport_stress.py.

The put tests take the NCCL library from the environment variable PPRUNTIME_NCCL_LIBRARY, if set.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings

import pytest
import torch
from rank_pool import run_in_pool
from torch.distributed import TCPStore
from transport_cases import GPU_KINDS

from ppruntime.transports import open_transport
from ppruntime.transports.base import Boundary, Channel, TensorSpec, TransportError
from ppruntime.transports.device import PENDING_WAIT_EXIT_CODE

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
KINDS = [pytest.param(kind, id=f"over_{kind}") for kind in GPU_KINDS]
SOON_SECONDS = 12.0
"""From a fault to its error: noticed in 0.5 s, told to all, waits let go 1.5 s later; put ends its
process after 5 s."""

SMALL = Boundary((TensorSpec("x", (3, 5), torch.float32), TensorSpec("i", (4,), torch.int32)))
LARGE = Boundary((TensorSpec("x", (8192, 4, 5120), torch.bfloat16),))


def _open(rank, kind, channels, timeout_seconds=30.0, **options):
    # Before the first call into CUDA, which is in this function.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if kind == "put" and os.environ.get("PPRUNTIME_NCCL_LIBRARY"):
        options["nccl_library"] = os.environ["PPRUNTIME_NCCL_LIBRARY"]
    return open_transport(
        kind,
        channels,
        rank,
        device=device,
        timeout_seconds=timeout_seconds,
        store=store,
        **options,
    )


# What runs on the GPU


def _profiled(rank, kind):
    """Names of what ran on the GPU and of what the host called, while messages crossed."""
    warnings.simplefilter("default")  # torch's profiler warns of its own doings
    channels = [
        Channel(0, "forward", 0, 1, 0, 1, SMALL, 2),
        Channel(1, "backward", 1, 0, 1, 0, LARGE, 2),
    ]
    device = torch.device("cuda", rank)
    transport = _open(rank, kind, channels)
    tensors = {
        c.id: [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in c.boundary.tensors]
        for c in channels
    }

    def step():
        for m in range(4):
            for c in channels:
                if c.src_rank == rank:
                    transport.send(c, m, tensors[c.id])
                else:
                    transport.post(c, m)
                    transport.take(c, m)
                    transport.release(c, m)

    step()
    transport.step_end()
    torch.cuda.synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("the step"):
            step()
        with torch.profiler.record_function("its end"):
            transport.step_end()
            torch.cuda.synchronize(device)
    transport.close()
    events = profile.events()
    is_gpu = torch.autograd.DeviceType.CUDA
    (span,) = (e.time_range for e in events if e.name == "the step" and e.device_type != is_gpu)
    on_gpu = {e.name for e in events if e.device_type == is_gpu} - {"the step", "its end"}
    host = {
        e.name
        for e in events
        if e.device_type != is_gpu and span.start <= e.time_range.start <= span.end
    }
    return on_gpu, host


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_never_block_the_host_and_only_nccl_launches_kernels(kind):
    for on_gpu, host in run_in_pool(2, _profiled, kind):
        blocking = {n for n in host if "Synchronize" in n or n in ("cudaMemcpy", "cuMemcpy")}
        assert not blocking, blocking
        kernels = {n for n in on_gpu if not n.startswith(("Memcpy", "Memset"))}
        if kind == "nccl":
            assert any("nccl" in n.lower() for n in kernels)
        else:
            assert not kernels, kernels


# Faults


def _killed(rank, kind, when):
    channel = Channel(0, "forward", 0, 1, 0, 1, LARGE if when == "during" else SMALL, 4)
    transport = _open(rank, kind, [channel])
    device = torch.device("cuda", rank)
    if rank == 0:
        tensors = [
            torch.ones(s.shape, dtype=s.dtype, device=device) for s in channel.boundary.tensors
        ]
        torch.cuda.synchronize(device)
        if when == "during":
            for m in range(4):
                transport.send(channel, m, tensors)
        elif when == "after":
            transport.send(channel, 0, tensors)
            transport.step_end()
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for m in range(5):
            transport.post(channel, m)
            transport.take(channel, m)
            transport.release(channel, m)
        torch.cuda.synchronize(device)
        transport.step_end()
    except TransportError as error:
        seconds = time.monotonic() - start
        transport.close()
        return str(error), seconds
    raise AssertionError("the death of rank 0 was not noticed")


@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_is_killed_is_reported_with_what_it_owed(rank_outcomes, kind, when):
    dead, left = rank_outcomes(2, _killed, kind, when, timeout_seconds=60)
    assert dead.exit_code == -signal.SIGKILL
    if kind == "put":  # nothing undoes its wait: the process ends itself, with a report
        assert left.exit_code == PENDING_WAIT_EXIT_CODE, left.error_text
        return
    assert left.error_text is None, left.error_text
    text, seconds = left.value
    assert "rank 0 is lost" in text
    assert "micro-batch" in text
    assert "forward channel 0" in text
    assert seconds < SOON_SECONDS


def _silent(rank, kind):
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, 2)
    transport = _open(rank, kind, [channel], timeout_seconds=3.0)
    start = time.monotonic()
    try:
        if rank == 1:
            transport.post(channel, 5)
            transport.take(channel, 5)
            torch.cuda.synchronize(rank)
        while time.monotonic() - start < 30:
            time.sleep(0.1)
            if rank == 0:
                transport.step_end()
            else:
                transport.post(channel, 6)
    except TransportError as error:
        seconds = time.monotonic() - start
        transport.close()
        return str(error), seconds
    raise AssertionError("nobody noticed that rank 0 sends nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_sends_nothing_ends_the_transfers_of_both_after_the_limit(rank_outcomes, kind):
    sender, receiver = rank_outcomes(2, _silent, kind, timeout_seconds=60)
    outcomes = [sender, receiver]
    if kind == "put":
        assert receiver.exit_code == PENDING_WAIT_EXIT_CODE, receiver.error_text
        outcomes = [sender]
    for outcome in outcomes:
        assert outcome.error_text is None, outcome.error_text
        text, seconds = outcome.value
        assert "waited 3 s for micro-batch 5 on the forward channel 0" in text
        assert "from rank 0" in text
        assert 3.0 < seconds < 3.0 + SOON_SECONDS


def _other_shape(rank, kind):
    wrong = Boundary((TensorSpec("x", (3, 6), torch.float32),))
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL if rank == 0 else wrong, 1)
    with pytest.raises(TransportError) as caught:
        _open(rank, kind, [channel])
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_another_shape_on_one_end_is_refused_by_both_at_open(kind):
    for text in run_in_pool(2, _other_shape, kind):
        assert "channel 0" in text
        assert "(3, 5)" in text
        assert "(3, 6)" in text


def _aborted(rank, kind):
    # Idle channels beside it: NCCL must not wait for the GPU while it gives those up.
    channels = [Channel(i, "forward", i % 2, 1 - i % 2, i, i + 1, SMALL, 2) for i in range(4)]
    channel = channels[0]
    transport = _open(rank, kind, channels)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 1:
        transport.post(channel, 0)
        transport.take(channel, 0)
        store.set("waits", "")
        start = time.monotonic()
        torch.cuda.synchronize(rank)
        seconds = time.monotonic() - start
        with pytest.raises(TransportError, match="the operator said so"):
            transport.post(channel, 1)
    else:
        store.wait(["waits"])
        start = time.monotonic()
        transport.abort("the operator said so")
        transport.abort("and again")
        with pytest.raises(TransportError, match="the operator said so"):
            transport.send(channel, 0, [])
        seconds = time.monotonic() - start
    transport.close()
    transport.close()
    return seconds


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_with_a_wait_pending_ends_in_time_on_both_ranks(rank_outcomes, kind):
    outcomes = rank_outcomes(2, _aborted, kind, timeout_seconds=60)
    if kind == "put":
        assert outcomes.pop(1).exit_code == PENDING_WAIT_EXIT_CODE
    for outcome in outcomes:
        assert outcome.error_text is None, outcome.error_text
        assert outcome.value < SOON_SECONDS


def _closed_alone(rank, kind):
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, 2)
    transport = _open(rank, kind, [channel])
    device = torch.device("cuda", rank)
    if rank == 0:
        transport.send(
            channel, 0, [torch.ones(s.shape, dtype=s.dtype, device=device) for s in SMALL.tensors]
        )
        transport.step_end()
        os.kill(os.getpid(), signal.SIGKILL)
    transport.post(channel, 0)
    transport.take(channel, 0)
    transport.release(channel, 0)
    torch.cuda.synchronize(device)
    start = time.monotonic()
    with contextlib.suppress(TransportError):  # the loss may be noticed before the close
        transport.close()
    return time.monotonic() - start


@pytest.mark.parametrize("kind", KINDS)
def test_a_close_does_not_wait_for_a_peer_that_has_gone(rank_outcomes, kind):
    dead, left = rank_outcomes(2, _closed_alone, kind, timeout_seconds=60)
    assert dead.exit_code == -signal.SIGKILL
    assert left.error_text is None, left.error_text
    assert left.value < SOON_SECONDS


def _one_queue(rank):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, 2)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    texts = []
    for kind in ("copy_engine", "put"):
        with pytest.raises(TransportError) as caught:
            open_transport(
                kind,
                [channel],
                rank,
                device=torch.device("cuda", rank),
                timeout_seconds=10,
                store=store,
            )
        texts.append(str(caught.value))
    return texts


def test_a_single_hardware_queue_is_refused(run_ranks):
    for texts in run_ranks(2, _one_queue):
        assert all("CUDA_DEVICE_MAX_CONNECTIONS=1" in text for text in texts)

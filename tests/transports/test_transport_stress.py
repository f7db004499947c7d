"""Thousands of random transfers, every bit compared, beside random delays and compute.

On two GPUs 10,000 per kind (PPRUNTIME_STRESS_MESSAGES changes that), on the CPU a few hundred.
"""

from __future__ import annotations

import math
import os
import random
import time
from contextlib import nullcontext

import pytest
import torch
from gpu_cases import in_turn_order
from transport_cases import GPU_KINDS, kinds, run_scenario

from ppruntime.transports.base import Boundary, Channel, TensorSpec
from ppruntime.transports.selftest import irregular_bytes

NUM_ON_GPU = int(os.environ.get("PPRUNTIME_STRESS_MESSAGES", "10000"))
NUM_ON_CPU = 300
MOST_BYTES = {"gpu": 40 << 20, "cpu": 64 << 10}
DTYPES = (torch.uint8, torch.bfloat16, torch.int32, torch.float32)


def _channels(most_bytes, rng):
    """Six channels each way: 1 to 3 tensors of mixed dtypes, sizes over all magnitudes, odd and
    empty ones among them; 1 to 3 slots."""
    channels = []
    for number in range(12):
        specs = []
        for i in range(rng.randint(1, 3)):
            dtype = rng.choice(DTYPES)
            size = int(math.exp(rng.uniform(0, math.log(most_bytes)))) if rng.random() > 0.05 else 0
            specs.append(TensorSpec(f"t{i}", (size // dtype.itemsize,), dtype))
        src = number % 2
        direction = "forward" if src == 0 else "backward"
        stages = (number, number + 1) if src == 0 else (number + 1, number)
        boundary = Boundary(tuple(specs))
        channels.append(Channel(number, direction, src, 1 - src, *stages, boundary, 1 + number % 3))
    return channels


def _content(channel, micro_batch, device):
    for index, spec in enumerate(channel.boundary.tensors):
        seed = channel.id * 1_000_003 + micro_batch * 4 + index
        raw = irregular_bytes(spec.num_bytes, seed, device)
        yield raw.view(spec.dtype).view(spec.shape)


def _stress(rank, open_channels, kind, num_messages):
    on_gpu = kind in GPU_KINDS
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    rng = random.Random(11)
    channels = _channels(MOST_BYTES["gpu" if on_gpu else "cpu"], rng)
    counts = dict.fromkeys(range(len(channels)), 0)
    for _ in range(num_messages):
        counts[rng.choice(channels).id] += 1
    order = in_turn_order(channels, counts, rng)[rank]
    transport = open_channels(channels, timeout_seconds=60)
    load = torch.cuda.Stream(device) if on_gpu else None
    square = torch.randn(4096, 4096, device=device).bfloat16() if on_gpu else None
    num_wrong = torch.zeros((), dtype=torch.int64, device=device)
    pauses, held = random.Random(rank), {}
    for name, channel, micro_batch in order:
        if pauses.random() < 0.02:
            time.sleep(pauses.uniform(0, 0.005))
        if square is not None and pauses.random() < 0.3:
            with torch.cuda.stream(load) if load is not None else nullcontext():
                square @ square
        if name == "post":
            transport.post(channel, micro_batch)
        elif name == "send":
            transport.send(channel, micro_batch, tuple(_content(channel, micro_batch, device)))
        elif name == "take":
            held[channel.id, micro_batch] = transport.take(channel, micro_batch)
        else:
            views = held.pop((channel.id, micro_batch))
            for view, wanted in zip(views, _content(channel, micro_batch, device), strict=True):
                num_wrong += (view.view(torch.uint8) != wanted.view(torch.uint8)).sum()
                view.view(torch.uint8).fill_(0xA5)
            transport.release(channel, micro_batch)
    transport.step_end()
    wrong = int(num_wrong)
    transport.close()
    return wrong, sum(counts[c.id] for c in channels if c.dst_rank == rank)


@pytest.mark.parametrize("kind", kinds(2))
def test_thousands_of_random_transfers_beside_load_have_no_wrong_byte(kind):
    num_messages = NUM_ON_GPU if kind in GPU_KINDS else NUM_ON_CPU
    start = time.monotonic()
    results = run_scenario(kind, 2, _stress, kind, num_messages, timeout_seconds=150)
    print(f"{kind}: {num_messages} messages in {time.monotonic() - start:.1f} s with the opening")
    assert sum(received for _, received in results) == num_messages
    assert [wrong for wrong, _ in results] == [0, 0]

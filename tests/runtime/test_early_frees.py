"""What crossed is free after its last reader: nobody on the way keeps it."""

from __future__ import annotations

import gc
from collections import defaultdict
from typing import Any

import pytest
import torch
from pipelines import BALANCE_SEED, LOSS_SEED, toy_boundaries, toy_stages
from torch.multiprocessing.reductions import StorageWeakRef
from toy_units import micro_batches

from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock
from ppruntime.executor import Executor
from ppruntime.schedules import make
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import Kind
from ppruntime.schedules.passes import add_frees, add_transfers, split_backward
from ppruntime.transports.local import open_ranks


class Watched:
    """A transport that remembers, weakly, the memory of all messages of its channels."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.live: dict[tuple[int, str], dict[int, list[StorageWeakRef]]] = defaultdict(dict)
        self.most_live: dict[tuple[int, str], int] = defaultdict(int)
        self.num_released = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, channel, micro_batch, tensors) -> None:
        key = channel.src_stage, channel.kind
        messages = self.live[key]
        messages[micro_batch] = [StorageWeakRef(t.untyped_storage()) for t in tensors]
        self._transport.send(channel, micro_batch, tensors)
        del tensors
        for m in [m for m, refs in messages.items() if all(r.expired() for r in refs)]:
            del messages[m]
        self.most_live[key] = max(self.most_live[key], len(messages))

    def release(self, channel, micro_batch) -> None:
        self._transport.release(channel, micro_batch)
        self.num_released += 1
        if channel.kind == "backward":  # a gradient has no reader but the one that is through
            refs = self.live[channel.src_stage, "backward"].get(micro_batch, [])
            assert all(r.expired() for r in refs), f"{channel} keeps micro-batch {micro_batch}"


def watched_run(name: str, num_micro_batches: int, *, split: bool) -> tuple[Watched, list[int]]:
    """A step of a pipeline whose stages all lie on one rank, in this thread: what is alive when is
    no matter of timing. Gives also the micro-batches in flight of each stage at its peak."""
    schedule = make(name, 1, num_micro_batches, stages_per_rank=2)
    if split:
        schedule = split_backward(schedule)
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    stages = toy_stages(6, [3], 7)
    batches = micro_batches(num_micro_batches, 1, 4, seed=3)
    boundaries = toy_boundaries(stages, batches[0])
    for stage in stages:
        stage.reset(loss_seed=LOSS_SEED, balance_seed=BALANCE_SEED)
    channels = make_channels(boundaries, lowered.stage_to_rank, slots)
    (transport,) = open_ranks(channels, 1, device=torch.device("cpu"), timeout_seconds=20)
    watched = Watched(transport)
    executor = Executor(lowered, 0, dict(enumerate(stages)), channels, watched, clock=HostClock())
    gc.collect()
    gc.disable()  # what only a collector frees counts as kept
    try:
        executor.run(batches)
    finally:
        gc.enable()
    peaks = []
    for stage in range(2):
        held = peak = 0
        for op in lowered.ops(0):
            if op.stage == stage:
                held += (op.kind is Kind.F) - (op.kind in (Kind.B, Kind.W))
                peak = max(peak, held)
        peaks.append(peak)
    for messages in watched.live.values():
        assert all(r.expired() for refs in messages.values() for r in refs), "kept after the step"
    return watched, peaks


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("interleaved_1f1b", False),
        ("interleaved_1f1b", True),
        ("zb_v", False),
        ("dualpipe_v", False),
    ],
)
def test_sent_outputs_and_received_gradients_are_free_after_their_last_reader(name, split):
    watched, peaks = watched_run(name, 6, split=split)
    assert watched.num_released == 2 * 6
    assert watched.most_live[0, "forward"] <= peaks[0]
    # Gradients leave one by one: the next is made when the last one's reader is through.
    assert watched.most_live[1, "backward"] <= 2


def test_receive_slots_do_not_grow_with_the_micro_batches():
    for name in ("1f1b", "async_1f1b", "1f1b_w", "zb_v", "dualpipe_v"):
        assert slots_held(make(name, 3, 64)) == slots_held(make(name, 3, 40)), name
        assert max(slots_held(make(name, 3, 64)).values()) < 12, name

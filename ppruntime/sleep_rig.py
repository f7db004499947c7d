"""Pipelines whose stages sleep instead of computing: an order's efficiency, measured on any laptop.

The real executor, orders and gloo transport run; only the work of a stage is a sleep, and a
transfer takes a given time longer. Two cores carry any number of sleeping ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock, OpTimes
from ppruntime.executor import Executor
from ppruntime.models.carry import MicroBatch
from ppruntime.schedules.costs import Costs
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import Schedule
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.transports import open_transport
from ppruntime.transports.base import Boundary, Channel, TensorSpec, Transport

_PAYLOAD = Boundary(
    (TensorSpec("streams", (64,), torch.float32), TensorSpec("mix", (1,), torch.float64))
)
"""The second tensor carries the time of the send, in seconds; both cross in both directions."""


class SleepStage:
    """A stage that sleeps for given seconds and passes its input on. See `executor.Computes`."""

    def __init__(self, index: int, costs: Costs, *, is_last: bool) -> None:
        self.index = index
        self.num_in_flight = 0
        self._costs = costs
        self._is_last = is_last
        self._message = (torch.zeros(64), torch.zeros(1, dtype=torch.float64))

    def forward(
        self, micro_batch: int, received: Sequence[Tensor], batch: MicroBatch
    ) -> tuple[Tensor, ...]:
        sleep_for(self._costs.forward[self.index])
        return () if self._is_last else self._message

    evaluate = forward

    def backward(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        sleep_for(self._costs.input_grad[self.index] + self._costs.weight_grad[self.index])
        return self._message if self.index else ()

    def backward_input(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        sleep_for(self._costs.input_grad[self.index])
        return self._message if self.index else ()

    def weight_grads(self, micro_batch: int) -> None:
        sleep_for(self._costs.weight_grad[self.index])


class DelayedTransport:
    """Another transport, on which a boundary arrives `latency_seconds` after it was sent, at the
    earliest. Both ends read one clock: ranks on one host. See `Transport`."""

    def __init__(self, inner: Transport, latency_seconds: float) -> None:
        self._inner = inner
        self._latency_seconds = latency_seconds
        self.post, self.release = inner.post, inner.release
        self.step_end, self.abort, self.close = inner.step_end, inner.abort, inner.close

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        sent = torch.tensor([time.perf_counter()], dtype=torch.float64)
        self._inner.send(channel, micro_batch, (*tensors[:-1], sent))

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        tensors = self._inner.take(channel, micro_batch)
        if channel.src_rank != channel.dst_rank:
            sleep_until(tensors[-1].item() + self._latency_seconds)
        return tensors


def sleep_for(seconds: float) -> None:
    """Sleeps, to within microseconds on an idle core."""
    sleep_until(time.perf_counter() + seconds)


def sleep_until(moment: float) -> None:
    """Sleeps until `time.perf_counter()` reads `moment`. The last tenth of a millisecond is spun,
    since a sleep wakes up that late."""
    while (left := moment - time.perf_counter()) > 0:
        if left > 2e-4:
            time.sleep(left - 1e-4)


@dataclass(frozen=True, slots=True)
class RigStep:
    """One rank's step."""

    seconds: float
    """From the barrier before the step to this rank's last op."""
    times: list[OpTimes[int]]


def run_rig(
    schedule: Schedule,
    costs: Costs,
    rank: int,
    store: Store,
    *,
    latency_seconds: float,
    num_steps: int,
    barrier: torch.distributed.ProcessGroup,
) -> list[RigStep]:
    """Runs `num_steps` steps of an order of computations as one rank; all ranks call it alike.
    `costs` are in seconds."""
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    boundaries = [_PAYLOAD] * (schedule.num_stages - 1)
    channels = make_channels(boundaries, schedule.stage_to_rank, slots)
    inner = open_transport(
        "auto", channels, rank, device=torch.device("cpu"), timeout_seconds=60, store=store
    )
    last = schedule.num_stages - 1
    stages = {s: SleepStage(s, costs, is_last=s == last) for s in schedule.stages_of(rank)}
    transport = DelayedTransport(inner, latency_seconds)
    executor = Executor(lowered, rank, stages, channels, transport, clock=HostClock())
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    batches = [MicroBatch(nothing, nothing, nothing)] * schedule.num_micro_batches
    steps = []
    for _ in range(num_steps):
        torch.distributed.barrier(barrier)
        start = time.perf_counter()
        executor.run(batches)
        times = executor.op_times()
        steps.append(RigStep(times[-1].end / 1e9 - start, times))
    torch.distributed.barrier(barrier)
    inner.close()
    return steps

"""What the executor itself costs: a rank whose stages do nothing, in CPU time of the one thread.

CPU time does not grow with the machine's load; and next to it stands a loop of plain calls,
measured in the same run, so that a ratio to it holds on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock
from ppruntime.executor import Executor
from ppruntime.models.carry import MicroBatch
from ppruntime.schedules import make
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import COMPUTE
from ppruntime.schedules.passes import add_frees, add_transfers, split_backward
from ppruntime.transports import open_transport
from ppruntime.transports.base import Boundary, TensorSpec

NUM_STAGES, NUM_MICRO_BATCHES = 8, 32
NUM_PLAIN_CALLS = 20_000
_BOUNDARY = Boundary(
    (
        TensorSpec("streams", (1, 4, 4, 8), torch.float32),
        TensorSpec("mix", (1, 4, 4), torch.float32),
        TensorSpec("kv", (1, 4, 8), torch.float32),
        TensorSpec("slots", (1, 4, 8), torch.int32),
    )
)
"""What crosses between two halves of V4.1, in small."""


@dataclass(frozen=True, slots=True)
class ExecutorCost:
    """Medians over steps, in microseconds of the main thread, time stamps of all ops included."""

    us_per_op: float
    """Per entry of the order: F, I, W, send, receive, free."""
    us_per_computation: float
    """Per F, I and W, with the transfers and frees around it."""
    us_per_plain_call: float
    """One round of a loop that calls a bound function and appends two stamps: Python's own cost."""
    num_ops: int
    num_computations: int

    @property
    def plain_calls_per_op(self) -> float:
        """The cost of an op in plain calls: it depends on the code, hardly on the machine."""
        return self.us_per_op / self.us_per_plain_call


class EmptyStage:
    """Computes nothing and hands on tensors that it has from the start. See `Computes`."""

    num_in_flight = 0

    def __init__(self, index: int, output: tuple[Tensor, ...], grad: tuple[Tensor, ...]) -> None:
        self.index = index
        self._output, self._grad = output, grad

    def forward(
        self, micro_batch: int, received: Sequence[Tensor], batch: MicroBatch
    ) -> tuple[Tensor, ...]:
        return self._output

    evaluate = forward

    def backward(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self._grad

    backward_input = backward

    def weight_grads(self, micro_batch: int) -> None:
        pass


def executor_cost(*, num_steps: int = 20) -> ExecutorCost:
    """Runs one rank with eight stages, backward split, over `local` channels, timeline on."""
    schedule = split_backward(
        make("interleaved_1f1b", 1, NUM_MICRO_BATCHES, stages_per_rank=NUM_STAGES)
    )
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    channels = make_channels([_BOUNDARY] * (NUM_STAGES - 1), schedule.stage_to_rank, slots)
    transport = open_transport("local", channels, 0, device=torch.device("cpu"), timeout_seconds=10)
    payloads = {c.kind: _zeros(c.boundary) for c in channels}
    stages = {
        s: EmptyStage(s, payloads["forward"], payloads["backward"]) for s in range(NUM_STAGES)
    }
    executor = Executor(lowered, 0, stages, channels, transport, clock=HostClock())
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    batches = [MicroBatch(nothing, nothing, nothing)] * NUM_MICRO_BATCHES

    def step() -> None:
        executor.run(batches)
        executor.op_times()

    ops = list(lowered.ops(0))
    num_computations = sum(op.kind in COMPUTE for op in ops)
    step()
    plain, steps = [], []
    for _ in range(num_steps):  # in turn, so that both see the same clock rate
        plain.append(_cpu_us(_plain_calls) / NUM_PLAIN_CALLS)
        steps.append(_cpu_us(step))
    transport.close()
    return ExecutorCost(
        us_per_op=median(steps) / len(ops),
        us_per_computation=median(steps) / num_computations,
        us_per_plain_call=median(plain),
        num_ops=len(ops),
        num_computations=num_computations,
    )


def _zeros(boundary: Boundary) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in boundary.tensors)


def _plain_calls() -> None:
    stamps: list[tuple[int, int]] = []
    append, clock, nothing = stamps.append, time.perf_counter_ns, _Nothing().nothing
    for _ in range(NUM_PLAIN_CALLS):
        start = clock()
        nothing()
        append((start, clock()))


class _Nothing:
    def nothing(self) -> None:
        pass


def _cpu_us(act: Callable[[], None]) -> float:
    before = time.thread_time_ns()
    act()
    return (time.thread_time_ns() - before) / 1e3

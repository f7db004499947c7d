"""Pipelines whose stages sleep instead of computing: an order's efficiency, measured on any laptop.

The real executor, orders and transport run; only the work of a stage is a sleep, and a
transfer takes a given time longer. Two cores carry any number of sleeping ranks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock, OpTimes
from ppruntime.emulate_transport import ReplayTransport, split_channels
from ppruntime.executor import Executor
from ppruntime.models.carry import MicroBatch
from ppruntime.schedules.absent import AbsentRanks
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Schedule, parse_op
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.transports import open_transport
from ppruntime.transports.base import Boundary, Channel, TensorSpec, Transport

PAYLOAD = Boundary((TensorSpec("streams", (1,), torch.float64),))
"""The time of the send, in seconds, where a latency is injected. One small tensor, so that packing
takes next to nothing."""

_HEAD_START_SECONDS = 0.005
"""Ranks hear of the common start this long before it, time enough on a busy host."""


class SleepStage:
    """A stage that sleeps for `costs`, in seconds, and sends what it has. See
    `executor.Computes`."""

    def __init__(self, index: int, costs: Costs, *, is_last: bool) -> None:
        self.index = index
        self.num_in_flight = 0
        self.costs = costs
        self._is_last = is_last
        self._message = (torch.zeros(1, dtype=torch.float64),)

    def forward(
        self, micro_batch: int, received: Sequence[Tensor], batch: MicroBatch
    ) -> tuple[Tensor, ...]:
        sleep_for(self.costs.forward[self.index])
        return () if self._is_last else self._message

    evaluate = forward

    def backward(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        sleep_for(self.costs.input_grad[self.index] + self.costs.weight_grad[self.index])
        return self._message if self.index else ()

    def backward_input(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        sleep_for(self.costs.input_grad[self.index])
        return self._message if self.index else ()

    def weight_grads(self, micro_batch: int) -> None:
        sleep_for(self.costs.weight_grad[self.index])


class DelayedTransport:
    """Another transport of `SleepStage`s, on which a message arrives `latency_seconds` after it was
    sent, at the earliest. Both ends read one clock: ranks on one host. See `Transport`."""

    def __init__(self, inner: Transport, latency_seconds: float) -> None:
        self._inner = inner
        self.latency_seconds = latency_seconds
        self.post, self.release = inner.post, inner.release
        self.step_end, self.abort, self.close = inner.step_end, inner.abort, inner.close

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        if self.latency_seconds:  # else not even a stamp: nothing is to delay a message
            tensors = (torch.tensor([time.perf_counter()], dtype=torch.float64),)
        self._inner.send(channel, micro_batch, tensors)

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        tensors = self._inner.take(channel, micro_batch)
        if self.latency_seconds and channel.src_rank != channel.dst_rank:
            sleep_until(tensors[0].item() + self.latency_seconds)
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
    """One rank's step, in seconds of `time.perf_counter`, which all ranks of a host share."""

    start: float
    """The moment at which all ranks agreed to start; the same on all."""
    end: float
    """When this rank was done: its last op, and all that it sent had left."""
    times: tuple[OpTimes[int], ...]


class SleepRig:
    """One rank of a pipeline of sleeping stages, open for any number of steps.

    `schedule` has computations only. Opening and `step` are collective: all ranks of `group` (rank
    r of the group is rank r of the order) make the same calls with the same arguments. `present`:
    the group is these ranks of the order, the others are replayed, see `emulate_transport`.
    """

    def __init__(
        self,
        schedule: Schedule,
        store: Store,
        group: dist.ProcessGroup | None = None,
        *,
        present: range | None = None,
    ) -> None:
        self._present = range(schedule.num_ranks) if present is None else present
        place = dist.get_rank(group)
        rank = self._present.start + place
        slots = slots_held(schedule)
        lowered = add_frees(add_transfers(schedule, slots=slots))
        boundaries = [PAYLOAD] * (schedule.num_stages - 1)
        channels = make_channels(boundaries, schedule.stage_to_rank, slots)
        device = torch.device("cpu")
        between, edges = split_channels(channels, self._present, rank)
        inner = open_transport(
            "auto", list(between.values()), place, device=device, timeout_seconds=60, store=store
        )
        last = schedule.num_stages - 1
        free = Costs.even(0, 0, 0, schedule.stage_to_rank)
        self._schedule, self._group = schedule, group
        self._stages = {s: SleepStage(s, free, is_last=s == last) for s in schedule.stages_of(rank)}
        self._delayed = DelayedTransport(inner, 0)
        self._replayed = (
            ReplayTransport(self._delayed, between, edges, rank, _OneMessage(), device=device)
            if len(self._present) < schedule.num_ranks
            else None
        )
        self._transport: Transport = self._replayed or self._delayed
        self._executor = Executor(
            lowered, rank, self._stages, channels, self._transport, clock=HostClock()
        )
        nothing = torch.zeros(1, 1, dtype=torch.int64)
        self._batches = [MicroBatch(nothing, nothing, nothing)] * schedule.num_micro_batches
        self.step(free, 0)  # first messages are slow; not part of what is measured

    def step(self, costs: Costs, latency_seconds: float) -> RigStep:
        """Runs the order once. `costs` are in seconds, one entry per stage, absent ones too."""
        for stage in self._stages.values():
            stage.costs = costs
        self._delayed.latency_seconds = latency_seconds
        start = start_together(self._group)
        if self._replayed is not None:
            hops = Hops.both(latency_seconds)
            self._replayed.begin(
                AbsentRanks(self._schedule, costs, hops, self._present, start=start)
            )
        self._executor.run(self._batches)
        end = time.perf_counter()
        return RigStep(start, end, tuple(self._executor.op_times()))

    def close(self) -> None:
        """Collective, so that no rank takes another's end for a loss."""
        dist.barrier(self._group)
        self._transport.close()


class _OneMessage:
    """Replays of the rig's empty messages, see `emulate_replays.Replays`."""

    def __init__(self) -> None:
        self._message = (torch.zeros(1, dtype=torch.float64),)

    def tensors(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        return self._message

    def sent(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        pass


def start_together(group: dist.ProcessGroup | None = None) -> float:
    """Lets all ranks of `group`, on one host, go on at one moment, and gives that moment. A barrier
    would let them go one after the other, some milliseconds apart."""
    moment = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX, group=group)
    start: float = moment.item() + _HEAD_START_SECONDS
    sleep_until(start)
    return start


def step_seconds(steps: Sequence[RigStep]) -> float:
    """How long a step took, from one `RigStep` per rank."""
    return max(step.end for step in steps) - min(step.start for step in steps)


def median_costs(num_stages: int, times: Iterable[OpTimes[int]]) -> Costs:
    """`average_costs` by medians."""
    return average_costs(num_stages, times, median)


def average_costs(
    num_stages: int, times: Iterable[OpTimes[int]], average: Callable[[Sequence[int]], float]
) -> Costs:
    """Each stage's op times in seconds, waits left out, averaged over any number of steps and
    ranks.

    A whole backward counts half as I and half as W where these never ran apart. A stage that ran
    nothing of a kind costs nothing.
    """
    samples: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    op_of: dict[str, Op] = {}
    for t in times:
        op = op_of.get(t.op) or op_of.setdefault(t.op, parse_op(t.op))
        if op.kind in COMPUTE:
            samples[op.stage, op.kind].append(t.end - t.ready)
    averages = {key: average(values) / 1e9 for key, values in samples.items()}

    def per_stage(kind: Kind, share_of_whole: float) -> tuple[float, ...]:
        return tuple(
            averages.get((stage, kind), share_of_whole * averages.get((stage, Kind.B), 0.0))
            for stage in range(num_stages)
        )

    return Costs(per_stage(Kind.F, 0.0), per_stage(Kind.I, 0.5), per_stage(Kind.W, 0.5))


def median_hop_seconds(schedule: Schedule, steps: Sequence[RigStep]) -> float | None:
    """How long a message was under way, as the median over those that were waited for; from one
    `RigStep` per rank. None where none was.

    From the start of its send to the moment at which the receiver had it: the injected latency, or
    what the transport and waking up really take.
    """
    sent = {t.op: t.start for step in steps for t in step.times}
    ranks = schedule.stage_to_rank
    hops = []
    for t in (t for step in steps for t in step.times):
        op = parse_op(t.op)
        send = _send_for(op)
        moment = None if send is None else sent.get(str(send))  # the ends' stages read no message
        if send is None or moment is None or ranks[send.stage] == ranks[op.stage]:
            continue
        if t.start < moment:  # else it may have come before it was asked for
            hops.append(t.ready - moment)
    return median(hops) / 1e9 if hops else None


def _send_for(op: Op) -> Op | None:
    """The send whose message `op` reads, wherever there is such a stage."""
    match op.kind:
        case Kind.F:
            return Op(op.stage - 1, Kind.SEND_F, op.micro_batch)
        case Kind.B | Kind.I:
            return Op(op.stage + 1, Kind.SEND_B, op.micro_batch)
        case _:
            return None

"""Some ranks of a pipeline of sleeping stages; the others are replayed. See `sleep_rig`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock
from ppruntime.emulate_transport import ReplayTransport, split_channels
from ppruntime.executor import Executor
from ppruntime.models.carry import MicroBatch
from ppruntime.schedules.absent import AbsentRanks
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import Schedule
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.sleep_rig import PAYLOAD, DelayedTransport, RigStep, SleepStage, start_together
from ppruntime.transports import open_transport
from ppruntime.transports.base import Channel


class EmulatedRig:
    """One present rank, open for any number of steps. Opening and `step` are collective: rank r of
    `group` is rank present.start + r of the order."""

    def __init__(
        self,
        schedule: Schedule,
        present: range,
        store: Store,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        place = dist.get_rank(group)
        rank = present.start + place
        slots = slots_held(schedule)
        lowered = add_frees(add_transfers(schedule, slots=slots))
        boundaries = [PAYLOAD] * (schedule.num_stages - 1)
        channels = make_channels(boundaries, schedule.stage_to_rank, slots)
        inner_channels, edges = split_channels(channels, present, rank)
        device = torch.device("cpu")
        inner = open_transport(
            "auto",
            list(inner_channels.values()),
            place,
            device=device,
            timeout_seconds=60,
            store=store,
        )
        last = schedule.num_stages - 1
        free = Costs.even(0, 0, 0, schedule.stage_to_rank)
        self._schedule, self._present, self._group = schedule, present, group
        self._stages = {s: SleepStage(s, free, is_last=s == last) for s in schedule.stages_of(rank)}
        self._delayed = DelayedTransport(inner, 0)
        self._transport = ReplayTransport(
            self._delayed, inner_channels, edges, rank, _Nothing(), device=device
        )
        self._executor = Executor(
            lowered, rank, self._stages, channels, self._transport, clock=HostClock()
        )
        nothing = torch.zeros(1, 1, dtype=torch.int64)
        self._batches = [MicroBatch(nothing, nothing, nothing)] * schedule.num_micro_batches
        self.step(free, 0)  # first messages are slow; not part of what is measured

    def step(self, costs: Costs, latency_seconds: float) -> RigStep:
        """Runs the order once; `costs` are also the absent ranks'."""
        for stage in self._stages.values():
            stage.costs = costs
        self._delayed.latency_seconds = latency_seconds
        start = start_together(self._group)
        hops = Hops.both(latency_seconds)
        self._transport.begin(AbsentRanks(self._schedule, costs, hops, self._present, start=start))
        self._executor.run(self._batches)
        end = time.perf_counter()
        return RigStep(start, end, tuple(self._executor.op_times()))

    def close(self) -> None:
        """Collective, so that no rank takes another's end for a loss."""
        dist.barrier(self._group)
        self._transport.close()


class _Nothing:
    """Replays of the rig's empty messages."""

    def __init__(self) -> None:
        self._message = (torch.zeros(1, dtype=torch.float64),)

    def tensors(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        return self._message

    def sent(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        pass

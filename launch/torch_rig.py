"""torch.distributed.pipelining on sleeping stages: what the executor is measured against.

The modules sleep in the same places as `sleep_rig.SleepStage`: F in the forward, I on the way to
the input's gradient, W on the way to the weight's. The two ways part in the graph, so torch's split
backward runs them apart. torch never splits the backward of its first stage: there I does nothing,
and W takes the time of both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import functional

from ppruntime.schedules.costs import Costs
from ppruntime.schedules.ops import Kind, Schedule
from ppruntime.sleep_rig import sleep_for, start_together

WIDTH = 64

TORCH_CLASSES = {
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""Our order -> torch's class that runs the same one."""


class _OnTheWay(torch.autograd.Function):
    """The identity, which sleeps one time forward and another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepModule, there: Kind | None, back: Kind) -> Tensor:
        ctx.stage, ctx.back = stage, back
        if there is not None:
            stage.sleep(there)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.stage.sleep(ctx.back)
        return grad, None, None, None


class SleepModule(nn.Module):
    """One stage. `seconds` of F, I and W may be changed between steps; `slept` counts them.

    The first stage adds a parameter to its input, as an embedding would, so that a gradient has to
    come all the way through it.
    """

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.embedding = nn.Parameter(torch.zeros(WIDTH)) if is_first else None
        self.seconds: dict[Kind, float] = {}
        self.slept: Counter[Kind] = Counter()

    def sleep(self, kind: Kind) -> None:
        self.slept[kind] += 1
        sleep_for(self.seconds.get(kind, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = x + self.embedding
        on_the_way: Any = _OnTheWay.apply  # torch gives it no type
        weight: Tensor = on_the_way(self.weight, self, None, Kind.W)
        y: Tensor = on_the_way(x, self, Kind.F, Kind.I)
        return y + weight


@dataclass(frozen=True, slots=True)
class TorchStep:
    """One rank's step, in seconds of `time.perf_counter`."""

    start: float
    end: float
    slept: dict[Kind, int]
    """How often F, I and W were slept for: that the work was all done."""


class TorchRig:
    """One rank of torch's pipeline of sleeping stages; all ranks make the same calls.

    `schedule` is our order; torch runs its own of that name (`TORCH_CLASSES`).
    """

    def __init__(self, schedule: Schedule) -> None:
        rank = dist.get_rank()
        own = schedule.stages_of(rank)
        self._modules = {s: SleepModule(is_first=s == 0) for s in own}
        stages = [
            PipelineStage(module, s, schedule.num_stages, torch.device("cpu"))
            for s, module in self._modules.items()
        ]
        kind: Any = getattr(torch_schedules, TORCH_CLASSES[schedule.name])
        is_multi = issubclass(kind, torch_schedules.PipelineScheduleMulti)
        self._schedule = kind(
            stages if is_multi else stages[0],
            n_microbatches=schedule.num_micro_batches,
            loss_fn=functional.mse_loss,
            scale_grads=False,
        )
        data = torch.zeros(schedule.num_micro_batches, WIDTH)
        self._inputs: Sequence[Tensor] = (data,) if 0 in own else ()
        self._targets = {"target": data} if schedule.num_stages - 1 in own else {}
        self.step(Costs.even(0, 0, 0, schedule.stage_to_rank))  # settles shapes; not measured

    def step(self, costs: Costs) -> TorchStep:
        """Runs the order once. `costs` are in seconds, one entry per stage."""
        for s, module in self._modules.items():
            module.slept.clear()
            module.zero_grad()
            module.seconds = {
                Kind.F: costs.forward[s],
                Kind.I: costs.input_grad[s],
                Kind.W: costs.weight_grad[s],
            }
        start = start_together()
        self._schedule.step(*self._inputs, **self._targets)
        end = time.perf_counter()
        slept = sum((module.slept for module in self._modules.values()), Counter[Kind]())
        return TorchStep(start, end, dict(slept))

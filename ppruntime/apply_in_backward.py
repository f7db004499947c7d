"""Updates that do not wait for the step's end: a stage's weights move once its order is through.

Each unit's gradients are reduced, their squares noted for the norm, the weights updated and the
gradients freed, unit by unit: reduced gradients never lie side by side. For update rules that read
nothing but a parameter's own gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppruntime.build import Pipeline
from ppruntime.optim.clip import local_square
from ppruntime.optim.sign_sgd import SignSGD
from ppruntime.wrap import reduce_grads


class ApplyInBackward:
    """One step's updates. Call it with each stage of this rank behind the stage's last op."""

    def __init__(
        self, pipeline: Pipeline, optimizer: SignSGD, data_group: dist.ProcessGroup
    ) -> None:
        self._pipeline, self._optimizer, self._data_group = pipeline, optimizer, data_group
        self._squares: dict[str, Tensor] = {}

    @property
    def squares(self) -> Mapping[str, Tensor]:
        """Square sums of the gradients that are gone, this rank's part of each; fp64 scalars."""
        return self._squares

    @torch.no_grad()
    def __call__(self, stage: int) -> None:
        """A collective of the stage's data ranks."""
        plan = self._pipeline.plan[stage]
        self._pipeline.stages[stage].flush_weight_grads()
        for spec, unit in zip(plan.units, self._pipeline.stages[stage].units, strict=True):
            reduce_grads([unit], self._data_group)
            params: set[nn.Parameter] = set()
            for name, param in unit.named_parameters():
                if param.grad is not None:
                    self._squares[f"{spec.name}.{name}"] = local_square(param.grad)
                    params.add(param)
            self._optimizer.apply(params)

"""torch.distributed.pipelining on a run's own stages: what a pipeline step is measured against.

The same units compute the same things; what differs is torch's runtime, its orders, its transfers.
torch 2.11 expects a gradient for every tensor that crosses, so all cross as floats and those that
have none send zeros back: a few percent more bytes backwards (the slot list), on torch's side only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from ppruntime.engram_tables import EngramLookups
from ppruntime.launch.torch_rig import TORCH_CLASSES
from ppruntime.models.carry import DIFFERENTIABLE, Carry, MicroBatch
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.ranks import Ranks
from ppruntime.schedules.ops import Kind, Op, Schedule
from ppruntime.stage import Stage
from ppruntime.transports.base import Boundary, TensorSpec


class TorchPipeline:
    """One rank of torch's pipeline over `stages`, of the order that `schedule` is one of; all ranks
    make the same calls. `boundaries` are those between all stages.

    Gradients are left in the parameters, as by our executor; `losses` has the last step's, one per
    micro-batch, on the rank of the last stage. Weight gradients are put off by the layers' own
    means, which torch has a hook for: its way of its own, which cuts the graph in two, fails on
    layers whose parameters an order does not reach. The stages are torch's from then on.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        boundaries: Sequence[Boundary],
        ranks: Ranks,
    ) -> None:
        num, last = schedule.num_micro_batches, schedule.num_stages - 1
        self._modules = {
            s: StageModule(
                stage,
                received=boundaries[s - 1] if s else None,
                handed_on=boundaries[s] if s < last else None,
                loss_seed=1 / num,
            )
            for s, stage in stages.items()
        }
        wrapped = [
            PipelineStage(
                module,
                s,
                schedule.num_stages,
                ranks.device,
                group=ranks.pipeline_group,
                input_args=module.input_args,
                output_args=module.output_args,
                dw_builder=module.weight_grads,
            )
            for s, module in self._modules.items()
        ]
        kind: Any = getattr(torch_schedules, TORCH_CLASSES[schedule.name])
        is_multi = issubclass(kind, torch_schedules.PipelineScheduleMulti)
        self._schedule = kind(
            wrapped if is_multi else wrapped[0],
            n_microbatches=num,
            loss_fn=_as_it_is,
            scale_grads=False,
        )
        self._has_first, self._has_last = 0 in stages, last in stages
        self._lookups = EngramLookups({s: stage.units for s, stage in stages.items()}, ahead=0)
        forwards = [Op(s, Kind.F, m) for s in stages for m in range(num)]
        for op, look in self._lookups.before(forwards).items():
            self._modules[op.stage].before.append(look)
        self.losses: list[Tensor] = []

    def step(self, batches: Sequence[MicroBatch]) -> None:
        """Forward and backward of all micro-batches; does not wait for the device."""
        ids = torch.cat([batch.ids for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        positions = torch.cat([batch.positions for batch in batches])
        self.losses = []
        self._lookups.begin(batches)
        for module in self._modules.values():
            module.num_forwards = 0
        arguments: Sequence[Tensor] = (ids,) if self._has_first else ()
        loss_arguments: dict[str, Any] = {}
        if self._has_last:
            loss_arguments = {"target": labels, "losses": self.losses}
        self._schedule.step(
            *arguments, **loss_arguments, token_ids=ids, labels=labels, positions=positions
        )
        self._lookups.end()


class StageModule(nn.Module):
    """A stage as torch calls one: floats in, floats out, the loss at the end."""

    def __init__(
        self,
        stage: Stage,
        *,
        received: Boundary | None,
        handed_on: Boundary | None,
        loss_seed: float,
    ) -> None:
        super().__init__()
        self.units = stage.units
        self._queue = WeightGradQueue()
        self._queue.deferring = True
        for unit in stage.units:
            set_queue(unit, self._queue)
        self.before: list[Callable[[], None]] = []
        """What precedes the forwards of a step, which come in the order of micro-batches."""
        self.num_forwards = 0
        self._received, self._handed_on = received, handed_on
        self._loss_seed = loss_seed
        if received is not None:
            self.input_args = tuple(_on_the_wire(spec) for spec in _crossing(received))
        else:  # the first stage reads token ids
            assert handed_on is not None, "a pipeline of one stage has no transfers to compare"
            shape = handed_on.tensors[0].shape[:2]
            self.input_args = (torch.empty(shape, dtype=torch.int64, device="meta"),)
        if handed_on is not None:
            self.output_args = tuple(_on_the_wire(spec) for spec in _crossing(handed_on))
        else:
            self.output_args = (torch.empty(1, device="meta", requires_grad=True),)

    def weight_grads(self) -> Callable[[], None]:
        """What torch calls behind each backward, and what that gives it where its order has W."""
        tasks = self._queue.pop()

        def run() -> None:
            with torch.no_grad():
                for task in tasks:
                    task()

        return run

    def forward(
        self, *arguments: Tensor, token_ids: Tensor, labels: Tensor, positions: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        if self.before:
            self.before[self.num_forwards]()
            self.num_forwards += 1
        fields: dict[str, Any] = {}
        if self._received is not None:
            received: Any = _Received.apply
            tensors = received(self._received, *arguments)
            fields = dict(zip(_names(self._received), tensors, strict=True))
        carry = Carry(**fields)
        for unit in self.units:
            carry = unit(carry, MicroBatch(token_ids, labels, positions))
        streams_or_loss = carry.streams if self._handed_on is not None else carry.loss
        for of_layers in (carry.balance_loss, carry.index_loss):
            if of_layers is not None and of_layers.requires_grad:
                with_loss: Any = _WithLoss.apply
                streams_or_loss = with_loss(streams_or_loss, of_layers)
        assert streams_or_loss is not None
        if self._handed_on is None:
            seed = torch.full((1,), self._loss_seed, device=streams_or_loss.device)
            return streams_or_loss * seed  # [1]: torch concatenates outputs
        carry = carry._replace(streams=streams_or_loss)
        crossing = (getattr(carry, spec.name) for spec in _crossing(self._handed_on))
        return tuple(_sent(tensor, anchor=streams_or_loss) for tensor in crossing)


def _as_it_is(loss: Tensor, target: Tensor) -> Tensor:
    del target  # the head has read it
    return loss.sum()  # of one entry; a squeeze would be a view


def _names(boundary: Boundary) -> tuple[str, ...]:
    return tuple(spec.name for spec in boundary.tensors)


def _crossing(boundary: Boundary) -> tuple[TensorSpec, ...]:
    return tuple(spec for spec in boundary.tensors if spec.num_bytes)


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return dtype
    return torch.float32 if dtype.itemsize == 4 else torch.bfloat16


def _on_the_wire(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=_wire_dtype(spec.dtype), device="meta", requires_grad=True)


def _sent(tensor: Tensor, *, anchor: Tensor) -> Tensor:
    """A float that requires a gradient and is no view: torch detaches outputs in place."""
    if tensor.requires_grad:
        return tensor.clone() if tensor._is_view() else tensor
    as_float: Any = _AsFloat.apply
    result: Tensor = as_float(tensor, anchor)
    return result


class _AsFloat(torch.autograd.Function):
    """A tensor without a gradient -> a float that seems to have one, as `anchor` does. int32 keeps
    its bits."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        del ctx, anchor
        if tensor.dtype.is_floating_point:
            return tensor.clone()
        if tensor.dtype.itemsize == 4:
            return tensor.contiguous().view(torch.float32).clone()
        return tensor.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        del ctx, grad
        return None, None


class _Received(torch.autograd.Function):
    """`_sent`, undone. Every float gets a gradient, zeros where nothing read what it carried."""

    @staticmethod
    def forward(ctx: Any, boundary: Boundary, *packed: Tensor) -> tuple[Tensor, ...]:
        ctx.shapes = [(p.shape, p.dtype, p.device) for p in packed]
        ctx.places = [i for i, spec in enumerate(boundary.tensors) if spec.num_bytes]
        left, tensors, constant = list(packed), [], []
        for spec in boundary.tensors:
            if not spec.num_bytes:
                device = packed[0].device
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            elif spec.dtype.is_floating_point:
                wire = left.pop(0)
                tensor = wire.view_as(wire)
            elif spec.dtype.itemsize == 4:
                tensor = left.pop(0).view(spec.dtype)
            else:
                tensor = left.pop(0).to(spec.dtype)
            if spec.name not in DIFFERENTIABLE:
                constant.append(tensor)
            tensors.append(tensor)
        ctx.mark_non_differentiable(*constant)
        ctx.has_grad = [spec.name in DIFFERENTIABLE for spec in boundary.tensors]
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        result: list[Tensor | None] = [None]
        for i, (shape, dtype, device) in zip(ctx.places, ctx.shapes, strict=True):
            if ctx.has_grad[i]:
                result.append(grads[i])
            else:
                result.append(torch.zeros(shape, dtype=dtype, device=device))
        return tuple(result)


class _WithLoss(torch.autograd.Function):
    """The identity on `x`, whose backward also starts that of `loss`, with gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = (loss.shape, loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.loss
        return grad, torch.ones(shape, dtype=dtype, device=device)

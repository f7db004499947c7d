"""One stage: runs its units on a micro-batch, forward and back, and keeps what a backward needs.

The units know nothing of the pipeline; the stage knows nothing of ranks, transports or orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ppruntime.models.carry import DIFFERENTIABLE, Carry, MicroBatch
from ppruntime.models.linear import WeightGradQueue
from ppruntime.models.weight_copies import WeightVersion, flush_weight_grads, set_weight_version


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What one micro-batch leaves behind until its backward: ends of its graph, never its outputs.

    A gradient edge keeps the graph alive but not the output's memory, so that a sent output is
    freed as soon as the transfer is done, unless a backward of this stage reads it.
    """

    leaves: tuple[Tensor, ...]
    output_edges: tuple[GradientEdge | None, ...]
    loss_edge: GradientEdge | None
    balance_edge: GradientEdge | None
    index_edge: GradientEdge | None


class Stage:
    """A run of units on this rank.

    `inputs` and `outputs` name the carry's fields that cross the boundary before and after the
    stage, in the boundary's order. `queue` gathers the weight gradients that `backward_input` puts
    off. The losses and expert loads of a step lie in `losses`, `balance_losses`, `index_losses` and
    `loads`, one entry per micro-batch in the order of the forwards, until `reset`.
    `backward_here`: backwards run in the thread that asks for them, whatever device they are on.
    """

    def __init__(
        self,
        index: int,
        units: Sequence[nn.Module],
        *,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        queue: WeightGradQueue,
        backward_here: bool = False,
    ) -> None:
        self.index, self._backward_here = index, backward_here
        self.units = nn.ModuleList(units)
        self.inputs = inputs
        self.outputs = outputs
        self.losses: list[Tensor] = []
        self.balance_losses: list[Tensor] = []
        self.index_losses: list[Tensor] = []
        self.loads: list[tuple[Tensor, ...]] = []
        self._grad_inputs = tuple(name in DIFFERENTIABLE for name in inputs)
        self._grad_outputs = tuple(i for i, name in enumerate(outputs) if name in DIFFERENTIABLE)
        self._queue = queue
        self._version = WeightVersion()
        set_weight_version(self.units, self._version)
        self._in_flight: dict[int, _InFlight] = {}
        self._weight_tasks: dict[int, list[Callable[[], None]]] = {}
        self._loss_seed = torch.ones(())
        self._balance_seed = torch.ones(())

    @property
    def num_in_flight(self) -> int:
        """Micro-batches forwarded and not yet through their backward, weight gradients included."""
        return len(self._in_flight) + len(self._weight_tasks)

    def standing_tensors(self) -> Iterator[Tensor]:
        """What lives as long as the stage, in the form in which the units read it just now."""
        yield from self.units.parameters()
        yield from self.units.buffers()

    def reset(self, *, loss_seed: Tensor, balance_seed: Tensor) -> None:
        """Starts a step. The seeds are the gradients of the step's loss with respect to one
        micro-batch's summed cross-entropy and balance loss (the indexers' loss has the balance
        loss's): fp32 scalars on the stage's device."""
        assert not self.num_in_flight, f"stage {self.index} starts a step with work left over"
        self.losses, self.balance_losses, self.index_losses, self.loads = [], [], [], []
        self._loss_seed, self._balance_seed = loss_seed, balance_seed

    def forward(
        self, micro_batch: int, received: Sequence[Tensor], batch: MicroBatch
    ) -> tuple[Tensor, ...]:
        """Runs the units and gives the boundary's tensors, which the caller owns from then on.

        `received` are the input boundary's tensors; they are read, and kept as leaves, until the
        backward of this micro-batch (its weight gradients when those are put off).
        """
        leaves = tuple(
            tensor.detach().requires_grad_(needs_grad)
            for tensor, needs_grad in zip(received, self._grad_inputs, strict=True)
        )
        carry = self._run_units(leaves, batch)
        outputs = self._outputs_of(carry)
        self._in_flight[micro_batch] = _InFlight(
            leaves=tuple(leaf for leaf in leaves if leaf.requires_grad),
            output_edges=tuple(_edge(outputs[i]) for i in self._grad_outputs),
            loss_edge=_edge(carry.loss),
            balance_edge=_edge(carry.balance_loss),
            index_edge=_edge(carry.index_loss),
        )
        return tuple(output.detach() for output in outputs)

    def evaluate(
        self, micro_batch: int, received: Sequence[Tensor], batch: MicroBatch
    ) -> tuple[Tensor, ...]:
        """Forward without gradients; nothing stays in flight. The outputs own their memory: what
        only passes through is copied, since its slot is free once this returns."""
        del micro_batch
        with torch.no_grad():
            outputs = self._outputs_of(self._run_units(received, batch))
            return tuple(_apart_from(output, received) for output in outputs)

    def backward(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The whole backward. `grads` are the gradients of the outputs that have one, in order.
        Gives the gradients of the inputs that have one; adds parameters' gradients to `.grad`."""
        flight = self._in_flight.pop(micro_batch)
        roots: list[GradientEdge] = []
        seeds: list[Tensor] = []
        for edge, grad in (
            *zip(flight.output_edges, grads, strict=True),
            (flight.balance_edge, self._balance_seed),
            (flight.index_edge, self._balance_seed),
            (flight.loss_edge, self._loss_seed),
        ):
            if edge is not None:
                roots.append(edge)
                seeds.append(grad)
        with torch.autograd.set_multithreading_enabled(not self._backward_here):
            torch.autograd.backward(roots, seeds)
        return tuple(_apart_from(_grad_of(leaf), grads) for leaf in flight.leaves)

    def backward_input(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As `backward`, but layers that can put their weight gradients off do so until
        `weight_grads`; all other parameters' gradients are computed here."""
        self._queue.deferring = True
        try:
            input_grads = self.backward(micro_batch, grads)
        finally:
            self._queue.deferring = False
        self._weight_tasks[micro_batch] = self._queue.pop()
        return input_grads

    def flush_weight_grads(self) -> None:
        """After the step's last backward, before gradients are reduced: adds the weight gradients
        that layers hold back in order to add several micro-batches' at once."""
        flush_weight_grads(self.units)

    def weights_changed(self) -> None:
        """After an update, or after loading weights: copies that layers made of them are stale."""
        self._version.advance()

    def weight_grads(self, micro_batch: int) -> None:
        """Adds the weight gradients that `backward_input` put off, if the stage has any. Each one's
        operands are freed before the next is computed."""
        tasks = self._weight_tasks.pop(micro_batch)
        tasks.reverse()
        with torch.no_grad():
            while tasks:
                tasks.pop()()

    def _run_units(self, received: Sequence[Tensor], batch: MicroBatch) -> Carry:
        fields: dict[str, Any] = dict(zip(self.inputs, received, strict=True))
        carry = Carry(**fields)
        for unit in self.units:
            carry = unit(carry, batch)
        if carry.loss is not None:
            self.losses.append(carry.loss.detach())
        if carry.balance_loss is not None:
            self.balance_losses.append(carry.balance_loss.detach())
        if carry.index_loss is not None:
            self.index_losses.append(carry.index_loss.detach())
        self.loads.append(carry.loads)
        return carry

    def _outputs_of(self, carry: Carry) -> tuple[Tensor, ...]:
        outputs = tuple(getattr(carry, name) for name in self.outputs)
        for name, output in zip(self.outputs, outputs, strict=True):
            assert output is not None, (
                f"stage {self.index} ends without {name}, which crosses there"
            )
        return outputs


def _edge(tensor: Tensor | None) -> GradientEdge | None:
    """Where a gradient enters the graph; None where there is nothing to differentiate, such as the
    embedding's constant mix."""
    return get_gradient_edge(tensor) if tensor is not None and tensor.requires_grad else None


def _grad_of(leaf: Tensor) -> Tensor:
    """A leaf's gradient, taken off it; zeros where nothing on this stage or later read the leaf."""
    grad, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if grad is None else grad


def _apart_from(tensor: Tensor, received: Sequence[Tensor]) -> Tensor:
    """The tensor, copied if it lies in a slot: that may be overwritten while it is sent on."""
    memory = tensor.untyped_storage().data_ptr()
    if any(memory == other.untyped_storage().data_ptr() for other in received):
        return tensor.clone()
    return tensor

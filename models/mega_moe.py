"""Dispatcher `mega_moe`: the fused MoE layer as an op with its gradient. Its passes, with the shape
letters, are in mega_moe_passes.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from ppruntime.models.dispatch import AnyExperts, Exchange
from ppruntime.models.expert_products import weight_grad
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_experts import Fp8Experts, MicroBatch
from ppruntime.models.kernels.moe_layout import most_rows
from ppruntime.models.kernels.quantize import GROUP, Quantized
from ppruntime.models.linear import now_or_later
from ppruntime.models.mega_moe_arena import Arena
from ppruntime.models.mega_moe_passes import (
    Bf16MicroBatch,
    Kept,
    Matrices,
    MegaMoeOptions,
    Passes,
)
from ppruntime.models.router import Routing


class MegaMoe(Passes):
    """Fused dispatch, experts and combine over the ranks of an exchange, as a dispatcher."""

    def __init__(self, exchange: Exchange, arena: Arena, options: MegaMoeOptions) -> None:
        super().__init__(exchange, arena, options)
        self._layers: WeakKeyDictionary[AnyExperts, int] = WeakKeyDictionary()
        self.name = f"{exchange.name} #{next(_NUMBERS)}"
        _DISPATCHERS[self.name] = self

    @property
    def outside_bytes(self) -> int:
        """The arena's."""
        return self.arena.shape.num_bytes

    def held(self, num_experts: int) -> range:
        share = num_experts // self.exchange.num_ranks
        return range(self.exchange.rank * share, (self.exchange.rank + 1) * share)

    def routed(
        self, experts: AnyExperts, x_ND: Tensor, routing: Routing, counts_E: Tensor
    ) -> Tensor:
        del counts_E  # the layout counts them anyway
        y_ND: Tensor = _MegaMoe.apply(  # type: ignore[no-untyped-call]
            x_ND,
            routing.weights_NK,
            experts.gate_up.weight,
            experts.down.weight,
            routing.experts_NK,
            experts,
            self,
        )
        return y_ND

    def layer_of(self, experts: AnyExperts) -> int:
        """A number for these experts, for `rooms`."""
        return self._layers.setdefault(experts, len(self._layers))


_NUMBERS = count()
_DISPATCHERS: WeakValueDictionary[str, MegaMoe] = WeakValueDictionary()
"""Ops take names, not objects. No two have one name: each has epochs of its own."""


@torch.library.custom_op("ppruntime::expert_mega_moe", mutates_args=())
def _forward_op(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    matrices: Sequence[Tensor],
    limit: float,
    power_of_two: bool,
    layer: int,
    dispatcher: str,
) -> list[Tensor]:
    """y and the fields of `Kept`. `matrices`: two in bf16, or FP8 bytes and scales by turns."""
    here = _DISPATCHERS[dispatcher]
    pair: Matrices
    if len(matrices) == 2:
        pair = (matrices[0], matrices[1])
    else:
        pair = (Quantized(*matrices[:2]), Quantized(*matrices[2:]))
    y_ND, kept = here.run(
        here.forward_steps(
            x_ND, experts_NK, weights_NK, pair, limit, power_of_two=power_of_two, layer=layer
        )
    )
    assert kept.z_RC is not None
    return [y_ND, *kept]  # type: ignore[list-item]


@_forward_op.register_fake
def _(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    matrices: Sequence[Tensor],
    limit: float,
    power_of_two: bool,
    layer: int,
    dispatcher: str,
) -> list[Tensor]:
    """Sizes of the worst routing."""
    num_ranks = _DISPATCHERS[dispatcher].exchange.num_ranks
    here, width, hidden = matrices[0].shape
    rows = most_rows(experts_NK.numel() * num_ranks, here)
    fp8 = len(matrices) == 4

    def ints(*shape: int) -> Tensor:
        return x_ND.new_empty(shape, dtype=torch.int32)

    return [
        torch.empty_like(x_ND, dtype=x_ND.dtype if fp8 else torch.float32),
        x_ND.new_empty(rows, width, dtype=torch.bfloat16),
        x_ND.new_empty(rows, hidden, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16),
        x_ND.new_empty((rows, hidden // GROUP) if fp8 else (0,), dtype=torch.float32),
        ints(rows),
        ints(rows),
        x_ND.new_empty(rows, dtype=torch.float32),
        ints(*experts_NK.shape),
        ints(2 * here + 1 + 2 * num_ranks * here + rows // GROUP),
        torch.empty(here, dtype=torch.int64),
    ]


class _MegaMoe(torch.autograd.Function):
    """The op with its gradient, which is one node: the order of its meetings is written in it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weights_NK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        experts_NK: Tensor,
        experts: AnyExperts,
        dispatcher: MegaMoe,
    ) -> Tensor:
        ctx.experts, ctx.dispatcher, ctx.weights = experts, dispatcher, None
        ctx.dtype = x_ND.dtype
        matrices, limit, keeps, power_of_two = [gate_up, down], float(experts.limit), True, False
        if isinstance(experts, Fp8Experts):
            weights = experts.quantized()
            matrices = [*weights.gate_up, *weights.down]
            keeps = experts.options.keep_expert_activations
            power_of_two = experts.options.power_of_two_scales
            ctx.weights = weights
        y_ND, z_RC, *others = torch.ops.ppruntime.expert_mega_moe(
            x_ND, experts_NK, weights_NK, matrices, limit, power_of_two,
            dispatcher.layer_of(experts), dispatcher.name,
        )  # fmt: skip
        ctx.save_for_backward(gate_up, down, z_RC if keeps else None, *others)
        ctx.parameters = gate_up, down  # see `linear.now_or_later`
        result: Tensor = y_ND
        return result

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, down, *kept = ctx.saved_tensors
        experts, dispatcher = ctx.experts, ctx.dispatcher
        weights = ctx.weights or (gate_up, down)
        fp8 = isinstance(experts, Fp8Experts)
        grads = dispatcher.run(
            dispatcher.backward_steps(
                grad_ND.contiguous(),
                Kept(*kept),
                weights,
                float(experts.limit),
                dtype=ctx.dtype,
                tile_scales=fp8 and experts.options.wgrad_tile_scales,
            )
        )
        gate_up_grad = down_grad = None
        if ctx.needs_input_grad[2]:
            if isinstance(grads.operands, MicroBatch):
                experts.put_weight_grads(grads.operands)
            else:
                gate_up_grad, down_grad = bf16_weight_grads(
                    experts, grads.operands, *ctx.parameters
                )
        return grads.x_ND, grads.weights_NK, gate_up_grad, down_grad, None, None, None


def bf16_weight_grads(
    experts: Experts, operands: Bf16MicroBatch, gate_up: Tensor, down: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the weights for autograd, or None, as `linear.now_or_later` gives them. Padding
    is zeros on both sides and adds nothing."""
    x_RD, gate_up_grad_RC, inner_RF, grad_RD, rows_L = operands
    rows: list[int] = rows_L.tolist()
    return (
        now_or_later(
            experts.gate_up.queue,
            gate_up,
            lambda: weight_grad(gate_up_grad_RC, x_RD, rows, len(rows)),
        ),
        now_or_later(
            experts.down.queue, down, lambda: weight_grad(grad_RD, inner_RF, rows, len(rows))
        ),
    )

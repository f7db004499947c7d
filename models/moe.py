"""Mixture of experts: route, hand over to the experts wherever they are, add the shared expert.

Shape letters: B sequences, T tokens, N = B T, K experts per token, E experts, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ppruntime.models.dims import ModelDims
from ppruntime.models.dispatch import AllHere, AnyExperts, Dispatcher
from ppruntime.models.experts import Experts, SharedExpert
from ppruntime.models.moe_kernels import REFERENCE, MoEKernels
from ppruntime.models.router import Router, Routing, expert_counts, sequence_balance_loss

if TYPE_CHECKING:
    from ppruntime.models.fp8_experts import Fp8Options


@dataclass(frozen=True, slots=True)
class MoEOptions:
    """How a layer's routed experts are computed, and how tokens reach them."""

    fp8: Fp8Options | None = None
    """None: in the compute dtype, by torch."""
    dispatcher: Dispatcher = field(default_factory=AllHere)
    kernels: MoEKernels = REFERENCE
    """Who computes what lies around them."""


HERE = MoEOptions()
"""All experts, in the compute dtype."""


class MoEOutput(NamedTuple):
    """What a MoE layer gives."""

    y_BTD: Tensor
    balance_loss: Tensor | None
    """fp32 scalar, weighted, summed over sequences; None if the weight is 0."""
    loads_E: Tensor
    """int64: tokens that each expert received."""


class MoE(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        by_token_id: bool = False,
        options: MoEOptions = HERE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.options = dims, options
        self.router = Router(dims, by_token_id=by_token_id, device=device, dtype=dtype)
        self.experts = routed_experts(dims, options, device=device, dtype=dtype)
        self.shared = SharedExpert(dims, device=device, dtype=dtype)
        self.router.wide_products = options.kernels.wide_products
        self.router.route = options.kernels.route
        self.shared.swiglu = options.kernels.swiglu
        if isinstance(self.experts, Experts):
            self.experts.swiglu = options.kernels.swiglu

    def forward(self, x_BTD: Tensor, ids_BT: Tensor) -> MoEOutput:
        x_ND = x_BTD.flatten(0, 1)
        routing: Routing = self.router(x_ND, ids_BT.flatten())
        counts_BE = expert_counts(routing.experts_NK, x_BTD.shape[0], self.dims.num_experts)
        routed_ND = self.routed(x_ND, routing, counts_BE)
        # Added in fp32 and rounded once, whatever the dtype in which the two come.
        y_ND = (routed_ND + self.shared(x_ND)).to(x_BTD.dtype)
        return MoEOutput(
            y_ND.view_as(x_BTD), self._balance_loss(routing, counts_BE), counts_BE.sum(0)
        )

    def routed(self, x_ND: Tensor, routing: Routing, counts_BE: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs, fp32 or rounded to the compute dtype."""
        return self.options.dispatcher.routed(self.experts, x_ND, routing, counts_BE.sum(0))

    def _balance_loss(self, routing: Routing, counts_BE: Tensor) -> Tensor | None:
        weight = self.dims.balance_loss_weight
        if weight == 0:
            return None
        per_token = self.dims.experts_per_token
        shares = self.options.kernels.mean_shares
        return weight * sequence_balance_loss(routing.scores_NE, counts_BE, per_token, shares)


def routed_experts(
    dims: ModelDims,
    options: MoEOptions,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AnyExperts:
    """A layer's routed experts as the options say, those that the dispatcher has here."""
    held = options.dispatcher.held(dims.num_experts)
    if options.fp8 is None:
        return Experts(dims, held=held, device=device, dtype=dtype)
    from ppruntime.models.fp8_experts import Fp8Experts  # needs Triton

    return Fp8Experts(dims, options.fp8, held=held, device=device, dtype=dtype)

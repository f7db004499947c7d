"""Who computes what of a MoE layer lies around its routed experts, as one record of functions.

`REFERENCE` is plain PyTorch; `moe_kernels` gives the fused ones as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppruntime.models.attention_kernels import REFERENCE as PLAIN
from ppruntime.models.experts import clamped_swiglu
from ppruntime.models.kernels import is_interpreted, unavailable_reason
from ppruntime.models.linear import Linear
from ppruntime.models.router import Routing, mean_shares, route


@dataclass(frozen=True, slots=True)
class MoEKernels:
    """One function per operation. All have the reference's meaning, shapes and gradients."""

    swiglu: Callable[[Tensor, float], Tensor] = clamped_swiglu
    """As `experts.clamped_swiglu`, of the shared expert and of routed ones in the compute dtype."""
    wide_products: Callable[[Sequence[Linear], Tensor], list[Tensor]] = PLAIN.wide_products
    """(linears with fp32 weights, x [..., I]) -> of each [..., O] in fp32: the router's logits."""
    route: Callable[[Tensor, Tensor | None, Tensor | None, int, float], Routing] = route
    """As `router.route`: logits to picks, weights and scores."""
    mean_shares: Callable[[Tensor, int], Tensor] = mean_shares
    """As `router.mean_shares`, for the balance loss."""


REFERENCE = MoEKernels()
"""Plain PyTorch."""


def moe_kernels(swiglu: str, router: str, device: torch.device, dtype: torch.dtype) -> MoEKernels:
    """The functions that the config's `kernels.swiglu` (reference, triton, auto) and
    `kernels.router` (reference, library, triton, auto) name, for a model of compute dtype `dtype`.
    auto: what is fastest and can run there.

    Raises RuntimeError, with the reason, for a named one that cannot.
    """
    chosen = REFERENCE
    reason = _no_triton(device)
    if swiglu == "triton" and reason:
        raise RuntimeError(f'kernels.swiglu = "triton": {reason}; "reference" runs anywhere')
    if swiglu == "triton" or (swiglu == "auto" and not reason and device.type == "cuda"):
        from ppruntime.models.kernels.shared_swiglu import swiglu as fused

        chosen = replace(chosen, swiglu=fused)
    is_low = dtype is torch.bfloat16
    if router == "library" and not is_low:
        raise RuntimeError(
            f'kernels.router = "library" is for bfloat16 models, this one is in {dtype};'
            ' "reference" runs anywhere'
        )
    if router == "triton" and reason:
        raise RuntimeError(f'kernels.router = "triton": {reason}; "reference" runs anywhere')
    is_auto = router == "auto" and device.type == "cuda"
    if is_low and (router in ("library", "triton") or is_auto):
        from ppruntime.models.kernels.wide_linear import wide_products

        chosen = replace(chosen, wide_products=wide_products)
    if router == "triton" or (is_auto and not reason):
        from ppruntime.models.kernels import routing

        chosen = replace(chosen, route=routing.route, mean_shares=routing.mean_shares)
    return chosen


def _no_triton(device: torch.device) -> str | None:
    if device.type == "cpu" and not is_interpreted():
        return "the model is on the CPU; TRITON_INTERPRET=1 runs the kernels there, slowly"
    return unavailable_reason("triton")

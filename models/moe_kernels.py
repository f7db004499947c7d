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


@dataclass(frozen=True, slots=True)
class MoEKernels:
    """One function per operation. All have the reference's meaning, shapes and gradients."""

    swiglu: Callable[[Tensor, float], Tensor] = clamped_swiglu
    """As `experts.clamped_swiglu`, of the shared expert and of routed ones in the compute dtype."""
    wide_products: Callable[[Sequence[Linear], Tensor], list[Tensor]] = PLAIN.wide_products
    """(linears with fp32 weights, x [..., I]) -> of each [..., O] in fp32: the router's scores."""


REFERENCE = MoEKernels()
"""Plain PyTorch."""


def moe_kernels(swiglu: str, router: str, device: torch.device, dtype: torch.dtype) -> MoEKernels:
    """The functions that the config's `kernels.swiglu` (reference, triton, auto) and
    `kernels.router` (reference, library, auto) name, for a model of compute dtype `dtype`. auto:
    what is fastest and can run there.

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
    if router == "library" or (router == "auto" and is_low and device.type == "cuda"):
        from ppruntime.models.kernels.wide_linear import wide_products

        chosen = replace(chosen, wide_products=wide_products)
    return chosen


def _no_triton(device: torch.device) -> str | None:
    if device.type == "cpu" and not is_interpreted():
        return "the model is on the CPU; TRITON_INTERPRET=1 runs the kernels there, slowly"
    return unavailable_reason("triton")

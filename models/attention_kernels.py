"""What attention leaves to others: the operations for which there are kernels, as one record.

A layer calls the functions of its record and does not ask who they are. `REFERENCE`, plain PyTorch,
is every layer's record until `set_kernels` hands it another (models/kernels/attention_backends.py
makes them).

Shape letters: B sequences, T tokens, H heads, K head width, N keys, W slots, I input width, O
output width, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ppruntime.models.linear import GroupedLinear, Linear
from ppruntime.models.norm import RMSNorm, rms_norm
from ppruntime.models.precision import widened
from ppruntime.models.rope import Rotation, rotate
from ppruntime.models.selection import Selection, select_entries
from ppruntime.models.sparse_attention import sparse_attention


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """One function per operation. All have the reference's meaning, shapes and gradients."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Rotation], Tensor]
    """(q [B, T, H, K], keys [B, N, K], slots [B, T, W], sink [H], rotation) -> [B, T, H, K]:
    attention to the listed keys, turned back by `rotation`."""
    select: Callable[..., Selection]
    """As `selection.select_entries`."""
    rotate: Callable[[Tensor, Rotation], Tensor]
    """(x [B, T, K] or [B, T, H, K], rotation) -> x with its last channels turned."""
    project_rotated: Callable[[Linear, Tensor, Rotation, int], Tensor]
    """(linear, x [B, T, I], rotation, heads) -> the product as heads [B, T, H, K], turned."""
    grouped: Callable[[GroupedLinear, Tensor], Tensor]
    """(linear, x [B, T, G, I]) -> [B, T, G O], every group by its own matrix."""
    norm: Callable[[Tensor, Tensor, float], Tensor]
    """As `norm.rms_norm`, of every norm that is not part of another kernel."""
    wide_products: Callable[[Sequence[Linear], Tensor], list[Tensor]]
    """(linears with fp32 weights, x [..., I]) -> of each [..., O] in fp32, whatever x is."""


def _attend(
    q_BTHK: Tensor, keys_BNK: Tensor, slots_BTW: Tensor, sink_H: Tensor, rotation: Rotation
) -> Tensor:
    o_BTHK = sparse_attention(q_BTHK, keys_BNK, slots_BTW, sink_H)
    return rotate(o_BTHK, rotation, inverse=True)


def _project_rotated(linear: Linear, x_BTI: Tensor, rotation: Rotation, num_heads: int) -> Tensor:
    """The plain form: a product, and a turned copy of it."""
    return rotate(linear(x_BTI).unflatten(-1, (num_heads, -1)), rotation)


def _grouped(linear: GroupedLinear, x_BTGI: Tensor) -> Tensor:
    y_BTGO: Tensor = linear(x_BTGI)
    return y_BTGO.flatten(-2)


def _wide_products(linears: Sequence[Linear], x: Tensor) -> list[Tensor]:
    wide = widened(x)
    return [linear(wide) for linear in linears]


REFERENCE = AttentionKernels(
    attend=_attend,
    select=select_entries,
    rotate=rotate,
    project_rotated=_project_rotated,
    grouped=_grouped,
    norm=rms_norm,
    wide_products=_wide_products,
)


class UsesKernels(nn.Module):
    """A module that calls the functions of `kernels`."""

    kernels: AttentionKernels = REFERENCE


def set_kernels(unit: nn.Module, kernels: AttentionKernels) -> None:
    """Hands one record to every module inside `unit` that uses one, and its norm to every norm."""
    for module in unit.modules():
        if isinstance(module, UsesKernels):
            module.kernels = kernels
        if isinstance(module, RMSNorm):
            module.function = kernels.norm

"""Where activation checkpointing can keep a result instead of computing it again.

What can be kept is what registered ops give. The readable path registers some with `named_op`, the
kernels do so anyway. A run names an op, or a group of ops by what they are (`SavePoint`).

An op's name says to which group it belongs (`point_of`), so that a new kernel is kept with its
group if it is named by the rule; to be named alone it needs its entry in `_HALVES`. Ops that
compute the same from the same have one name: `op_name` says which. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import StrEnum


class SavePoint(StrEnum):
    """Groups of ops of a half layer whose results may be kept through a recompute."""

    EXPERTS = "experts"
    """Rows sent to the routed experts, their products, what comes back: every op `expert_*`, and
    every collective."""
    ENGRAM = "engram"
    """Rows looked up and their projection: every op `engram_*`."""
    PROJECTIONS = "projections"
    """Products with weights of all dense layers: `mm` and every op `*_linear`."""
    ATTENTION = "attention"
    """What sparse attention gives, and what an indexer kernel picks: every op `sparse_attention*`
    or `index_*`."""


_NAMESPACE = "ppruntime::"
_COLLECTIVES = "_c10d_functional::"
_SAME = {
    "aten::mm": "mm",
    "aten::addmm": "mm",
    "aten::_scaled_mm": "mm",
    "engram_fetched": "engram_rows",
    "fp8_rotated_linear": "rotated_linear",
    "grouped_columns_linear": "grouped_linear",
    "index_select_library": "index_select",
    "sparse_attention_reference": "sparse_attention",
}
"""Ops that stand for one another: the same result of the same half, by whichever kernels."""

_ATTENTION, _MOE = frozenset({"attention"}), frozenset({"moe"})
_BOTH = _ATTENTION | _MOE
_HALVES: Mapping[str, frozenset[str]] = {
    "mm": _BOTH,
    "wide_linear": _BOTH,
    "fp8_linear": _BOTH,
    "fp8_swiglu_linear": _MOE,
    "grouped_linear": _ATTENTION,
    "rotated_linear": _ATTENTION,
    "sparse_attention": _ATTENTION,
    "index_select": _ATTENTION,
    "rotate": _ATTENTION,
    "rms_norm": _BOTH,
    "mhc_read": _BOTH,
    "mhc_write": _BOTH,
    "one_stream_read": _BOTH,
    "one_stream_write": _BOTH,
    "engram_rows": _ATTENTION,
    "engram_linear": _ATTENTION,
    "gate_engram": _ATTENTION,
    "route": _MOE,
    "mean_shares": _MOE,
    "shared_swiglu": _MOE,
    "fp8_experts": _MOE,
    "expert_rows": _MOE,
    "expert_linear": _MOE,
    "expert_counts": _MOE,
    "expert_dispatch": _MOE,
    "expert_combine": _MOE,
    "expert_tokens": _MOE,
    "expert_mega_moe": _MOE,
}
"""Ops that a run may name, and the halves that they may run in."""
_OF_ENGRAM = frozenset({"engram_rows", "engram_linear", "gate_engram"})

SAVE_NAMES: tuple[str, ...] = (*SavePoint, *_HALVES)
"""Groups and ops that a run may name, in the order in which a list of them is written."""
ALIASES: tuple[str, ...] = tuple(name for name in _SAME if "::" not in name)
"""Ops that a run may name too, for those that they stand for."""


def op_name(name: str) -> str:
    """The op by the name that a run's list has: its own without the namespace, "mm" for torch's
    products, or that of the op which it stands for."""
    short = name.removeprefix(_NAMESPACE)
    return _SAME.get(short, short)


def point_of(name: str) -> SavePoint | None:
    """The group of an op by its qualified name, such as "ppruntime::sparse_attention", or by that
    which `op_name` gives."""
    if name.startswith(_COLLECTIVES):
        return SavePoint.EXPERTS
    name = op_name(name)
    if name == "mm":
        return SavePoint.PROJECTIONS
    if "::" in name or name.endswith("_backward"):
        return None
    if name.startswith("expert_") or name == "fp8_experts":
        return SavePoint.EXPERTS
    if name.startswith("engram_"):
        return SavePoint.ENGRAM
    if name.startswith(("sparse_attention", "index_")):
        return SavePoint.ATTENTION
    return SavePoint.PROJECTIONS if name.endswith("linear") else None


def is_kept(kept: Set[str], name: str) -> bool:
    """Whether an op's results are among those kept, which are groups and names as `op_name` gives
    them."""
    return op_name(name) in kept or point_of(name) in kept


def names_in(*, is_moe: bool, has_engram: bool, has_mhc: bool = True) -> frozenset[str]:
    """Groups and ops that may be kept in one half of a layer, whichever kernels it has; `has_mhc`:
    its residual is mHC."""
    half = "moe" if is_moe else "attention"
    ops = {name for name, halves in _HALVES.items() if half in halves}
    ops -= {"one_stream_read", "one_stream_write"} if has_mhc else {"mhc_read", "mhc_write"}
    if not has_engram:
        ops -= _OF_ENGRAM
    return frozenset(ops | {point for op in ops if (point := point_of(op)) is not None})

"""Where activation checkpointing can keep a result instead of computing it again.

A save point is a set of registered ops. The readable path registers its own with `named_op`, the
kernels do so anyway; an op belongs to a save point by its name (`point_of`), so that a new kernel
needs no entry here if it is named by the rule. Imports without torch.
"""

from __future__ import annotations

from enum import StrEnum


class SavePoint(StrEnum):
    """What of a half layer may be kept through a recompute."""

    EXPERTS = "experts"
    """Rows sent to the routed experts, their products, what comes back: every op `expert_*`, and
    every collective."""
    ENGRAM = "engram"
    """Rows looked up and their projection: every op `engram_*`."""
    PROJECTIONS = "projections"
    """Products with weights of all dense layers: `aten::mm`, `aten::addmm` and every op
    `*_linear`."""
    ATTENTION = "attention"
    """What sparse attention gives, and what an indexer kernel picks: every op `sparse_attention*`
    or `index_*`."""


def points_in(*, is_moe: bool, has_engram: bool) -> frozenset[SavePoint]:
    """The save points that there are in one half of a layer."""
    if is_moe:
        return frozenset({SavePoint.EXPERTS, SavePoint.PROJECTIONS})
    found = {SavePoint.PROJECTIONS, SavePoint.ATTENTION}
    return frozenset(found | ({SavePoint.ENGRAM} if has_engram else set()))


_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"})
_NAMESPACE = "ppruntime::"


def point_of(op_name: str) -> SavePoint | None:
    """The save point of an op by its qualified name, such as "ppruntime::sparse_attention"."""
    if op_name in _PRODUCTS:
        return SavePoint.PROJECTIONS
    if op_name.startswith("_c10d_functional::"):
        return SavePoint.EXPERTS
    if not op_name.startswith(_NAMESPACE):
        return None
    name = op_name.removeprefix(_NAMESPACE)
    if name.endswith("_backward"):
        return None
    if name.startswith("expert_") or name == "fp8_experts":
        return SavePoint.EXPERTS
    if name.startswith("engram_"):
        return SavePoint.ENGRAM
    if name.startswith(("sparse_attention", "index_")):
        return SavePoint.ATTENTION
    return SavePoint.PROJECTIONS if name.endswith("linear") else None

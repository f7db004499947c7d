"""How DeepSeek's Muon recipe updates each parameter, and of which matrices it is made. No torch.

Sources: the V4 report, section 2.4 (Muon, its matrices) and V4.1's, section 2.5 (tables).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from ppruntime.models.parameters import ParameterSpec, Part

if TYPE_CHECKING:
    from ppruntime.models.dims import ModelDims

NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
"""(a, b, c) of each step Y <- a Y + b (Y Y^T) Y + c (Y Y^T)^2 Y: eight that bring singular values
near 1 fast, two that bring them to it."""

TABLE_LR_FACTOR = 5.0
"""Engram tables learn so much faster than all else (V4.1)."""


class Update(Enum):
    """An update rule."""

    MUON = auto()
    """Momentum, orthogonalised matrix by matrix."""
    SINKHORN = auto()
    """Momentum, rows and columns of which are brought to equal norms in turn."""
    ADAMW = auto()


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What happens to one parameter."""

    update: Update
    decays: bool
    """Whether it has weight decay."""
    heights: tuple[int, ...] = ()
    """MUON: rows of the matrices that lie one below the other, in a parameter with three axes in
    each entry of the first one. Each is orthogonalised by itself, over all columns."""
    lr_factor: float = 1.0

    @property
    def num_moments(self) -> int:
        """Tensors of the parameter's shape that the optimizer keeps."""
        return 2 if self.update is Update.ADAMW else 1


def update_rule(dims: ModelDims, parameter: ParameterSpec) -> UpdateRule:
    """The rule of a parameter of a model with these sizes.

    The reports leave open: Engram's gate weights count as norm weights, which decay; the embedding
    and the head of V4 models, which AdamW updates, do not decay; several shared experts are one.
    """
    part, name = parameter.part, parameter.name
    if part is Part.ENGRAM_TABLE:
        return UpdateRule(Update.SINKHORN, decays=False, lr_factor=TABLE_LR_FACTOR)
    if part is Part.LOOKUP or name == "projection.weight":  # embedding and head: a row a token
        balanced = dims.family == "v41"
        return UpdateRule(Update.SINKHORN if balanced else Update.ADAMW, decays=False)
    if part in (Part.VECTOR, Part.ENGRAM_VECTOR):
        decays = part is Part.ENGRAM_VECTOR or name.endswith("norm.weight")
        return UpdateRule(Update.ADAMW, decays=decays)
    return UpdateRule(Update.MUON, decays=True, heights=_heights(dims, parameter))


def _heights(dims: ModelDims, parameter: ParameterSpec) -> tuple[int, ...]:
    rows, streams = parameter.shape[-2], dims.num_streams
    match parameter.name:
        case "attention.q_b.weight":
            return (dims.head_dim,) * dims.num_heads
        case "attention.indexer.query.weight":
            return (dims.index_head_dim,) * dims.index_heads
        case "moe.experts.gate_up.weight" | "moe.shared.gate_up.weight":
            return (rows // 2,) * 2
        case "mhc.projection.weight":  # pre, post, comb
            return (streams, streams, streams**2)
        case "engram.projection.weight":  # a key for each stream, the value
            return (dims.hidden_size,) * (streams + 1)
        case _:
            return (rows,)


def newton_schulz_flops(rule: UpdateRule, width: int) -> int:
    """FLOPs to orthogonalise the matrices of `rule.heights`, `width` columns wide."""
    total = 0
    for rows in rule.heights:
        small, large = sorted((rows, width))
        total += len(NEWTON_SCHULZ) * (4 * small**2 * large + 2 * small**3)
    return total

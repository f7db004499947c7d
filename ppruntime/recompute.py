"""What `[ac]` says of each unit: whether it is recomputed in the backward, and what is kept then.

Pure; no torch. The modes, by the half layer they are set for:

    mode          kept                                    computed again in the backward
    none          all that autograd saves                 nothing
    matmul        projections, attention, experts         norms, rotations, gates, mHC, router
    attention     attention, experts                      that, and projections
    projections   projections, experts                    that of matmul, and sparse attention
    full          experts                                 all else
    full_moe      -                                       all, dispatch and experts included

"Kept" comes on top of the half's inputs. Experts: the rows that reached them, their two products
and what came back, so that neither a message nor an expert's product is repeated. Engram's rows and
their projection are kept in every mode, unless `recompute_engram` gives them up where the mode is
full or full_moe. What belongs to which is said by op names in `models/save_points.py`. Embedding
and head are never recomputed.
"""

from __future__ import annotations

from ppruntime.config.keys import Config, RecomputeMode
from ppruntime.models.dims import ForwardFlops, UnitKind, UnitSpec, forward_flops_per_token
from ppruntime.models.save_points import SavePoint

_KEPT: dict[RecomputeMode, frozenset[SavePoint]] = {
    "full_moe": frozenset(),
    "full": frozenset({SavePoint.EXPERTS}),
    "projections": frozenset({SavePoint.EXPERTS, SavePoint.PROJECTIONS}),
    "attention": frozenset({SavePoint.EXPERTS, SavePoint.ATTENTION}),
    "matmul": frozenset({SavePoint.EXPERTS, SavePoint.PROJECTIONS, SavePoint.ATTENTION}),
}
_IN_HALF = {
    UnitKind.ATTENTION: {SavePoint.ENGRAM, SavePoint.PROJECTIONS, SavePoint.ATTENTION},
    UnitKind.MOE: {SavePoint.EXPERTS, SavePoint.PROJECTIONS},
}


def mode_of(config: Config, spec: UnitSpec) -> RecomputeMode:
    """The mode of a unit: its layer's, else `ac.mode`; "none" for embedding and head."""
    if spec.kind not in _IN_HALF:
        return "none"
    found = (config.ac.layer_modes or {}).get(str(spec.layer), config.ac.mode)
    return found if isinstance(found, str) else found[spec.kind is UnitKind.MOE]


def kept_points(config: Config, spec: UnitSpec) -> frozenset[SavePoint] | None:
    """What the unit keeps through its recompute, of what there is in it; None: no recompute."""
    mode = mode_of(config, spec)
    if mode == "none":
        return None
    kept = set(_KEPT[mode])
    if spec.engram_parameters and not (config.ac.recompute_engram and mode in ("full", "full_moe")):
        kept.add(SavePoint.ENGRAM)
    there = _IN_HALF[spec.kind] - ({SavePoint.ENGRAM} if not spec.engram_parameters else set())
    return frozenset(kept & there)


def repeated_flops(config: Config, spec: UnitSpec) -> ForwardFlops:
    """FLOPs per token that the unit's backward spends on computing results again."""
    kept = kept_points(config, spec)
    dims = config.model.dims
    flops = forward_flops_per_token(dims, spec, config.train.seq_len)
    if kept is None:
        return ForwardFlops(0.0, 0.0, 0.0)
    experts = 0.0
    if spec.kind is UnitKind.MOE:
        experts = 6.0 * dims.experts_per_token * dims.hidden_size * dims.expert_width
    engram = 0.0
    if spec.engram_parameters:
        columns = (dims.engram_max_order - 1) * dims.engram_heads
        width = (dims.num_streams + 1) * dims.hidden_size
        engram = 2.0 * columns * dims.engram_head_dim * width
    dense = flops.matmul - experts - engram
    return ForwardFlops(
        matmul=experts * (SavePoint.EXPERTS not in kept)
        + engram * (SavePoint.ENGRAM not in kept)
        + dense * (SavePoint.PROJECTIONS not in kept),
        attention=flops.attention * (SavePoint.ATTENTION not in kept),
        index_scores=flops.index_scores,
    )

"""What `[ac]` says of each unit: whether it is recomputed in the backward, and what is kept then.

Pure; no torch. The modes, by the half layer they are set for:

    mode          kept                                    computed again in the backward
    none          all that autograd saves                 nothing
    matmul        projections, attention, experts         norms, rotations, gates, mHC, router
    attention     attention, experts                      that, and projections
    projections   projections, experts                    that of matmul, and sparse attention
    full          experts                                 all else
    full_moe      -                                       all, dispatch and experts included
    selective     what `ac.save` names                    all else

"Kept" comes on top of the half's inputs; a list names groups of ops or ops (`save_points`), and
what the half's kernels do not run as an op is computed again. Experts: the rows that reached them,
their two products and what came back, so that neither a message nor an expert's product is
repeated. Engram's rows and their projection are kept in every mode, unless `recompute_engram` gives
them up where the mode is full or full_moe; selective keeps them if the list has them. What belongs
to which is said by op names in `models/save_points.py`. Embedding and head are never recomputed.
"""

from __future__ import annotations

from typing import get_args

from msgspec import convert
from msgspec.structs import replace

from ppruntime.config.keys import ActivationCheckpointing, Config, RecomputeMode
from ppruntime.kernel_forms import attention_kernels, expert_form, has_fp8_linears, kernel
from ppruntime.models.dims import (
    ForwardFlops,
    UnitKind,
    UnitSpec,
    forward_flops_per_token,
    unit_parameters,
)
from ppruntime.models.product_ops import Products
from ppruntime.models.save_points import SAVE_NAMES, SavePoint, is_kept, names_in, op_name

_KEPT: dict[RecomputeMode, frozenset[str]] = {
    "full_moe": frozenset(),
    "full": frozenset({SavePoint.EXPERTS}),
    "projections": frozenset({SavePoint.EXPERTS, SavePoint.PROJECTIONS}),
    "attention": frozenset({SavePoint.EXPERTS, SavePoint.ATTENTION}),
    "matmul": frozenset({SavePoint.EXPERTS, SavePoint.PROJECTIONS, SavePoint.ATTENTION}),
}
_MAY_LEAVE_ENGRAM = ("full", "full_moe")
_SELECTIVE: RecomputeMode = "selective"
_LIST = f"{_SELECTIVE}:"


def mode_of(config: Config, spec: UnitSpec) -> RecomputeMode:
    """The mode of a unit: its layer's, else `ac.mode`; "none" for embedding and head."""
    if spec.layer is None:
        return "none"
    found = (config.ac.layer_modes or {}).get(str(spec.layer), config.ac.mode)
    return found if isinstance(found, str) else found[spec.kind is UnitKind.MOE]


def mode_name(config: Config, spec: UnitSpec | None = None) -> str:
    """The mode of a unit, else `ac.mode`, as rows of a calibration have it: selective with its
    list, in one order, since other lists are other modes: "selective:experts+attention"."""
    mode = config.ac.mode if spec is None else mode_of(config, spec)
    if mode != _SELECTIVE:
        return mode
    return _LIST + "+".join(name for name in SAVE_NAMES if name in _saved(config))


def is_mode_name(name: str) -> bool:
    """Whether `mode_name` gives such names."""
    mode, _, listed = name.partition(":")
    if mode != _SELECTIVE:
        return name in get_args(RecomputeMode)
    names = listed.split("+")
    return names == [name for name in SAVE_NAMES if name in names]


def in_mode(config: Config, name: str) -> Config:
    """The config with that mode, named as by `mode_name`, for all its layers."""
    assert is_mode_name(name), f"{name} is no mode"
    mode, _, listed = name.partition(":")
    save = tuple(listed.split("+")) if listed else None
    ac = convert({"mode": mode, "save": save}, ActivationCheckpointing)
    given_up = config.ac.recompute_engram and mode in _MAY_LEAVE_ENGRAM
    return replace(config, ac=replace(ac, recompute_engram=given_up))


def mode_overrides(name: str) -> tuple[str, ...]:
    """`in_mode` as texts of a command line, `layer_modes` and `recompute_engram` apart."""
    mode, _, listed = name.partition(":")
    quoted = ", ".join(f'"{point}"' for point in listed.split("+"))
    return f"ac.mode={mode}", f"ac.save=[{quoted}]" if listed else "ac.save=default"


def _saved(config: Config) -> frozenset[str]:
    """What `ac.save` names, each by one name."""
    return frozenset(map(op_name, config.ac.save or ()))


def names_to_keep(config: Config, spec: UnitSpec) -> frozenset[str]:
    """Groups and ops that there may be in a half layer, whichever kernels it has."""
    return names_in(
        is_moe=spec.kind is UnitKind.MOE,
        has_engram=spec.engram_parameters > 0,
        has_mhc=config.model.dims.residual_type == "mhc",
    )


def kept_points(config: Config, spec: UnitSpec) -> frozenset[str] | None:
    """The groups and ops whose results the unit keeps through its recompute, of those there are in
    it; None: no recompute."""
    mode = mode_of(config, spec)
    if mode == "none":
        return None
    there = names_to_keep(config, spec)
    if mode == _SELECTIVE:
        return _saved(config) & there
    kept = _KEPT[mode]
    if not (config.ac.recompute_engram and mode in _MAY_LEAVE_ENGRAM):
        kept |= {SavePoint.ENGRAM}
    return kept & there


def repeated_flops(config: Config, spec: UnitSpec) -> ForwardFlops:
    """FLOPs per token that the unit's backward spends on computing results again."""
    kept = kept_points(config, spec)
    if kept is None:
        return ForwardFlops(0.0, 0.0, 0.0)
    dims = config.model.dims
    flops = forward_flops_per_token(dims, spec, config.train.seq_len)
    products = _products(config, spec)
    again = sum(
        parameter.active(dims)
        for parameter in unit_parameters(dims, spec)
        if parameter.active(dims)
        if not is_kept(kept, products.op(parameter.name.removesuffix(".weight")))
    )
    return ForwardFlops(
        matmul=2.0 * again,
        attention=flops.attention * (not is_kept(kept, "sparse_attention")),
        index_scores=flops.index_scores,
    )


def _products(config: Config, spec: UnitSpec) -> Products:
    assert spec.layer is not None
    return Products(
        dims=config.model.dims,
        layer=spec.layer,
        is_low=config.train.precision == "bf16",
        kernels=attention_kernels(config),
        mhc=kernel(config, "mhc"),
        router=kernel(config, "router"),
        fp8_linears=has_fp8_linears(config),
        experts=expert_form(config),
    )

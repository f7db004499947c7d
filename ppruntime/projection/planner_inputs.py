"""A run and a calibration -> what the planner plans. Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise, product
from typing import get_args

from msgspec.structs import replace

from ppruntime.config.keys import Config, ExpertCompute, RecomputeMode
from ppruntime.experts.arena_bytes import arena_bytes
from ppruntime.memory import (
    activation_bytes,
    compute_dtype_name,
    gradient_bytes,
    head_bytes,
    lookup_bytes,
    put_off_bytes,
    recompute_bytes,
    state_bytes,
    workspace_bytes,
)
from ppruntime.models.dims import UnitKind, UnitSpec, boundary_bytes, unit_specs
from ppruntime.plan import StagePlan, cut
from ppruntime.plan_report import boundary_of
from ppruntime.projection.calibrate_kernels import expert_scale, weight_scale
from ppruntime.projection.calibration import (
    Calibration,
    PerStep,
    UnitTimes,
    transfer_seconds,
    unit_type,
)
from ppruntime.projection.kernel_records import Kernels
from ppruntime.projection.pipeline import check_fits
from ppruntime.projection.planner_task import Choice, ExpertUse, PlannedUnit, Task, Variant
from ppruntime.projection.projector import Origin, ProjectionError, weakest
from ppruntime.projection.step_pieces import on_run
from ppruntime.recompute import in_mode, is_mode_name, mode_name
from ppruntime.reduction_bytes import reduction_peak


def task_of(
    config: Config,
    calibration: Calibration,
    *,
    memory_bytes: float,
    reserved_bytes: float,
    host_bytes_per_s: float,
    link: str | None,
    variants: Sequence[Variant] = (),
) -> Task:
    """The planner's task: choices per unit from the calibration's rows of all its AC modes, bytes
    as the memory ledger has them; `variants` are `expert_variants` of the config if none are given.
    Raises ProjectionError for a missing row, and for times of another run."""
    check_fits(config, None, calibration)
    specs = unit_specs(config.model.dims)
    variants = tuple(variants) or expert_variants(config)
    run = config
    if any(variant.use is not None for variant in variants):  # the plan's run has FP8 experts
        run = _with_experts(config, replace(config.moe.compute, backend="triton"))
    return Task(
        units=_units(run, calibration, specs),
        num_stages=config.pp.size,
        num_micro_batches=config.train.num_micro_batches,
        hop_s=_hop(config, calibration, specs, link),
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        variants=variants,
        host_bytes_per_s=host_bytes_per_s,
        every_rank_bytes=float(arena_bytes(config)),
        per_step_s=sum(piece.seconds for piece in per_step_of(config, calibration)),
    )


def per_step_of(config: Config, calibration: Calibration) -> tuple[PerStep, ...]:
    """The calibration's pieces on the run's ranks, at the run's cut: a plan's is not known yet."""
    plan = cut(
        config.model.dims,
        range(config.pp.size),
        config.pp.layers_per_stage if config.pp.num_stages == config.pp.size else None,
        seq_len=config.train.seq_len,
    )
    return tuple(on_run(piece, config, plan) for piece in calibration.per_step)


def expert_variants(config: Config, kernels: Kernels | None = None) -> tuple[Variant, ...]:
    """What a stage may do with its FP8 experts: fused weight gradients or not, gathered bf16
    weights kept or freed, turned copies kept or made on demand.

    With `kernels` times change as these say, and experts are in FP8 whatever the config says.
    Without, nothing says what turning or fusing costs: both are as the config has them; freeing
    costs no time. Raises ProjectionError where the config has them for stages by number.
    """
    compute = config.moe.compute
    freed_or_not = (False, True) if config.train.precision == "bf16" else (False,)
    if kernels is not None:
        measured = (1, *sorted(kernels.experts.fused_gain_s))
        return tuple(
            _variant(config, ExpertUse(freed, turned, fused), kernels)
            for fused, freed, turned in product(measured, freed_or_not, (False, True))
        )
    if compute.backend == "torch":
        return (Variant("in the compute dtype", 0.0),)
    for name in ("fp8_transposed_on_demand", "fused_wgrad_micro_batches"):
        if isinstance(given := getattr(compute, name), tuple):
            raise ProjectionError(
                f"moe.compute.{name} = {list(given)} is for stages by number, and a search makes "
                "the stages; give one value for all"
            )
    turned, fused = compute.turns_on_demand(0), compute.num_fused(0)
    return tuple(_variant(config, ExpertUse(freed, turned, fused)) for freed in freed_or_not)


def _variant(config: Config, use: ExpertUse, kernels: Kernels | None = None) -> Variant:
    name = "bf16 freed" if use.free_bf16_expert_weights else "bf16 kept"
    if use.fp8_transposed_on_demand:
        name += ", FP8 turned on demand"
    num_fused = use.fused_wgrad_micro_batches
    if num_fused > 1:
        name += f", fused wgrad n {num_fused}"
    turn_s = gain_s = 0.0
    if kernels is not None:
        turn_s = use.fp8_transposed_on_demand * kernels.experts.turn_s * weight_scale(config)
        gain_s = kernels.experts.fused_gain_s.get(num_fused, 0.0) * expert_scale(config, kernels)
    block = next(s for s in unit_specs(config.model.dims) if s.kind is UnitKind.MOE)
    used = _with_experts(config, replace(config.moe.compute, backend="triton", **asdict(use)))
    static = _state(used, block) - _state(_with_experts(config, ExpertCompute()), block)
    return Variant(
        name,
        static,
        input_grad_s=turn_s,
        weight_grad_s=-gain_s,
        use=use,
        update_bytes=_update(used, block),
    )


def _with_experts(config: Config, compute: ExpertCompute) -> Config:
    return replace(config, moe=replace(config.moe, compute=compute))


def _alone(spec: UnitSpec) -> StagePlan:
    return StagePlan(index=0, rank=0, units=(spec,), before=None, after=spec)


def _state(config: Config, spec: UnitSpec) -> float:
    """What lies on a rank through a step for one unit."""
    state = state_bytes(config, _alone(spec))
    lookups = lookup_bytes(config, _alone(spec))
    return float(state.weights + state.gradients + state.optimizer + lookups)


def _update(config: Config, spec: UnitSpec) -> float:
    applied = config.optim.apply_in_backward
    return float(reduction_peak(config, [_alone(spec)], applied=applied).more)


def _held(
    config: Config, specs: Sequence[UnitSpec], mode: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a micro-batch keeps by each unit inside a stage, all units before it there in the same
    mode, and by each unit as its stage's first."""
    of_mode = in_mode(config, mode)
    up_to = [0]
    for index in range(len(specs)):
        prefix = StagePlan(
            index=0, rank=0, units=tuple(specs[: index + 1]), before=None, after=specs[index]
        )
        up_to.append(activation_bytes(of_mode, prefix))
    inside = tuple(float(more - less) for less, more in pairwise(up_to))
    return inside, tuple(float(activation_bytes(of_mode, _alone(spec))) for spec in specs)


def _units(
    config: Config, calibration: Calibration, specs: Sequence[UnitSpec]
) -> tuple[PlannedUnit, ...]:
    held = {
        mode: _held(config, specs, checked_mode(mode))
        for mode in {row.ac_mode for row in calibration.units}
    }
    return tuple(
        _unit(
            config,
            calibration,
            spec,
            {mode: (inside[i], first[i]) for mode, (inside, first) in held.items()},
        )
        for i, spec in enumerate(specs)
    )


def checked_mode(name: str) -> str:
    """The name. Raises ProjectionError for a calibration's mode that no run could have."""
    if not is_mode_name(name):
        raise ProjectionError(
            f"the calibration has units with ac_mode {name}, which is none of "
            f"{', '.join(get_args(RecomputeMode))}; calibrate it again"
        )
    return name


def with_fast_kernels(config: Config) -> Config:
    """The config with each kernel on "auto" that is on "reference": the run that kernels' records
    are of, each part by the fastest that was timed."""
    names = config.kernels.__struct_fields__
    slow = [name for name in names if getattr(config.kernels, name) == "reference"]
    return replace(config, kernels=replace(config.kernels, **dict.fromkeys(slow, "auto")))


def _unit(
    config: Config,
    calibration: Calibration,
    spec: UnitSpec,
    held: Mapping[str, tuple[float, float]],
) -> PlannedUnit:
    kind = unit_type(config.model.dims, spec)
    # A config has one list of what is saved, so a plan cannot mix two: rows of others stay out.
    lists = {mode_name(config, half) for half in unit_specs(config.model.dims)}
    rows = [
        row
        for row in calibration.units
        if row.unit == kind and (":" not in row.ac_mode or row.ac_mode in lists)
    ]
    if not rows:
        raise ProjectionError(
            f"the calibration has no unit {kind}, which {spec.name} needs; calibrate it"
        )
    plain = _with_experts(config, ExpertCompute())  # a variant adds to that
    return PlannedUnit(
        name=spec.name,
        choices=tuple(_choice(config, spec, row, *held[row.ac_mode]) for row in rows),
        static_bytes=_state(plain, spec),
        is_expert_block=spec.kind is UnitKind.MOE,
        is_half=spec.layer is not None,
        origin=weakest(*(Origin(row.origin) for row in rows)),
        boundary_bytes=float(boundary_of(config, _alone(spec))),
        gradient_bytes=float(gradient_bytes(config, spec)),
        update_bytes=_update(plain, spec),
        put_off_bytes=float(put_off_bytes(config, spec)),
    )


def _choice(
    config: Config, spec: UnitSpec, row: UnitTimes, held: float, first_held: float
) -> Choice:
    of_mode, alone = in_mode(config, row.ac_mode), _alone(spec)
    made = recompute_bytes(of_mode, alone) + workspace_bytes(of_mode, alone)
    return Choice(
        mode=row.ac_mode,
        forward_s=row.forward_s,
        input_grad_s=row.input_grad_s,
        weight_grad_s=row.weight_grad_s,
        held_bytes=held,
        first_held_bytes=first_held,
        made_bytes=float(max(made, head_bytes(of_mode, alone).most)),
    )


def _hop(
    config: Config, calibration: Calibration, specs: Sequence[UnitSpec], link: str | None
) -> float:
    """The slowest hop that a cut could have."""
    links = sorted({row.link for row in calibration.transfers})
    chosen = link if link is not None else (links[0] if len(links) == 1 else None)
    rows = [row for row in calibration.transfers if row.link == chosen]
    if not links:
        raise ProjectionError(
            "the calibration has no transfers; add them with ppruntime calibrate on two pipeline "
            "ranks"
        )
    if not rows:
        missing = "" if link is None else f"no link {link}, but "
        raise ProjectionError(
            f"the calibration has {missing}links {', '.join(links)}; choose one with --link"
        )
    train = config.train
    sizes = [
        boundary_bytes(
            config.model.dims,
            spec,
            train.micro_batch_size,
            train.seq_len,
            dtype=compute_dtype_name(config),
        )
        for spec in specs[:-1]
    ]
    return transfer_seconds(rows, max(sizes)).seconds

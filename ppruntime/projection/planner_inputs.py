"""A run and a calibration -> what the planner plans. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

from msgspec.structs import replace

from ppruntime.config.keys import Config, ExpertCompute
from ppruntime.memory import activation_bytes, compute_dtype_name, state_bytes
from ppruntime.models.dims import UnitKind, UnitSpec, boundary_bytes, unit_specs
from ppruntime.plan import StagePlan
from ppruntime.projection.calibration import Calibration, on_data_ranks, transfer_seconds, unit_type
from ppruntime.projection.kernel_records import Kernels
from ppruntime.projection.pipeline import check_fits
from ppruntime.projection.planner_task import Choice, ExpertUse, PlannedUnit, Task, Variant
from ppruntime.projection.projector import Origin, ProjectionError, weakest
from ppruntime.recompute import in_mode, mode_name


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
    from its memory rows, else by the model's sizes; `variants` are `expert_variants` of the config
    if none are given. Raises ProjectionError for a missing row, and for times of another run."""
    check_fits(config, None, calibration)
    specs = unit_specs(config.model.dims)
    return Task(
        units=tuple(_unit(config, calibration, spec) for spec in specs),
        num_stages=config.pp.size,
        num_micro_batches=config.train.num_micro_batches,
        hop_s=_hop(config, calibration, specs, link),
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        variants=tuple(variants) or expert_variants(config),
        host_bytes_per_s=host_bytes_per_s,
        per_step_s=sum(
            on_data_ranks(piece, config.parallel.num_data_ranks).seconds
            for piece in calibration.per_step
        ),
    )


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
        tokens = config.train.micro_batch_size * config.train.seq_len
        scale = tokens * config.model.dims.experts_per_token / kernels.experts.rows
        turn_s = use.fp8_transposed_on_demand * kernels.experts.turn_s
        gain_s = kernels.experts.fused_gain_s.get(num_fused, 0.0) * scale
    block = next(s for s in unit_specs(config.model.dims) if s.kind is UnitKind.MOE)
    compute = replace(config.moe.compute, backend="triton", **asdict(use))
    static = _state(config, compute, block) - _state(config, ExpertCompute(), block)
    return Variant(name, static, input_grad_s=turn_s, weight_grad_s=-gain_s, use=use)


def _state(config: Config, compute: ExpertCompute, spec: UnitSpec) -> float:
    """What lies on a rank through a step for one unit, with its experts used as `compute` says."""
    alone = StagePlan(index=0, rank=0, units=(spec,), before=None, after=spec)
    state = state_bytes(replace(config, moe=replace(config.moe, compute=compute)), alone)
    return float(state.weights + state.gradients + state.optimizer)


def _unit(config: Config, calibration: Calibration, spec: UnitSpec) -> PlannedUnit:
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
    held = {row.ac_mode: float(row.num_bytes) for row in calibration.memory if row.unit == kind}
    alone = StagePlan(index=0, rank=0, units=(spec,), before=None, after=spec)
    return PlannedUnit(
        name=spec.name,
        choices=tuple(
            Choice(
                row.ac_mode,
                row.forward_s,
                row.input_grad_s,
                row.weight_grad_s,
                held[row.ac_mode]
                if row.ac_mode in held
                else float(activation_bytes(in_mode(config, row.ac_mode), alone)),
            )
            for row in rows
        ),
        static_bytes=_state(config, ExpertCompute(), spec),  # a variant adds to that
        is_expert_block=spec.kind is UnitKind.MOE,
        is_half=spec.layer is not None,
        origin=weakest(*(Origin(row.origin) for row in rows)),
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

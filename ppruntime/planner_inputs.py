"""A run and a calibration -> what the planner plans. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ppruntime.calibrate_kernels import Kernels
from ppruntime.calibration import Calibration, transfer_seconds, unit_type
from ppruntime.config_keys import Config
from ppruntime.memory import activation_bytes, compute_dtype_name, state_bytes
from ppruntime.models.dims import UnitKind, UnitSpec, boundary_bytes, unit_specs
from ppruntime.plan import StagePlan
from ppruntime.planner import Choice, PlannedUnit, Task, Variant
from ppruntime.projector import Origin, ProjectionError, weakest


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
    from its memory rows, else by the model's sizes. Raises ProjectionError for a missing row."""
    specs = unit_specs(config.model.dims)
    return Task(
        units=tuple(_unit(config, calibration, spec) for spec in specs),
        num_stages=config.pp.size,
        num_micro_batches=config.train.num_micro_batches,
        hop_s=_hop(config, calibration, specs, link),
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        variants=tuple(variants) or (Variant("as it is", 0.0),),
        host_bytes_per_s=host_bytes_per_s,
        per_step_s=sum(piece.seconds for piece in calibration.per_step),
    )


def expert_variants(config: Config, kernels: Kernels) -> tuple[Variant, ...]:
    """What a stage may do with its FP8 experts. Weights in bf16 are counted by `state_bytes`
    already; FP8 copies, forward and turned, come on top unless a variant leaves them out."""
    dims = config.model.dims
    block = dims.num_experts * 3.0 * dims.hidden_size * dims.expert_width / config.parallel.ep
    tokens = config.train.micro_batch_size * config.train.seq_len
    scale = tokens * dims.experts_per_token / kernels.experts.rows
    turn = kernels.experts.turn_s
    gain = kernels.experts.fused_gain_s * scale
    operands = kernels.experts.held_bytes * scale
    variants = []
    for fused, fused_name in ((0, ""), (1, ", fused wgrad n 2")):
        for freed, freed_name in ((0, "bf16 kept"), (1, "bf16 freed")):
            for turned, turned_name in ((0, ""), (1, ", FP8 turned on demand")):
                variants.append(
                    Variant(
                        name=freed_name + turned_name + fused_name,
                        static_bytes=block * (2 - 2 * freed - turned) + fused * operands,
                        input_grad_s=turned * turn,
                        weight_grad_s=-fused * gain,
                    )
                )
    return tuple(variants)


def _unit(config: Config, calibration: Calibration, spec: UnitSpec) -> PlannedUnit:
    kind = unit_type(config.model.dims, spec)
    rows = [row for row in calibration.units if row.unit == kind]
    if not rows:
        raise ProjectionError(
            f"the calibration has no unit {kind}, which {spec.name} needs; calibrate it"
        )
    held = {row.ac_mode: float(row.num_bytes) for row in calibration.memory if row.unit == kind}
    alone = StagePlan(index=0, rank=0, units=(spec,), before=None, after=spec)
    state = state_bytes(config, alone)
    return PlannedUnit(
        name=spec.name,
        choices=tuple(
            Choice(
                row.ac_mode,
                row.forward_s,
                row.input_grad_s,
                row.weight_grad_s,
                held.get(row.ac_mode, float(activation_bytes(config, alone))),
            )
            for row in rows
        ),
        static_bytes=float(state.weights + state.gradients + state.optimizer),
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
    if not rows:
        raise ProjectionError(
            f"the calibration has links {', '.join(links) or 'none'}; choose one with --link, or "
            "add transfers"
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
    return transfer_seconds(rows, max(sizes))[0]

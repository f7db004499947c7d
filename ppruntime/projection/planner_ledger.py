"""Plans whose runs fit memory by the ledger: what a planner adds up is held to `ledger.predict`.

A planner adds sizes of units; the ledger walks the run's order op by op and knows the update. Every
plan that is given away has the ledger's peaks, and none of them is above the cap. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import convert, structs

from ppruntime.config.keys import Config, ExpertCompute, RecomputeMode
from ppruntime.ledger import RankLedger, predict
from ppruntime.projection.planner import Found, Plan, disturbed, find_plans, uniform_plan
from ppruntime.projection.planner_task import ExpertUse, PlannedStage, Task

_ENOUGH = 1 + 1e-9


def plans_that_fit(config: Config, task: Task, keep: int = 3) -> Found:
    """`find_plans` of `config`'s task, with peaks as the ledger has them. Where units add up to
    less than a stage's peak, the difference is kept free there and all is planned again. Raises
    ProjectionError if nothing fits memory."""
    margins = (0.0,) * task.num_stages
    while True:
        found = find_plans(replace(task, margins=margins), keep)
        plans = tuple(with_ledger(config, task, plan) for plan in found.plans)
        missing = _missing(task, plans)
        if not any(missing):
            break
        margins = tuple(a + b for a, b in zip(margins, missing, strict=True))
    uniform, why = _uniform_that_fits(config, task)
    return replace(found, plans=plans, uniform=uniform, why_no_uniform=why)


def with_ledger(config: Config, task: Task, plan: Plan) -> Plan:
    """The plan with its run's peaks by the ledger, and what is reserved. What a plan has in host
    memory no run says in bytes; it is taken off, in place of what the run would offload."""
    run = run_of(config, plan)
    if any(stage.offloaded_bytes for stage in plan.stages):
        run = structs.replace(run, pp=structs.replace(run.pp, activation_offload=False))
    ledgers = predict(run)
    stages = tuple(
        _with_peak(task, stage, ledger) for stage, ledger in zip(plan.stages, ledgers, strict=True)
    )
    return replace(plan, stages=stages)


def run_of(config: Config, plan: Plan) -> Config:
    """`config` cut, ordered and recomputed as planned, with its experts used so."""
    has_warmup = plan.order in ("async_1f1b", "1f1b_w")
    pp = structs.replace(
        config.pp,
        schedule=plan.order,
        layers_per_stage=plan.layers_per_stage,
        warmup_step=plan.warmup if has_warmup else None,
    )
    ac = structs.replace(config.ac, layer_modes=_layer_modes(plan))
    run = structs.replace(config, pp=pp, ac=ac)
    if not any(stage.experts for stage in plan.stages):
        return run
    return structs.replace(
        run, moe=structs.replace(run.moe, compute=_experts(run.moe.compute, plan))
    )


def _layer_modes(plan: Plan) -> dict[str, RecomputeMode | tuple[RecomputeMode, RecomputeMode]]:
    halves: dict[str, list[RecomputeMode]] = {}
    for stage in plan.stages:
        for unit, mode in zip(stage.units, stage.modes, strict=True):
            if unit.startswith("layers."):
                # With a list of what is saved it is the config's own: a plan has no other.
                plain = convert(mode.partition(":")[0], RecomputeMode)
                halves.setdefault(unit.split(".")[1], []).append(plain)
    return {layer: (attention, moe) for layer, (attention, moe) in halves.items()}


def _experts(compute: ExpertCompute, plan: Plan) -> ExpertCompute:
    uses = [stage.experts or ExpertUse() for stage in plan.stages]
    return structs.replace(
        compute,
        backend="auto" if compute.backend == "torch" else compute.backend,
        free_bf16_expert_weights=_stages(use.free_bf16_expert_weights for use in uses),
        fp8_transposed_on_demand=_stages(use.fp8_transposed_on_demand for use in uses),
        fused_wgrad_micro_batches=tuple(use.fused_wgrad_micro_batches for use in uses),
    )


def _stages(which: Iterable[bool]) -> tuple[int, ...] | bool:
    """As a list of stages, which a run has in place of none."""
    return tuple(index for index, is_so in enumerate(which) if is_so) or False


def _with_peak(task: Task, stage: PlannedStage, ledger: RankLedger) -> PlannedStage:
    away = (stage.in_flight - min(stage.in_flight, 2)) * stage.offloaded_bytes
    return replace(stage, peak_bytes=task.reserved_bytes + ledger.peak_bytes - away)


def _missing(task: Task, plans: Sequence[Plan]) -> list[float]:
    """By stage: how far the plans are above the cap."""
    peaks = zip(*([stage.peak_bytes for stage in plan.stages] for plan in plans), strict=True)
    cap = task.memory_bytes
    return [max(peak) - cap if max(peak) > cap * _ENOUGH else 0.0 for peak in peaks]


def _uniform_that_fits(config: Config, task: Task) -> tuple[Plan | None, str]:
    """As `plans_that_fit`, with margins of its own."""
    margins = (0.0,) * task.num_stages
    while True:
        plan, why = uniform_plan(replace(task, margins=margins))
        if plan is None:
            return None, why
        plan = with_ledger(config, task, disturbed(task, plan))
        missing = _missing(task, [plan])
        if not any(missing):
            return plan, ""
        margins = tuple(a + b for a, b in zip(margins, missing, strict=True))

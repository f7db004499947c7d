"""Where to cut, what to recompute, which order: the plan with the shortest step that fits memory.

The best cut for the micro-batches in flight that an order needs at the least (`planner_cut`); then
warm-up vectors within memory by the steady-state law; and the best few played in virtual time.
Pure, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from ppruntime.projection.planner_cut import Fronts
from ppruntime.projection.planner_task import (
    Flow,
    PlannedStage,
    Task,
    slot_bytes,
    stage_of,
    units_of,
    waiting_bytes,
    with_peak,
)
from ppruntime.projection.projector import ProjectionError
from ppruntime.schedules import make
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.counts import Edge, peak_in_flight, slots_held
from ppruntime.schedules.law import steady_time
from ppruntime.schedules.machine import Interference, Link, Machine
from ppruntime.schedules.ops import Kind, Schedule, ScheduleError
from ppruntime.schedules.plan_warmup import plan_warmup
from ppruntime.schedules.simulator import simulate_machine
from ppruntime.schedules.timeline import simulate


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, played in virtual time."""

    name: str
    order: str
    warmup: tuple[int, ...]
    stages: tuple[PlannedStage, ...]
    cycle_s: float
    """Per micro-batch, by the steady-state law."""
    step_s: float

    @property
    def busiest(self) -> int:
        work = [stage.work_s for stage in self.stages]
        return work.index(max(work))

    @property
    def layers_per_stage(self) -> tuple[float, ...]:
        return tuple(stage.layers for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Bounds:
    """No plan within these units, modes and memory is faster; seconds per micro-batch."""

    balance_s: float
    """All work in the fastest modes, spread evenly, or the largest unit that cannot be cut."""
    cut_s: float
    """The busiest stage of the best cut, with as few micro-batches in flight as an order needs."""
    step_s: float
    """M x cut_s, and per-step pieces."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best plans, the shortest step first."""

    plans: tuple[Plan, ...]
    bounds: Bounds
    uniform: Plan | None
    """Equal layers per stage, one mode, the same order; None where it does not fit memory."""
    why_no_uniform: str = ""


def find_plans(task: Task, keep: int = 3) -> Found:
    """The best plans. Raises ProjectionError if nothing fits memory."""
    fronts = Fronts(task)
    plans: list[Plan] = []
    cut_s = math.inf
    for order in task.orders:
        stages = fronts.best_cut(_least_flow(order, task))
        if stages is None:
            continue
        cut_s = min(cut_s, max(stage.work_s for stage in stages))
        plans += _played(task, order, stages)
    if not plans:
        raise ProjectionError(_nothing_fits(task))
    plans.sort(key=lambda plan: plan.step_s)
    plans = sorted((disturbed(task, plan) for plan in plans[:keep]), key=lambda plan: plan.step_s)
    uniform, why = uniform_plan(task)
    if uniform is not None:
        uniform = disturbed(task, uniform)
    least = [min(unit.choices, key=lambda c: c.work_s).work_s for unit in task.units]
    balance = max(sum(least) / task.num_stages, max(least))
    return Found(
        tuple(plans),
        Bounds(balance, cut_s, task.num_micro_batches * cut_s + task.per_step_s),
        uniform,
        why,
    )


def uniform_plan(task: Task) -> tuple[Plan | None, str]:
    """Equal layers a stage, the head on the last, one mode and variant everywhere: the fastest such
    plan that fits, or why none does."""
    halves = sum(unit.is_half for unit in task.units)
    if halves % task.num_stages:
        return None, f"{halves} half-layers are not the same number on {task.num_stages} stages"
    size = halves // task.num_stages
    modes = sorted({choice.mode for unit in task.units for choice in unit.choices})
    best: Plan | None = None
    for order, mode, variant in product(task.orders, modes, task.variants):
        flow = _least_flow(order, task)
        stages = []
        for p in range(task.num_stages):
            units = units_of(task, p * size, (p + 1) * size, p)
            chosen = [
                next((c for c in unit.choices if c.mode == mode), unit.choices[0]) for unit in units
            ]
            place = (p, p * size, (p + 1) * size)
            stages.append(stage_of(task, place, chosen, variant, flow, 0.0))
        if any(stage.peak_bytes > task.memory_bytes for stage in stages):
            continue
        for plan in _played(task, order, tuple(stages)):
            if best is None or plan.step_s < best.step_s:
                best = replace(plan, name=f"uniform {size / 2:g} layers, {mode}, {variant.name}")
    return best, "" if best else "no single mode fits the memory cap"


def _least_flow(order: str, task: Task) -> Flow:
    """What an order has there at the least; more warm-up comes later."""
    warmup = (
        tuple(min(task.num_micro_batches, task.num_stages - 1 - r) for r in range(task.num_stages))
        if order == "async_1f1b"
        else None
    )
    schedule = make(order, task.num_stages, task.num_micro_batches, warmup_step=warmup)
    return _flow(schedule)


def _flow(schedule: Schedule) -> Flow:
    puts_off = any(op.kind is Kind.W for op in schedule.ops(0))
    slots, stages = slots_held(schedule), range(schedule.num_stages)
    return Flow(
        peak_in_flight(schedule),
        tuple(slots[Edge(s - 1, s, "F")] if s else 0 for s in stages),
        tuple(slots[Edge(s + 1, s, "B")] if s + 1 < len(stages) else 0 for s in stages),
        puts_off,
    )


def _played(task: Task, order: str, stages: tuple[PlannedStage, ...]) -> Iterator[Plan]:
    """The order as it is, and with the warm-up that memory allows and the hops need."""
    costs = _costs(stages)
    hops = Hops.both(task.hop_s)
    deferred = order == "1f1b_w"
    warmups: list[tuple[int, ...]] = []
    if order == "async_1f1b":
        limits = _most_in_flight(task, stages)
        try:
            planned = plan_warmup(
                costs, hops, memory_budget=_falling(limits), defer_weight_grads=deferred
            )
            warmups.append(tuple(min(task.num_micro_batches, w) for w in planned.warmup))
        except ScheduleError:
            return
    else:
        warmups.append(tuple(task.num_stages - 1 - r for r in range(task.num_stages)))
    for warmup in warmups:
        given = warmup if order == "async_1f1b" else None
        schedule = make(order, task.num_stages, task.num_micro_batches, warmup_step=given)
        final = _with_flow(task, stages, _flow(schedule))
        if any(stage.peak_bytes > task.memory_bytes * (1 + 1e-12) for stage in final):
            continue  # slots took what was left for more warm-up
        yield Plan(
            name=f"searched cut, modes by half, {order}",
            order=order,
            warmup=warmup,
            stages=final,
            cycle_s=steady_time(warmup, costs, hops, defer_weight_grads=deferred),
            step_s=simulate(schedule, costs, hops).makespan + task.per_step_s,
        )


def disturbed(task: Task, plan: Plan) -> Plan:
    """The plan with the step that it takes where transfers slow compute down; the rank that an op
    is on sends its messages one after another."""
    if task.interference == Interference():
        return plan
    warmup = plan.warmup if plan.order == "async_1f1b" else None
    schedule = make(plan.order, task.num_stages, task.num_micro_batches, warmup_step=warmup)
    num_hops = task.num_stages - 1
    machine = Machine(
        costs=_costs(plan.stages),
        links=(Link("hop", 0.0, 1.0),) * num_hops,  # a message's bytes are its seconds
        forward_bytes=(task.hop_s,) * num_hops,
        backward_bytes=(task.hop_s,) * num_hops,
        interference=task.interference,
    )
    return replace(plan, step_s=simulate_machine(schedule, machine).seconds + task.per_step_s)


def _costs(stages: Sequence[PlannedStage]) -> Costs:
    return Costs(
        tuple(s.forward_s for s in stages),
        tuple(s.input_grad_s for s in stages),
        tuple(s.weight_grad_s for s in stages),
    )


def _falling(limits: Sequence[int]) -> list[int]:
    """The law takes warm-ups that do not grow from rank to rank, so a rank's limit is its own."""
    return [max(1, limit) for limit in limits]


def _places(task: Task, stages: Sequence[PlannedStage]) -> list[tuple[int, int, int]]:
    """Number, first half and the one behind the last of each stage."""
    ends = [0, *accumulate(round(2 * stage.layers) for stage in stages)]
    return [(p, first, last) for p, (first, last) in enumerate(pairwise(ends))]


def _with_flow(task: Task, stages: Sequence[PlannedStage], flow: Flow) -> tuple[PlannedStage, ...]:
    """The stages with what another order, or more warm-up, has there at once."""
    return tuple(
        with_peak(
            task,
            place[0],
            replace(
                stage,
                in_flight=flow.in_flight[place[0]],
                waiting_bytes=waiting_bytes(units_of(task, place[1], place[2], place[0]), flow),
                slot_bytes=task.every_rank_bytes + slot_bytes(task, flow, place),
            ),
        )
        for stage, place in zip(stages, _places(task, stages), strict=True)
    )


def _most_in_flight(task: Task, stages: Sequence[PlannedStage]) -> list[int]:
    """By stage; each further micro-batch has a slot as well."""
    limits = []
    for stage, (_, first, _) in zip(stages, _places(task, stages), strict=True):
        each = stage.held_bytes + (task.units[first].boundary_bytes if first else 0.0)
        free = task.memory_bytes - stage.peak_bytes
        if not each or free == math.inf:
            limits.append(task.num_micro_batches)
        else:
            limits.append(min(task.num_micro_batches, stage.in_flight + int(free / each)))
    return limits


def _nothing_fits(task: Task) -> str:
    least = [min(unit.choices, key=lambda c: c.held_bytes) for unit in task.units]
    static = sum(unit.static_bytes for unit in task.units) / task.num_stages
    held = sum(choice.held_bytes for choice in least) / task.num_stages
    return (
        f"no cut into {task.num_stages} stages fits {task.memory_bytes / 1e9:.4g} GB a rank: on "
        f"average {task.reserved_bytes / 1e9:.3g} GB are reserved, {static / 1e9:.4g} GB lie there "
        f"throughout and {held / 1e9:.3g} GB are kept of each micro-batch in flight; raise "
        "--memory-gb, parallel.dp or pp.size"
        + ("" if task.host_bytes_per_s else ", or allow offload with --host-gb-per-s")
    )

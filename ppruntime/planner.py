"""Where to cut, what to recompute, which order: the plan with the shortest step that fits memory.

For every run of half-layers the Pareto front of time against held bytes over its units' modes; over
cuts, the smallest busiest stage by dynamic programming, exact for given micro-batches in flight;
then warm-up vectors within memory by the steady-state law; and the best few played in virtual time.
Pure, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ppruntime.projector import Origin, ProjectionError
from ppruntime.schedules import make
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.counts import peak_in_flight
from ppruntime.schedules.law import steady_time
from ppruntime.schedules.ops import ScheduleError
from ppruntime.schedules.plan_warmup import plan_warmup
from ppruntime.schedules.timeline import simulate


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a unit: seconds of a micro-batch, and the bytes that it then keeps."""

    mode: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    held_bytes: float

    @property
    def work_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit and what may be chosen for it. `static_bytes` lie on the rank throughout."""

    name: str
    choices: tuple[Choice, ...]
    static_bytes: float
    is_expert_block: bool
    is_half: bool
    """A half-layer; embedding and head go with the first and the last one."""
    origin: Origin = Origin.ASSUMED


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """What a stage does with its FP8 experts, by the names of `[moe.compute]`."""

    free_bf16_expert_weights: bool = False
    fp8_transposed_on_demand: bool = False
    fused_wgrad_micro_batches: int = 1


@dataclass(frozen=True, slots=True)
class Variant:
    """A way for a stage to use its experts; numbers are per MoE block."""

    name: str
    static_bytes: float
    """What lies there throughout on top of the unit's own."""
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    """Change of times."""
    use: ExpertUse | None = None
    """None: as the run's config has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be planned. All bytes are of one rank."""

    units: tuple[PlannedUnit, ...]
    """In model order: embedding, halves, head."""
    num_stages: int
    num_micro_batches: int
    hop_s: float
    memory_bytes: float
    """The cap; inf: none."""
    reserved_bytes: float
    """Of the cap: context, communication, buffers, workspaces."""
    variants: tuple[Variant, ...] = (Variant("as it is", 0.0),)
    host_bytes_per_s: float = 0.0
    """To the host and back at once; 0: activations are never offloaded."""
    per_step_s: float = 0.0
    orders: tuple[str, ...] = ("1f1b", "1f1b_w", "async_1f1b")


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage of a plan."""

    layers: float
    units: tuple[str, ...]
    modes: tuple[str, ...]
    """One per unit."""
    variant: str
    experts: ExpertUse | None
    """Of the variant."""
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    held_bytes: float
    """Of one micro-batch, on the device."""
    offloaded_bytes: float
    """Of one micro-batch, moved to the host and back."""
    static_bytes: float
    in_flight: int
    peak_bytes: float
    """With what is reserved."""

    @property
    def work_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


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
    fronts = _Fronts(task)
    plans: list[Plan] = []
    cut_s = math.inf
    for order in task.orders:
        in_flight = _in_flight(order, task)
        stages = fronts.best_cut(in_flight)
        if stages is None:
            continue
        cut_s = min(cut_s, max(stage.work_s for stage in stages))
        plans += _played(task, order, stages)
    if not plans:
        raise ProjectionError(_nothing_fits(task))
    plans.sort(key=lambda plan: plan.step_s)
    uniform, why = uniform_plan(task)
    least = [min(unit.choices, key=lambda c: c.work_s).work_s for unit in task.units]
    balance = max(sum(least) / task.num_stages, max(least))
    return Found(
        tuple(plans[:keep]),
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
        in_flight = _in_flight(order, task)
        stages = []
        for p in range(task.num_stages):
            units = _slice(task, p * size, (p + 1) * size, p)
            chosen = [
                next((c for c in unit.choices if c.mode == mode), unit.choices[0]) for unit in units
            ]
            stages.append(_stage(task, units, chosen, variant, in_flight[p], 0.0))
        if any(stage.peak_bytes > task.memory_bytes for stage in stages):
            continue
        for plan in _played(task, order, tuple(stages)):
            if best is None or plan.step_s < best.step_s:
                best = replace(plan, name=f"uniform {size / 2:g} layers, {mode}, {variant.name}")
    return best, "" if best else "no single mode fits the memory cap"


def _in_flight(order: str, task: Task) -> tuple[int, ...]:
    """Micro-batches each rank holds at the least with an order; more warm-up comes later."""
    warmup = (
        tuple(min(task.num_micro_batches, task.num_stages - 1 - r) for r in range(task.num_stages))
        if order == "async_1f1b"
        else None
    )
    schedule = make(order, task.num_stages, task.num_micro_batches, warmup_step=warmup)
    return peak_in_flight(schedule)


def _played(task: Task, order: str, stages: tuple[PlannedStage, ...]) -> Iterator[Plan]:
    """The order as it is, and with the warm-up that memory allows and the hops need."""
    costs = Costs(
        tuple(s.forward_s for s in stages),
        tuple(s.input_grad_s for s in stages),
        tuple(s.weight_grad_s for s in stages),
    )
    hops = Hops.both(task.hop_s)
    deferred = order == "1f1b_w"
    warmups: list[tuple[int, ...]] = []
    if order == "async_1f1b":
        limits = [_most_in_flight(task, stage) for stage in stages]
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
        held = peak_in_flight(schedule)
        final = tuple(
            replace(s, in_flight=k, peak_bytes=_peak(task, s, k))
            for s, k in zip(stages, held, strict=True)
        )
        yield Plan(
            name=f"searched cut, modes by half, {order}",
            order=order,
            warmup=warmup,
            stages=final,
            cycle_s=steady_time(warmup, costs, hops, defer_weight_grads=deferred),
            step_s=simulate(schedule, costs, hops).makespan + task.per_step_s,
        )


def _falling(limits: Sequence[int]) -> list[int]:
    """The law takes warm-ups that do not grow from rank to rank, so a rank's limit is its own."""
    return [max(1, limit) for limit in limits]


def _peak(task: Task, stage: PlannedStage, in_flight: int) -> float:
    moving = min(in_flight, 2)  # one on its way out, one on its way back
    return (
        task.reserved_bytes
        + stage.static_bytes
        + in_flight * stage.held_bytes
        + moving * stage.offloaded_bytes
    )


def _most_in_flight(task: Task, stage: PlannedStage) -> int:
    free = task.memory_bytes - _peak(task, stage, 0) - 2 * stage.offloaded_bytes
    if not stage.held_bytes or free == math.inf:
        return task.num_micro_batches
    return min(task.num_micro_batches, int(free / stage.held_bytes))


def _slice(task: Task, first: int, last: int, stage: int) -> tuple[PlannedUnit, ...]:
    """Halves first to last - 1, with the embedding on stage 0 and the head on the last one."""
    units = task.units[1 + first : 1 + last]
    if stage == 0:
        units = (task.units[0], *units)
    if stage == task.num_stages - 1:
        units = (*units, task.units[-1])
    return units


def _stage(
    task: Task,
    units: Sequence[PlannedUnit],
    chosen: Sequence[Choice],
    variant: Variant,
    in_flight: int,
    offloaded: float,
) -> PlannedStage:
    blocks = sum(unit.is_expert_block for unit in units)
    stage = PlannedStage(
        layers=sum(unit.is_half for unit in units) / 2,
        units=tuple(unit.name for unit in units),
        modes=tuple(choice.mode for choice in chosen),
        variant=variant.name,
        experts=variant.use,
        forward_s=sum(c.forward_s for c in chosen),
        input_grad_s=sum(c.input_grad_s for c in chosen) + blocks * variant.input_grad_s,
        weight_grad_s=sum(c.weight_grad_s for c in chosen) + blocks * variant.weight_grad_s,
        held_bytes=sum(c.held_bytes for c in chosen) - offloaded,
        offloaded_bytes=offloaded,
        static_bytes=sum(u.static_bytes for u in units) + blocks * variant.static_bytes,
        in_flight=in_flight,
        peak_bytes=0.0,
    )
    return replace(stage, peak_bytes=_peak(task, stage, in_flight))


@dataclass(frozen=True, slots=True)
class _Point:
    work_s: float
    held_bytes: float
    chosen: tuple[Choice, ...]


class _Fronts:
    """For each run of units the modes that nothing beats in both time and held bytes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._halves = sum(unit.is_half for unit in task.units)
        self._longest = min(self._halves, math.ceil(2.5 * self._halves / task.num_stages) + 1)
        self._known: dict[tuple[int, int], list[_Point]] = {}
        self._cuts: dict[tuple[int, ...], tuple[PlannedStage, ...] | None] = {}

    def best_cut(self, in_flight: tuple[int, ...]) -> tuple[PlannedStage, ...] | None:
        """The cut whose busiest stage is the shortest; of such cuts, the one with the least sum of
        squares. None if no cut fits."""
        if in_flight not in self._cuts:
            self._cuts[in_flight] = self._best_cut(in_flight)
        return self._cuts[in_flight]

    def _best_cut(self, in_flight: tuple[int, ...]) -> tuple[PlannedStage, ...] | None:
        task, halves = self._task, self._halves
        table: list[dict[tuple[int, int], PlannedStage]] = []
        for p in range(task.num_stages):
            row = {}
            starts = [0] if p == 0 else range(halves + 1)
            for i in starts:
                ends = [halves] if p == task.num_stages - 1 else range(i, halves + 1)
                for j in ends:
                    if j - i <= self._longest:
                        stage = self._fitting(i, j, p, in_flight[p])
                        if stage is not None:
                            row[i, j] = stage
            table.append(row)
        limit = self._chain(table, lambda so_far, stage: max(so_far, stage.work_s))
        if limit is None:
            return None
        most = limit[0] * (1 + 1e-12)
        kept = [{key: s for key, s in row.items() if s.work_s <= most} for row in table]
        best = self._chain(kept, lambda so_far, stage: so_far + stage.work_s**2)
        assert best is not None, "the shortest busiest stage is there"
        return best[1]

    def _chain(self, table, join) -> tuple[float, tuple[PlannedStage, ...]] | None:  # type: ignore[no-untyped-def]
        """The best value over cuts of `join` along the stages, and these."""
        best: dict[int, tuple[float, tuple[PlannedStage, ...]]] = {0: (0.0, ())}
        for row in table:
            new: dict[int, tuple[float, tuple[PlannedStage, ...]]] = {}
            for (i, j), stage in row.items():
                if i in best:
                    value = join(best[i][0], stage)
                    if j not in new or value < new[j][0]:
                        new[j] = (value, (*best[i][1], stage))
            best = new
        return best.get(self._halves)

    def _fitting(self, i: int, j: int, p: int, in_flight: int) -> PlannedStage | None:
        """The fastest way to run halves i to j - 1 as stage p within memory."""
        task, front = self._task, self._front(i, j, p)
        units = _slice(task, i, j, p)
        blocks = sum(unit.is_expert_block for unit in units)
        alone = sum(unit.static_bytes for unit in units)
        shortest = math.inf
        best: tuple[_Point, Variant, float] | None = None
        for variant in task.variants:
            extra = blocks * (variant.input_grad_s + variant.weight_grad_s)
            static = alone + blocks * variant.static_bytes
            free = task.memory_bytes - task.reserved_bytes - static
            if free < 0:
                continue
            for point in front:  # fastest first
                if point.work_s + extra >= shortest * (1 - 1e-12):
                    break  # as fast at best; earlier variants change less
                offloaded = self._offloaded(point, extra, in_flight, free)
                if offloaded is not None:
                    shortest, best = point.work_s + extra, (point, variant, offloaded)
                    break
        if best is None:
            return None
        point, variant, offloaded = best
        return _stage(task, units, point.chosen, variant, in_flight, offloaded)

    def _offloaded(self, point: _Point, extra: float, in_flight: int, free: float) -> float | None:
        """Bytes of a micro-batch that have to go to the host; None if even that does not fit."""
        missing = in_flight * point.held_bytes - free
        if missing <= 0:
            return 0.0
        if not self._task.host_bytes_per_s or in_flight <= 2:
            return None
        needed = missing / (in_flight - 2)
        most = min(point.held_bytes, self._task.host_bytes_per_s * max(0.0, point.work_s + extra))
        return needed if needed <= most else None

    def _front(self, i: int, j: int, p: int) -> list[_Point]:
        """Of stage p with halves i to j - 1, and the embedding or the head if it has them."""
        front, last = self._from(-1 if p == 0 else i, j), self._task.units[-1]
        return self._longer(front, last) if p == self._task.num_stages - 1 else front

    def _from(self, i: int, j: int) -> list[_Point]:
        """Of halves i to j - 1; i = -1: of the embedding and halves 0 to j - 1."""
        if (i, j) not in self._known:
            units = self._task.units
            if j > max(i, 0):
                front = self._longer(self._from(i, j - 1), units[j])  # half j - 1 is unit j
            else:
                front = [_Point(0.0, 0.0, ())]
                front = self._longer(front, units[0]) if i < 0 else front
            self._known[i, j] = front
        return self._known[i, j]

    def _longer(self, front: list[_Point], unit: PlannedUnit) -> list[_Point]:
        points = _pareto(
            _Point(
                point.work_s + choice.work_s,
                point.held_bytes + choice.held_bytes,
                (*point.chosen, choice),
            )
            for point in front
            for choice in unit.choices
        )
        return points[:1] if self._task.memory_bytes == math.inf else points


def _pareto(points: Iterator[_Point]) -> list[_Point]:
    """Fastest first; each holds less than all before it."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.work_s, p.held_bytes)):
        if not front or point.held_bytes < front[-1].held_bytes:
            front.append(point)
    return front


def _nothing_fits(task: Task) -> str:
    least = [min(unit.choices, key=lambda c: c.held_bytes) for unit in task.units]
    static = sum(unit.static_bytes for unit in task.units) / task.num_stages
    held = sum(choice.held_bytes for choice in least) / task.num_stages
    return (
        f"no cut into {task.num_stages} stages fits {task.memory_bytes / 1e9:.4g} GB a rank: on "
        f"average {task.reserved_bytes / 1e9:.3g} GB are reserved, {static / 1e9:.4g} GB lie there "
        f"throughout and {held / 1e9:.3g} GB are kept of each micro-batch in flight; raise "
        "--memory-gb, dp or pp.size, or allow --host-bandwidth"
    )

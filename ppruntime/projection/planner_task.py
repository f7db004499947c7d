"""What a planner is given and what a stage of a plan is. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ppruntime.projection.projector import Origin
from ppruntime.schedules.machine import Interference

_UNDISTURBED = Interference()


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a unit: seconds of a micro-batch, and the bytes that it then keeps."""

    mode: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    held_bytes: float
    first_held_bytes: float | None = None
    """Where the unit begins a stage, so that what it gets lies in a slot; None: as elsewhere."""
    made_bytes: float = 0.0
    """What a backward computes again, or the head's loss allocates."""

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
    boundary_bytes: float = 0.0
    """Of a micro-batch, handed on where a stage ends with this unit."""
    gradient_bytes: float = 0.0
    """Of a micro-batch, coming back there."""
    update_bytes: float = 0.0
    """What reducing the unit's gradients takes beyond what lies there."""
    put_off_bytes: float = 0.0
    """Of a micro-batch between I and W, whatever was kept before; 0: not known."""


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
    update_bytes: float | None = None
    """In place of the unit's own; None: that stands."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What an order has there at once, by stage: micro-batches in flight, and receive buffers for
    activations and for gradients."""

    in_flight: tuple[int, ...]
    forward_slots: tuple[int, ...]
    backward_slots: tuple[int, ...]
    puts_off: bool = False
    """Whether weight gradients wait for a W."""


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
    """Of the cap: what the ledger does not have, as context and the allocator's slack."""
    variants: tuple[Variant, ...] = (Variant("as it is", 0.0),)
    host_bytes_per_s: float = 0.0
    """To the host and back at once; 0: activations are never offloaded."""
    per_step_s: float = 0.0
    interference: Interference = _UNDISTURBED
    """What transfers do to compute; the plans that are found are played with it."""
    orders: tuple[str, ...] = ("1f1b", "1f1b_w", "async_1f1b")
    every_rank_bytes: float = 0.0
    """On every rank throughout, whatever its units."""
    margins: tuple[float, ...] = ()
    """By stage: kept free besides, where sizes of units add up to less than the ledger's peak."""


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
    slot_bytes: float
    """Receive buffers."""
    made_bytes: float
    """The most of its units': one after another computes again."""
    update_bytes: float
    """What reducing gradients takes beyond what lies there; at most, as earlier units' are gone."""
    in_flight: int
    waiting_bytes: float
    """Of the micro-batch whose I is at its last unit: what its other units' put-off weight
    gradients read. 0: none wait."""
    peak_bytes: float
    """With what is reserved."""

    @property
    def work_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


def units_of(task: Task, first: int, last: int, stage: int) -> tuple[PlannedUnit, ...]:
    """Halves first to last - 1, with the embedding on stage 0 and the head on the last one."""
    units = task.units[1 + first : 1 + last]
    if stage == 0:
        units = (task.units[0], *units)
    if stage == task.num_stages - 1:
        units = (*units, task.units[-1])
    return units


def slot_bytes(task: Task, flow: Flow, place: tuple[int, int, int]) -> float:
    """Receive buffers of a stage, `place`: its number, its first half and the one behind its
    last."""
    stage, first, last = place
    total = 0.0
    if stage > 0:
        total += flow.forward_slots[stage] * task.units[first].boundary_bytes
    if stage < task.num_stages - 1:
        total += flow.backward_slots[stage] * task.units[last].gradient_bytes
    return total


def update_bytes(units: Sequence[PlannedUnit], variant: Variant) -> float:
    """The most of the units', each by itself."""
    return max(
        (
            variant.update_bytes
            if unit.is_expert_block and variant.update_bytes is not None
            else unit.update_bytes
            for unit in units
        ),
        default=0.0,
    )


def waiting_bytes(units: Sequence[PlannedUnit], flow: Flow) -> float:
    """Of a stage's units, see `PlannedStage`."""
    if not flow.puts_off:
        return 0.0
    first = next((k for k, unit in enumerate(units) if unit.is_half), 0)
    return sum(unit.put_off_bytes for unit in units[first + 1 :])


def most_held(in_flight: int, held: float, waiting: float) -> float:
    """Of all micro-batches of a stage in flight, one of which may be between I and W."""
    return (in_flight - 1) * held + max(held, waiting)


def held_by(choice: Choice, *, is_first: bool) -> float:
    """Of one micro-batch, by a unit that begins a stage or stands in one."""
    if is_first and choice.first_held_bytes is not None:
        return choice.first_held_bytes
    return choice.held_bytes


def stage_of(
    task: Task,
    place: tuple[int, int, int],
    chosen: Sequence[Choice],
    variant: Variant,
    flow: Flow,
    offloaded: float,
) -> PlannedStage:
    """The stage at `place` (as in `slot_bytes`) with its units in these modes. `offloaded` bytes of
    what a micro-batch keeps go to the host."""
    index, first, last = place
    units = units_of(task, first, last, index)
    blocks = sum(unit.is_expert_block for unit in units)
    held = sum(held_by(choice, is_first=k == 0) for k, choice in enumerate(chosen))
    stage = PlannedStage(
        layers=sum(unit.is_half for unit in units) / 2,
        units=tuple(unit.name for unit in units),
        modes=tuple(choice.mode for choice in chosen),
        variant=variant.name,
        experts=variant.use,
        forward_s=sum(c.forward_s for c in chosen),
        input_grad_s=sum(c.input_grad_s for c in chosen) + blocks * variant.input_grad_s,
        weight_grad_s=sum(c.weight_grad_s for c in chosen) + blocks * variant.weight_grad_s,
        held_bytes=held - offloaded,
        offloaded_bytes=offloaded,
        static_bytes=sum(u.static_bytes for u in units) + blocks * variant.static_bytes,
        slot_bytes=task.every_rank_bytes + slot_bytes(task, flow, place),
        made_bytes=max((choice.made_bytes for choice in chosen), default=0.0),
        update_bytes=update_bytes(units, variant),
        in_flight=flow.in_flight[index],
        waiting_bytes=waiting_bytes(units, flow),
        peak_bytes=0.0,
    )
    return with_peak(task, index, stage)


def with_peak(task: Task, index: int, stage: PlannedStage) -> PlannedStage:
    """The stage with the most that its rank holds: in an op, or while gradients are reduced."""
    moving = min(stage.in_flight, 2)  # one on its way out, one on its way back
    held = most_held(stage.in_flight, stage.held_bytes, stage.waiting_bytes)
    in_ops = held + moving * stage.offloaded_bytes + stage.made_bytes
    lasting = reserved_bytes(task, index) + stage.static_bytes + stage.slot_bytes
    return replace(stage, peak_bytes=lasting + max(in_ops, stage.update_bytes))


def reserved_bytes(task: Task, index: int) -> float:
    """Of the cap, what no size of units says."""
    return task.reserved_bytes + (task.margins[index] if task.margins else 0.0)

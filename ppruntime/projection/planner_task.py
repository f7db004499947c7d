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
    interference: Interference = _UNDISTURBED
    """What transfers do to compute; the plans that are found are played with it."""
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


def units_of(task: Task, first: int, last: int, stage: int) -> tuple[PlannedUnit, ...]:
    """Halves first to last - 1, with the embedding on stage 0 and the head on the last one."""
    units = task.units[1 + first : 1 + last]
    if stage == 0:
        units = (task.units[0], *units)
    if stage == task.num_stages - 1:
        units = (*units, task.units[-1])
    return units


def stage_of(
    task: Task,
    units: Sequence[PlannedUnit],
    chosen: Sequence[Choice],
    variant: Variant,
    in_flight: int,
    offloaded: float,
) -> PlannedStage:
    """A stage of these units in these modes. `offloaded` bytes of what a micro-batch keeps go to
    the host."""
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
    return replace(stage, peak_bytes=peak_bytes(task, stage, in_flight))


def peak_bytes(task: Task, stage: PlannedStage, in_flight: int) -> float:
    """The most that a rank holds with so many micro-batches in flight."""
    moving = min(in_flight, 2)  # one on its way out, one on its way back
    return (
        task.reserved_bytes
        + stage.static_bytes
        + in_flight * stage.held_bytes
        + moving * stage.offloaded_bytes
    )

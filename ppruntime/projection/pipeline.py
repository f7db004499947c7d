"""A pipeline's step from the times of its parts: simulated, taken apart by cause. No torch.

`stage_costs` and `hop_costs` say what the parts take, from a calibration or from an assumption;
`project` plays the order in `schedules.timeline`, adds what comes once a step and gives the pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from ppruntime.config.keys import Config
from ppruntime.memory import compute_dtype_name, gradient_bytes
from ppruntime.models.dims import UnitSpec, boundary_bytes
from ppruntime.plan import StagePlan
from ppruntime.plan_report import flop_costs
from ppruntime.projection.calibration import (
    Calibration,
    PerStep,
    TransferTimes,
    changed_sizes,
    of_other_sizes,
    transfer_seconds,
    unit_type,
)
from ppruntime.projection.projector import Job, Origin, Pace, ProjectionError, weakest
from ppruntime.recompute import mode_name
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Schedule
from ppruntime.schedules.timeline import Timeline, simulate

SPREAD: Mapping[Origin, float] = MappingProxyType(
    {Origin.MEASURED: 0.02, Origin.MODELLED: 0.15, Origin.ASSUMED: 0.40}
)
"""By how much a time may be off, as a share of it, by where it comes from. Assumed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stage: seconds of one micro-batch on one GPU."""

    name: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    origin: Origin
    source: str

    def seconds(self, kind: Kind) -> float:
        """Of an op; B is I and W."""
        times = {Kind.F: self.forward_s, Kind.I: self.input_grad_s, Kind.W: self.weight_grad_s}
        return self.input_grad_s + self.weight_grad_s if kind is Kind.B else times[kind]


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage takes: the sum of its pieces."""

    pieces: tuple[Piece, ...]

    def seconds(self, kind: Kind) -> float:
        return sum(piece.seconds(kind) for piece in self.pieces)

    @property
    def origin(self) -> Origin:
        """A sum of several pieces is a model, whatever they are."""
        origins = [piece.origin for piece in self.pieces]
        return weakest(*origins) if len(origins) == 1 else weakest(Origin.MODELLED, *origins)


@dataclass(frozen=True, slots=True)
class HopCost:
    """Seconds from one stage to the next (`forward_s`) and of the gradient coming back."""

    forward_s: float
    backward_s: float
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that a step is made of. One stage cost per stage, one hop per pair of neighbours."""

    schedule: Schedule
    stages: tuple[StageCost, ...]
    hops: tuple[HopCost, ...]
    per_step: tuple[PerStep, ...]
    jitter: float = 0.0
    """Relative standard deviation of op times, one draw."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where a step's seconds go, seen from the busiest rank; they add up to the step."""

    even_work_s: float
    """What every rank would compute if the work were spread evenly."""
    imbalance_s: float
    """What the busiest rank computes beyond that."""
    fill_s: float
    drain_s: float
    dependency_s: float
    """Between its ops: the input was not made yet."""
    transfer_s: float
    """Between its ops: the input was on its way."""
    per_step_s: float
    """Beside the pipeline."""


@dataclass(frozen=True, slots=True)
class Projection:
    """What `project` gives."""

    pace: Pace
    timeline: Timeline
    step: StepParts
    shares: dict[Origin, float]
    """Of the step's critical path: by origin of the times that it is made of; they add up to 1."""


def shifted(parts: Parts, shift: float, spread: Mapping[Origin, float] = SPREAD) -> Parts:
    """`parts` with every time longer by `shift` times the spread of its origin: an interval's ends
    are at -1 and 1, where all of them are off the same way."""

    def factor(origin: Origin | str) -> float:
        return max(0.0, 1 + shift * spread[Origin(origin)])

    def piece(p: Piece) -> Piece:
        f = factor(p.origin)
        return replace(
            p,
            forward_s=f * p.forward_s,
            input_grad_s=f * p.input_grad_s,
            weight_grad_s=f * p.weight_grad_s,
        )

    def hop(h: HopCost) -> HopCost:
        f = factor(h.origin)
        return replace(h, forward_s=f * h.forward_s, backward_s=f * h.backward_s)

    return replace(
        parts,
        stages=tuple(StageCost(tuple(map(piece, stage.pieces))) for stage in parts.stages),
        hops=tuple(map(hop, parts.hops)),
        per_step=tuple(
            msgspec.structs.replace(row, seconds=factor(row.origin) * row.seconds)
            for row in parts.per_step
        ),
    )


def project(job: Job, parts: Parts) -> Projection:
    """The step in virtual time, per-step pieces after it one by one."""
    costs = Costs(
        *(tuple(stage.seconds(kind) for stage in parts.stages) for kind in (Kind.F, Kind.I, Kind.W))
    )
    hops = Hops(
        tuple(hop.forward_s for hop in parts.hops), tuple(hop.backward_s for hop in parts.hops)
    )
    timeline = simulate(
        parts.schedule,
        costs,
        hops,
        jitter=parts.jitter,
        seed=parts.seed,
    )
    per_step = sum(piece.seconds for piece in parts.per_step)
    step_s = timeline.makespan + per_step
    busiest = timeline.busy.index(max(timeline.busy))
    idle, even = timeline.idle[busiest], sum(timeline.busy) / len(timeline.busy)
    return Projection(
        pace=job.at_step_s(step_s),
        timeline=timeline,
        step=StepParts(
            even_work_s=even,
            imbalance_s=timeline.busy[busiest] - even,
            fill_s=idle.fill,
            drain_s=idle.drain,
            dependency_s=idle.dependency,
            transfer_s=idle.transfer,
            per_step_s=per_step,
        ),
        shares=_shares(parts, timeline, step_s),
    )


def stage_costs(
    config: Config,
    plan: Sequence[StagePlan],
    *,
    calibration: Calibration | None,
    efficiency: float | None,
    gpu_flops: float,
    parts_backwards: bool = False,
) -> tuple[StageCost, ...]:
    """Each stage from the calibration's row for it, else from rows for the types of its units, else
    from FLOPs at `efficiency`, a share of `gpu_flops`.

    These FLOPs are the executed ones: attention and recomputation count. `parts_backwards`: the
    order has I and W apart, which of a stage whose backwards were timed whole is a model. Raises
    ProjectionError where a unit has no row and no efficiency is assumed.
    """
    whole = {row.stage: row for row in calibration.stages} if calibration else {}
    if calibration:
        check_fits(config, plan, calibration)
    costs = []
    used_efficiency = False
    for stage in plan:
        if stage.index in whole:
            row = whole[stage.index]
            if row.ac_modes not in (None, modes := modes_of(config, stage)):
                raise ProjectionError(
                    f"the calibration timed stage {stage.index} with ac modes "
                    f"{_listed(row.ac_modes or ())} of its half-layers, the run has "
                    f"{_listed(modes)}; set ac.mode and ac.layer_modes alike or calibrate the run"
                )
            times = (row.forward_s, row.input_grad_s, row.weight_grad_s)
            origin = Origin(row.origin)
            if row.whole_backwards and parts_backwards:
                origin = weakest(origin, Origin.MODELLED)
            piece = Piece(f"stage {stage.index}", *times, origin, row.source)
            costs.append(StageCost((piece,)))
            continue
        pieces = []
        for spec in stage.units:
            known = _known(config, spec, calibration)
            used_efficiency |= known is None
            pieces.append(known or _from_flops(config, spec, efficiency, gpu_flops))
        costs.append(StageCost(tuple(pieces)))
    if calibration and efficiency is not None and not used_efficiency:
        raise ProjectionError(
            "--efficiency has no effect: the calibration has the time of every stage; leave it out"
        )
    return tuple(costs)


def hop_costs(
    config: Config, plan: Sequence[StagePlan], calibration: Calibration, link: str | None
) -> tuple[HopCost, ...]:
    """Each hop's times by the bytes that cross there, from the calibration's rows of its link:
    `link` names one for all hops, or one per hop, separated by commas."""
    rows_of: dict[str, list[TransferTimes]] = {}
    for row in calibration.transfers:
        rows_of.setdefault(row.link, []).append(row)
    links = ", ".join(sorted(rows_of))
    if link is None and len(rows_of) > 1:
        raise ProjectionError(
            f"the calibration has links {links}; choose with --link, one for all hops or one per "
            "hop, separated by ','"
        )
    named = list(rows_of) if link is None else [part.strip() for part in link.split(",")]
    if len(named) not in (1, len(plan) - 1):
        raise ProjectionError(
            f"--link names {len(named)} links, the pipeline has {len(plan) - 1} hops; give one for "
            "all or one per hop"
        )
    hops = []
    for index, stage in enumerate(plan[:-1]):
        chosen = named[0] if len(named) == 1 else named[index]
        rows = rows_of.get(chosen)
        if rows is None:
            raise ProjectionError(f"the calibration has no link {chosen}; it has {links}")
        forward = boundary_bytes(
            config.model.dims,
            stage.after,
            config.train.micro_batch_size,
            config.train.seq_len,
            dtype=compute_dtype_name(config),
        )
        there = transfer_seconds(rows, forward)
        back = transfer_seconds(rows, gradient_bytes(config, stage.after))
        least = Origin.MEASURED if there.is_exact and back.is_exact else Origin.MODELLED
        used = (*there.rows, *back.rows)
        sources = "; ".join(dict.fromkeys(row.source for row in used))
        hops.append(
            HopCost(
                there.seconds,
                back.seconds,
                weakest(least, *(Origin(row.origin) for row in used)),
                f"{chosen}: {sources}",
            )
        )
    return tuple(hops)


def check_fits(config: Config, plan: Sequence[StagePlan] | None, calibration: Calibration) -> None:
    """Raises ProjectionError for times of another model, batch or cut, which are not this run's;
    `plan` is its cut, None where the cut is still to be found."""
    here = (
        ("model", config.model.name, calibration.model, "model.name"),
        ("seq_len", config.train.seq_len, calibration.seq_len, "train.seq_len"),
        (
            "micro_batch_size",
            config.train.micro_batch_size,
            calibration.micro_batch_size,
            "train.micro_batch_size",
        ),
        ("ep", config.parallel.ep, calibration.ep, "parallel.ep"),
    )
    for name, run, timed, key in here:
        if run != timed:
            raise ProjectionError(
                f"the calibration is for {name} {timed}, the run has {run}; set {key}={timed} or "
                "calibrate the run"
            )
    complaint = of_other_sizes(calibration, changed_sizes(config))
    if complaint is not None:
        raise ProjectionError(f"the calibration is {complaint}; use its sizes or calibrate the run")
    if calibration.precision not in (None, config.train.precision):
        raise ProjectionError(
            f"the calibration is for precision {calibration.precision}, the run has "
            f"{config.train.precision}; set train.precision={calibration.precision} or calibrate "
            "the run"
        )
    if plan is None or not calibration.stages:
        return
    if calibration.layers_per_stage != tuple(s.num_layers for s in plan):
        cut = ", ".join(f"{layers:g}" for layers in calibration.layers_per_stage or ())
        raise ProjectionError(
            f"the calibration timed stages of {cut} layers; set pp.layers_per_stage=[{cut}] or "
            "calibrate the run's cut"
        )


def _known(config: Config, spec: UnitSpec, calibration: Calibration | None) -> Piece | None:
    if calibration is None:
        return None
    kind = unit_type(config.model.dims, spec)
    for row in calibration.units:
        if row.unit == kind and row.ac_mode == _mode(config, spec):
            times = (row.forward_s, row.input_grad_s, row.weight_grad_s)
            return Piece(spec.name, *times, Origin(row.origin), row.source)
    return None


def modes_of(config: Config, stage: StagePlan) -> tuple[str, ...]:
    """Of the stage's half-layers, as rows of units have them."""
    return tuple(mode_name(config, spec) for spec in stage.units if spec.layer is not None)


def _listed(modes: Sequence[str]) -> str:
    """One name where all are alike."""
    return ", ".join(modes if len(set(modes)) > 1 else modes[:1]) or "none, as it has no half-layer"


def _mode(config: Config, spec: UnitSpec) -> str:
    """The mode of a half-layer's row; embedding and head have the run's."""
    return mode_name(config, None if spec.layer is None else spec)


def _from_flops(config: Config, spec: UnitSpec, efficiency: float | None, peak: float) -> Piece:
    if efficiency is None:
        raise ProjectionError(
            f"the calibration has no unit {unit_type(config.model.dims, spec)} with ac_mode "
            f"{_mode(config, spec)}, which {spec.name} needs; add it or assume an --efficiency"
        )
    alone = StagePlan(index=0, rank=0, units=(spec,), before=None, after=spec)
    flops = flop_costs(config, (alone,))
    tokens = config.train.micro_batch_size * config.train.seq_len
    scale = tokens / (efficiency * peak)
    times = (flops.forward[0] * scale, flops.input_grad[0] * scale, flops.weight_grad[0] * scale)
    source = f"executed FLOPs at {100 * efficiency:.4g} % of the peak, --efficiency"
    return Piece(spec.name, *times, Origin.ASSUMED, source)


def _shares(parts: Parts, timeline: Timeline, step_s: float) -> dict[Origin, float]:
    """Walks the critical path, which has no gap: every second of the step has an origin."""
    seconds = dict.fromkeys(Origin, 0.0)
    for leg in timeline.critical_path:
        for origin, part in _origins(parts, leg.op):
            seconds[origin] += part * (leg.finish - leg.start)
    for piece in parts.per_step:
        seconds[Origin(piece.origin)] += piece.seconds
    return {origin: time / step_s for origin, time in seconds.items()}


def _origins(parts: Parts, op: Op) -> list[tuple[Origin, float]]:
    """What an op's time is made of, as shares of it."""
    if op.kind not in COMPUTE:
        hop = parts.hops[op.stage if op.kind is Kind.SEND_F else op.stage - 1]
        return [(hop.origin, 1.0)]
    stage = parts.stages[op.stage]
    total = stage.seconds(op.kind)
    if not total:
        return []
    return [(piece.origin, piece.seconds(op.kind) / total) for piece in stage.pieces]

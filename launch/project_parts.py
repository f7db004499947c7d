"""The command line's words for a pipeline -> its parts. What `project` and `simulate` share. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppruntime.config import Config
from ppruntime.order import make_order
from ppruntime.plan import StagePlan, cut
from ppruntime.projection.calibration import Calibration, PerStep, read_calibration
from ppruntime.projection.pipeline import (
    HopCost,
    Parts,
    Piece,
    StageCost,
    hop_costs,
    stage_costs,
)
from ppruntime.projection.projector import MOST_OF_PEAK, Origin, ProjectionError, positive
from ppruntime.projection.step_pieces import on_run
from ppruntime.schedules.costs import parse_costs
from ppruntime.schedules.ops import Kind, Schedule


@dataclass(frozen=True, slots=True)
class FoundParts:
    """A pipeline's parts, the cut they are of, and the calibration they come from."""

    parts: Parts
    plan: tuple[StagePlan, ...]
    calibration: Calibration | None


def pipeline_parts(
    config: Config,
    *,
    gpu_flops: float,
    calibration: Path | None,
    costs: str | None,
    efficiency: float | None,
    transfer_s: str | None,
    link: str | None,
    per_step_s: str | None,
    jitter: float = 0.0,
    seed: int = 0,
) -> FoundParts:
    """What the options say, `efficiency` in percent. Raises ProjectionError for what is missing,
    doubled or out of range."""
    if efficiency is not None:
        positive("--efficiency", efficiency)
        if efficiency < 1:
            raise ProjectionError(
                f"--efficiency {efficiency:g} is under 1 %; it is in percent, so write "
                f"{100 * efficiency:g} if that was meant"
            )
        if efficiency > 100 * MOST_OF_PEAK:
            raise ProjectionError(
                f"--efficiency {efficiency:g} is over {100 * MOST_OF_PEAK:g} % of the peak, which "
                "no GPU does; give a percentage of --peak-flops"
            )
    known = read_calibration(calibration) if calibration else None
    schedule = make_order(config).computations
    plan = cut(
        config.model.dims,
        schedule.stage_to_rank,
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )
    parts = Parts(
        schedule=schedule,
        stages=_given_costs(costs, schedule)
        if costs is not None
        else stage_costs(
            config,
            plan,
            calibration=known,
            efficiency=None if efficiency is None else efficiency / 100,
            gpu_flops=gpu_flops,
            parts_backwards=Kind.I in schedule.kinds(),
        ),
        hops=tuple(
            HopCost(0.0, 0.0, Origin.MODELLED, "both stages are on one rank")
            if plan[index].rank == plan[index + 1].rank
            else hop
            for index, hop in enumerate(_hops(config, plan, known, transfer_s, link))
        ),
        per_step=_per_step(config, plan, known, per_step_s),
        jitter=jitter,
        seed=seed,
    )
    return FoundParts(parts, plan, known)


def _given_costs(text: str, schedule: Schedule) -> tuple[StageCost, ...]:
    costs = parse_costs(text, schedule.stage_to_rank)
    times = zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)
    return tuple(
        StageCost((Piece(f"stage {stage}", f, i, w, Origin.ASSUMED, "--costs"),))
        for stage, (f, i, w) in enumerate(times)
    )


def _hops(
    config: Config,
    plan: Sequence[StagePlan],
    calibration: Calibration | None,
    transfer_s: str | None,
    link: str | None,
) -> tuple[HopCost, ...]:
    num_hops = len(plan) - 1
    if num_hops == 0:
        for option, value in (("--transfer-s", transfer_s), ("--link", link)):
            if value is not None:
                raise ProjectionError(f"{option} has no effect on one stage; leave it out")
        return ()
    if transfer_s is not None:
        if link is not None:
            raise ProjectionError("--link has no effect beside --transfer-s; leave one of them out")
        seconds = seconds_of("--transfer-s", transfer_s)
        if len(seconds) not in (1, num_hops):
            raise ProjectionError(
                f"--transfer-s has {len(seconds)} numbers, the pipeline {num_hops} hops; give one "
                "for all or one per hop"
            )
        per_hop = seconds * num_hops if len(seconds) == 1 else seconds
        return tuple(HopCost(s, s, Origin.ASSUMED, "--transfer-s") for s in per_hop)
    if calibration is not None and calibration.transfers:
        return hop_costs(config, plan, calibration, link)
    if link is not None:
        raise ProjectionError(
            "--link has no effect: no calibration has transfers; leave it out or add them"
        )
    raise ProjectionError(
        "nothing says how long a transfer takes; give --transfer-s, or a calibration with transfers"
    )


def _per_step(
    config: Config, plan: Sequence[StagePlan], calibration: Calibration | None, text: str | None
) -> tuple[PerStep, ...]:
    """The calibration's pieces, on the run's ranks and cut; a piece of the same name on the command
    line replaces it."""
    pieces = {piece.name: piece for piece in (calibration.per_step if calibration else ())}
    if text is None and not pieces:
        raise ProjectionError(
            "nothing says what a step takes beside its pipeline (optimizer, gradient reduction); "
            "give --per-step-s, or a calibration with per_step"
        )
    said: set[str] = set()
    for part in text.split(",") if text is not None else ():
        name, equals, seconds = part.rpartition("=")
        value = seconds_of("--per-step-s", seconds)[0]
        key = name.strip() if equals else "rest"
        if not key:
            raise ProjectionError(
                f"--per-step-s {part.strip()!r} has no name before '='; write such as "
                "optimizer=0.15"
            )
        if key in said:
            raise ProjectionError(f"--per-step-s names {key} twice; say it once")
        said.add(key)
        pieces[key] = PerStep(name=key, seconds=value, origin="assumed", source="--per-step-s")
    return tuple(on_run(row, config, plan) for row in pieces.values())


def seconds_of(option: str, text: str) -> tuple[float, ...]:
    """Seconds, separated by commas."""
    return numbers_of(option, text, "seconds, 0 or more", "0.0073")


def numbers_of(
    option: str, text: str, what: str = "numbers of 0 or more", example: str = "3,12"
) -> tuple[float, ...]:
    """Numbers of 0 or more, separated by commas. Raises ProjectionError with the option."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number < float("inf") for number in numbers):
        raise ProjectionError(f"{option} {text!r} is not {what}; write such as {example}")
    return numbers

"""`ppruntime project`: from an MFU, a step time or the parts of a pipeline to days.

No torch, no GPU. Mistakes of the user are ProjectionErrors, ConfigErrors and ScheduleErrors,
which the caller prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ppruntime.launch.intervals import spread_of, spread_words
from ppruntime.launch.percent import MaybePercent
from ppruntime.launch.project_numbers import (
    calibration_words,
    collective_words,
    cost_numbers,
    flag,
    goodput_numbers,
    memory_numbers,
    offload_words,
    pace_numbers,
    pipeline_numbers,
)
from ppruntime.launch.projected_job import Projected, asked_job
from ppruntime.launch.whole_numbers import MaybeWhole
from ppruntime.projection.projector import (
    MOST_OF_PEAK,
    Job,
    Number,
    Origin,
    Pace,
    ProjectionError,
    positive,
    with_interval,
)

if TYPE_CHECKING:
    from ppruntime.config import Config
    from ppruntime.launch.project_parts import FoundParts

_SHORT = Parameter(show_default=lambda value: f"{value:g}")


def project(
    *arguments: Projected,
    mfu: float | None = None,
    step_s: float | None = None,
    tokens_per_s: float | None = None,
    days: float | None = None,
    calibration: Path | None = None,
    costs: str | None = None,
    efficiency: float | None = None,
    gpus: MaybeWhole = None,
    tokens: Annotated[float, _SHORT] = 20e12,
    peak_flops: Annotated[float, _SHORT] = 989e12,
    global_batch_tokens: float | None = None,
    active_parameters: float | None = None,
    frozen_parameters: Annotated[float, _SHORT] = 0.0,
    adapter_parameters: Annotated[float, _SHORT] = 0.0,
    transfer_s: str | None = None,
    link: str | None = None,
    per_step_s: str | None = None,
    jitter: MaybePercent = None,
    seed: MaybeWhole = None,
    spread: str | None = None,
    failures_per_gpu_hour: float | None = None,
    checkpoint_s: float | None = None,
    restart_s: float | None = None,
    checkpoint_interval_s: float | None = None,
    price_per_gpu_hour: float | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Says how long a training takes and what that rests on.

    It starts from one of --mfu, --step-s, --tokens-per-s, --days; or from the parts of a pipeline:
    --calibration, --costs or --efficiency (which also fills in what a calibration lacks).

    Parameters
    ----------
    mfu
        Model FLOPs utilisation in percent, by the 6ND rule.
    step_s
        Seconds per optimizer step.
    tokens_per_s
        Over all GPUs.
    days
        For all tokens.
    calibration
        JSON file with times of stages or units, transfers and per-step pieces.
    costs
        F,I,W: seconds of forward, input and weight gradient per rank and micro-batch; or one
        triple per stage, separated by ';'.
    efficiency
        Percent of the peak at which the executed FLOPs run, attention and recomputation included.
    gpus
        GPUs in all; by default what the run has.
    tokens
        Tokens to train on.
    peak_flops
        FLOP/s of one GPU that MFU is a share of; 989e12 is an H200's in dense bf16.
    global_batch_tokens
        Tokens per optimizer step, instead of the run's.
    active_parameters
        Matmul parameters that a token meets, instead of the model's.
    frozen_parameters
        How many of these get no gradient: 4 FLOPs a token instead of 6.
    adapter_parameters
        Trained ones on top (LoRA): 6 FLOPs a token.
    transfer_s
        Seconds of one hop between ranks, one way; or one number per stage hop, separated by ','.
    link
        Link of the calibration that the hops go over, or one per hop, separated by ','.
    per_step_s
        Seconds per step beside the pipeline, or NAME=SECONDS separated by ','.
    jitter
        Relative standard deviation of op times, in percent; under 1 write such as 0.5%.
    seed
        Of the jitter.
    spread
        MEASURED,MODELLED,ASSUMED in percent: by how much times may be off, for intervals; 2,15,40
        by default.
    failures_per_gpu_hour
        With --checkpoint-s and --restart-s: days with failures as well.
    checkpoint_s
        For so long training stands still at a save.
    restart_s
        From a failure until training goes on.
    checkpoint_interval_s
        Training between saves; by default the best there is.
    price_per_gpu_hour
        In any currency: gives the cost.
    json
        Print one JSON object.
    """
    from ppruntime.launch.project_report import json_text, text

    starts = {
        "mfu": mfu,
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "days": days,
        "calibration": calibration,
        "costs": costs,
        "efficiency": efficiency,
    }
    start = _the_start(starts)
    is_pipeline = start in ("calibration", "costs", "efficiency")
    asked = asked_job(
        arguments,
        gpus=gpus,
        tokens=tokens,
        peak_flops=peak_flops,
        is_pipeline=is_pipeline,
        global_batch_tokens=global_batch_tokens,
        active_parameters=active_parameters,
        frozen_parameters=frozen_parameters,
        adapter_parameters=adapter_parameters,
    )
    config, job = asked.config, asked.job

    def all_numbers(pace: Pace, parts: Mapping[str, Number]) -> dict[str, Number]:
        numbers = {
            **pace_numbers(pace, start, starts[start]),
            **asked.inputs,
            **parts,
            **goodput_numbers(
                pace, failures_per_gpu_hour, checkpoint_s, restart_s, checkpoint_interval_s
            ),
        }
        return numbers | cost_numbers(numbers, price_per_gpu_hour)

    facts: list[str] = []
    if is_pipeline:
        shares = spread_of(spread)
        found, paces = _pipeline(
            config,
            job,
            shares,
            calibration=calibration,
            costs=costs,
            efficiency=efficiency,
            transfer_s=transfer_s,
            link=link,
            per_step_s=per_step_s,
            jitter=jitter,
            seed=seed,
        )
        middle, *ends = (all_numbers(pace, parts) for pace, parts in paces)
        numbers = {
            name: with_interval(number, *(end[name] for end in ends))
            for name, number in middle.items()
        }
        facts = [
            *calibration_words(found.calibration),
            *collective_words(config, found.parts),
            *offload_words(config),
            spread_words(shares),
        ]
    else:
        _no_effect(
            start,
            transfer_s=transfer_s,
            link=link,
            per_step_s=per_step_s,
            jitter=jitter,
            seed=seed,
            spread=spread,
        )
        numbers = all_numbers(_from_number(job, start, starts[start]), {})
    print(json_text(numbers, facts) if json else text(numbers, facts))
    return 0


def _the_start(starts: Mapping[str, object]) -> str:
    """The one starting point; --efficiency beside --calibration fills in and is none."""
    given = [name for name, value in starts.items() if value is not None]
    if given == ["calibration", "efficiency"]:
        return "calibration"
    if len(given) != 1:
        what = ", ".join(map(flag, given)) or "none"
        raise ProjectionError(
            f"a projection starts from one number, and {what} was given; give one of "
            f"{', '.join(map(flag, starts))}"
        )
    return given[0]


def _no_effect(start: str, **pipeline_flags: object) -> None:
    """Refuses what only a pipeline's parts have a use for."""
    for name, value in pipeline_flags.items():
        if value is not None:
            raise ProjectionError(
                f"{flag(name)} has no effect with {flag(start)}; leave it out, or start from "
                "--calibration, --costs or --efficiency"
            )


def _from_number(job: Job, start: str, value: object) -> Pace:
    assert isinstance(value, float), f"{start} starts no arithmetic"
    positive(flag(start), value)
    given = value
    if start == "mfu":
        if value < 1:
            raise ProjectionError(
                f"--mfu {value:g} is under 1 %; it is in percent, so write {100 * value:g} if "
                "that was meant"
            )
        value /= 100
    found = {
        "mfu": job.at_mfu,
        "step_s": job.at_step_s,
        "tokens_per_s": job.at_tokens_per_s,
        "days": job.at_days,
    }[start](value)
    if found.mfu > MOST_OF_PEAK:
        raise ProjectionError(
            f"{flag(start)} {given:g} is {100 * found.mfu:.4g} % MFU on {job.num_gpus:,} GPUs at "
            f"{job.global_batch_tokens:,.0f} tokens a step, over {100 * MOST_OF_PEAK:g} % of a "
            f"peak of {job.gpu_flops:g} FLOP/s, which no GPU does; correct one of them"
        )
    return found


def _pipeline(
    config: Config,
    job: Job,
    spread: Mapping[Origin, float],
    *,
    jitter: float | None,
    seed: int | None,
    **options: Any,  # of `pipeline_parts`, as they are
) -> tuple[FoundParts, list[tuple[Pace, dict[str, Number]]]]:
    """The parts; and pace and numbers from them, from shorter ones and from longer ones."""
    from ppruntime.launch.project_parts import pipeline_parts
    from ppruntime.projection.pipeline import project as play
    from ppruntime.projection.pipeline import shifted
    from ppruntime.projection.step_memory import ledgers_of

    if seed is not None and not jitter:
        raise ProjectionError("--seed has an effect with --jitter only; add it or leave --seed out")
    found = pipeline_parts(
        config, gpu_flops=job.gpu_flops, jitter=jitter or 0.0, seed=seed or 0, **options
    )
    memory = memory_numbers(
        ledgers_of(config), found.calibration.peaks if found.calibration else ()
    )
    paces = []
    for shift in (0.0, -1.0, 1.0):
        parts = shifted(found.parts, shift, spread)
        projection = play(job, parts)
        paces.append((projection.pace, pipeline_numbers(parts, projection) | memory))
    return found, paces

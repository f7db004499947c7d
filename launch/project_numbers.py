"""The numbers of a projection, each with unit, origin and source. Pure.

Names are the keys of the JSON. Modelled numbers name in their source the numbers they follow from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ppruntime.projection.projector import (
    Interruptions,
    Job,
    Number,
    Origin,
    Pace,
    ProjectionError,
    mtbf_s,
    positive,
    training_flops_per_token,
)

if TYPE_CHECKING:
    from ppruntime.config import Config
    from ppruntime.ledger import RankLedger
    from ppruntime.projection.calibration import Calibration, StagePeak
    from ppruntime.projection.pipeline import Parts, Projection


def flag(name: str) -> str:
    """The option that a name on the command line is: --step-s."""
    return "--" + name.replace("_", "-")


def job_numbers(
    config: Config,
    *,
    run: str,
    gpus: int | None,
    tokens: float,
    peak_flops: float,
    global_batch_tokens: float | None,
    active_parameters: float | None,
    frozen_parameters: float,
    adapter_parameters: float,
) -> dict[str, Number]:
    """The job's numbers, each with its source."""
    from ppruntime.models.dims import counts

    if active_parameters is None:
        exact = counts(config.model.dims).active_matmul_parameters
        active = Number(
            exact, "parameters", Origin.MODELLED, f"the matmul sizes of {config.model.name}"
        )
    else:
        active = Number(active_parameters, "parameters", Origin.ASSUMED, "--active-parameters")
    assert isinstance(active.value, int | float), "a count is one number"
    flops = training_flops_per_token(
        active.value, frozen=frozen_parameters, adapters=adapter_parameters
    )
    rule = "6 x active_parameters"
    if frozen_parameters:
        rule += f" - 2 x {frozen_parameters:g} frozen"
    if adapter_parameters:
        rule += f" + 6 x {adapter_parameters:g} in adapters"
    train, pp, parallel = config.train, config.pp, config.parallel
    if global_batch_tokens is None:
        batch = Number(
            config.global_batch_size * train.seq_len,
            "tokens",
            Origin.MODELLED,
            f"{train.num_micro_batches} micro-batches x {train.micro_batch_size} x "
            f"{train.seq_len:,} tokens x dp {parallel.dp} x ep {parallel.ep}, pp {pp.size}; {run}",
        )
    else:
        batch = Number(global_batch_tokens, "tokens", Origin.ASSUMED, "--global-batch-tokens")
    return {
        "gpus": Number(config.world_size, "GPUs", Origin.ASSUMED, run)
        if gpus is None
        else Number(gpus, "GPUs", Origin.ASSUMED, "--gpus"),
        "global_batch_tokens": batch,
        "total_tokens": Number(tokens, "tokens", Origin.ASSUMED, "--tokens"),
        "active_parameters": active,
        "flops_per_token": Number(flops, "FLOP", Origin.MODELLED, rule),
        "peak_flops": Number(peak_flops, "FLOP/s", Origin.ASSUMED, "--peak-flops, of one GPU"),
    }


def job_of(inputs: Mapping[str, Number]) -> Job:
    def one(name: str) -> float:
        value = inputs[name].value
        assert isinstance(value, int | float), f"{name} is one number"
        return value

    return Job(
        flops_per_token=one("flops_per_token"),
        total_tokens=one("total_tokens"),
        num_gpus=int(one("gpus")),
        gpu_flops=one("peak_flops"),
        global_batch_tokens=one("global_batch_tokens"),
    )


def pace_numbers(pace: Pace, start: str, given: object) -> dict[str, Number]:
    """Days first: what is asked. `start` is the option that all began with, `given` its value,
    which is shown as it was given."""
    job = pace.job
    per_second = {
        "mfu": "mfu x gpus x peak_flops / flops_per_token",
        "days": "total_tokens / days",
    }
    in_virtual_time = "the pipeline in virtual time + per_step_s"
    is_arithmetic = start in ("mfu", "step_s", "tokens_per_s", "days")
    step = "global_batch_tokens / tokens_per_s" if is_arithmetic else in_virtual_time
    rows = (
        ("days", pace.days, "days", "total_tokens / tokens_per_s"),
        ("step_s", pace.step_s, "s", step),
        ("mfu", 100 * pace.mfu, "%", "tokens_per_s x flops_per_token / (gpus x peak_flops)"),
        (
            "tokens_per_s",
            pace.tokens_per_s,
            "tokens/s",
            per_second.get(start, "global_batch_tokens / step_s"),
        ),
        (
            "tokens_per_s_per_gpu",
            pace.tokens_per_s / job.num_gpus,
            "tokens/s",
            "tokens_per_s / gpus",
        ),
        (
            "steps",
            job.total_tokens / job.global_batch_tokens,
            "steps",
            "total_tokens / global_batch_tokens",
        ),
        ("gpu_hours", pace.gpu_hours, "GPU-hours", "24 x days x gpus"),
    )
    numbers = {
        name: Number(value, unit, Origin.MODELLED, source) for name, value, unit, source in rows
    }
    if is_arithmetic:
        assert isinstance(given, float), f"{flag(start)} is one number"
        numbers[start] = Number(given, numbers[start].unit, Origin.ASSUMED, flag(start))
        for origin in Origin:
            numbers[f"{origin}_share"] = Number(
                100.0 * (origin is Origin.ASSUMED),
                "%",
                Origin.MODELLED,
                f"of the step, all of which follows from {flag(start)}",
            )
    return numbers


def goodput_numbers(
    pace: Pace,
    failures: float | None,
    checkpoint_s: float | None,
    restart_s: float | None,
    interval_s: float | None,
) -> dict[str, Number]:
    given = {
        "failures_per_gpu_hour": failures,
        "checkpoint_s": checkpoint_s,
        "restart_s": restart_s,
    }
    missing = [flag(name) for name, value in given.items() if value is None]
    if len(missing) == len(given) and interval_s is None:
        return {}
    if failures is None or checkpoint_s is None or restart_s is None:
        raise ProjectionError(f"days with failures need {', '.join(missing)} as well; give them")
    mean = mtbf_s(failures, pace.job.num_gpus)
    model = Interruptions(
        mtbf_s=mean, checkpoint_s=checkpoint_s, restart_s=restart_s, interval_s=interval_s
    )
    share = model.useful_share
    interval = (
        Number(model.best_interval_s, "s", Origin.MODELLED, "the interval with the most goodput")
        if interval_s is None
        else Number(interval_s, "s", Origin.ASSUMED, "--checkpoint-interval-s")
    )
    units = {"failures_per_gpu_hour": "1/h", "checkpoint_s": "s", "restart_s": "s"}
    return {
        **{
            name: Number(value, units[name], Origin.ASSUMED, flag(name))
            for name, value in given.items()
            if value is not None
        },
        "mtbf_s": Number(mean, "s", Origin.MODELLED, "1 / (failures_per_gpu_hour x gpus)"),
        "checkpoint_interval_s": interval,
        "goodput": Number(
            100 * share, "%", Origin.MODELLED, "failures at random; lost work, saves, restarts"
        ),
        "goodput_days": Number(pace.days / share, "days", Origin.MODELLED, "days / goodput"),
        "goodput_gpu_hours": Number(
            pace.gpu_hours / share, "GPU-hours", Origin.MODELLED, "gpu_hours / goodput"
        ),
    }


def cost_numbers(numbers: Mapping[str, Number], price: float | None) -> dict[str, Number]:
    if price is None:
        return {}
    positive("--price-per-gpu-hour", price)
    hours = "goodput_gpu_hours" if "goodput_gpu_hours" in numbers else "gpu_hours"
    value = numbers[hours].value
    assert isinstance(value, float), "GPU-hours are one number"
    return {
        "price_per_gpu_hour": Number(price, "money", Origin.ASSUMED, "--price-per-gpu-hour"),
        "cost": Number(price * value, "money", Origin.MODELLED, f"{hours} x price_per_gpu_hour"),
    }


def pipeline_numbers(parts: Parts, projection: Projection) -> dict[str, Number]:
    """The step taken apart, and what it was made of."""
    timeline, step = projection.timeline, projection.step
    simulated = f"{parts.schedule.name} in virtual time"
    busiest = timeline.busy.index(max(timeline.busy))
    step_s = projection.pace.step_s
    numbers: dict[str, Number] = {}

    def add(name: str, value: float | tuple[float, ...], unit: str, source: str) -> None:
        numbers[name] = Number(value, unit, Origin.MODELLED, source)

    for origin, share in projection.shares.items():
        add(f"{origin}_share", 100 * share, "%", "of the step's critical path, by origin of times")
    add("even_work_s", step.even_work_s, "s", "work of all ranks / ranks")
    add("imbalance_s", step.imbalance_s, "s", f"work of rank {busiest}, the busiest, beyond that")
    for cause in ("fill", "drain", "dependency", "transfer"):
        add(f"{cause}_s", getattr(step, f"{cause}_s"), "s", f"idle on rank {busiest}; {simulated}")
    bubble = step_s - step.per_step_s - step.even_work_s - step.imbalance_s
    add("bubble_share", 100 * bubble / step_s, "%", "fill, drain, dependency, transfer / step_s")
    add("per_step_s", step.per_step_s, "s", "sum of the per-step pieces")
    add(
        "peak_in_flight",
        tuple(map(float, timeline.peak_in_flight)),
        "stage activations",
        f"the order {parts.schedule.name}",
    )
    add("rank_busy_s", timeline.busy, "s", simulated)
    for cause in ("fill", "drain", "dependency", "transfer"):
        idle = tuple(getattr(rank, cause) for rank in timeline.idle)
        add(f"rank_{cause}_s", idle, "s", simulated)
    numbers |= _stage_numbers(parts)
    for piece in parts.per_step:
        numbers[f"per_step.{piece.name}_s"] = Number(
            piece.seconds, "s", Origin(piece.origin), piece.source
        )
    numbers["jitter"] = Number(
        100 * parts.jitter,
        "%",
        Origin.ASSUMED,
        f"--jitter, one draw with seed {parts.seed}" if parts.jitter else "no --jitter given",
    )
    return numbers


def memory_numbers(ledgers: Sequence[RankLedger], peaks: Sequence[StagePeak]) -> dict[str, Number]:
    """The most that each rank holds, by the ledger; and what a calibration measured."""
    from ppruntime.projection.pipeline import SPREAD
    from ppruntime.projection.step_memory import SOURCE, WITHOUT

    held, off = tuple(float(each.peak_bytes) for each in ledgers), SPREAD[Origin.MODELLED]
    numbers = {
        "rank_peak_bytes": Number(
            held,
            "bytes",
            Origin.MODELLED,
            f"{SOURCE}; assumed to be off by up to {100 * off:g} %; without {WITHOUT}"
            + ("; measured_peak is an emulation's, which has no optimizer" if peaks else ""),
            low=tuple((1 - off) * number for number in held),
            high=tuple((1 + off) * number for number in held),
        )
    }
    for peak in peaks:
        numbers[f"measured_peak.stage{peak.stage}"] = Number(
            peak.allocated_bytes, "bytes", Origin(peak.origin), peak.source
        )
    return numbers


def calibration_words(known: Calibration | None, *, counted: bool = False) -> list[str]:
    """What a calibration's times are of, and that its slow-downs are not `counted` where they are
    not. Nothing without one."""
    if known is None:
        return []
    words = [
        f"calibration: of {known.date} on {known.device}, ops timed with transport "
        f"{known.transport}, routing {known.routing}, ep {known.ep}; made by: {known.command}"
    ]
    if known.slowdowns and not counted:
        rows = ", ".join(
            f"{row.transport} {100 * row.both_ways:.3g} % while messages go both ways"
            for row in known.slowdowns
        )
        words.append(
            f"not counted: the calibration says what transfers do to compute ({rows}); "
            "`ppruntime simulate --transport` counts it"
        )
    return words


def collective_words(config: Config, parts: Parts) -> list[str]:
    """Said where several data ranks have collectives that no per-step piece is of."""
    num = config.parallel.num_data_ranks
    said = {piece.name for piece in parts.per_step}
    missing = [name for name in ("reduce", "gather") if name not in said]
    if num == 1 or not missing or "rest" in said:
        return []
    option = ",".join(f"{name}=SECONDS" for name in missing)
    return [
        f"not counted: {' and '.join(missing)} over {num} data ranks, of which no per-step piece is"
        f" named; give --per-step-s {option}, or `ppruntime simulate --data-bandwidth`"
    ]


def offload_words(config: Config) -> list[str]:
    """Said where bytes are of a run that offloads and times are not."""
    if not config.pp.activation_offload or config.pp.offload_target != "host":
        return []
    return [
        "not counted: what host copies of pp.activation_offload take; `ppruntime simulate "
        "--offload-every --host-bandwidth` plays them"
    ]


def _stage_numbers(parts: Parts) -> dict[str, Number]:
    """Times of each stage and hop."""
    from ppruntime.schedules.ops import Kind

    numbers = {}
    kinds = {"forward_s": Kind.F, "input_grad_s": Kind.I, "weight_grad_s": Kind.W}
    for index, stage in enumerate(parts.stages):
        sources = sorted({piece.source for piece in stage.pieces})
        source = "; ".join(sources) or "a stage without units"
        if len(stage.pieces) > 1:
            source = f"sum of {len(stage.pieces)} units: {source}"
        for name, kind in kinds.items():
            numbers[f"stage{index}.{name}"] = Number(stage.seconds(kind), "s", stage.origin, source)
    for index, hop in enumerate(parts.hops):
        for name, seconds in (("forward_s", hop.forward_s), ("backward_s", hop.backward_s)):
            numbers[f"hop{index}.{name}"] = Number(seconds, "s", hop.origin, hop.source)
    return numbers

"""`ppruntime simulate`: a pipeline's step on a cluster that is not ideal, taken apart.

No torch, no GPU. Mistakes of the user are ProjectionErrors, ConfigErrors and ScheduleErrors,
which the caller prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ppruntime.launch.intervals import spread_of, spread_words
from ppruntime.launch.outputs import check_output
from ppruntime.launch.percent import Percent
from ppruntime.launch.project_numbers import calibration_words, goodput_numbers, offload_words
from ppruntime.launch.projected_job import Projected, asked_job
from ppruntime.launch.whole_numbers import MaybeWhole
from ppruntime.projection.projector import Origin, ProjectionError, positive

if TYPE_CHECKING:
    from ppruntime.projection.calibration import Calibration
    from ppruntime.schedules.machine import HostCopies, Interference

_SHORT = Parameter(show_default=lambda value: f"{value:g}")
_PLAIN = Parameter(negative="")


def simulate(
    *arguments: Projected,
    calibration: Path | None = None,
    costs: str | None = None,
    efficiency: float | None = None,
    gpus: MaybeWhole = None,
    tokens: Annotated[float, _SHORT] = 20e12,
    peak_flops: Annotated[float, _SHORT] = 989e12,
    transfer_s: str | None = None,
    link: str | None = None,
    per_step_s: str | None = None,
    transport: str | None = None,
    interference: str | None = None,
    jitter: Percent = 0.0,
    stragglers: Percent = 0.0,
    stall: str | None = None,
    seed: MaybeWhole = None,
    replicas: MaybeWhole = None,
    data_bandwidth: float | None = None,
    offload_every: MaybeWhole = None,
    host_bandwidth: str | None = None,
    memory: Annotated[bool, _PLAIN] = False,
    spread: str | None = None,
    failures_per_gpu_hour: float | None = None,
    checkpoint_s: float | None = None,
    restart_s: float | None = None,
    checkpoint_interval_s: float | None = None,
    json: Annotated[bool, _PLAIN] = False,
    html: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Plays a step with what slows real clusters down, and says where the time goes.

    Parameters
    ----------
    calibration
        JSON file with times of stages or units, transfers and per-step pieces.
    costs
        F,I,W: seconds per rank and micro-batch; or one triple per stage, separated by ';'.
    efficiency
        Percent of the peak at which the executed FLOPs run.
    gpus
        GPUs in all; by default what the run has.
    tokens
        Tokens to train on.
    peak_flops
        FLOP/s of one GPU that MFU is a share of.
    transfer_s
        Seconds of one hop, one way; or one number per stage hop, separated by ','.
    link
        Link of the calibration that the hops go over, or one per hop, separated by ','.
    per_step_s
        Seconds per step beside the pipeline, or NAME=SECONDS separated by ','.
    transport
        Transport of the calibration's slow-downs: what transfers in flight do to compute; by
        default the run's pp.transport, if there are any of it.
    interference
        ONE,BOTH[,BLOCKING] in percent: how much longer ops take while messages go in or out,
        while they do both, and the share of an op that stands still meanwhile.
    jitter
        Relative standard deviation of op times, in percent; under 1 write such as 0.5%.
    stragglers
        Relative standard deviation of ranks' speeds, in percent (under 1 such as 0.5%); of an
        expert group the slowest counts.
    stall
        PERCENT,SECONDS: so many ops are held up once for so long.
    seed
        Of all noise; 0 by default.
    replicas
        Pipelines side by side that are drawn, 1 by default; the slowest is the step.
    data_bandwidth
        Bytes per second at which a rank reduces gradients and gathers weights over data ranks,
        instead of what a calibration says of that.
    offload_every
        Activations of every so many micro-batches go to the host.
    host_bandwidth
        TO,FROM the host in bytes per second, or one number for both.
    memory
        Bytes over time, by the memory ledger.
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
    json
        Print one JSON object.
    html
        Write a page with pictures.
    trace
        Write a Chrome trace.
    """
    from ppruntime.launch.project_parts import pipeline_parts
    from ppruntime.launch.simulate_report import Report, json_text, text
    from ppruntime.projection.simulate import (
        Surroundings,
        collective_seconds,
        interval,
        with_data_ranks,
    )
    from ppruntime.projection.simulate import simulate as play
    from ppruntime.projection.step_memory import copied_bytes, ledgers_of
    from ppruntime.schedules.draw import chrome_trace
    from ppruntime.schedules.machine import Noise

    if (
        sum(given is not None for given in (calibration, costs))
        + (efficiency is not None and calibration is None)
        != 1
    ):
        raise ProjectionError(
            "a simulation needs the parts' times from one place; give --calibration, --costs or "
            "--efficiency"
        )
    shares = spread_of(spread)
    check_output("--html", html)
    check_output("--trace", trace)
    asked = asked_job(arguments, gpus=gpus, tokens=tokens, peak_flops=peak_flops)
    config, job = asked.config, asked.job
    found = pipeline_parts(
        config,
        gpu_flops=job.gpu_flops,
        calibration=calibration,
        costs=costs,
        efficiency=efficiency,
        transfer_s=transfer_s,
        link=link,
        per_step_s=per_step_s,
    )
    slows, source, origin = _interference(
        found.calibration, transport, interference, config.pp.transport_of_all
    )
    stall_share, stall_s = _pair("--stall", stall) if stall is not None else (0.0, 0.0)
    if replicas is not None and replicas < 1:
        raise ProjectionError(f"--replicas {replicas} is no count; give 1 or more")
    if stall_share > 100:
        raise ProjectionError(
            f"--stall {stall!r} holds up {stall_share:g} % of ops; give at most 100"
        )
    if offload_every is not None and offload_every < 1:
        raise ProjectionError(
            f"--offload-every {offload_every} is no count; give 1 (every micro-batch) or more"
        )
    if data_bandwidth is not None:
        positive("--data-bandwidth", data_bandwidth)
    noise = Noise(
        jitter=jitter,
        rank_spread=stragglers,
        group=config.parallel.ep,
        stall_probability=stall_share / 100,
        stall=stall_s,
        seed=seed or 0,
    )
    for option, value in (("--seed", seed), ("--replicas", replicas)):
        if noise.is_none and value is not None:
            raise ProjectionError(
                f"{option} has no effect without noise; leave it out, or add --jitter, "
                "--stragglers or --stall"
            )
    num_ranks = found.parts.schedule.num_ranks
    per_rank = (
        collective_seconds(config, found.plan, num_ranks, data_bandwidth)
        if data_bandwidth is not None
        else None
    )
    host = _host(host_bandwidth, offload_every)
    wants_bytes = memory or html is not None or offload_every is not None
    around = Surroundings(
        interference=slows,
        interference_source=source,
        interference_origin=origin,
        noise=noise,
        replicas=replicas or 1,
        offload_every=offload_every,
        host=host,
        copied_bytes=copied_bytes(config, found.plan) if offload_every is not None else None,
        ledgers=ledgers_of(config, offload_every=offload_every) if wants_bytes else (),
    )
    parts, around = with_data_ranks(found.parts, around, per_rank)
    simulation = play(job, parts, around)
    report = Report.of(
        job,
        asked.inputs,
        parts,
        around,
        simulation,
        goodput_numbers(
            simulation.pace, failures_per_gpu_hour, checkpoint_s, restart_s, checkpoint_interval_s
        ),
        interval(job, parts, around, shares),
        (
            *calibration_words(found.calibration, counted=source != "none given"),
            *(offload_words(config) if offload_every is None else ()),
            spread_words(shares),
        ),
    )
    print(json_text(report) if json else text(report))
    if html is not None:
        from ppruntime.launch.simulate_page import page

        html.write_text(page(report))
    if trace is not None:
        trace.write_text(
            chrome_trace(simulation.step.rows, simulation.step.transfers, process="simulated")
        )
    return 0


def _interference(
    calibration: Calibration | None,
    transport: str | None,
    text: str | None,
    of_the_run: str | None,
) -> tuple[Interference, str, Origin]:
    """From the option, else from the calibration's row of the transport, else from that of the
    run's transport, else none. Ops that were timed beside a transport are slowed down already."""
    from ppruntime.schedules.machine import Interference

    if text is not None:
        if transport is not None:
            raise ProjectionError(
                "--interference and --transport say the same thing twice; leave one of them out"
            )
        numbers = [number / 100 for number in _numbers("--interference", text)]
        if len(numbers) not in (2, 3):
            raise ProjectionError(
                f"--interference {text!r} is not ONE,BOTH[,BLOCKING] in percent; write such as 3,12"
            )
        if len(numbers) == 3 and numbers[2] > 1:
            raise ProjectionError(
                f"--interference {text!r}: {100 * numbers[2]:g} % of an op cannot stand still; "
                "give at most 100"
            )
        return Interference(*numbers), "--interference", Origin.ASSUMED
    rows = {row.transport: row for row in (calibration.slowdowns if calibration else ())}
    is_idle = calibration is None or calibration.transport == "idle"
    if transport is None:
        if of_the_run is None or not (is_idle and of_the_run in rows):
            return Interference(), "none given", Origin.ASSUMED
        transport = of_the_run
    if not is_idle:
        assert calibration is not None, "none is idle"
        raise ProjectionError(
            f"--transport {transport}: the calibration's ops were timed beside "
            f"{calibration.transport} already; leave it out, or give one that was made without "
            "transfers"
        )
    if transport not in rows:
        raise ProjectionError(
            f"no calibration says what transport {transport} does to compute; it has "
            f"{', '.join(rows) or 'no slow-downs'}; give --interference"
        )
    row = rows[transport]
    return (
        Interference(row.one_way, row.both_ways, row.blocking),
        f"{transport}: {row.source}",
        Origin(row.origin),
    )


def _host(text: str | None, every: int | None) -> HostCopies | None:
    from ppruntime.schedules.machine import HostCopies

    if (text is None) != (every is None):
        raise ProjectionError(
            "offloading needs --offload-every and --host-bandwidth; give both or neither"
        )
    if text is None:
        return None
    numbers = _numbers("--host-bandwidth", text)
    for number in numbers:
        positive("--host-bandwidth", number)
    if len(numbers) > 2:
        raise ProjectionError(f"--host-bandwidth {text!r} is not one number or two; write TO,FROM")
    return HostCopies(numbers[0], numbers[-1])


def _pair(option: str, text: str) -> tuple[float, float]:
    numbers = _numbers(option, text)
    if len(numbers) != 2:
        raise ProjectionError(f"{option} {text!r} is not PERCENT,SECONDS; write such as 0.01,2")
    return numbers[0], numbers[1]


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers of 0 or more, separated by commas."""
    from ppruntime.launch.project_parts import numbers_of

    return numbers_of(option, text)

"""`ppruntime validate-run`: rung V3, a real pipeline against a simulation calibrated elsewhere.

Under torchrun, one process a rank. First the run with the calibration's overrides (another number
of micro-batches, warm-up or transport) gives op times and what a step takes beside its pipeline;
from these the run itself is predicted, which is written down, and then run. Both train: gradients
are reduced, weights are updated.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ppruntime.launch import cuda_environment
from ppruntime.launch.outputs import check_output
from ppruntime.launch.records import write_record
from ppruntime.launch.run_files import files_and_overrides
from ppruntime.launch.whole_numbers import Whole
from ppruntime.projection.projector import ProjectionError
from ppruntime.typed_command import typed
from ppruntime.validate import Ledger, Verdict, predictions_beside

if TYPE_CHECKING:
    from ppruntime.config import Config
    from ppruntime.measured_run import MeasuredRun

STEP_LIMIT, CYCLE_LIMIT, MEMORY_LIMIT = 0.03, 0.02, 0.03


def validate_run(
    *arguments: str,
    calibrate_with: str,
    steps: Whole = 5,
    out: Path = Path("docs/bench/validation-run.json"),
    predictions: Path | None = None,
) -> int:
    """Predicts a run of this pipeline from another one, writes that down, and runs it.

    Start it with torchrun: --nproc-per-node N -m ppruntime.launch.cli validate-run RUN.toml ...

    Parameters
    ----------
    arguments
        The run that is predicted: TOML files and section.key=value texts.
    calibrate_with
        Overrides of the run that is measured first, separated by blanks, such as
        "train.num_micro_batches=12 pp.schedule=1f1b pp.transport=nccl".
    steps
        Steps of each of the two; medians count.
    out
        JSON file to write.
    predictions
        File that gets each prediction, a JSON line, before its run; by default beside `out`.
    """
    from ppruntime.config import load

    files, overrides = files_and_overrides(arguments)
    config = load(files, overrides)
    calibration = load(files, [*overrides, *calibrate_with.split()])
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != config.world_size or calibration.world_size != config.world_size or steps < 1:
        raise ProjectionError(
            f"{started} processes started, the runs have {config.world_size} and "
            f"{calibration.world_size} ranks, --steps {steps}; start as many as both have, with 1 "
            "step or more"
        )
    predictions = predictions or predictions_beside(out)
    check_output("--out", out, makes_folder=True)
    check_output("--predictions", predictions, makes_folder=True)
    os.environ.update(cuda_environment.left_out())
    return _validate(config, calibration, calibrate_with, steps, out, predictions)


def _validate(
    config: Config,
    calibration: Config,
    calibrate_with: str,
    steps: int,
    out: Path,
    predictions: Path,
) -> int:
    import torch
    import torch.distributed as dist

    from ppruntime.measured_run import measure_run
    from ppruntime.ranks import Layout, join, leave

    torch.set_num_threads(config.run.num_threads)
    on_cuda = config.run.device == "cuda" or (
        config.run.device == "auto" and torch.cuda.is_available()
    )
    layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
    limit = config.fault.init_timeout_seconds
    ranks = join(layout, use_cuda=on_cuda, timeout_seconds=limit)
    start = time.monotonic()
    try:
        # Two runs in one world: what each agrees on goes by names of its own.
        first = measure_run(calibration, replace(ranks, store_prefix="calibration "), steps)
        predicted = _predicted(config, calibration, first)
        case = f"{config.model.name}, {config.pp.schedule}, M {config.train.num_micro_batches}"
        digest = ""
        if ranks.rank == 0:
            digest = Ledger(predictions).predict("v3", case, predicted, calibrate_with)
        dist.barrier()  # nobody runs before the prediction is written
        measured = _measured(measure_run(config, ranks, steps))
    finally:
        leave()
    if ranks.rank:
        return 0
    verdicts = [
        Verdict("v3", case, what, value, measured[what], _limit(what), digest)
        for what, value in predicted.items()
    ]
    for verdict in verdicts:
        print(verdict, flush=True)
    record = {
        "command": typed(),
        "device": torch.cuda.get_device_name() if on_cuda else platform.machine(),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "seconds": time.monotonic() - start,
        "predictions": predictions.name,
        "cases": [verdict.record() for verdict in verdicts],
    }
    write_record(out, record)
    return int(not all(verdict.met for verdict in verdicts))


def _limit(what: str) -> float | None:
    """The largest |error| that passes; None for what stands there for the record only."""
    if what.endswith("peak bytes"):
        return MEMORY_LIMIT
    return {"step s": STEP_LIMIT, "cycle s": CYCLE_LIMIT}.get(what)


def _predicted(config: Config, calibration: Config, first: MeasuredRun) -> dict[str, float]:
    """Step, cycle and most memory of the run, from what the calibration's steps took and held.
    Memory: what the plans of the two differ by, beyond what was measured."""
    from ppruntime.emulate import check_emulation
    from ppruntime.ledger import predict
    from ppruntime.schedules.costs import Costs, Hops
    from ppruntime.schedules.counts import peak_in_flight
    from ppruntime.schedules.timeline import simulate

    order = check_emulation(config, range(config.pp.size))[0].computations
    costs = Costs(*zip(*first.mean_s, strict=True))
    hop = max((row.seconds for row in first.transfers), default=0.0)
    timeline = simulate(order, costs, Hops.both(hop))
    held, count = peak_in_flight(order), config.train.num_micro_batches
    cycles = []
    for stage, row in enumerate(timeline.rows):
        window = range(held[stage], count - held[stage])
        ends = [t.finish for t in row if t.op.kind.value in "BI" and t.op.micro_batch in window]
        cycles.append((max(ends) - min(ends)) / max(1, len(ends) - 1))
    found = {
        "step s": timeline.makespan + first.rest_s,
        "cycle s": max(cycles),
        "beside the pipeline s": first.rest_s,
    }
    before, after = predict(calibration), predict(config)
    for peak in first.peaks:
        more = after[peak.stage].peak_bytes - before[peak.stage].peak_bytes
        found[f"stage {peak.stage} peak bytes"] = peak.allocated_bytes + more
    return found | _op_seconds(first)


def _measured(found: MeasuredRun) -> dict[str, float]:
    values = {
        "step s": median(found.step_s),
        "cycle s": max(found.cycle_s),
        "beside the pipeline s": found.rest_s,
    }
    values |= {
        f"stage {peak.stage} peak bytes": float(peak.allocated_bytes) for peak in found.peaks
    }
    return values | _op_seconds(found)


def _op_seconds(found: MeasuredRun) -> dict[str, float]:
    """The op times that a prediction rests on: where they differ, so do the steps."""
    values = {}
    for stage, (forward, input_grad, weight_grad) in enumerate(found.mean_s):
        values[f"stage {stage} F s"] = forward
        values[f"stage {stage} I + W s"] = input_grad + weight_grad
    return values

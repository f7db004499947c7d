"""`ppruntime emulate`: stages i to j of a deeper pipeline on the GPUs at hand -> a calibration.

Under torchrun every process is one rank; in one process it takes a single stage, or stages one
after another with --one-by-one.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ppruntime.launch import cuda_environment
from ppruntime.launch.outputs import check_output
from ppruntime.launch.run_files import files_and_overrides
from ppruntime.launch.whole_numbers import Whole
from ppruntime.projection.projector import ProjectionError

if TYPE_CHECKING:
    from ppruntime.config import Config
    from ppruntime.emulate import Emulation
    from ppruntime.schedules.costs import Costs

_PLAIN = Parameter(negative="")


def emulate(
    *arguments: str,
    stages: str,
    out: Path,
    costs: str | None = None,
    calibration: Path | None = None,
    hop_s: float = 0.0,
    steps: Whole = 3,
    boundaries: Path | None = None,
    keep: Whole = 2,
    one_by_one: Annotated[bool, _PLAIN] = False,
    few_samples: Annotated[bool, _PLAIN] = False,
) -> int:
    """Runs some stages of a pipeline with the real executor and transport; the rest is replayed.

    Start it as many times as there are stages: torchrun --nproc-per-node N -m
    ppruntime.launch.cli emulate RUN.toml --stages 0-7 --out calibration.json. Rows of stages that
    the file at --out has already stay, if it is of the same run.

    Parameters
    ----------
    arguments
        The run: TOML files and section.key=value texts. pp.size is the whole pipeline's.
    stages
        First and last stage that run here: 0-7, or one number.
    out
        Calibration file to write, or to add the stages to.
    costs
        F,I,W of the absent stages in seconds: one triple, or one per stage separated by ';'.
    calibration
        File with times of the absent stages, instead of --costs; also --out of an earlier job.
    hop_s
        Seconds of a transfer from or to an absent stage, one way; measure it on this transport.
    steps
        Steps that are measured, after one that is not.
    boundaries
        Folder in which what leaves for absent stages is kept, and from which what comes from them
        is replayed if an earlier job kept it there; else tensors are drawn.
    keep
        Micro-batches that are kept there, and repeat.
    one_by_one
        The stages one after another in this one process, each with both neighbours absent.
    few_samples
        Write rows with fewer than 100 samples, as assumed ones that say so.
    """
    from ppruntime.config import load

    config = load(*files_and_overrides(arguments))
    present = _stages(stages)
    if (costs is None) == (calibration is None):
        raise ProjectionError(
            "what the absent stages take has to come from one place; give --costs or --calibration"
        )
    if min(steps, keep) < 1 or not 0 <= hop_s < float("inf"):
        raise ProjectionError(
            f"--steps {steps}, --keep {keep}, --hop-s {hop_s:g}; the least are 1, 1 and 0"
        )
    jobs = [range(s, s + 1) for s in present] if one_by_one else [present]
    needed = len(jobs[0]) * config.parallel.num_data_ranks
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != needed:
        return _say_how(needed, started)
    check_output("--out", out, makes_folder=True)
    os.environ.update(cuda_environment.left_out())
    return _run(config, jobs, out, costs, calibration, hop_s, steps, boundaries, keep, few_samples)


def _run(
    config: Config,
    jobs: list[range],
    out: Path,
    costs: str | None,
    calibration: Path | None,
    hop_s: float,
    steps: int,
    boundaries: Path | None,
    keep: int,
    few_samples: bool,
) -> int:
    import torch

    from ppruntime.config import one_transport
    from ppruntime.emulate import check_emulation
    from ppruntime.emulate import emulate as run
    from ppruntime.emulate_replays import Blanks, Recorder
    from ppruntime.projection.calibration_file import refuse_before
    from ppruntime.ranks import Layout, join, leave

    torch.set_num_threads(config.run.num_threads)
    for job in jobs:
        check_emulation(config, job)
    absent = _absent_costs(config, jobs, costs, calibration)
    refuse_before(
        out,
        config,
        transport=one_transport(config),
        samples=steps * min(len(_steady_part(config, stage)) for job in jobs for stage in job),
        few_samples=few_samples,
        stages=True,
    )
    layout = Layout(len(jobs[0]), config.parallel.dp, config.parallel.ep)
    use_cuda = config.run.device == "cuda" or (
        config.run.device == "auto" and torch.cuda.is_available()
    )
    ranks = join(layout, use_cuda=use_cuda, timeout_seconds=config.fault.init_timeout_seconds)
    try:
        for job in jobs:
            replays = (
                Blanks(ranks.device)
                if boundaries is None
                else Recorder(boundaries, keep, ranks.data_rank, ranks.device)
            )
            found = run(
                config,
                ranks,
                job,
                costs=absent,
                hop_s=hop_s,
                num_steps=steps,
                replays=replays,
            )
            if ranks.rank == 0:
                _report(config, found, job, hop_s)
                _write(config, found, out, few_samples=few_samples)
    finally:
        leave()
    return 0


def _stages(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ProjectionError(
            f"--stages {text!r} is not FIRST-LAST or one number; write such as 0-7"
        )
    found = range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ProjectionError(f"--stages {text} ends before it begins; write the first stage first")
    return found


def _say_how(needed: int, started: int) -> int:
    print(
        f"the stages need {needed} processes (a rank each, times parallel.dp x parallel.ep), "
        f"{started} started; nothing ran. Use:\n",
        file=sys.stderr,
    )
    words = [*sys.argv[1:]]
    print(shlex.join(["torchrun", "--nproc-per-node", str(needed), "-m", _MODULE, *words]))
    return 2


_MODULE = "ppruntime.launch.cli"


def _absent_costs(
    config: Config, jobs: list[range], costs: str | None, calibration: Path | None
) -> Costs:
    """Seconds of all stages; those of present ones are not looked at."""
    from ppruntime.plan import cut
    from ppruntime.projection.calibration import read_calibration
    from ppruntime.projection.pipeline import check_fits
    from ppruntime.schedules.costs import Costs, parse_costs

    stage_to_rank = range(config.pp.size)
    if costs is not None:
        return parse_costs(costs, stage_to_rank)
    assert calibration is not None, "one of the two is given"
    found = read_calibration(calibration)
    plan = cut(
        config.model.dims, stage_to_rank, config.pp.layers_per_stage, seq_len=config.train.seq_len
    )
    check_fits(config, plan, found)
    known = {row.stage: row for row in found.stages}
    one = len(jobs) == 1
    missing = [s.index for s in plan if s.index not in known and not (one and s.index in jobs[0])]
    if missing:
        raise ProjectionError(
            f"{calibration} has no times of stages {missing}, which are absent; emulate them too, "
            "or give --costs"
        )
    rows = [known.get(s.index) for s in plan]
    return Costs(
        tuple(row.forward_s if row else 0.0 for row in rows),
        tuple(row.input_grad_s if row else 0.0 for row in rows),
        tuple(row.weight_grad_s if row else 0.0 for row in rows),
    )


def _steady_part(config: Config, stage: int) -> range:
    """The micro-batches of a step whose times count: one pipe-full off at each end."""
    from ppruntime.order import make_order
    from ppruntime.schedules.counts import peak_in_flight

    held = peak_in_flight(make_order(config).computations)[stage]
    return range(held, config.train.num_micro_batches - held)


def _report(config: Config, found: Emulation, job: range, hop_s: float) -> None:
    """A line a stage, with what the numbers are of."""
    train, parallel = config.train, config.parallel
    print(
        f"{config.model.name}: stages {job.start}-{job.stop - 1} of {config.pp.size}, "
        f"{config.pp.schedule}, {train.num_micro_batches} micro-batches of "
        f"{train.micro_batch_size} x {train.seq_len:,} tokens, dp {parallel.dp} x ep "
        f"{parallel.ep}, on {len(job) * parallel.num_data_ranks} of {config.world_size} ranks; "
        f"hops to absent stages {1e3 * hop_s:.3g} ms (assumed)"
    )
    for row, cycle in zip(found.stages, found.cycle_s, strict=True):
        print(
            f"stage {row.stage:>3}  F {1e3 * row.forward_s:9.3f}  I {1e3 * row.input_grad_s:9.3f}"
            f"  W {1e3 * row.weight_grad_s:9.3f} ms  cycle {1e3 * cycle:9.3f} ms, "
            f"{row.samples} samples"
        )


def _write(config: Config, found: Emulation, out: Path, *, few_samples: bool) -> None:
    from ppruntime.config import one_transport
    from ppruntime.projection.calibration_file import calibration_of, merged, write_calibration

    known = calibration_of(
        config,
        few_samples=few_samples,
        transport=one_transport(config),
        stages=found.stages,
        transfers=found.transfers,
        peaks=found.peaks,
    )
    write_calibration(merged(out, known), out)

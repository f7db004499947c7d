"""`ppruntime calibrate`: what a model's units, transfers and steps take on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    from ppruntime.projection.calibration import Calibration, HeldBytes, Row, UnitTimes
    from ppruntime.ranks import Ranks

_PLAIN = Parameter(negative="")
_SIZES = "262144,2097152,16777216,83886080,335544320"


def calibrate(
    *arguments: str,
    out: Path | None = None,
    samples: Whole = 100,
    modes: str | None = None,
    depths: str | None = None,
    transfer_bytes: str = _SIZES,
    per_step: Annotated[bool, _PLAIN] = False,
    in_flight: Annotated[bool, _PLAIN] = False,
    idle: Path | None = None,
    few_samples: Annotated[bool, _PLAIN] = False,
) -> int:
    """Times every kind of unit of a model, and writes a calibration.

    In one process: units, optimizer, or with --depths whole models of two depths. Under torchrun
    with two pipeline ranks (pp.size=2): transfers, added to the same file. With --per-step, one
    process a rank of the run: what comes once a step beside the pipeline. With --in-flight, on two
    pipeline ranks: units beside transfers.

    Parameters
    ----------
    arguments
        The run: TOML files and section.key=value texts.
    out
        Calibration file to write, or to add rows to; with --depths, a record of its own.
    samples
        How often each thing is timed.
    modes
        AC modes, separated by ','; by default the run's own and none. selective saves what ac.save
        names; selective:experts+attention has its own list.
    depths
        TWO,DEPTHS in layers: the marginal layer, and the whole model's step from it.
    transfer_bytes
        Sizes of transfers, separated by ','.
    per_step
        Weights gathered and quantised, gradients reduced and clipped, the update: timed on all
        ranks of the run. A sample is a step; few micro-batches (train.num_micro_batches=2) do.
    in_flight
        Both ranks send each other the model's largest boundary, back to back, while rank 0 times
        the units; to a file of its own. Its difference to one without is what a transport costs.
    idle
        With --in-flight: a calibration of the same units without transfers. It gets a row of what
        the transport did to them, for `simulate --transport`.
    few_samples
        Write rows with fewer than 100 samples, as assumed ones that say so.
    """
    from ppruntime.config import load, one_transport
    from ppruntime.recompute import mode_name

    files, overrides = files_and_overrides(arguments)
    config = load(files, overrides)
    if samples < 1 or (out is None and depths is None):
        raise ProjectionError(
            f"--samples {samples}, --out {out}, --depths {depths}: time 1 time or more, and give "
            "--out, --depths or both"
        )
    if per_step and (depths is not None or modes is not None or in_flight):
        raise ProjectionError(
            "--per-step times steps of the run as it is; leave out --depths, --modes and "
            "--in-flight"
        )
    if in_flight and (depths is not None or config.world_size != 2 or config.pp.size != 2):
        raise ProjectionError(
            f"--in-flight times units on two pipeline ranks, and the run has pp.size "
            f"{config.pp.size} and {config.world_size} ranks; use pp.size=2, parallel.dp=1, "
            "parallel.ep=1 and no --depths"
        )
    if in_flight and one_transport(config) == "auto":
        raise ProjectionError(
            'pp.transport = "auto" does not say what was in flight; name it, such as '
            "pp.transport=put"
        )
    if idle is not None and not (in_flight and idle.is_file()):
        raise ProjectionError(
            f"--idle {idle}: it is a calibration that was made without --in-flight, and goes with"
            " --in-flight"
        )
    if config.parallel.ep > 1 and not per_step:
        raise ProjectionError(
            f"parallel.ep = {config.parallel.ep}: a unit is timed with all its experts on one rank "
            "so far; use 1, with model.num_experts divided by the ranks that would share them"
        )
    os.environ.update(cuda_environment.left_out())
    started = int(os.environ.get("WORLD_SIZE", "1"))
    as_the_run = per_step or in_flight
    if (started != config.world_size and (started > 1 or as_the_run)) or (started > 1 and depths):
        raise ProjectionError(
            f"{started} processes started, the run has {config.world_size} ranks; start one for "
            "units and depths, or as many as the run has for transfers, --per-step and --in-flight"
        )
    if out is not None:
        check_output("--out", out, makes_folder=True)
    if out is not None and depths is None:
        from ppruntime.projection.calibration_file import refuse_before

        transport = one_transport(config) if in_flight else "idle"
        refuse_before(
            out,
            config,
            transport=transport,
            samples=samples,
            few_samples=few_samples,
            stages=False,
        )
        if idle is not None:
            from ppruntime.projection.calibration import read_calibration
            from ppruntime.projection.calibration_file import calibration_of, check_idle

            beside = calibration_of(config, few_samples=few_samples, transport=transport)
            check_idle(read_calibration(idle), beside)
    names = modes.split(",") if modes is not None else sorted({mode_name(config), "none"})
    in_modes = [load(files, [*overrides, *_in_mode(name)]) for name in names]
    configs = {mode_name(each): each for each in in_modes}
    sizes = _whole_numbers("--transfer-bytes", transfer_bytes)
    task = _Task(config, configs, ranks_started=started, samples=samples, few_samples=few_samples)
    if depths is not None:
        numbers = _two_depths(depths, task)
        return _on_ranks(task, lambda ranks: _depths(task, ranks, numbers, out))
    assert out is not None, "given without depths"
    if per_step:
        return _on_ranks(task, lambda ranks: _per_step(task, ranks, out), as_the_run=True)
    if in_flight:
        return _on_ranks(task, lambda ranks: _units_in_flight(task, ranks, out, idle))
    if started > 1:
        return _on_ranks(task, lambda ranks: _transfers(task, ranks, out, sizes))
    return _on_ranks(task, lambda ranks: _units(task, ranks, out))


def _in_mode(name: str) -> tuple[str, ...]:
    """Overrides that put all layers into a mode; "selective" alone has the run's own list."""
    from ppruntime.recompute import mode_overrides

    found = ("ac.mode=selective",) if name == "selective" else mode_overrides(name)
    return ("ac.layer_modes=default", *found)


@dataclass(frozen=True, slots=True)
class _Task:
    """What is timed, and how often."""

    config: Config
    configs: Mapping[str, Config]
    """The same with each AC mode, by its name."""
    ranks_started: int
    samples: int
    few_samples: bool

    def add(self, path: Path, *, transport: str = "idle", **rows: Sequence[Row]) -> Calibration:
        """Adds the rows to the file, which it gives."""
        from ppruntime.projection.calibration_file import calibration_of, merged, write_calibration

        new = calibration_of(
            self.config,
            few_samples=self.few_samples,
            transport=transport,
            **rows,  # type: ignore[arg-type]
        )
        known = merged(path, new)
        write_calibration(known, path)
        return known


def _on_ranks(task: _Task, act: Callable[[Ranks], None], *, as_the_run: bool = False) -> int:
    """Joins the ranks, as those of the run where several started, and leaves them after `act`."""
    import torch

    from ppruntime.ranks import Layout, join, leave

    config = task.config
    torch.set_num_threads(config.run.num_threads)
    layout = Layout(1, 1, 1)
    if task.ranks_started > 1 or as_the_run:
        layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
    use_cuda = config.run.device == "cuda" or (
        config.run.device == "auto" and torch.cuda.is_available()
    )
    ranks = join(layout, use_cuda=use_cuda, timeout_seconds=config.fault.init_timeout_seconds)
    try:
        act(ranks)
    finally:
        leave()
    return 0


def _units(task: _Task, ranks: Ranks, out: Path) -> None:
    """Each unit's row is written once it is there: what ends the command early loses one unit."""
    from ppruntime.projection.calibrate import optimizer_row, unit_rows

    _say(task, ranks)
    for row, held in unit_rows(task.configs, ranks, task.samples):
        task.add(out, units=[row], memory=[held])
        _print_unit(row, held)
    task.add(out, per_step=[optimizer_row(task.config, ranks, task.samples)])


def _units_in_flight(task: _Task, ranks: Ranks, out: Path, idle: Path | None) -> None:
    """Both ranks time all units, so that both compute; rank 0's times count."""
    from ppruntime.config import one_transport
    from ppruntime.projection.calibrate import unit_rows
    from ppruntime.projection.calibrate_traffic import Traffic, largest_boundary_bytes
    from ppruntime.projection.calibration import read_calibration
    from ppruntime.projection.calibration_file import slowdown_row

    num_bytes, kind = largest_boundary_bytes(task.config), one_transport(task.config)
    beside = f"messages of {num_bytes:,} bytes both ways on {kind}"
    if ranks.rank == 0:
        _say(task, ranks)
    with Traffic(task.config, ranks, num_bytes) as traffic:
        for row, _ in unit_rows(task.configs, ranks, task.samples, beside=beside):
            if ranks.rank == 0:
                known = task.add(out, transport=kind, units=[row])
                _print_unit(row)
    if ranks.rank:
        return
    print(f"{traffic.num_messages:,} {beside} meanwhile")
    if idle is not None:
        slowdown = slowdown_row(read_calibration(idle), known)
        task.add(idle, slowdowns=[slowdown])
        print(f"{100 * slowdown.both_ways:.2f} % longer: {slowdown.source}; added to {idle}")


def _print_unit(row: UnitTimes, held: HeldBytes | None = None) -> None:
    print(
        f"{row.unit:<32} {row.ac_mode:<10} F {1e3 * row.forward_s:9.3f}"
        f"  I {1e3 * row.input_grad_s:9.3f}  W {1e3 * row.weight_grad_s:9.3f} ms"
        + (f"  keeps {held.num_bytes / 1e6:.3f} MB" if held else ""),
        flush=True,
    )


def _transfers(task: _Task, ranks: Ranks, out: Path, sizes: tuple[int, ...]) -> None:
    from ppruntime.projection.calibrate import transfer_rows

    rows = transfer_rows(task.config, ranks, sizes, task.samples)
    if ranks.rank:
        return
    _say(task, ranks)
    for row in rows:
        print(f"{row.link} {row.num_bytes:>12,} bytes {1e3 * row.seconds:9.3f} ms one way")
    task.add(out, transfers=rows)


def _per_step(task: _Task, ranks: Ranks, out: Path) -> None:
    from ppruntime.projection.calibrate_step import per_step_rows

    if ranks.rank == 0:
        _say(task, ranks)

    def tell(num_steps: int, seconds: float) -> None:
        if ranks.rank == 0 and (num_steps < 3 or num_steps % 10 == 0):
            print(f"step {num_steps}, {seconds:.2f} s of it timed or in the pipeline", flush=True)

    rows = per_step_rows(task.config, ranks, task.samples, tell=tell)
    if ranks.rank:
        return
    for row in rows:
        print(f"{row.name:<10} {1e3 * row.seconds:9.3f} ms a step; {row.source}")
    task.add(out, per_step=rows)


def _two_depths(text: str, task: _Task) -> tuple[int, int]:
    from ppruntime.projection.calibration import LEAST_SAMPLES

    if task.samples < LEAST_SAMPLES and not task.few_samples:
        raise ProjectionError(
            f"--samples {task.samples} is too few for a median and a 95th percentile; take "
            f"{LEAST_SAMPLES} or more, or say --few-samples"
        )
    numbers = _whole_numbers("--depths", text)
    if len(numbers) != 2:
        raise ProjectionError(f"--depths {text!r} is not two depths; write such as 4,8")
    return numbers


def _depths(task: _Task, ranks: Ranks, numbers: tuple[int, int], out: Path | None) -> None:
    from msgspec import to_builtins

    from ppruntime.launch.records import write_record
    from ppruntime.models.dims import counts
    from ppruntime.projection.calibrate import depths
    from ppruntime.projection.calibration import LEAST_SAMPLES
    from ppruntime.projection.calibration_file import calibration_of

    config, samples = task.config, task.samples
    label = "measured" if samples >= LEAST_SAMPLES else f"assumed: {samples} samples only"

    def tell(depth: int, seconds: float, p95: float) -> None:
        print(
            f"{depth:>3} layers {1e3 * seconds:10.3f} ms a micro-batch, 95 % within "
            f"{1e3 * p95:.3f} ms ({label})",
            flush=True,
        )

    _say(task, ranks)
    found = depths(config, ranks, *numbers, samples, tell=tell)
    print(f"one layer  {1e3 * found.layer_s:10.3f} ms (modelled: what layers between them take)")
    tokens = config.train.micro_batch_size * config.train.seq_len
    rate = counts(config.model.dims).flops_per_token * tokens / found.whole_s
    print(
        f"{found.num_layers:>3} layers {1e3 * found.whole_s:10.3f} ms a micro-batch, "
        f"{rate / 1e12:.4g} TFLOP/s by 6N (modelled: all layers as those, no pipeline, nothing "
        "that comes once a step)"
    )
    if out is not None:
        head = to_builtins(calibration_of(config, few_samples=True, transport="idle"))
        kept = ("command", "device", "versions", "date", "model", "seq_len", "routing")
        modelled = {"layer_s": found.layer_s, "whole_s": found.whole_s, "flops_per_s": rate}
        write_record(out, {k: head[k] for k in kept} | asdict(found) | modelled)


def _say(task: _Task, ranks: Ranks) -> None:
    train, layout = task.config.train, ranks.layout
    print(
        f"{task.config.model.name} on {ranks.device}: {train.micro_batch_size} x {train.seq_len:,} "
        f"tokens, {train.precision}, pp {layout.pp} x dp {layout.dp} x ep {layout.ep}, "
        f"{task.samples} samples each",
        flush=True,
    )


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise ProjectionError(f"{option} {text!r} is not whole numbers above 0, such as 4,8")
    return tuple(map(int, parts))

"""`ppruntime bench`: measurements, each a ratio to a baseline of the same run. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from ppruntime.launch.records import run_python
from ppruntime.launch.whole_numbers import MaybeWholes, Whole

app = App(
    name="bench",
    help="Measure: orders, transports, pipelines, layers, experts, residuals.",
    default_parameter=Parameter(negative=""),
)

Rest = Annotated[str, Parameter(allow_leading_hyphen=True, help="See --help of the bench itself.")]


@app.command
def schedules(
    *,
    only: list[Literal["rig", "torch", "executor"]] | None = None,
    orders: list[str] | None = None,
    ranks: Whole = 4,
    micro_batches: Whole = 16,
    op_ms: float = 20.0,
    latencies_ms: list[float] | None = None,
    steps: Whole = 3,
    torch_steps: Whole = 7,
    out: Path = Path("docs/bench/schedules.json"),
) -> int:
    """Runs orders on stages that sleep: measured steps against the timeline's and torch's.

    Needs no GPU; a quiet machine of two cores. Gives 1 if a bar is missed.

    Parameters
    ----------
    only
        Part to run, may be repeated; by default all: rig (steps against the timeline), torch
        (against torch.distributed.pipelining), executor (its own cost).
    orders
        Order to run, may be repeated; by default all.
    ranks
        Pipeline ranks, a process each.
    micro_batches
        Micro-batches a step.
    op_ms
        Time of one F, I or W of a stage; a whole backward takes twice that.
    latencies_ms
        Injected latency of a transfer between ranks, may be repeated; by default 0, 5, 15 and 30.
    steps
        Steps a case of the rig; the median counts.
    torch_steps
        Steps of ours and of torch's, in turn.
    out
        JSON file to write.
    """
    from ppruntime.launch.bench_schedules import PARTS, Options, run
    from ppruntime.schedules import NAMES

    return run(
        Options(
            only=tuple(only) if only else PARTS,
            orders=tuple(orders) if orders else NAMES,
            ranks=ranks,
            micro_batches=micro_batches,
            op_ms=op_ms,
            latencies_ms=tuple(latencies_ms) if latencies_ms else (0.0, 5.0, 15.0, 30.0),
            steps=steps,
            torch_steps=torch_steps,
            out=out,
        )
    )


@app.command(help_flags=[])
def transports(*arguments: Rest) -> int:
    """Moves boundaries between two GPUs by every transport."""
    return _module("bench_transports", arguments)


@app.command(help_flags=[])
def pipeline(*arguments: Rest) -> int:
    """Runs pipeline steps: orders and transports against the timeline, nccl and torch's runtime."""
    return _module("bench_pipeline", arguments)


@app.command(help_flags=[])
def layers(*arguments: Rest) -> int:
    """Runs the layers of a model on one GPU."""
    return _module("bench_layers", arguments)


@app.command(help_flags=[])
def moe(*arguments: Rest) -> int:
    """Runs experts and their dispatch."""
    return _module("bench_moe", arguments)


@app.command(help_flags=[])
def memory(*arguments: Rest) -> int:
    """Trains with each knob that saves memory: peaks against the plan's, steps against off's."""
    return _module("bench_memory", arguments)


@app.command
def residuals(
    *,
    seeds: MaybeWholes = None,
    steps: Whole = 250,
    out: Path = Path("docs/bench/residuals.json"),
) -> int:
    """Trains the tiny model on a CPU with each residual type: how they learn beside each other.

    Gives 1 if a run fails.

    Parameters
    ----------
    seeds
        Seed of weights and data order, may be repeated; by default 1 and 2.
    steps
        Steps of each run, 25 at least.
    out
        JSON file to write.
    """
    from ppruntime.launch.bench_residuals import run

    return run(seeds=seeds or (1, 2), steps=steps, out=out)


@app.command
def kernels(
    *overrides: str,
    steps: Whole = 200,
    only: list[Literal["reference", "kernels", "fp8", "seed"]] | None = None,
    limit_seconds: float | None = None,
    config: Path | None = None,
    out: Path = Path("docs/bench/kernel-losses.json"),
) -> int:
    """Trains four layers with the references, with kernels, with FP8: how their losses compare.

    Gives 1 if a run fails or the limit cuts it, or if kernels are farther from the references than
    twice what another seed is, once the record has all three.

    Parameters
    ----------
    overrides
        section.key=value, in the place of the four layers at full width.
    steps
        Steps of each run, 40 at least.
    only
        Run to make, may be repeated, in the order given; by default all: reference, kernels, fp8
        and seed, the kernels from another seed. What the record has of the others is kept.
    limit_seconds
        No run is begun after that, one that runs is ended and recorded as far as it came.
        Default: none.
    config
        File to start from; default: launch/configs/v41-proxy-8.toml.
    out
        JSON file to write, or to add to.
    """
    from ppruntime.launch import bench_kernel_losses as bench

    chosen = overrides or bench.FOUR_LAYERS
    return bench.run(
        steps=steps,
        overrides=chosen,
        config=config or bench.CONFIG,
        out=out,
        only=only or tuple(bench.PARTS),
        limit_seconds=limit_seconds,
    )


def _module(name: str, arguments: tuple[str, ...]) -> int:
    """As a module of its own, since these benches start themselves again, once a rank."""
    return run_python(["-m", f"ppruntime.launch.{name}", *arguments])

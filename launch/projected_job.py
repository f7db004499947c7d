"""A projected run on a command line: files and overrides, and the job that they and options make.

What `project` and `simulate` share. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter

from ppruntime.launch.project_numbers import job_numbers, job_of
from ppruntime.launch.run_files import files_and_overrides
from ppruntime.projection.projector import Job, Number, ProjectionError, positive

if TYPE_CHECKING:
    from ppruntime.config import Config

PLAN_OF_RECORD = Path(__file__).parent / "configs" / "v41-flash-pp16.toml"
"""The run whose batch, order and model count where no file is given."""

Projected: TypeAlias = Annotated[
    str,
    Parameter(
        help="The run: TOML files, later ones on top, and section.key=value texts; without a file "
        "the shipped v41-flash-pp16.toml. Its parallel.dp follows from --gpus."
    ),
]


@dataclass(frozen=True, slots=True)
class AskedJob:
    """A run on so many GPUs, and what it is to train."""

    config: Config
    inputs: Mapping[str, Number]
    """The job's numbers, each with its source."""

    @property
    def job(self) -> Job:
        return job_of(self.inputs)


def asked_job(
    arguments: Sequence[str],
    *,
    gpus: int | None,
    tokens: float,
    peak_flops: float,
    is_pipeline: bool = True,
    global_batch_tokens: float | None = None,
    active_parameters: float | None = None,
    frozen_parameters: float = 0.0,
    adapter_parameters: float = 0.0,
) -> AskedJob:
    """What the words say; `gpus` None: as many as the run has. Raises ProjectionError for what is
    said twice, and for GPUs that are no whole pipelines where the run's make the batch."""
    from ppruntime.config import load

    positive("--tokens", tokens)
    positive("--peak-flops", peak_flops)
    files, overrides = files_and_overrides(arguments)
    files = files or [str(PLAN_OF_RECORD)]
    config = load(files, overrides)
    if global_batch_tokens is not None:
        positive("--global-batch-tokens", global_batch_tokens)
    if gpus is not None:
        if any(override.partition("=")[0].strip() == "parallel.dp" for override in overrides):
            raise ProjectionError(
                "--gpus and parallel.dp say the same thing twice; leave one of them out"
            )
        dp = replicas(config, gpus, whole=is_pipeline or global_batch_tokens is None)
        if dp:
            config = load(files, [*overrides, f"parallel.dp={dp}"])
    if is_pipeline and global_batch_tokens is not None:
        raise ProjectionError(
            "--global-batch-tokens does not say how a pipeline makes its batch; set "
            "train.num_micro_batches instead"
        )
    inputs = job_numbers(
        config,
        run=", ".join([*(Path(file).name for file in files), *overrides]),
        gpus=gpus,
        tokens=tokens,
        peak_flops=peak_flops,
        global_batch_tokens=global_batch_tokens,
        active_parameters=active_parameters,
        frozen_parameters=frozen_parameters,
        adapter_parameters=adapter_parameters,
    )
    return AskedJob(config, inputs)


def replicas(config: Config, gpus: int, *, whole: bool) -> int:
    """Pipelines side by side on so many GPUs; 0 where the GPUs are not whole ones and need not."""
    positive("--gpus", gpus)
    pp, ep = config.pp.size, config.parallel.ep
    if gpus % (pp * ep) == 0:
        return gpus // (pp * ep)
    if not whole:
        return 0
    below, above = gpus // (pp * ep) * pp * ep, -(-gpus // (pp * ep)) * pp * ep
    nearest = f"{below:,} or {above:,}" if below else f"{above:,}"
    raise ProjectionError(
        f"{gpus:,} GPUs are not whole pipelines of pp.size {pp} x parallel.ep {ep} = {pp * ep};"
        f" use {nearest}, change pp.size or parallel.ep, or give an MFU, a step or days with "
        "--global-batch-tokens"
    )

"""`ppruntime bench residuals`: short runs of the tiny model, each residual type, and their losses.

Shows how the types learn beside each other and beside another seed, on the Python library's text.
Says nothing of full-size models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import torch

from ppruntime.launch.bench_training import trained
from ppruntime.launch.records import write_record
from ppruntime.metrics import StepMetrics
from ppruntime.models.dims import changed, counts, preset

TYPES = ("mhc", "gated", "layerscale")
CONFIG = Path(__file__).resolve().parent / "configs" / "tiny.toml"
_OVERRIDES = (
    "pp.size=1",
    "train.num_micro_batches=1",
    "train.micro_batch_size=4",
    "train.seq_len=32",
    "train.eval_steps=16",
    "optim.warmup_steps=25",
    "run.tensorboard=false",
    "run.log_interval=1000",
)
_LAST = 50
"""Steps whose mean loss stands for the end of a run."""


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    residual_type: str
    seed: int
    parameters: int
    """Backbone and Engram."""
    first_loss: float
    last_loss: float
    """Mean of the last 50 steps, or of all if there are fewer."""
    val_loss: float
    """After the last step, on documents that were held out."""
    seconds: float
    """All steps together."""
    losses: tuple[float, ...]
    """Of every tenth step, the first included."""


def run(*, seeds: Sequence[int], steps: int, out: Path) -> int:
    """Trains every type from every seed, prints a table and writes it to `out`.

    Gives 1 if a run did not end well.
    """
    command = " ".join(["ppruntime bench residuals", *(f"--seeds {s}" for s in seeds)])
    found: list[Learned] = []
    print(f"{'residual':<12}{'seed':>5}{'first':>9}{'last 50':>9}{'held out':>10}{'s':>8}")
    for seed in seeds:
        for residual_type in TYPES:
            metrics = _train(residual_type, seed, steps)
            if metrics is None:
                return 1
            found.append(_learned(residual_type, seed, metrics))
            row = found[-1]
            print(
                f"{residual_type:<12}{seed:>5}{row.first_loss:>9.4f}{row.last_loss:>9.4f}"
                f"{row.val_loss:>10.4f}{row.seconds:>8.1f}",
                flush=True,
            )
    record = {
        "command": f"{command} --steps {steps}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "cpu",
        "versions": {"torch": str(torch.__version__)},
        "config": ["launch/configs/tiny.toml", *_OVERRIDES, f"train.steps={steps}"],
        "runs": [asdict(row) for row in found],
    }
    write_record(out, record)
    print(f"results in {out}")
    return 0


def _train(residual_type: str, seed: int, steps: int) -> list[StepMetrics] | None:
    own = (
        f"model.residual_type={residual_type}",
        f"train.seed={seed}",
        f"train.steps={steps}",
        f"train.eval_interval={steps}",
    )
    return trained(CONFIG, [*_OVERRIDES, *own])


def _learned(residual_type: str, seed: int, metrics: Sequence[StepMetrics]) -> Learned:
    losses = [step.loss for step in metrics if step.loss is not None]
    assert len(losses) == len(metrics), "a run with a loss that is no number does not end well"
    val_loss = metrics[-1].val_loss
    assert val_loss is not None, "the last step is evaluated"
    total = counts(changed(preset("tiny"), residual_type=residual_type))
    return Learned(
        residual_type,
        seed,
        total.parameters + total.engram_parameters,
        losses[0],
        fmean(losses[-_LAST:]),
        val_loss,
        sum(step.step_seconds for step in metrics),
        tuple(losses[::10]),
    )

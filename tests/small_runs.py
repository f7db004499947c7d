"""A training run of the tiny model that takes a second, for tests of whole runs."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

CONFIG = Path(__file__).resolve().parent.parent / "launch" / "configs" / "tiny.toml"
SMALL = (
    "train.seq_len=16",
    "train.micro_batch_size=1",
    "train.num_micro_batches=3",
    "data.type=counting",
    "optim.warmup_steps=1",
    "run.tensorboard=false",
)


def train(rank: int, run_dir: str, overrides: tuple[str, ...]) -> tuple[int, str, str]:
    """One rank's exit code, standard output and standard error. For `run_ranks`."""
    from ppruntime.config import load
    from ppruntime.session import run

    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = run(load([CONFIG], [*SMALL, f"run.dir={run_dir}", *overrides]))
    return code, out.getvalue(), err.getvalue()

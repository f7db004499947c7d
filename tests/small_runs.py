"""A training run of the tiny model that takes a second, for tests of whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

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


@contextmanager
def trainer_of(overrides: tuple[str, ...]) -> Iterator[tuple[Any, Any, Any]]:
    """A trainer, its data and its ranks, for one rank of a started world."""
    import torch.distributed as dist

    from ppruntime.build import build_pipeline
    from ppruntime.config import load
    from ppruntime.data.batches import open_data
    from ppruntime.ranks import Layout, join, leave
    from ppruntime.trainer import Trainer

    config = load([CONFIG], [*SMALL, *overrides])
    layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
    ranks = join(layout, use_cuda=False, timeout_seconds=120)
    pipeline = build_pipeline(config, ranks)
    try:
        yield Trainer(config, ranks, pipeline), open_data(config), ranks
    finally:
        dist.barrier()
        pipeline.transport.close()
        leave()


def whole(tensor: Any) -> Any:
    """A copy of a parameter or gradient with the rows of all ranks. A collective."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def found_in_checkpoint(path: str, overrides: tuple[str, ...], save_to: str | None) -> Any:
    """Everything that this rank finds in a checkpoint, whole; saved again if wanted."""
    from ppruntime import checkpoint

    with trainer_of(overrides) as (trainer, _, ranks):
        tensors = trainer.state_tensors()
        training = checkpoint.load(Path(path), tensors, group=ranks.world_group)
        if save_to is not None:
            checkpoint.save(Path(save_to), tensors, training, group=ranks.world_group)
        return {name: whole(tensor) for name, tensor in tensors.items()}

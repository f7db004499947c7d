"""A training run of the tiny model that takes a second, for tests of whole runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from ppruntime.metrics import StepMetrics

CONFIG = Path(__file__).resolve().parent.parent / "launch" / "configs" / "tiny.toml"
SMALL = (
    "train.seq_len=16",
    "train.micro_batch_size=1",
    "train.num_micro_batches=3",
    "data.type=counting",
    "optim.warmup_steps=1",
    "run.tensorboard=false",
)
ON_GPUS = (
    "model.hidden_size=256",
    "train.precision=bf16",
    "train.seq_len=64",
    "optim.min_lr=3e-3",
    "run.device=cuda",
    "run.memory_timeline=false",
)
GPU_SECONDS = 100
"""Most that a run on GPUs may take, or another call of a pool there: the first one starts processes
on a busy machine and compiles kernels."""


def train(rank: int, run_dir: str, overrides: tuple[str, ...]) -> tuple[int, str, str]:
    """One rank's exit code, standard output and standard error. For `run_ranks`."""
    from ppruntime.config import load
    from ppruntime.session import run

    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = run(load([CONFIG], [*SMALL, f"run.dir={run_dir}", *overrides]))
    return code, out.getvalue(), err.getvalue()


def train_alone(rank: int, run_dir: str, overrides: tuple[str, ...]) -> tuple[int, str, str]:
    """`train` as rank 0 without a launcher, so that its world is this process; other ranks do
    nothing, and say that they have done it."""
    if rank:
        return 0, "", ""
    with patch.dict(os.environ):
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        return train(rank, run_dir, overrides)


def steps_on_gpus(
    num_ranks: int, run_dir: Path, overrides: tuple[str, ...]
) -> tuple[StepMetrics, ...]:
    """The steps of a run on one GPU or two, all in one pair of processes. In the test process."""
    import torch
    from rank_pool import run_in_pool

    from ppruntime.metrics import read_metrics

    function = train if num_ranks > 1 else train_alone
    pool = max(num_ranks, min(2, torch.cuda.device_count()))
    options = (*ON_GPUS, *overrides)
    told = run_in_pool(pool, function, str(run_dir), options, timeout_seconds=GPU_SECONDS)
    assert [code for code, _, _ in told] == [0] * pool, told
    return read_metrics(run_dir / "metrics.jsonl")


def checkpoint_digest(run_dir: Path) -> str:
    """Of every tensor that a run's checkpoints hold, by name, bit for bit. Not of the files: what
    stands around the tensors there comes in an order of its own at every write."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    shards = sorted(run_dir.glob("ckpt/**/*.safetensors"))
    assert shards, f"no checkpoint below {run_dir}"
    for shard in shards:
        for name, tensor in sorted(load_file(shard).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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

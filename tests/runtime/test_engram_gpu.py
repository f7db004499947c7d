"""Engram tables on GPUs: over two of them, read ahead on a stream, in host memory."""

from __future__ import annotations

import pytest
import torch
from small_runs import train

from ppruntime.metrics import read_metrics

WIDE = (
    "model.hidden_size=256",
    "train.precision=bf16",
    "train.seq_len=64",
    "train.steps=3",
    "optim.min_lr=3e-3",
    "run.device=cuda",
)
ALONE = ("pp.size=1", "train.num_micro_batches=4")
SPREAD = ("pp.size=1", "parallel.dp=2", "train.num_micro_batches=2")
AHEAD = ("engram.lookups_ahead=1",)


def steps_of(run_ranks, num_ranks: int, run_dir, overrides: tuple[str, ...]):
    options = (*WIDE, *overrides)
    told = run_ranks(num_ranks, train, str(run_dir), options, timeout_seconds=300)
    assert [code for code, _, _ in told] == [0] * num_ranks, told
    return read_metrics(run_dir / "metrics.jsonl")


def assert_near(steps, others, rel: float):
    for step, other in zip(steps, others, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=rel)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=10 * rel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_on_a_gpu_lookups_ahead_are_bitwise_and_tables_on_the_host_within_rounding(
    kernel, place, tmp_path, run_ranks
):
    options = (*ALONE, f"kernels.engram={kernel}")
    plain = steps_of(run_ranks, 1, tmp_path / "plain", options)
    where = (f"engram.tables={place}",)
    here = steps_of(run_ranks, 1, tmp_path / "here", (*options, *where))
    ahead = steps_of(run_ranks, 1, tmp_path / "ahead", (*options, *where, *AHEAD))
    assert [s.loss for s in ahead] == [s.loss for s in here]
    assert [s.grad_norm for s in ahead] == [s.grad_norm for s in here]
    assert_near(here, plain, 1e-3)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "more",
    [(), AHEAD, (*AHEAD, "engram.tables=host", "kernels.engram=triton", "ac.mode=full")],
    ids=str,
)
def test_two_gpus_with_half_of_a_table_each_train_as_one_does(more, tmp_path, run_ranks):
    alone = steps_of(run_ranks, 1, tmp_path / "alone", ALONE)
    assert_near(steps_of(run_ranks, 2, tmp_path / "two", (*SPREAD, *more)), alone, 5e-3)

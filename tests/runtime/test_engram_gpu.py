"""Engram tables on GPUs: over two of them, read ahead on a stream, in host memory."""

from __future__ import annotations

import pytest
import torch

STEPS = ("train.steps=3",)
ALONE = ("pp.size=1", "train.num_micro_batches=4")
SPREAD = ("pp.size=1", "parallel.dp=2", "train.num_micro_batches=2")
AHEAD = ("engram.lookups_ahead=1",)


def assert_near(steps, others, rel: float):
    for step, other in zip(steps, others, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=rel)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=10 * rel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_on_a_gpu_lookups_ahead_are_bitwise_and_tables_on_the_host_within_rounding(
    kernel, place, gpu_steps
):
    options = (*STEPS, *ALONE, f"kernels.engram={kernel}")
    where = (f"engram.tables={place}",)
    here = gpu_steps(1, *options, *where)
    ahead = gpu_steps(1, *options, *where, *AHEAD)
    assert [s.loss for s in ahead] == [s.loss for s in here]
    assert [s.grad_norm for s in ahead] == [s.grad_norm for s in here]
    assert_near(here, gpu_steps(1, *options, "engram.tables=device"), 1e-3)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "more",
    [(), AHEAD, (*AHEAD, "engram.tables=host", "kernels.engram=triton", "ac.mode=full")],
    ids=str,
)
def test_two_gpus_with_half_of_a_table_each_train_as_one_does(more, gpu_steps):
    alone = gpu_steps(1, *STEPS, *ALONE, "kernels.engram=reference", "engram.tables=device")
    assert_near(gpu_steps(2, *STEPS, *SPREAD, *more), alone, 5e-3)

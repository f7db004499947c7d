"""Muon on GPUs: its two updates against fp64 and the CPU's, runs against the CPU's and over two."""

from __future__ import annotations

import math

import naive_muon
import pytest
import torch

from ppruntime.optim.muon import newton_schulz
from ppruntime.optim.sinkhorn import sinkhorn_step_

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RUN = (
    "model.num_layers=2",
    "model.compress_ratios=[0, 1]",
    "model.kv_sources=[1]",
    "model.index_sources=[1]",
    "model.candidate_source=1",
    "model.engram_layers=[1]",
    "optim.type=muon",
    "optim.eps=1e-20",
    "optim.lr=1e-3",
    "optim.min_lr=1e-3",
    "pp.size=1",
    "train.steps=3",
)


def assert_near(steps, others, rel):
    assert len(steps) == len(others) == 3
    for step, other in zip(steps, others, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=rel)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=10 * rel)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(512, 1280), (5120, 256), (3, 333, 1000)], ids=str)
def test_on_a_gpu_matrices_become_orthogonal_as_in_fp64_and_bits_repeat(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = torch.stack([naive_muon.newton_schulz(m) for m in matrices.view(-1, *shape[-2:])])
    for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        found = newton_schulz(matrices.cuda(), dtype)
        assert found.dtype is dtype
        error = (found.double().cpu().view(exact.shape) - exact).norm() / exact.norm()
        assert error < allowed
        assert torch.equal(found, newton_schulz(matrices.cuda(), dtype))
    zeros = torch.zeros(shape, device="cuda")
    assert torch.equal(newton_schulz(zeros, torch.bfloat16), zeros.bfloat16())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [777, 9000])  # of 1,024 numbers: one piece, and three
def test_on_a_gpu_a_table_moves_as_on_the_cpu(rows):
    generator = torch.Generator().manual_seed(0)
    weight, momentum, grad = (torch.randn(rows, 1024, generator=generator) for _ in range(3))
    grad[::3], momentum[::3] = 0, 0

    def moved(device):
        w, m = weight.to(device, copy=True), momentum.to(device, copy=True)
        for _ in range(2):
            sinkhorn_step_(
                w, m, grad.to(device), num_rows=rows, lr=1e-2, beta=0.95, add_up=lambda _: None
            )
        return w.cpu(), m.cpu()

    for found, expected in zip(moved("cuda"), moved("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7)
    assert math.isfinite(moved("cuda")[0].sum())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("more", [(), ("engram.tables=host",)], ids=str)
def test_a_run_on_a_gpu_is_the_cpus_to_bf16(more, gpu_steps):
    on_gpu = gpu_steps(1, *RUN, *more)
    assert_near(on_gpu, gpu_steps(1, *RUN, "run.device=cpu"), 1e-2)
    assert on_gpu[-1].loss < on_gpu[0].loss


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("spread", ["parallel.dp=2", "parallel.ep=2"])
def test_two_gpus_train_as_one_does(spread, gpu_steps):
    alone = gpu_steps(1, *RUN, "train.num_micro_batches=4")
    assert_near(gpu_steps(2, *RUN, spread, "train.num_micro_batches=2"), alone, 1e-2)

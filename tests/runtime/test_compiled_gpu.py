"""`kernels.compile` on a GPU: by torch's own compiler, with the references and with the kernels."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
RUN = (
    "model.num_layers=2",
    "model.compress_ratios=[0, 1]",
    "model.kv_sources=[1]",
    "model.index_sources=[1]",
    "model.candidate_source=1",
    "model.engram_layers=[1]",
    "model.num_heads=16",
    "optim.lr=3e-4",
    "optim.min_lr=3e-4",
    "pp.size=1",
    "train.steps=3",
)
KERNELS = tuple(
    f"kernels.{name}=auto"
    for name in ("indexer", "mhc", "rope", "grouped_output", "norm", "router", "swiglu", "engram")
)


@pytest.mark.parametrize(
    "overrides",
    [(), ("pp.schedule=zb_h1",), (*KERNELS, "train.eval_interval=3", "train.eval_steps=1")],
    ids=["references", "weight gradients that wait", "kernels and an evaluation"],
)
def test_a_compiled_run_is_the_plain_one_but_for_roundings(overrides, gpu_steps):
    plain = gpu_steps(1, *RUN, *overrides)
    compiled = gpu_steps(1, *RUN, *overrides, "kernels.compile=true")
    assert len(plain) == len(compiled) == 3
    for step, other in zip(compiled, plain, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=5e-3)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=5e-2)
        if other.val_loss is not None:
            assert step.val_loss == pytest.approx(other.val_loss, rel=5e-3)

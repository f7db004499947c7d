"""`kernels.compile`: torch.compile of what is plain PyTorch in a unit."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from small_runs import train
from toy_units import Half

from ppruntime.metrics import read_metrics
from ppruntime.models.fp8_linear import Fp8Linear, Fp8LinearOptions
from ppruntime.models.kernels.fp8_linear_backends import LinearBackend
from ppruntime.models.linear import Linear, WeightGradQueue, set_queue
from ppruntime.wrap import wrap_units

# Torch's compiler looks at everything, also at what warns when it is looked at.
pytestmark = pytest.mark.filterwarnings("ignore")


def steps(run_dir: Path, *overrides: str):
    """Losses and norms of a run of one process."""
    code, out, err = train(0, str(run_dir), ("pp.size=1", "train.steps=2", *overrides))
    assert code == 0, out + err
    found = read_metrics(run_dir / "metrics.jsonl")
    return [(step.loss, step.grad_norm, step.val_loss) for step in found]


@pytest.fixture
def compiled_parts(monkeypatch):
    """The parts that were compiled, by a compiler that changes no operation."""
    parts = []

    def kept(graph, inputs):
        parts.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=kept))
    torch._dynamo.reset()
    yield parts
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "overrides",
    [
        ("pp.schedule=zb_v", "train.indexer_loss_weight=0.01"),
        pytest.param(
            ("train.precision=bf16", "train.eval_interval=1", "train.eval_steps=1"),
            marks=pytest.mark.long,
        ),
        ("model.name=tiny-v4", "ac.mode=full_moe"),
    ],
    ids=[
        "weight gradients that wait, indexers that learn",
        "bf16 and an evaluation",
        "V4, some of it recomputed",
    ],
)
def test_units_in_compiled_parts_have_the_bits_of_plain_ones(
    overrides, tmp_path, compiled_parts, monkeypatch
):
    waited, add = [], WeightGradQueue.add
    monkeypatch.setattr(
        WeightGradQueue, "add", lambda queue, task: (waited.append(task), add(queue, task))
    )
    plain = steps(tmp_path / "plain", *overrides)
    assert not compiled_parts
    num_plain = len(waited)
    assert steps(tmp_path / "compiled", "kernels.compile=true", *overrides) == plain
    assert len(compiled_parts) > 5
    assert len(waited) == 2 * num_plain  # as many weight gradients waited for their W


@pytest.mark.parametrize("in_fp8", [False, True], ids=["Linear", "Fp8Linear"])
def test_a_weight_gradient_waits_also_where_it_did_not_when_the_layer_was_compiled(
    in_fp8, compiled_parts
):
    layer = Linear(256, 128)
    if in_fp8:
        layer = Fp8Linear(layer, Fp8LinearOptions(backend=LinearBackend.REFERENCE))
    weight, queue, x = layer.weight, WeightGradQueue(), torch.randn(3, 256)
    torch.nn.init.normal_(weight)
    set_queue(layer, queue)
    run = torch.compile(lambda x: layer(x * 2).square().sum())
    run(x.requires_grad_()).backward()
    expected, weight.grad = weight.grad, None
    loss = run(x)
    queue.deferring = True  # set by an I, long after the forward
    loss.backward()
    assert weight.grad is None
    for task in queue.pop():
        task()
    assert torch.equal(weight.grad, expected)
    assert compiled_parts


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler wants g++ on a CPU")
def test_a_compiled_run_is_one_whose_roundings_differ(tmp_path):
    plain = steps(tmp_path / "plain")
    compiled = steps(tmp_path / "compiled", "kernels.compile=true")
    # Engram's gate, a square root of a size, is steep at 0: it makes 3e-4 of last bits.
    for (loss, norm, _), (plain_loss, plain_norm, _) in zip(compiled, plain, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-5)
        assert norm == pytest.approx(plain_norm, rel=3e-4)


def test_units_that_are_recomputed_stay_plain(compiled_parts):
    recomputed, compiled = Half(0), Half(1)
    wrap_units(
        [recomputed, compiled],
        recompute=[frozenset(), None],
        sharding=None,
        fp32_names=[(), ()],
        compile_units=True,
    )
    assert not hasattr(recomputed.forward, "_torchdynamo_orig_callable")
    assert hasattr(compiled.forward, "_torchdynamo_orig_callable")

"""Models with one residual stream, and with indexers that learn, in a pipeline: the bits of one
process."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from whole_model import build_units, random_batch

from ppruntime.compare import compare_metrics
from ppruntime.metrics import read_metrics
from ppruntime.models.carry import Carry
from ppruntime.models.dims import changed, preset, unit_specs
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.stage import Stage

OPTIONS = {
    "gated": {"residual_type": "gated"},
    "layerscale": {"residual_type": "layerscale"},
    "an indexer's loss": {"indexer_loss_weight": 0.5},
}
CONFIG = Path(__file__).resolve().parents[2] / "launch" / "configs" / "tiny.toml"
SEED, BALANCE_SEED = torch.tensor(1 / 37), torch.tensor(1 / 3)


def cut_into_stages(units, ends):
    """Stages of whole units that end behind the units of these numbers."""
    stages, start, received = [], 0, ()
    for index, end in enumerate(ends):
        queue, own = WeightGradQueue(), units[start : end + 1]
        for unit in own:
            set_queue(unit, queue)
        outputs = own[-1].spec.live_after
        stages.append(Stage(index, own, inputs=received, outputs=outputs, queue=queue))
        start, received = end + 1, outputs
    return stages


@pytest.mark.parametrize("option", OPTIONS)
def test_stages_with_split_backwards_have_the_bits_of_one_process(option):
    dims = changed(preset("tiny"), **OPTIONS[option])
    batch, last = random_batch(dims, 0, [(11, 6)]), len(unit_specs(dims)) - 1
    whole, carry = build_units(dims, 0), Carry()
    for unit in whole:
        carry = unit(carry, batch)
    roots = [(carry.balance_loss, BALANCE_SEED), (carry.loss, SEED)]
    if dims.indexer_learns:
        roots.append((carry.index_loss, BALANCE_SEED))
    torch.autograd.backward(*zip(*roots, strict=True))
    # Cut before the candidate source's own experts, and before the layer that selects anew.
    stages = cut_into_stages(build_units(dims, 0), (9, 12, last))
    assert ("mix" in stages[0].outputs) == (dims.residual_type == "mhc")
    assert ("trained_index_keys" in stages[1].inputs) == dims.indexer_learns
    received = ()
    for stage in stages:
        stage.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
        received = stage.forward(0, tuple(t.clone() for t in received), batch)
    grads = ()
    for stage in reversed(stages):
        grads = stage.backward_input(0, tuple(g.clone() for g in grads))
        stage.weight_grads(0)
    assert torch.equal(stages[-1].losses[0], carry.loss)
    found = [loss for stage in stages for loss in stage.index_losses]
    if dims.indexer_learns:
        assert len(found) == 2  # one with the two Full layers, one with the Reindex layer
        assert sum(found).item() == pytest.approx(carry.index_loss.item(), rel=1e-6)
    else:
        assert found == []
    found = [p.grad for stage in stages for p in stage.units.parameters()]
    for grad, expected in zip(found, (p.grad for u in whole for p in u.parameters()), strict=True):
        assert (grad is None and expected is None) or torch.equal(grad, expected)
    keys = stages[0].units[9].attention.indexer.key.weight.grad
    assert (keys is not None) == dims.indexer_learns


def train(rank: int, run_dir: str, overrides: tuple[str, ...]) -> tuple[int, str]:
    from ppruntime.config import load
    from ppruntime.session import run

    small = (
        *("train.seq_len=16", "train.micro_batch_size=1", "train.num_micro_batches=3"),
        *("train.steps=3", "train.eval_interval=default", "train.eval_steps=default"),
        *("data.type=counting", "optim.warmup_steps=1", "run.tensorboard=false"),
    )
    with redirect_stderr(StringIO()) as told:
        code = run(load([CONFIG], [*small, f"run.dir={run_dir}", *overrides]))
    return code, told.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("residual_type", ["gated", "layerscale"])
def test_a_run_over_two_ranks_has_the_losses_of_one_and_its_checkpoint_is_of_its_type(
    residual_type, tmp_path, run_ranks
):
    kind = f"model.residual_type={residual_type}"
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_ranks(1, train, str(one), ("pp.size=1", kind)) == [(0, "")]
    results = run_ranks(2, train, str(two), ("pp.size=2", "pp.schedule=zb_v", kind))
    assert [code for code, _ in results] == [0, 0]
    assert compare_metrics(one / "metrics.jsonl", two / "metrics.jsonl").first_difference is None
    ((code, told),) = run_ranks(1, train, str(one), ("pp.size=1", "train.steps=4"))
    assert code != 0
    assert f'was written with model.residual_type = "{residual_type}", this model has "mhc"' in told


@pytest.mark.long
def test_a_run_whose_indexers_learn_has_the_same_losses_over_four_ranks(tmp_path, run_ranks):
    options = ("train.indexer_loss_weight=0.1", "ac.mode=full")
    one, four = tmp_path / "one", tmp_path / "four"
    assert run_ranks(1, train, str(one), ("pp.size=1", *options)) == [(0, "")]
    cut = "pp.layers_per_stage=[2.5, 2, 1.5, 2]"
    results = run_ranks(4, train, str(four), ("pp.size=4", cut, "pp.schedule=1f1b_w", *options))
    assert [code for code, _ in results] == [0] * 4
    assert compare_metrics(one / "metrics.jsonl", four / "metrics.jsonl").first_difference is None
    steps, others = (read_metrics(path / "metrics.jsonl") for path in (one, four))
    for step, other in zip(steps, others, strict=True):
        assert step.index_loss > 0
        assert step.index_loss == pytest.approx(other.index_loss, rel=1e-6)
    assert len({step.index_loss for step in steps}) == 3

"""Models with one residual stream in a pipeline: the bits of one process, and their checkpoints."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from whole_model import build_units, random_batch

from ppruntime.compare import compare_metrics
from ppruntime.models.carry import Carry
from ppruntime.models.dims import changed, preset, unit_specs
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.stage import Stage

TYPES = ("gated", "layerscale")
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


@pytest.mark.parametrize("residual_type", TYPES)
def test_two_stages_with_split_backwards_have_the_bits_of_one_process(residual_type):
    dims = changed(preset("tiny"), residual_type=residual_type)
    batch, last = random_batch(dims, 0, [(11, 6)]), len(unit_specs(dims)) - 1
    whole, carry = build_units(dims, 0), Carry()
    for unit in whole:
        carry = unit(carry, batch)
    torch.autograd.backward((carry.balance_loss, carry.loss), (BALANCE_SEED, SEED))
    stages = cut_into_stages(build_units(dims, 0), (6, last))
    assert "mix" not in stages[0].outputs
    received = ()
    for stage in stages:
        stage.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
        received = stage.forward(0, tuple(t.clone() for t in received), batch)
    grads = ()
    for stage in reversed(stages):
        grads = stage.backward_input(0, tuple(g.clone() for g in grads))
        stage.weight_grads(0)
    assert torch.equal(stages[-1].losses[0], carry.loss)
    found = [p.grad for stage in stages for p in stage.units.parameters()]
    for grad, expected in zip(found, (p.grad for u in whole for p in u.parameters()), strict=True):
        assert (grad is None and expected is None) or torch.equal(grad, expected)


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
@pytest.mark.parametrize("residual_type", TYPES)
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

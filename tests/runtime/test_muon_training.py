"""Whole runs with Muon: against a loop in fp64, at other cuts and degrees, resumed, measured.

Bitwise over pp and from checkpoints. Over data ranks gradients are sums in another order, and
orthogonalising enlarges what differs in directions with small singular values.
"""

from __future__ import annotations

from contextlib import contextmanager

import naive_muon
import pytest
import torch
import torch.distributed as dist
from small_runs import CONFIG, SMALL, train
from torch.distributed.tensor import DTensor

from ppruntime.compare import compare_metrics
from ppruntime.config import load
from ppruntime.ledger import predict
from ppruntime.ledger_check import run_check_text
from ppruntime.memory import host_table_bytes, state_bytes
from ppruntime.metrics import read_metrics
from ppruntime.models.dims import unit_parameters, unit_specs
from ppruntime.models.update_rules import update_rule
from ppruntime.plan import cut

MUON = (
    "model.num_layers=2",
    "model.compress_ratios=[0, 1]",
    "model.kv_sources=[1]",
    "model.index_sources=[1]",
    "model.candidate_source=1",
    "model.engram_layers=[1]",
    "optim.type=muon",
    "optim.eps=1e-20",
    "optim.min_lr=3e-3",
    "train.steps=3",
    "run.log_interval=100",
)
ONE = ("pp.size=1",)
ALONE = (*ONE, "train.num_micro_batches=4")
DP2 = (*ONE, "parallel.dp=2", "train.num_micro_batches=2")
EP2 = (*ONE, "parallel.ep=2", "train.num_micro_batches=2")
V4 = (
    "model.name=tiny-v4",
    "model.kv_sources=default",
    "model.index_sources=default",
    "model.candidate_source=default",
    "model.engram_layers=default",
    "model.compress_ratios=[4, 16]",
    "model.num_hash_layers=1",
)


@contextmanager
def trainer_of(overrides: tuple[str, ...]):
    """A trainer, its data and its ranks, for one rank of a started world."""
    from ppruntime.build import build_pipeline
    from ppruntime.data.batches import open_data
    from ppruntime.ranks import Layout, join, leave
    from ppruntime.trainer import Trainer

    config = load([CONFIG], [*SMALL, *MUON, *overrides])
    layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
    ranks = join(layout, use_cuda=False, timeout_seconds=120)
    pipeline = build_pipeline(config, ranks)
    try:
        yield Trainer(config, ranks, pipeline), open_data(config), ranks
    finally:
        dist.barrier()
        pipeline.transport.close()
        leave()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run(overrides, run_ranks, run_dir, num_ranks=1):
    told = run_ranks(num_ranks, train, str(run_dir), (*MUON, *overrides))
    assert [code for code, _, _ in told] == [0] * num_ranks, told
    return run_dir / "metrics.jsonl"


# --- against a loop -------------------------------------------------------------------------------


def three_steps(rank: int, overrides: tuple[str, ...]):
    """Weights before and behind three steps, the gradients that they moved by (behind clipping), of
    this rank's part where experts are split, and the learning rates."""
    import ppruntime.trainer as module

    with trainer_of(overrides) as (trainer, data, _):
        params = trainer.pipeline.params
        before = {name: whole(param) for name, param in params.items()}
        grads: dict[str, list[torch.Tensor]] = {name: [] for name in params}
        clip = module.clip_

        def spied(found, *args):
            clip(found, *args)
            for name, param in params.items():
                if param.requires_grad:
                    grads[name].append(whole(param.grad))

        module.clip_ = spied
        lrs = [trainer.step(index, data).lr for index in range(3)]
        module.clip_ = clip
        return before, grads, lrs, {name: whole(param) for name, param in params.items()}


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [(1, ALONE), (2, DP2), (2, EP2), (1, (*ALONE, *V4))],
    ids=["one", "dp", "ep", "v4"],
)
def test_three_steps_of_a_run_are_those_of_a_loop_in_fp64(num_ranks, overrides, run_ranks):
    dims = load([CONFIG], [*SMALL, *MUON, *overrides]).model.dims
    rules = {
        f"{unit.name}.{p.name}": update_rule(dims, p)
        for unit in unit_specs(dims)
        for p in unit_parameters(dims, unit)
    }
    for before, grads, lrs, after in run_ranks(num_ranks, three_steps, overrides):
        assert before.keys() == rules.keys()
        for name, weight in before.items():
            if not grads[name]:  # an indexer's
                assert torch.equal(after[name], weight)
                continue
            rule = rules[name]
            expected = naive_muon.trained(weight, grads[name], rule, lrs, eps=1e-20)
            error = (after[name] - expected).norm() / (expected - weight).norm()
            print(f"{name:50} {rule.update.name:10} {float(error):.1e}")

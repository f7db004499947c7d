"""Whole runs with Muon: against a loop in fp64, at other cuts and degrees, resumed, measured.

Bitwise over pp and from checkpoints. Over data ranks gradients are sums in another order, and
orthogonalising enlarges what differs in directions with small singular values.
"""

from __future__ import annotations

import shutil

import naive_muon
import pytest
import torch
from small_runs import CONFIG, SMALL, found_in_checkpoint, train, trainer_of, whole

from ppruntime.compare import compare_metrics
from ppruntime.config import load
from ppruntime.ledger import predict
from ppruntime.ledger_check import run_check_text
from ppruntime.memory import host_table_bytes, state_bytes
from ppruntime.metrics import read_metrics
from ppruntime.models.dims import unit_parameters, unit_specs
from ppruntime.models.update_rules import Update, update_rule
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
BF16 = "train.precision=bf16"
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


def run(overrides, run_ranks, run_dir, num_ranks=1):
    told = run_ranks(num_ranks, train, str(run_dir), (*MUON, *overrides))
    assert [code for code, _, _ in told] == [0] * num_ranks, told
    return run_dir / "metrics.jsonl"


# --- against a loop -------------------------------------------------------------------------------


def three_steps(rank: int, overrides: tuple[str, ...]):
    """Weights before and behind three steps, the gradients that they moved by (behind clipping), of
    this rank's part where experts are split, and the learning rates."""
    import ppruntime.trainer as module

    with trainer_of((*MUON, *overrides)) as (trainer, data, _):
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
    errors: dict[Update, list[float]] = {}
    for before, grads, lrs, after in run_ranks(num_ranks, three_steps, overrides):
        assert before.keys() == rules.keys()
        for name, weight in before.items():
            if not grads[name]:  # an indexer's
                assert torch.equal(after[name], weight)
                continue
            expected = naive_muon.trained(weight, grads[name], rules[name], lrs, eps=1e-20)
            error = float((after[name] - expected).norm() / (expected - weight).norm())
            errors.setdefault(rules[name].update, []).append(error)
    assert max(errors[Update.ADAMW]) < 5e-5  # of a path of 1e-2 that starts at 1
    assert max(errors.get(Update.SINKHORN, [0])) < 5e-6
    # Eight of ten steps multiply small singular values by 3.4, two by 2: where a gradient has a
    # lower rank than its matrix has rows, so do they fp32's rounding, up to 8e4 times.
    muon = sorted(errors[Update.MUON])
    assert muon[len(muon) // 3] < 5e-6
    assert muon[-1] < 2e-3


def test_twenty_steps_learn(tmp_path, run_ranks):
    metrics = run((*ONE, "train.steps=20", "optim.lr=1e-2"), run_ranks, tmp_path / "run")
    losses = [step.loss for step in read_metrics(metrics)]
    assert max(losses[-3:]) < losses[0] - 1


# --- over cuts and data ranks ---------------------------------------------------------------------

CUTS = {
    "two ranks, inside a layer": (2, ("pp.size=2", "pp.layers_per_stage=[0.5, 1.5]"), 1, ONE),
    "weight gradients that wait, in a V": (2, ("pp.size=2", "pp.schedule=zb_v"), 1, ONE),
    "other owners of the matrices": (4, (*DP2, "pp.size=2"), 2, DP2),
    "other owners, in bf16": (4, (*EP2, BF16, "pp.size=2"), 2, (*EP2, BF16)),
}


@pytest.mark.parametrize(
    "case", [next(iter(CUTS)), *(pytest.param(c, marks=pytest.mark.long) for c in [*CUTS][1:])]
)
def test_a_cut_has_the_losses_and_norms_of_one_stage(case, tmp_path, run_ranks):
    num_ranks, overrides, num_others, others = CUTS[case]
    found = run(overrides, run_ranks, tmp_path / "cut", num_ranks)
    expected = run(others, run_ranks, tmp_path / "one", num_others)
    assert compare_metrics(found, expected).equal


@pytest.mark.parametrize("overrides", [DP2, pytest.param(EP2, marks=pytest.mark.long)], ids=str)
def test_two_data_ranks_are_near_one(overrides, tmp_path, run_ranks):
    found = run(overrides, run_ranks, tmp_path / "two", 2)
    expected = run(ALONE, run_ranks, tmp_path / "one")
    for step, other in zip(read_metrics(found), read_metrics(expected), strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-6 if step.step == 1 else 1e-5)
        assert step.grad_norm == pytest.approx(
            other.grad_norm, rel=1e-6 if step.step == 1 else 1e-4
        )


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (2, ("pp.size=2",)),
        pytest.param(2, DP2, marks=pytest.mark.long),
        pytest.param(
            4,
            ("pp.size=2", "parallel.ep=2", "train.num_micro_batches=2", "pp.offload_masters=true"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["pp", "dp", "pp, ep, masters that leave"],
)
def test_bf16_stays_near_fp32(num_ranks, overrides, tmp_path, run_ranks):
    more = ("train.precision=bf16", "train.num_micro_batches=4")
    found = run((*more, *overrides), run_ranks, tmp_path / "bf16", num_ranks)
    expected = run(ALONE, run_ranks, tmp_path / "fp32")
    for step, other in zip(read_metrics(found), read_metrics(expected), strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-2)
        assert step.loss != other.loss


# --- Engram tables in host memory -----------------------------------------------------------------


@pytest.mark.parametrize("overrides", [ONE, pytest.param(DP2, marks=pytest.mark.long)], ids=str)
def test_tables_in_host_memory_move_as_on_the_device(overrides, tmp_path, run_ranks):
    num_ranks = 1 if overrides is ONE else 2
    here = run(overrides, run_ranks, tmp_path / "device", num_ranks)
    host = (*overrides, "engram.tables=host")
    assert compare_metrics(run(host, run_ranks, tmp_path / "host", num_ranks), here).equal


# --- checkpoints ----------------------------------------------------------------------------------

SAVING = ("checkpoint.interval=1", "checkpoint.keep_last=5")


def test_a_run_that_goes_on_has_the_steps_of_one_that_never_stopped_bitwise(tmp_path, run_ranks):
    straight = run((*DP2, *SAVING), run_ranks, tmp_path / "straight", 2)
    run((*DP2, *SAVING, "train.steps=2"), run_ranks, tmp_path / "run", 2)
    again = run((*DP2, *SAVING), run_ranks, tmp_path / "run", 2)
    assert compare_metrics(again, straight).equal


def state(rank: int, path: str, overrides: tuple[str, ...], save_to: str | None):
    return found_in_checkpoint(path, (*MUON, *overrides), save_to)


@pytest.mark.long
def test_what_two_ranks_save_loads_at_other_degrees_and_goes_on(tmp_path, run_ranks):
    run((*DP2, *SAVING), run_ranks, tmp_path / "run", 2)
    written, again = tmp_path / "run" / "ckpt" / "step-00000002", tmp_path / "again"
    [alone] = run_ranks(1, state, str(written), ALONE, str(again))
    kinds = [n.split(".")[1] for n in alone if n.endswith("layers.1.moe.moe.experts.down.weight")]
    assert sorted(kinds) == ["1", "momentum"]
    three = (*ONE, "parallel.dp=3", "train.num_micro_batches=1")
    for num_ranks, overrides in ((2, EP2), (3, three)):
        for found in run_ranks(num_ranks, state, str(again / written.name), overrides, None):
            assert found.keys() == alone.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, alone[name]), name
    # The last of three steps again, in one process.
    shutil.rmtree(tmp_path / "run" / "ckpt" / "step-00000003")
    straight = read_metrics(tmp_path / "run" / "metrics.jsonl")
    resumed = read_metrics(run((*ALONE, *SAVING), run_ranks, tmp_path / "run"))
    assert [step.step for step in resumed] == [1, 2, 3]
    assert resumed[2].loss == pytest.approx(straight[2].loss, rel=1e-6)
    assert resumed[2].grad_norm == pytest.approx(straight[2].grad_norm, rel=1e-6)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [
        (1, ("train.precision=bf16",)),
        pytest.param(2, ("parallel.dp=2",), marks=pytest.mark.long),
        pytest.param(2, ("parallel.ep=2", "train.precision=bf16"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_measures_the_planned_bytes_of_momentum(num_ranks, more, tmp_path, run_ranks):
    even = ("model.engram_bucket_floor=98",)  # rows that two ranks share evenly
    overrides = (*ONE, *even, *more, "run.memory_timeline=true")
    metrics = run(overrides, run_ranks, tmp_path / "run", num_ranks)
    [ledger] = predict(load([CONFIG], [*SMALL, *MUON, *overrides]))
    [measured] = read_metrics(metrics)[-1].memory
    assert measured.optimizer == ledger.optimizer
    assert run_check_text(tmp_path / "run").count("+0.00%") == 2


def test_momentum_is_one_moment_and_adamw_keeps_two_of_the_little_rest():
    base = [*SMALL, *ONE]
    muon, adamw = (load([CONFIG], [*base, f"optim.type={t}"]) for t in ("muon", "adamw"))
    dims = muon.model.dims
    (stage,) = cut(dims, (0,), None, seq_len=16)
    sizes = {moments: 0 for moments in (1, 2)}
    for unit in stage.units:
        for parameter in unit_parameters(dims, unit):
            if not parameter.frozen:
                sizes[update_rule(dims, parameter).num_moments] += 4 * parameter.numel
    assert state_bytes(muon, stage).optimizer == sizes[1] + 2 * sizes[2]
    assert state_bytes(adamw, stage).optimizer == 2 * (sizes[1] + sizes[2])
    assert sizes[2] < 0.01 * sizes[1]
    hosts = [load([CONFIG], [*base, "engram.tables=host", f"optim.type={t}"])
             for t in ("muon", "adamw")]  # fmt: skip
    assert 4 * host_table_bytes(hosts[0], stage) == 3 * host_table_bytes(hosts[1], stage)

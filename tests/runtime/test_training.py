"""Whole runs of the tiny model: any pipeline gives the losses of one process, bit for bit."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from ppruntime.compare import compare_metrics
from ppruntime.metrics import read_metrics
from ppruntime.run_dir import read_status

CONFIG = Path(__file__).resolve().parents[2] / "launch" / "configs" / "tiny.toml"
SMALL = (
    "train.seq_len=16",
    "train.micro_batch_size=1",
    "train.num_micro_batches=3",
    "train.steps=3",
    "train.eval_interval=2",
    "train.balance_loss_weight=1e-2",
    "train.routing_bias_rate=1e-3",
    "data.type=counting",
    "optim.warmup_steps=1",
    "run.tensorboard=false",
    "run.log_interval=100",
)


def train(rank: int, run_dir: str, overrides: tuple[str, ...]) -> int:
    from ppruntime.config import load
    from ppruntime.session import run

    return run(load([CONFIG], [*SMALL, f"run.dir={run_dir}", *overrides]))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, run_ranks):
    """Metrics of the same training in one process."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    run_ranks(1, train, str(run_dir), ("pp.size=1", "pp.layers_per_stage=default"))
    return run_dir / "metrics.jsonl"


CASES = {
    "two ranks": (2, ()),
    "eight ranks, more than micro-batches, an empty stage": (
        8,
        ("pp.layers_per_stage=[0.5, 1.5, 0, 2, 0.5, 1.5, 1, 1]",),
    ),
    "cuts inside layers": (4, ("pp.layers_per_stage=[2.5, 0.5, 3.5, 1.5]",)),
    "deferred weight gradients": (4, ("pp.schedule=1f1b_w",)),
    "two stages a rank in a V": (2, ("pp.schedule=zb_v",)),
    "DualPipeV": (2, ("pp.schedule=dualpipe_v",)),
    "DualPipeV, whose pairs would overlap on GPUs": (
        2,
        ("pp.schedule=dualpipe_v", "pp.overlap_pairs=true"),
    ),
    "activation checkpointing and weight gradients that wait": (
        2,
        ("ac.mode=full", "pp.schedule=zb_v"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_has_the_losses_and_norms_of_one_process(case, one_process, tmp_path, run_ranks):
    num_ranks, overrides = CASES[case]
    run_dir = tmp_path / "run"
    codes = run_ranks(num_ranks, train, str(run_dir), (f"pp.size={num_ranks}", *overrides))
    assert codes == [0] * num_ranks
    result = compare_metrics(run_dir / "metrics.jsonl", one_process)
    assert result.first_difference is None
    assert result.num_steps == 3
    for name in ("timeline.svg", "trace.json", "status.json", "ckpt"):
        assert (run_dir / name).exists(), name


def test_two_data_ranks_with_fsdp_are_within_a_millionth(one_process, tmp_path, run_ranks):
    run_dir = tmp_path / "run"
    run_ranks(4, train, str(run_dir), ("pp.size=2", "parallel.dp=2", "train.num_micro_batches=2"))
    alone = tmp_path / "alone"
    run_ranks(1, train, str(alone), ("pp.size=1", "train.num_micro_batches=4"))
    steps, expected = (read_metrics(d / "metrics.jsonl") for d in (run_dir, alone))
    for step, other in zip(steps, expected, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-6)
        # Behind an update of AdamW, which divides by roots of sums that differ in their last bits,
        # it is another model's gradient.
        bound = 1e-6 if step.step == 1 else 1e-5
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=bound)


def test_a_run_that_goes_on_at_another_cut_has_the_next_losses_bitwise(
    one_process, tmp_path, run_ranks
):
    run_dir = tmp_path / "run"
    first = ("pp.size=4", "checkpoint.interval=1", "train.steps=2", "optim.min_lr=3e-3")
    run_ranks(4, train, str(run_dir), first)
    second = ("pp.size=2", "pp.schedule=zb_v", "checkpoint.interval=1", "optim.min_lr=3e-3")
    run_ranks(2, train, str(run_dir), second)
    straight = tmp_path / "straight"
    run_ranks(1, train, str(straight), ("pp.size=1", "optim.min_lr=3e-3"))
    assert compare_metrics(run_dir / "metrics.jsonl", straight / "metrics.jsonl").equal


def test_bf16_with_fp32_masters_stays_near_fp32(one_process, tmp_path, run_ranks):
    run_dir = tmp_path / "run"
    run_ranks(2, train, str(run_dir), ("pp.size=2", "train.precision=bf16", "pp.schedule=1f1b_w"))
    steps, expected = (read_metrics(p) for p in (run_dir / "metrics.jsonl", one_process))
    for step, other in zip(steps, expected, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=5e-3)
        assert step.loss != other.loss
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=0.1)


def test_a_loss_that_is_not_finite_ends_all_ranks_before_the_update(tmp_path, run_ranks):
    run_dir = tmp_path / "run"
    wild = ("pp.size=2", "optim.lr=1e30", "train.eval_interval=default", "train.eval_steps=default")
    codes = run_ranks(2, train, str(run_dir), wild)
    assert codes == [12, 12]
    assert [line.step for line in read_metrics(run_dir / "metrics.jsonl")] == [1]
    status = read_status(run_dir)
    assert status is not None
    assert (status.exit, status.step) == (12, 1)
    assert status.reason.startswith("step 2: the ")


def test_a_wrong_number_of_processes_is_refused_by_all(tmp_path, run_ranks):
    codes = run_ranks(2, train, str(tmp_path / "run"), ("pp.size=4",))
    assert codes == [2, 2]


def train_differently(rank: int, run_dir: str) -> tuple[int, str]:
    steps = ("train.num_micro_batches=2",) if rank == 1 else ()
    with redirect_stderr(StringIO()) as told:
        code = train(rank, run_dir, ("pp.size=2", *steps))
    return code, told.getvalue()


def test_ranks_with_different_configs_are_refused_before_anything_moves(tmp_path, run_ranks):
    (code, told), (other_code, silence) = run_ranks(2, train_differently, str(tmp_path / "run"))
    assert code == other_code == 17
    assert "train.num_micro_batches is 3 on rank 0 but 2 on rank 1" in told
    assert silence == ""

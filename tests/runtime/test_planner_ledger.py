"""What a search prints fits its cap by the memory ledger, in the run that it says to start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ppruntime.config import load
from ppruntime.launch.cli import main
from ppruntime.launch.plan_search import BENCHES, kernel_overrides, overrides
from ppruntime.ledger import UPDATE, predict
from ppruntime.projection.calibrate_kernels import kernel_calibration
from ppruntime.projection.kernel_records import read_kernels
from ppruntime.projection.planner import Plan, find_plans
from ppruntime.projection.planner_inputs import expert_variants, task_of, with_fast_kernels
from ppruntime.projection.planner_ledger import plans_that_fit, run_of, with_ledger
from ppruntime.projection.planner_task import Task
from ppruntime.projection.projector import ProjectionError

FULL = Path(__file__).parents[2] / "launch" / "configs" / "v41-flash-pp16.toml"
RUN = ("parallel.dp=12", "train.num_micro_batches=24")
KERNELS = read_kernels(BENCHES)


def task_for(*keys: str, memory_bytes: float, host_bytes_per_s: float = 0.0):
    config = with_fast_kernels(load([FULL], [*RUN, *keys]))
    task = task_of(
        config,
        kernel_calibration(config, KERNELS, "put"),
        memory_bytes=memory_bytes,
        reserved_bytes=10e9,
        host_bytes_per_s=host_bytes_per_s,
        link=None,
        variants=expert_variants(config, KERNELS),
    )
    return config, replace(task, orders=("1f1b_w",))


def peaks(plan: Plan) -> list[float]:
    return [stage.peak_bytes for stage in plan.stages]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "cap_gb", "in_update"),
    [
        pytest.param((), 139, False, marks=pytest.mark.long),
        ((), 79.5, False),
        (("parallel.dp=2",), 139, False),
        (("train.seq_len=128", "train.num_micro_batches=2"), 139, True),
        (("train.seq_len=128", "train.num_micro_batches=2"), 57, True),
    ],
)
def test_every_plan_that_is_printed_fits_by_the_ledger_with_its_overrides(
    keys, cap_gb, in_update, capsys
):
    words = [*RUN, *keys]
    arguments = ["plan", "--search", str(FULL), *words, "--memory-gb", str(cap_gb), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    plans = [*found["plans"], *([found["uniform"]] if found["uniform"] else [])]
    assert plans
    for plan in plans:
        ledgers = predict(load([FULL], [*words, *plan["overrides"]]))
        for stage, ledger in zip(plan["stages"], ledgers, strict=True):
            assert stage["peak_bytes"] == pytest.approx(10e9 + ledger.peak_bytes)
            assert stage["peak_bytes"] <= 1e9 * cap_gb * (1 + 1e-9)
        assert in_update == (ledgers[1].peak.op == UPDATE)


def test_units_sizes_add_up_to_the_ledgers_peak_within_two_percent():
    for keys, cap in (((), 139e9), ((), 79.5e9), (("train.seq_len=2048",), 100e9)):
        config, task = task_for(*keys, memory_bytes=cap)
        (plan,) = find_plans(task, keep=1).plans
        assert peaks(plan) == pytest.approx(peaks(with_ledger(config, task, plan)), rel=0.02)


@pytest.mark.slow
def test_where_units_add_up_to_less_the_search_keeps_the_difference_free():
    """A task whose units keep a tenth less than they do."""
    config, task = task_for(memory_bytes=100e9)
    short = replace(task, units=tuple(map(lighter, task.units)))
    (plan,) = find_plans(short, keep=1).plans
    assert max(peaks(with_ledger(config, task, plan))) > 101e9
    for plan in plans_that_fit(config, short, keep=1).plans:
        assert peaks(plan) == peaks(with_ledger(config, task, plan))
        assert 95e9 < max(peaks(plan)) <= 100e9


def lighter(unit):
    choices = (
        replace(c, held_bytes=0.9 * c.held_bytes, first_held_bytes=0.9 * c.first_held_bytes)
        for c in unit.choices
    )
    return replace(unit, choices=tuple(choices))


def test_what_a_plan_has_in_host_memory_is_taken_off():
    config, task = task_for(memory_bytes=62e9, host_bytes_per_s=20e9)
    task = replace(task, orders=("1f1b",))  # what waits for a W never leaves
    (plan,) = plans_that_fit(config, task, keep=1).plans
    ledgers = predict(run_of(config, plan))
    assert any(stage.offloaded_bytes for stage in plan.stages)
    for stage, ledger in zip(plan.stages, ledgers, strict=True):
        still_there = min(2, stage.in_flight)
        away = (stage.in_flight - still_there) * stage.offloaded_bytes
        assert stage.peak_bytes == pytest.approx(10e9 + ledger.peak_bytes - away)
        assert stage.peak_bytes <= 62e9 * (1 + 1e-9)
    offloads, _ = task_for("pp.activation_offload=true", memory_bytes=62e9)
    assert peaks(with_ledger(offloads, task, plan)) == peaks(plan), "what is away is away once"


@pytest.mark.slow
def test_a_cap_that_the_update_alone_is_above_is_refused():
    keys = ("train.seq_len=128", "train.num_micro_batches=2")
    config, task = task_for(*keys, memory_bytes=139e9)
    (plan,) = plans_that_fit(config, task, keep=1).plans
    smallest = smallest_that_fits(config, task)
    assert smallest < max(peaks(plan))
    with pytest.raises(ProjectionError, match="no cut into 16 stages fits"):
        plans_that_fit(config, replace(task, memory_bytes=0.5 * smallest))


def smallest_that_fits(config, task: Task) -> float:
    """Caps lower and lower, until nothing fits."""
    most = task.memory_bytes
    while True:
        try:
            (plan,) = plans_that_fit(config, replace(task, memory_bytes=most), keep=1).plans
        except ProjectionError:
            return most
        assert max(peaks(plan)) <= most
        most = 0.99 * max(peaks(plan))


def test_a_plans_run_is_its_overrides(tmp_path):
    asked = load([FULL], RUN)
    config, task = task_for(memory_bytes=72e9)
    (plan,) = plans_that_fit(config, task, keep=1).plans
    words = [*RUN, *overrides(plan, config), *kernel_overrides(config, asked)]
    assert predict(load([FULL], words)) == predict(run_of(config, plan))
    assert set(kernel_overrides(config, asked)) >= {"kernels.head=auto", "kernels.attention=auto"}
    # The shipped run's warm-up has no effect on plain 1F1B, which would refuse it.
    plain = overrides(replace(plan, order="1f1b"), config)
    assert "pp.warmup_step=default" in plain
    load([FULL], [*RUN, *plain])

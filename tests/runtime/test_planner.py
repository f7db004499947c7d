"""The planner: exact where all can be tried out, within memory, and better than equal cuts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.launch.cli import main
from ppruntime.planner import Choice, PlannedUnit, Task, Variant, find_plans
from ppruntime.projector import ProjectionError

FULL = Path(__file__).parents[2] / "launch" / "configs" / "v41-flash-pp16.toml"
SMALL = st.floats(0.1, 2)


@st.composite
def tasks(draw):
    """Six halves on three stages, two modes each."""

    def unit(name: str, *, is_half: bool, is_block: bool = False) -> PlannedUnit:
        times = [draw(SMALL) for _ in range(3)]
        held = draw(SMALL)
        keep = Choice("none", *times, held)
        again = Choice("full", times[0], times[1] + times[0], times[2], 0.2 * held)
        return PlannedUnit(name, (keep, again), draw(SMALL), is_block, is_half)

    halves = [unit(f"half{i}", is_half=True, is_block=i % 2 == 1) for i in range(6)]
    return Task(
        units=(unit("embed", is_half=False), *halves, unit("head", is_half=False)),
        num_stages=3,
        num_micro_batches=12,
        hop_s=draw(st.floats(0, 0.3)),
        memory_bytes=draw(st.floats(6, 14)),
        reserved_bytes=0.5,
        variants=(Variant("kept", 0.3), Variant("freed", 0.0, input_grad_s=0.05)),
        orders=("1f1b", "1f1b_w"),
    )


def busiest_of_all(task: Task, in_flight: tuple[int, ...]) -> float | None:
    """The shortest busiest stage over every cut, mode and variant, each tried out."""
    best = None
    for cuts in combinations(range(8), 2):
        starts, ends = (0, cuts[0], cuts[1] - 1), (cuts[0], cuts[1] - 1, 6)
        stages = []
        for p, (i, j) in enumerate(zip(starts, ends, strict=True)):
            units = list(task.units[1 + i : 1 + j])
            units = [task.units[0], *units] if p == 0 else units
            units = [*units, task.units[-1]] if p == 2 else units
            fitting = []
            blocks = sum(u.is_expert_block for u in units)
            for modes in product((0, 1), repeat=len(units)):
                chosen = [u.choices[m] for u, m in zip(units, modes, strict=True)]
                for variant in task.variants:
                    static = sum(u.static_bytes for u in units) + blocks * variant.static_bytes
                    held = in_flight[p] * sum(c.held_bytes for c in chosen)
                    if 0.5 + static + held <= task.memory_bytes:
                        fitting.append(
                            sum(c.work_s for c in chosen) + blocks * variant.input_grad_s
                        )
            if not fitting:
                break
            stages.append(min(fitting))
        else:
            best = max(stages) if best is None else min(best, max(stages))
    return best


@settings(max_examples=15, deadline=None)
@given(tasks())
def test_the_best_cut_is_the_best_of_all_that_can_be_tried(task):
    truth = busiest_of_all(task, (3, 2, 1))
    if truth is None:
        with pytest.raises(ProjectionError, match="no cut into 3 stages fits"):
            find_plans(task)
        return
    found = find_plans(task)
    assert found.bounds.cut_s == pytest.approx(truth, rel=1e-9)
    best = found.plans[0]
    assert max(stage.work_s for stage in best.stages) >= truth * (1 - 1e-9)
    assert max(stage.peak_bytes for stage in best.stages) <= task.memory_bytes * (1 + 1e-9)
    assert found.bounds.balance_s <= found.bounds.cut_s * (1 + 1e-9)
    assert found.bounds.step_s <= best.step_s * (1 + 1e-9)
    names = [name for stage in best.stages for name in stage.units]
    assert names == [unit.name for unit in task.units]
    if found.uniform is not None:
        assert found.uniform.step_s >= best.cycle_s * task.num_micro_batches * (1 - 1e-9)


def test_a_host_makes_room_for_what_the_device_cannot_hold():
    choice = Choice("none", 1.0, 1.0, 1.0, 4.0)
    half = PlannedUnit("half", (choice,), 1.0, is_expert_block=False, is_half=True)
    end = PlannedUnit(
        "end", (Choice("none", 0, 0, 0, 0),), 0.0, is_expert_block=False, is_half=False
    )
    task = Task(
        units=(end, *(half,) * 4, end),
        num_stages=4,
        num_micro_batches=16,
        hop_s=0.0,
        memory_bytes=12.0,
        reserved_bytes=0.0,
        orders=("1f1b",),
    )
    with pytest.raises(ProjectionError, match="or allow --host-bandwidth"):
        find_plans(task)
    best = find_plans(replace(task, host_bytes_per_s=2.0)).plans[0]
    moved = [stage.offloaded_bytes for stage in best.stages]
    assert moved[0] > 0
    assert moved[-1] == 0
    assert max(moved) <= 2.0 * best.stages[0].work_s
    assert max(stage.peak_bytes for stage in best.stages) <= 12.0 + 1e-9


@pytest.mark.slow
def test_for_v41_flash_the_search_beats_uniform_stages_and_says_by_how_much(capsys):
    arguments = ["plan", "--search", str(FULL), "parallel.dp=12", "train.num_micro_batches=64"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["global_batch_tokens"]) == (1536, 64 * 8192 * 96)
    assert found["faster_than_uniform"] > 0.1
    best = found["plans"][0]
    assert sum(best["layers_per_stage"]) == 40
    assert all(stage["peak_bytes"] <= 139e9 * (1 + 1e-9) for stage in best["stages"])
    assert found["bounds"]["step_s"] <= best["step_s"]
    assert "0 % measured" in found["rests_on"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--memory-gb 5", "reserve less than there is"),
        ("--memory-gb 20", "no cut into 16 stages fits 20 GB a rank"),
        ("--transport gloo", "the benches have no transport gloo"),
        ("--calibration x --benches y", "leave one of them out"),
        ("--benches nowhere", "has no complete kernel records"),
    ],
)
def test_wrong_uses_are_refused_with_the_remedy(options, complaint, capsys):
    assert main(["plan", "--search", str(FULL), *options.split()]) == 2
    assert complaint in capsys.readouterr().err

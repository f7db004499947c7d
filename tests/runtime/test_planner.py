"""The planner: exact where all can be tried out, within memory, and better than equal cuts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.config import load
from ppruntime.launch.cli import main
from ppruntime.launch.plan_search import BENCHES, left_out, overrides
from ppruntime.models.dims import unit_specs
from ppruntime.order import make_order
from ppruntime.plan import cut
from ppruntime.projection.calibrate_kernels import kernel_calibration
from ppruntime.projection.calibration import UnitTimes, unit_type
from ppruntime.projection.kernel_records import read_kernels
from ppruntime.projection.planner import find_plans
from ppruntime.projection.planner_inputs import expert_variants, task_of
from ppruntime.projection.planner_task import Choice, ExpertUse, PlannedUnit, Task, Variant
from ppruntime.projection.projector import ProjectionError
from ppruntime.recompute import mode_name, mode_of
from ppruntime.schedules.counts import peak_in_flight

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
    with pytest.raises(ProjectionError, match="or allow offload with --host-gb-per-s"):
        find_plans(task)
    with pytest.raises(ProjectionError, match=r"parallel\.dp or pp\.size$"):
        find_plans(replace(task, memory_bytes=1.0, host_bytes_per_s=2.0))
    best = find_plans(replace(task, host_bytes_per_s=2.0)).plans[0]
    moved = [stage.offloaded_bytes for stage in best.stages]
    assert moved[0] > 0
    assert moved[-1] == 0
    (said,) = left_out(best)  # a run with the overrides alone would not fit
    assert said.startswith("not among them: what stages 0")
    calm = replace(task, memory_bytes=100.0)
    assert left_out(find_plans(calm).plans[0]) == []
    assert max(moved) <= 2.0 * best.stages[0].work_s
    assert max(stage.peak_bytes for stage in best.stages) <= 12.0 + 1e-9


@pytest.mark.slow
def test_for_v41_flash_the_search_beats_uniform_stages_and_says_by_how_much(capsys):
    arguments = ["plan", "--search", "parallel.dp=12", "train.num_micro_batches=64"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["global_batch_tokens"]) == (1536, 64 * 8192 * 96)
    assert found["faster_than_uniform"] > 0.1
    best = found["plans"][0]
    assert sum(best["layers_per_stage"]) == 40
    assert all(stage["peak_bytes"] <= 139e9 * (1 + 1e-9) for stage in best["stages"])
    assert found["bounds"]["step_s"] <= best["step_s"]
    assert "0 % measured" in found["rests_on"]
    low, high = best["mfu_between"]
    off = sum(found["shares"][o] * s for o, s in (("modelled", 0.15), ("assumed", 0.4)))
    assert (low, high) == pytest.approx((best["mfu"] / (1 + off), best["mfu"] / (1 - off)))
    assert "times may be off, measured by 2 %" in found["intervals"]
    assert sum(found["shares"].values()) == pytest.approx(1)


def test_a_search_from_a_calibration_says_what_share_of_it_was_measured(tmp_path, capsys):
    row = {"origin": "assumed", "source": "a guess", "samples": 0}
    times = {"forward_s": 0.01, "input_grad_s": 0.01, "weight_grad_s": 0.01}
    timed = {"origin": "measured", "source": "run 1", "samples": 100}
    dims = load([FULL]).model.dims
    kinds = sorted({unit_type(dims, spec) for spec in unit_specs(dims)})
    known = {
        **{"schema": 1, "command": "", "device": "H200", "versions": {}, "date": "2026-01-01"},
        **{"model": "v41-flash", "seq_len": 8192, "micro_batch_size": 1, "ep": 8, "seeds": [0]},
        **{"transport": "idle", "routing": "", "zero_weights": False, "profiled": False},
        "units": [
            (timed if kind == "moe.routed" else row) | times | {"unit": kind, "ac_mode": "full"}
            for kind in kinds
        ],
        "transfers": [row | {"link": "ib", "num_bytes": 10**9, "seconds": 0.001}],
    }
    path = tmp_path / "c.json"
    path.write_text(json.dumps(known))
    arguments = ["plan", "--search", "parallel.dp=12", "train.num_micro_batches=32"]
    assert main([*arguments, "--memory-gb", "500", "--calibration", str(path)]) == 0
    # 40 of 82 units of equal length.
    assert (
        f"{path}, of 2026-01-01 on H200; of the best plan's step, where whole units count as their "
        "weakest part: 49 % measured, 0 % modelled, 51 % assumed\n"
    ) in capsys.readouterr().out
    # What comes once a step is in it, and has an origin of its own.
    path.write_text(json.dumps(known | {"per_step": [row | {"name": "rest", "seconds": 3.0}]}))
    assert main([*arguments, "--memory-gb", "500", "--calibration", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    once = 3.0 / found["plans"][0]["step_s"]
    assert 0.1 < once < 0.9
    assert found["shares"]["measured"] == pytest.approx((1 - once) * 40 / 82)
    assert sum(found["shares"].values()) == pytest.approx(1)


def test_a_search_counts_what_the_transport_does_to_compute_or_says_that_it_does_not(
    tmp_path, capsys
):
    """--transport nccl and put gave one step."""
    proxy = [str(FULL.with_name("v41-proxy-8.toml")), "parallel.dp=2", "--json"]
    calibration = ["--calibration", str(BENCHES / "calibration.json")]

    def found(*words: str) -> dict[str, object]:
        assert main(["plan", "--search", *proxy, *words]) == 0
        return json.loads(capsys.readouterr().out)

    def step(of: dict[str, object]) -> float:
        return of["plans"][0]["step_s"]

    nccl, put = (found("--transport", kind) for kind in ("nccl", "put"))
    assert step(nccl) > step(put)
    assert "(modelled: nccl: measured between two GPUs" in nccl["counted"][0]
    assert put["plans"][0]["step_s"] >= put["bounds"]["step_s"]
    run, other = (found(*calibration, f"pp.transport={kind}") for kind in ("put", "auto"))
    assert step(run) > step(other)
    assert "compute slowed down by 19.3 %" in run["counted"][0]
    assert "not counted: what transfers do to compute; --transport" in other["counted"][0]
    assert len(other["counted"]) == 1
    without = json.loads((BENCHES / "calibration.json").read_text()) | {"per_step": []}
    (tmp_path / "without.json").write_text(json.dumps(without))
    other = found("--calibration", str(tmp_path / "without.json"), "pp.transport=auto")
    assert "not counted: gather and reduce over 2 data ranks" in other["counted"][1]
    for file, kind, complaint in (
        ("calibration.json", "nccl", "only of put; leave it out, or add it with ppruntime"),
        ("calibration-put.json", "put", "the calibration has no transfers; add them with ppr"),
    ):
        words = ["--calibration", str(BENCHES / file), "--transport", kind]
        assert main(["plan", "--search", *proxy, *words]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("train.seq_len=4096", "is for seq_len 8192, the run has 4096; set train.seq_len=8192"),
        ("parallel.ep=2", "is for ep 1, the run has 2; set parallel.ep=1 or calibrate the run"),
        ("train.micro_batch_size=2", "is for micro_batch_size 1, the run has 2; set train.micro"),
        ("model.name=v4-proxy-8", "is for model v41-proxy-8, the run has v4-proxy-8; set model"),
    ],
)
def test_a_search_takes_no_times_of_another_run(key, complaint, capsys):
    """Times of 8,192 tokens made a plan for 4,096 of the half MFU, measured as it said."""
    proxy = FULL.with_name("v41-proxy-8.toml")
    calibration = str(BENCHES / "calibration.json")
    assert main(["plan", "--search", str(proxy), key, "--calibration", calibration]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert complaint in err


def test_a_plans_overrides_are_the_run_that_it_planned():
    """A tight cap, so that stages differ in all that a search chooses."""
    config = load([FULL], ["parallel.dp=12", "train.num_micro_batches=48"])
    kernels = read_kernels(BENCHES)
    task = task_of(
        config,
        kernel_calibration(config, kernels, "put"),
        memory_bytes=72e9,
        reserved_bytes=10e9,
        host_bytes_per_s=0.0,
        link=None,
        variants=expert_variants(config, kernels),
    )
    (plan,) = find_plans(task, keep=1).plans
    run = load([FULL], ["parallel.dp=12", "train.num_micro_batches=48", *overrides(plan, config)])
    order, compute = make_order(run).computations, run.moe.compute
    assert peak_in_flight(order) == tuple(stage.in_flight for stage in plan.stages)
    specs = {spec.name: spec for spec in unit_specs(run.model.dims)}
    cuts = cut(run.model.dims, range(16), run.pp.layers_per_stage, seq_len=8192)
    for stage, units in zip(plan.stages, cuts, strict=True):
        assert stage.units == tuple(unit.name for unit in units.units)
        for name, mode in zip(stage.units, stage.modes, strict=True):
            assert specs[name].layer is None or mode_of(run, specs[name]) == mode
        assert stage.experts == ExpertUse(
            compute.frees_weights(units.index),
            compute.turns_on_demand(units.index),
            compute.num_fused(units.index),
        )
    uses = {stage.experts for stage in plan.stages}
    for name in ExpertUse.__slots__:
        assert len({getattr(use, name) for use in uses}) > 1, name


@pytest.mark.parametrize(
    ("compute", "names"),
    [
        ((), ["in the compute dtype"]),
        (("moe.compute.backend=triton",), ["bf16 kept", "bf16 freed"]),
        (
            ("moe.compute.backend=triton", "moe.compute.fp8_transposed_on_demand=true"),
            ["bf16 kept, FP8 turned on demand", "bf16 freed, FP8 turned on demand"],
        ),
        (("moe.compute.backend=triton", "train.precision=fp32"), ["bf16 kept"]),
    ],
)
def test_without_kernels_experts_are_used_as_the_config_says(compute, names):
    config = load([FULL], compute)
    found = expert_variants(config)
    assert [variant.name for variant in found] == names
    block = 48 * 3 * 5120 * 2304
    if "bf16 freed" in names:
        kept, freed = (variant.static_bytes for variant in found)
        assert kept - freed == 2 * block
        assert kept == pytest.approx(2 * block, rel=3e-4)  # scales beside them


def test_a_plan_may_save_what_the_run_does_and_no_other_list():
    few = ["parallel.dp=12", "train.num_micro_batches=48"]
    own = ["ac.mode=selective", 'ac.save=["experts", "attention"]']
    config = load([FULL], [*few, *own])
    dims = config.model.dims
    kinds = sorted({unit_type(dims, spec) for spec in unit_specs(dims)})
    timed = {"origin": "measured", "source": "run 1", "samples": 100}
    modes = ("none", "selective:experts+attention", "selective:projections")
    units = tuple(
        UnitTimes(
            unit=kind,
            ac_mode=mode,
            forward_s=0.01,
            input_grad_s=0.02 / (1 + number),
            weight_grad_s=0.01,
            **timed,
        )
        for number, mode in enumerate(modes)
        for kind in kinds
    )
    known = kernel_calibration(config, read_kernels(BENCHES), "put")
    known = msgspec.structs.replace(known, units=units, memory=())
    options = {"memory_bytes": 1e15, "reserved_bytes": 0.0, "host_bytes_per_s": 0.0, "link": None}
    task = task_of(config, known, **options)
    without = task_of(load([FULL], few), known, **options)
    for unit, plain in zip(task.units, without.units, strict=True):
        assert [choice.mode for choice in unit.choices] == list(modes[:2])
        assert unit.choices[:1] == plain.choices, "bytes are those of the row's mode"
        assert not unit.is_half or unit.choices[0].held_bytes != unit.choices[1].held_bytes
    (plan,) = find_plans(task, keep=1).plans
    lines = overrides(plan, config)
    assert {"ac.mode=selective", 'ac.save=["experts", "attention"]'} <= set(lines)
    assert mode_name(load([FULL], [*few, *own, *lines])) == modes[1]
    (other,) = find_plans(without, keep=1).plans
    assert "ac.mode=none" in overrides(other, load([FULL], few))
    assert "ac.save=default" in overrides(other, config), "else the run's list would be refused"


def test_a_search_from_a_calibration_refuses_options_for_stages_by_number():
    keys = ["moe.compute.backend=triton", "moe.compute.fp8_transposed_on_demand=[3]"]
    with pytest.raises(ProjectionError, match=r"on_demand = \[3\] is for stages by number"):
        expert_variants(load([FULL], keys))


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


@pytest.mark.parametrize(
    "options", ["--memory-gb 80", "--transport nccl", "--link ib --check .", "--ledger --benches ."]
)
def test_options_of_a_search_are_refused_without_one(options, capsys):
    assert main(["plan", str(FULL), *options.split()]) == 2
    assert "is for --search, which is not there; add it" in capsys.readouterr().err

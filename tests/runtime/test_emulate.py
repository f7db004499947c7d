"""Emulation and calibration: tiny models in local processes, started as a user would."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import msgspec
import pytest
import torch

from ppruntime.build import build_stage
from ppruntime.clocks import OpTimes
from ppruntime.config import load
from ppruntime.connect import open_beside
from ppruntime.data.batches import open_data
from ppruntime.emulate import check_emulation, emulate
from ppruntime.emulate_replays import Blanks, Recorder, drawn
from ppruntime.emulate_transport import ReplayTransport, split_channels
from ppruntime.experts.options import ExpertChoice
from ppruntime.launch.cli import main
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.op_samples import waited_for
from ppruntime.plan import cut
from ppruntime.projection.calibrate import Depths
from ppruntime.projection.calibration import (
    Calibration,
    PerStep,
    StageTimes,
    read_calibration,
)
from ppruntime.projection.calibration_file import (
    calibration_of,
    merged,
    refuse_profilers,
    write_calibration,
)
from ppruntime.projection.pipeline import stage_costs
from ppruntime.projection.projector import ProjectionError
from ppruntime.ranks import Layout, join, leave
from ppruntime.schedules import make
from ppruntime.schedules.absent import AbsentRanks
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.transports.base import Boundary, Channel, TensorSpec, TransportError

ROOT = Path(__file__).parents[2]
TINY = ROOT / "launch" / "configs" / "tiny.toml"
SMALL = [
    "train.seq_len=8",
    "train.micro_batch_size=1",
    "data.type=counting",
    "pp.size=4",
    "pp.schedule=1f1b_w",
]
ONE_LAYER = (
    *("train.seq_len=8", "train.micro_batch_size=1", "data.type=counting"),
    *("model.name=tiny-v4", "model.num_layers=1", "model.compress_ratios=[0]"),
    *("model.num_hash_layers=0", "model.hidden_size=128", "model.expert_width=128"),
    *("model.num_experts=2", "model.experts_per_token=1"),
)
PER_STEP = (*ONE_LAYER, "pp.size=1", "train.precision=bf16", "train.num_micro_batches=1")
LIMIT_SECONDS = 300


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@pytest.mark.long
@pytest.mark.slow
def test_the_slurm_job_emulates_stages_on_local_processes_and_a_second_job_replays_them(tmp_path):
    """The sbatch script, with an srun that runs its command here; the plain script under it starts
    two ranks, stages 2 and 3 of 4. Then stage 1 alone, on the gradients that stage 2 sent."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/bash\nshift\nSLURM_NODEID=0 exec "$@"\n')
    (tools / "scontrol").write_text("#!/bin/bash\necho 127.0.0.1\necho elsewhere\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    out, boundaries = tmp_path / "calibration.json", tmp_path / "boundaries"
    subprocess.run(
        [str(ROOT / "launch" / "emulate_8_nodes.sbatch")],
        check=True,
        cwd=ROOT,
        timeout=LIMIT_SECONDS,
        env=environment(
            PATH=f"{tools}{os.pathsep}{os.environ['PATH']}",
            SLURM_JOB_NUM_NODES="1",
            SLURM_JOB_NODELIST="here",
            SLURM_JOB_ID="1",
            MASTER_PORT=str(free_port()),
            GPUS_PER_NODE="2",
            PYTHON=sys.executable,
            RUN=str(TINY),
            STAGES="2-3",
            OUT=str(out),
            BOUNDARIES=str(boundaries),
            COSTS="0.001,0.001,0.001",
            HOP_S="0.0001",
            STEPS="1",
            OVERRIDES=" ".join([*SMALL, "train.num_micro_batches=6"]),
            OPTIONS="--few-samples --keep 1",
        ),
    )
    first = read_calibration(out)
    assert [row.stage for row in first.stages] == [2, 3]
    assert all(row.forward_s > 0 and row.weight_grad_s > 0 for row in first.stages)
    assert {row.origin for row in first.stages} == {"assumed"}
    assert "samples only" in first.stages[0].source
    assert [path.name for path in boundaries.iterdir()] == ["backward-2-0.pt"]
    grads = torch.load(boundaries / "backward-2-0.pt", weights_only=True)
    assert all(bool(grad.any()) for grad in grads)

    one = ["emulate", str(TINY), *SMALL, "train.num_micro_batches=9", "--stages", "1"]
    options = ["--out", str(out), "--boundaries", str(boundaries), "--few-samples", "--steps", "1"]
    options += ["--keep", "1", "--costs", "0.001,0.001,0.001", "--one-by-one"]
    subprocess.run(
        [sys.executable, "-m", "ppruntime.launch.cli", *one, *options],
        check=True,
        cwd=tmp_path,
        timeout=LIMIT_SECONDS,
        env=environment(),
    )
    both = read_calibration(out)
    assert [row.stage for row in both.stages] == [1, 2, 3]
    assert (boundaries / "forward-1-0.pt").is_file()
    config = load([TINY], SMALL)
    plan = cut(config.model.dims, range(4), config.pp.layers_per_stage, seq_len=8)
    with pytest.raises(ProjectionError, match="no unit embed"):  # stage 0 was never there
        stage_costs(config, plan, calibration=both, efficiency=None, gpu_flops=1e12)
    costs = stage_costs(config, plan, calibration=both, efficiency=0.5, gpu_flops=1e12)
    assert [len(cost.pieces) for cost in costs[1:]] == [1, 1, 1]


def test_a_units_calibration_has_a_row_for_each_kind_and_mode_and_projects(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = tmp_path / "units.json"
    run = [str(TINY), "train.seq_len=8", "train.micro_batch_size=1", "data.type=counting"]
    options = ["--out", str(out), "--samples", "1", "--few-samples", "--modes"]
    run += ["ac.mode=selective", 'ac.save=["attention"]', 'ac.layer_modes={"2" = "selective"}']
    assert main(["calibrate", *run, *options, "none,selective"]) == 0
    known = read_calibration(out)
    config = load([TINY], ["train.seq_len=8", "train.micro_batch_size=1"])
    kinds = {(row.unit, row.ac_mode) for row in known.units}
    assert {mode for _, mode in kinds} == {"none", "selective:attention"}
    assert kinds == {(row.unit, row.ac_mode) for row in known.memory}
    plan = cut(config.model.dims, range(4), None, seq_len=8)
    costs = stage_costs(config, plan, calibration=known, efficiency=None, gpu_flops=1e12)
    assert all(cost.pieces for cost in costs)
    assert known.per_step[0].name == "optimizer"
    assert main(["project", *run, "--calibration", str(out), "--transfer-s", "0.001"]) == 0


def test_a_calibration_that_ends_early_keeps_the_units_it_has_timed(tmp_path, monkeypatch):
    from ppruntime.projection import calibrate as timing

    def ends_at_the_third(*args, **kwargs):
        rows = unit_rows(*args, **kwargs)
        yield next(rows)
        yield next(rows)
        raise KeyboardInterrupt

    unit_rows = timing.unit_rows
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(timing, "unit_rows", ends_at_the_third)
    out = tmp_path / "units.json"
    options = ["--out", str(out), "--samples", "1", "--few-samples", "--modes", "none"]
    with pytest.raises(SystemExit, match="130"):
        main(["calibrate", str(TINY), *SMALL, *options])
    assert len(read_calibration(out).units) == 2


def test_a_marginal_layer_makes_the_whole_model():
    """Embedding and head 3 s, a layer 2 s."""
    found = Depths(
        depths=(4, 8), step_s=(11.0, 19.0), step_p95_s=(12.0, 20.0), num_layers=40, samples=100
    )
    assert found.layer_s == 2.0
    assert found.whole_s == 83.0


def test_two_depths_are_timed_and_say_what_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run = ["calibrate", str(TINY), *SMALL, "--depths", "1,2", "--samples", "2"]
    assert main(run) == 2
    assert "--samples 2 is too few" in capsys.readouterr().err
    out = tmp_path / "depths.json"
    assert main([*run, "--few-samples", "--out", str(out)]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert "1 x 8 tokens" in first
    ms = [float(re.search(r" ([-\d.]+) ms", row)[1]) for row in rows]
    assert ["samples only" in row for row in rows] == [True, True, False, False]
    assert min(ms[:2]) > 0
    assert ms[2] == pytest.approx(ms[1] - ms[0], abs=0.0021)
    assert ms[3] == pytest.approx(ms[0] + 7 * ms[2], abs=0.01)
    record = json.loads(out.read_text())
    assert record["command"].startswith("ppruntime")
    assert record["samples"] == 2
    assert record["step_s"] == pytest.approx([value / 1e3 for value in ms[:2]], abs=1e-5)
    assert record["layer_s"] == pytest.approx(ms[2] / 1e3, abs=1e-5)
    for wrong, complaint in (
        ("4", "is not two depths"),
        ("2,2", "the smaller first"),
        ("4,9", "depths of the model's 8 layers"),
    ):
        given = ["--depths", wrong, "--few-samples", "--samples", "1"]
        assert main(["calibrate", str(TINY), *SMALL, *given]) == 2
        assert complaint in capsys.readouterr().err


def test_pieces_of_a_step_are_timed_on_the_ranks_of_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    in_torch = ExpertChoice(ExpertBackend.REFERENCE)
    monkeypatch.setattr("ppruntime.build.choose_experts", lambda config: in_torch)
    out = tmp_path / "step.json"
    run = ["calibrate", str(TINY), *PER_STEP, "--out", str(out), "--samples", "2", "--few-samples"]
    assert main([*run, "moe.compute.backend=triton", "--per-step"]) == 0
    assert "step 2, " in capsys.readouterr().out
    rows = {row.name: row for row in read_calibration(out).per_step}
    assert rows.keys() == {"gather", "quantise", "reduce", "clip", "optimizer"}
    assert {name for name, row in rows.items() if row.data_ranks is None} == {"quantise"}
    assert rows["reduce"].parameters == 0, "one data rank sends nothing"
    assert rows["optimizer"].parameters >= rows["quantise"].parameters > 0
    assert all(row.seconds > 0 and row.p95_s >= row.seconds for row in rows.values())
    assert {row.origin for row in rows.values()} == {"assumed"}, "two samples are no measurement"
    assert "2 samples only" in rows["reduce"].source
    capsys.readouterr()
    updates = ["optim.type=sign_sgd", "optim.clip_norm=default", "optim.apply_in_backward=true"]
    for wrong, complaint in (
        (["parallel.dp=2"], "1 processes started, the run has 2 ranks"),
        (["--modes", "none"], "leave out --depths, --modes and --in-flight"),
        (updates, "nothing comes once a step that could be timed"),
    ):
        assert main([*run, "--per-step", *wrong]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_two_data_ranks_time_what_they_send_each_other(tmp_path):
    out = tmp_path / "step.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "ppruntime.launch.cli", "calibrate", str(TINY)),
            *(*PER_STEP, "parallel.dp=2", "--per-step"),
            *("--out", str(out), "--samples", "1", "--few-samples"),
        ],
        check=True,
        cwd=tmp_path,
        timeout=LIMIT_SECONDS,
        env=environment(),
    )
    rows = {row.name: row for row in read_calibration(out).per_step}
    assert rows.keys() == {"gather", "reduce", "clip", "optimizer"}
    assert {row.data_ranks for row in rows.values()} == {2}
    assert "slowest of 2 ranks, pp 1 x dp 2 x ep 1" in rows["reduce"].source


def test_a_second_job_computes_the_bits_of_the_whole_pipeline_on_what_the_first_one_sent(tmp_path):
    """E3 with as many recorded micro-batches as there are: stage 0, then stage 1 on its outputs,
    hand on what the two stages hand on that are run one after the other."""
    count = 6
    keys = ["pp.size=2", "pp.layers_per_stage=[0.5,0.5]", "pp.schedule=1f1b_w"]
    keys += ["train.precision=fp32", f"train.num_micro_batches={count}"]
    config = load([TINY], [*ONE_LAYER, *keys])
    folder, ranks = (
        tmp_path / "boundaries",
        join(Layout(1, 1, 1), use_cuda=False, timeout_seconds=60),
    )
    costs = Costs((1e-4, 1e-4), (1e-4, 1e-4), (1e-4, 1e-4))
    try:
        found = [
            emulate(
                config,
                ranks,
                range(stage, stage + 1),
                costs=costs,
                hop_s=0.0,
                num_steps=1,
                replays=Recorder(folder, count, 0, ranks.device),
            )
            for stage in (0, 1, 0)
        ]
        plan = check_emulation(config, range(2))[1]
        first, last = (build_stage(config, plan[stage], ranks) for stage in (0, 1))
    finally:
        leave()
    one, data = torch.ones(()), open_data(config)
    for stage in (first, last):
        stage.reset(loss_seed=one, balance_seed=one)
    for m in range(count):
        outputs = first.forward(m, (), data.micro_batch(0, m))
        last.forward(m, outputs, data.micro_batch(0, m))
        grads = last.backward(m, ())
        for name, expected in ((f"forward-0-{m}.pt", outputs), (f"backward-1-{m}.pt", grads)):
            kept = torch.load(folder / name, weights_only=True)
            assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True)), name
    rows = [emulation.stages[0] for emulation in found]
    assert not any(row.whole_backwards for row in rows), "1f1b_w has I and W apart"
    assert "stage 0 of 2 alone, no transfer in flight" in rows[0].source
    sources = [row.source.rpartition("; ")[2] for row in rows]
    assert sources == [f"what came from absent stages was {how}" for how in _CAME]


_CAME = ("drawn", "recorded", "recorded")


def test_transfers_that_were_seldom_waited_for_cost_an_emulation_none_of_its_rows():
    """Stage 1 waits for every message of 99 and of 100 micro-batches, and for one gradient."""

    def times(count):
        sent = [OpTimes(f"0SEND_F{m}", 1000 * m + 500, 0, 0) for m in range(count)]
        taken = [OpTimes(f"1F{m}", 1000 * m, 1000 * m + 502, 0) for m in range(count)]
        early = [OpTimes(f"1F{count}", 10**9, 10**9, 0), OpTimes("0B0", 0, 7, 0)]
        return [[*sent, *taken, OpTimes("1SEND_B0", 4, 0, 0)], early]

    boundary = Boundary(
        (TensorSpec("kv", (5,), torch.float32), TensorSpec("slots", (5,), torch.int32))
    )
    config = load([TINY], SMALL)
    for count, origin in ((99, "assumed"), (100, "measured")):
        few, many = waited_for(range(2), [boundary], [times(count)], "put", "emulated")
        assert (few.num_bytes, few.samples, few.origin) == (20, 1, "assumed")
        assert (many.num_bytes, many.samples, many.origin) == (40, count, origin)
        assert many.seconds == pytest.approx(2e-9)
        assert ("99 samples only" in many.source) == (count == 99)
        known = calibration_of(config, few_samples=False, transport="put", transfers=[few, many])
        assert len(known.transfers) == 2


def test_recorded_boundaries_repeat_and_those_of_another_run_are_refused(tmp_path):
    device, there = torch.device("cpu"), channel()
    Recorder(tmp_path, 2, 0, device).sent(there, 1, (torch.tensor([1.0, 2.0]),))
    replays = Recorder(tmp_path, 2, 0, device)
    assert replays.describe() == ""
    for micro_batch in (1, 3):
        assert replays.tensors(there, micro_batch)[0].tolist() == [1.0, 2.0]
    assert replays.describe() == "; what came from absent stages was recorded"
    assert torch.equal(replays.tensors(there, 2)[0], drawn(there.boundary, 0, device)[0])
    assert replays.describe().endswith("was drawn, 1 of 2 boundaries apart")
    assert Recorder(tmp_path, 2, 1, device).tensors(there, 1)[0].tolist() != [1.0, 2.0]
    wider = channel(boundary=Boundary((TensorSpec("streams", (3,), torch.float32),)))
    with pytest.raises(ProjectionError, match="is of another run, delete it or name another"):
        Recorder(tmp_path, 2, 0, device).tensors(wider, 1)


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_time_units_beside_the_messages_that_they_send_each_other(tmp_path):
    out, idle = tmp_path / "in-flight.json", tmp_path / "idle.json"
    keys = (*ONE_LAYER, "pp.size=2", "pp.layers_per_stage=[0.5,0.5]", "pp.transport=gloo")
    once = ("--modes", "none", "--samples", "1", "--few-samples")
    assert main(["calibrate", str(TINY), *keys, *once, "--out", str(idle)]) == 0
    told = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "ppruntime.launch.cli", "calibrate", str(TINY)),
            *(*keys, *once, "--in-flight", "--out", str(out), "--idle", str(idle)),
        ],
        check=True,
        cwd=tmp_path,
        timeout=LIMIT_SECONDS,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    known = read_calibration(out)
    assert known.transport == "gloo"
    (slowdown,) = read_calibration(idle).slowdowns
    assert (slowdown.transport, slowdown.origin) == ("gloo", "assumed")
    assert "4 units beside messages both ways" in slowdown.source
    assert {row.unit for row in known.units} == {
        "embed",
        "attention.swa.ratio0",
        "moe.routed",
        "head",
    }
    assert all("bytes both ways on gloo" in row.source for row in known.units)
    assert int(re.search(r"^([\d,]+) messages of", told, re.MULTILINE)[1].replace(",", "")) >= 1


@pytest.mark.slow
def test_a_run_is_predicted_from_another_one_before_it_runs(tmp_path):
    out, predictions = tmp_path / "v3.json", tmp_path / "predictions.jsonl"
    code = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "ppruntime.launch.cli", "validate-run", str(TINY)),
            *(*ONE_LAYER, "pp.size=2", "pp.layers_per_stage=[0.5,0.5]", "pp.schedule=1f1b_w"),
            *("train.num_micro_batches=12", "--steps", "2", "--out", str(out)),
            *("--calibrate-with", "train.num_micro_batches=8 pp.schedule=1f1b"),
            *("--predictions", str(predictions)),
        ],
        check=False,  # on a busy machine op times of milliseconds may miss their bars
        cwd=tmp_path,
        timeout=LIMIT_SECONDS,
        env=environment(),
    ).returncode
    (line,) = predictions.read_text().splitlines()
    said, record = json.loads(line), json.loads(out.read_text())
    cases = {case["what"]: case for case in record["cases"]}
    assert said["rests_on"] == "train.num_micro_batches=8 pp.schedule=1f1b"
    assert said["written"] < record["date"]
    assert said["predicted"] == {what: case["predicted"] for what, case in cases.items()}
    assert {"step s", "cycle s"} == {what for what, case in cases.items() if case["limit"]}
    assert {f"stage {s} {kind} s" for s in (0, 1) for kind in ("F", "I + W")} < cases.keys()
    assert "beside the pipeline s" in cases
    assert all(case["measured"] > 0 for case in cases.values())
    assert code in (0, 1)
    assert not list(tmp_path.glob(".*.new"))


# In this process


def channel(**changes: object) -> Channel:
    spec = TensorSpec("streams", (2,), torch.float32)
    given = {
        "id": 0,
        "kind": "forward",
        "src_rank": 0,
        "dst_rank": 1,
        "src_stage": 0,
        "dst_stage": 1,
        "boundary": Boundary((spec,)),
        "slots": 2,
    }
    return Channel(**(given | changes))


def test_a_replaying_transport_waits_for_what_the_absent_rank_would_take():
    schedule = make("1f1b", 2, 2)
    there = channel()
    back = channel(id=1, kind="backward", src_rank=1, dst_rank=0, src_stage=1, dst_stage=0)
    inner, edges = split_channels([there, back], range(1), 0)
    assert (inner, edges) == ({}, (there, back))
    device = torch.device("cpu")
    transport = ReplayTransport(None, inner, edges, 0, Blanks(device), device=device)
    start = perf_counter()
    costs = Costs((0.0, 0.02), (0.0, 0.03), (0.0, 0.0))
    transport.begin(AbsentRanks(schedule, costs, Hops.both(0.01), range(1), start=start))
    transport.post(back, 0)
    sent = perf_counter()
    transport.send(there, 0, (torch.ones(2),))
    (grad,) = transport.take(back, 0)
    assert perf_counter() - sent >= 0.01 + 0.02 + 0.03 + 0.01
    assert grad.shape == (2,)
    assert bool(grad.any())
    transport.release(back, 0)
    transport.post(back, 1)
    with pytest.raises(TransportError, match="never comes"):
        transport.take(back, 1)


def test_drawn_boundaries_are_never_all_zeros_where_numbers_are_multiplied():
    boundary = Boundary(
        (TensorSpec("streams", (4,), torch.bfloat16), TensorSpec("slots", (3,), torch.int32))
    )
    numbers, slots = drawn(boundary, 0, torch.device("cpu"))
    assert bool(numbers.any())
    assert not bool(slots.any())


def test_calibrations_of_another_run_few_samples_and_profilers_are_refused(tmp_path):
    config = load([TINY], SMALL)
    row = StageTimes(
        stage=0,
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        origin="measured",
        source="test",
        samples=7,
    )

    def known(**changes: object) -> Calibration:
        made = calibration_of(config, few_samples=True, transport="gloo", stages=[row])
        return msgspec.structs.replace(made, **changes)

    path = tmp_path / "a folder that is not there" / "c.json"
    write_calibration(known(), path)
    with pytest.raises(ProjectionError, match="7 samples are too few"):
        calibration_of(config, few_samples=False, transport="gloo", stages=[row])
    with pytest.raises(ProjectionError, match="is of seq_len 8, this run of 16"):
        merged(path, known(seq_len=16))
    with pytest.raises(ProjectionError, match="stages of another cut"):
        merged(path, known(layers_per_stage=(8.0, 0.0, 0.0, 0.0)))
    assert len(merged(path, known()).stages) == 1
    timed, guessed = (
        PerStep(name="optimizer", seconds=s, origin=o, source="test", samples=100)
        for s, o in ((1.0, "measured"), (2.0, "modelled"))
    )
    beside = tmp_path / "step.json"
    for row, seconds in ((guessed, 2.0), (timed, 1.0), (guessed, 1.0)):
        new = calibration_of(config, few_samples=False, transport="gloo", per_step=[row])
        write_calibration(merged(beside, new), beside)
        assert read_calibration(beside).per_step[0].seconds == seconds
    path.write_text(json.dumps(json.loads(path.read_text()) | {"zero_weights": True}))
    with pytest.raises(ProjectionError, match="weights were zeros"):
        read_calibration(path)
    sys.setprofile(lambda *_: None)
    try:
        with pytest.raises(ProjectionError, match="a Python profiler is on"):
            refuse_profilers()
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    "command",
    [
        "emulate {tiny} --stages 2-3 --one-by-one --costs 1,1,1 --steps 2 --out {out}",
        "calibrate {tiny} pp.size=1 --samples 24 --out {out}",
    ],
)
def test_what_a_file_would_refuse_is_refused_before_anything_runs(
    command, tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("ppruntime.ranks.join", lambda *_, **__: pytest.fail("something ran"))
    out = tmp_path / "c.json"
    keys = [key for key in SMALL if "pp.size" not in key] + ["train.num_micro_batches=18"]
    words = [*command.format(tiny=TINY, out=out).split(), *keys]
    assert main(words) == 2
    assert re.search(r"^(24|28) samples are too few", capsys.readouterr().err)
    other = calibration_of(
        load([TINY], [*keys, "train.seq_len=16"]), few_samples=True, transport=""
    )
    write_calibration(other, out)
    assert main([*words, "--few-samples"]) == 2
    assert "is of seq_len 16, this run of 8; write to another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("pp.layers_per_stage=[2,2,2,2]", "timed stages of 3, 1, 2, 2 layers"),
        ("train.seq_len=16", "is for seq_len 8, the run has 16"),
    ],
)
def test_absent_stages_do_not_take_what_those_of_another_run_took(
    key, complaint, tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("ppruntime.ranks.join", lambda *_, **__: pytest.fail("something ran"))
    keys = [k for k in SMALL if "layers" not in k] + ["train.num_micro_batches=18"]
    row = StageTimes(
        stage=3,
        **{"forward_s": 0.1, "input_grad_s": 0.1, "weight_grad_s": 0.1},
        **{"origin": "assumed", "source": "a guess"},
    )
    known = tmp_path / "known.json"
    cut = "pp.layers_per_stage=[3,1,2,2]"
    config = load([TINY], [*keys, cut])
    write_calibration(
        calibration_of(config, few_samples=True, transport="gloo", stages=[row]), known
    )
    words = ["emulate", str(TINY), *keys, cut, key, "--stages", "0", "--out", str(tmp_path / "c")]
    assert main([*words, "--calibration", str(known), "--few-samples"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "present", "complaint"),
    [
        (["train.num_micro_batches=11"], range(0, 2), "set train.num_micro_batches to 12 or more"),
        (["pp.schedule=interleaved_1f1b"], range(0, 2), "has 2 stages a rank"),
        (["train.num_micro_batches=12"], range(3, 6), "name stages of 0 to 3"),
    ],
)
def test_what_cannot_be_emulated_is_refused(overrides, present, complaint):
    with pytest.raises(ProjectionError, match=complaint):
        check_emulation(load([TINY], [*SMALL, *overrides]), present)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("emulate {tiny} --stages 0-x --out c", "is not FIRST-LAST"),
        ("emulate {tiny} --stages 3-1 --out c --costs 1,1,1", "--stages 3-1 ends before it begins"),
        ("emulate {tiny} --stages 0 --out c", "give --costs or --calibration"),
        ("emulate {tiny} --stages 0-1 --out c --costs 1,1,1", "need 2 processes"),
        ("calibrate {tiny}", "give --out, --depths or both"),
        ("calibrate {tiny} --depths 4 --samples 0", "time 1 time or more"),
        (
            "calibrate {tiny} --out c --in-flight",
            "on two pipeline ranks, and the run has pp.size 4",
        ),
        ("calibrate {tiny} --out c --in-flight --per-step", "leave out --depths, --modes and --in"),
        (
            "calibrate {tiny} pp.size=2 --out c --in-flight",
            'pp.transport = "auto" does not say what was in flight',
        ),
        (
            "calibrate {tiny} pp.size=2 pp.transport=gloo --out c --in-flight",
            "1 processes started, the run has 2 ranks",
        ),
        ("validate --ranks 3", "ranks are even"),
        ("validate-run {tiny} --calibrate-with pp.size=2", "start as many as both have"),
    ],
)
def test_wrong_uses_of_the_commands_are_refused(arguments, complaint, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(arguments.format(tiny=TINY).split()) == 2
    assert complaint in capsys.readouterr().err


def test_calibrations_and_emulations_move_messages_as_the_run_says(monkeypatch):
    """A library for put, thread blocks, lead: what `[pp]` says reaches a transport of theirs."""
    given = {}
    monkeypatch.setattr(
        "ppruntime.connect.open_transport", lambda kind, *_, **options: given.update(options)
    )
    keys = ("pp.size=2", "pp.transport=put", "pp.nccl_library=/opt/libnccl.so.2")
    config = load([TINY], [*keys, "pp.timeout_seconds=7"])
    ranks = join(Layout(1, 1, 1), use_cuda=False, timeout_seconds=60)
    try:
        open_beside(config, ranks, ())
    finally:
        leave()
    assert (given["nccl_library"], given["timeout_seconds"]) == ("/opt/libnccl.so.2", 7)

"""A projection's bytes are the memory ledger's, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import CONFIG, SMALL

from ppruntime.config import load
from ppruntime.launch.cli import main
from ppruntime.ledger import UPDATE, predict
from ppruntime.projection.step_memory import ledgers_of, memory_over_time
from ppruntime.schedules.ops import parse_op
from ppruntime.schedules.timeline import TimedOp

FULL = Path(__file__).parents[2] / "launch" / "configs" / "v41-flash-pp16.toml"
TINY = (str(CONFIG), *SMALL, "train.precision=bf16", "train.num_micro_batches=8")
WHOLE = (str(FULL), "train.num_micro_batches=32")
LAYOUTS = {
    "pp1": (*TINY, "pp.size=1", "pp.layers_per_stage=default"),
    "pp1 dp2, one micro-batch": (
        *(*TINY, "pp.size=1", "pp.layers_per_stage=default"),
        *("parallel.dp=2", "train.num_micro_batches=1"),
    ),
    "pp2 full": (*TINY, "pp.size=2", "ac.mode=full"),
    "pp2 dualpipe_v": (*TINY, "pp.size=2", "pp.schedule=dualpipe_v"),
    "pp2 ep2 full_moe": (*TINY, "pp.size=2", "parallel.ep=2", "ac.mode=full_moe"),
    "pp4 1f1b_w dp2": (*TINY, "pp.size=4", "pp.schedule=1f1b_w", "parallel.dp=2"),
    "pp4 masters away": (*TINY, "pp.size=4", "pp.offload_masters=true", "ac.mode=matmul"),
    "pp16 ep8": WHOLE,
    "pp16 ep8 dp12 1f1b": (*WHOLE, "parallel.dp=12", "pp.schedule=1f1b", "pp.warmup_step=default"),
    "pp16 ep8 dp12 1f1b_w fp8": (
        *(*WHOLE, "parallel.dp=12", "pp.schedule=1f1b_w", "ac.mode=full_moe"),
        *("moe.compute.backend=auto", "moe.compute.free_bf16_expert_weights=true"),
    ),
    "pp16 ep8 dualpipe_v none": (
        *(*WHOLE, "pp.schedule=dualpipe_v", "pp.layers_per_stage=default"),
        *("pp.warmup_step=default", "ac.mode=none"),
    ),
}


def split(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    return [w for w in words if w.endswith(".toml")], [w for w in words if "=" in w]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_project_and_simulate_have_the_ledgers_peaks_in_every_layout(layout, capsys):
    words = LAYOUTS[layout]
    parts = ["--costs", "1,1,1", "--per-step-s", "0", "--json"]
    if "pp.size=1" not in words:
        parts += ["--transfer-s", "0"]
    assert main(["project", *words, *parts]) == 0
    held = json.loads(capsys.readouterr().out)["numbers"]["rank_peak_bytes"]
    assert main(["simulate", *words, *parts, "--memory"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    ledgers = predict(load(*split(words)))
    peaks = [ledger.peak_bytes for ledger in ledgers]
    assert held["value"] == simulated["peak_bytes"] == peaks
    most = [max(b for _, b in points) for points in simulated["memory"]]
    in_step = [
        ledger.through_the_step + max(moment.total for moment in ledger.moments)
        for ledger in ledgers
    ]
    assert most == in_step
    assert "memory ledger" in held["source"]
    assert any("memory ledger" in line for line in simulated["conditions"])


def test_offloaded_activations_are_away_as_in_a_run_that_offloads(capsys):
    words = (*TINY, "pp.size=4", "train.num_micro_batches=12")
    run = ["--costs", "1,1,1", "--transfer-s", "0", "--per-step-s", "0", "--json"]
    moved = ["--offload-every", "2", "--host-bandwidth", "1e9"]
    assert main(["simulate", *words, *run, *moved]) == 0
    found = json.loads(capsys.readouterr().out)
    files, overrides = split(words)
    offloads = ("pp.activation_offload=true", "pp.offload_every=2")
    away = predict(load(files, [*overrides, *offloads]))
    assert found["peak_bytes"] == [ledger.peak_bytes for ledger in away]
    stay = [ledger.peak_bytes for ledger in predict(load(files, overrides))]
    assert all(less <= most for less, most in zip(found["peak_bytes"], stay, strict=True))
    assert sum(found["peak_bytes"]) < sum(stay)
    # A run that offloads has these bytes as it is; what its copies take is said to be left out.
    for command in ("project", "simulate"):
        extra = ["--memory"] if command == "simulate" else []
        assert main([command, *words, *offloads, *run, *extra]) == 0
        said = json.loads(capsys.readouterr().out)
        assert "not counted: what host copies" in " ".join(said["conditions"])


def test_an_ops_bytes_begin_with_it_and_the_updates_behind_all():
    config = load(*split((*TINY, "pp.size=1", "pp.layers_per_stage=default")))
    (ledger,) = ledgers_of(config)
    *ops, update = ledger.moments
    row = [TimedOp(parse_op(m.op), 0, 2.0 * i, 2.0 * i + 1) for i, m in enumerate(ops)]
    points = memory_over_time(ledger, row)
    assert [point.time for point in points] == [*(op.start for op in row), row[-1].finish]
    assert points[-1].bytes_held == ledger.through_the_step + update.total
    assert update.op == UPDATE
    assert max(point.bytes_held for point in points) == ledger.peak_bytes

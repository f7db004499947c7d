"""The bench that trains with references and with kernels: what it compares, and a run of it."""

from __future__ import annotations

import json

import pytest

from ppruntime.config import load
from ppruntime.launch import bench_kernel_losses as bench
from ppruntime.launch.bench_kernel_losses import RUNS, WINDOW, Learned, apart, curve


def learned(*losses: float) -> Learned:
    return Learned("run", (), losses, 1.0)


def test_a_curve_has_a_point_for_every_window_and_leaves_a_rest_out():
    assert curve([1.0] * WINDOW + [3.0] * WINDOW + [9.0] * (WINDOW - 1)) == [1.0, 3.0]
    assert curve([1.0] * (WINDOW - 1)) == []


def test_runs_are_apart_by_their_largest_distance_but_for_the_first_point():
    one = learned(*[9.0] * WINDOW, *[2.0] * WINDOW, *[1.0] * WINDOW)
    other = learned(*[5.0] * WINDOW, *[2.5] * WINDOW, *[1.25] * WINDOW)
    assert apart(one, other) == 0.5
    assert apart(one, one) == 0


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_a_config(name):
    config = load([bench.CONFIG], [*bench.FOUR_LAYERS, *RUNS[name], "train.steps=200"])
    assert config.model.dims.num_layers == 4
    assert (config.kernels.linear == "auto") == ("FP8" in name)


def test_a_run_that_fails_ends_the_bench_but_fp8_is_left_out(tmp_path, monkeypatch, capsys):
    def trained(config, overrides):
        failing = "FP8" if bench.FP8[0] in overrides else "other"
        return None if failing in fails else [_Step() for _ in range(40)]

    monkeypatch.setattr(bench, "trained", trained)
    out = tmp_path / "losses.json"
    fails = {"FP8"}
    assert bench.run(steps=40, overrides=(), config=bench.CONFIG, out=out) == 0
    assert [run["name"] for run in json.loads(out.read_text())["runs"]] == [
        name for name in RUNS if "FP8" not in name
    ]
    assert "left out" in capsys.readouterr().out
    fails = {"other"}
    assert bench.run(steps=40, overrides=(), config=bench.CONFIG, out=out) == 1


class _Step:
    loss, step_seconds = 2.0, 0.1


def test_kernels_farther_from_the_references_than_another_seed_are_told(tmp_path, monkeypatch):
    losses = iter([2.0, 2.5, 2.0, 2.1])

    def trained(config, overrides):
        step = _Step()
        step.loss = next(losses)
        return [step] * 40

    monkeypatch.setattr(bench, "trained", trained)
    out = tmp_path / "losses.json"
    assert bench.run(steps=40, overrides=(), config=bench.CONFIG, out=out) == 1

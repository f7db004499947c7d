"""The bench that trains with references and with kernels: what it compares, and a run of it."""

from __future__ import annotations

import json

import pytest
from small_runs import CONFIG

from ppruntime.config import load
from ppruntime.launch import bench_kernel_losses as bench
from ppruntime.launch.bench_kernel_losses import (
    IN_BF16,
    IN_FP8,
    OTHER_SEED,
    REFERENCE,
    RUNS,
    WINDOW,
    Learned,
    apart,
    curve,
)
from ppruntime.launch.bench_training import Trained, trained_for


def learned(*losses: float) -> Learned:
    return Learned("run", (), losses, 1.0)


def test_a_curve_has_a_point_for_every_window_and_leaves_a_rest_out():
    assert curve([1.0] * WINDOW + [3.0] * WINDOW + [9.0] * (WINDOW - 1)) == [1.0, 3.0]
    assert curve([1.0] * (WINDOW - 1)) == []


def test_runs_are_apart_by_their_largest_distance_as_far_as_both_go_but_for_the_first_point():
    one = learned(*[9.0] * WINDOW, *[2.0] * WINDOW, *[1.0] * WINDOW)
    other = learned(*[5.0] * WINDOW, *[2.5] * WINDOW, *[1.75] * WINDOW)
    assert apart(one, other) == 0.75
    assert apart(one, one) == 0
    assert apart(one, learned(*other.losses[: 2 * WINDOW + 1])) == 0.5
    assert apart(one, learned(*other.losses[:WINDOW])) is None


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_a_config(name):
    config = load([bench.CONFIG], [*bench.FOUR_LAYERS, *RUNS[name], "train.steps=200"])
    assert config.model.dims.num_layers == 4
    assert (config.kernels.linear == "auto") == ("FP8" in name)


class _Step:
    step_seconds = 0.1

    def __init__(self, loss=2.0):
        self.loss = loss


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Plays runs of given losses, None for one that fails; gives code and record of a bench."""

    def run(losses, steps=40, cut=(), **options):
        asked = []

        def trained_for(config, overrides, *, limit_seconds):
            (name,) = (n for n, own in RUNS.items() if list(own) == overrides[:-1])
            asked.append(name)
            loss = losses[name]
            if loss is None:
                return None
            count = steps // 2 if name in cut else steps
            return Trained([_Step(loss) for _ in range(count)], name in cut)

        monkeypatch.setattr(bench, "trained_for", trained_for)
        out = tmp_path / "losses.json"
        code = bench.run(steps=steps, overrides=(), config=bench.CONFIG, out=out, **options)
        return code, json.loads(out.read_text()), asked

    return run


ALIKE = dict.fromkeys(RUNS, 2.0)


def test_a_run_that_fails_ends_the_bench_but_fp8_is_left_out(play, capsys):
    code, record, _ = play({**ALIKE, IN_FP8: None})
    assert code == 0
    assert [run["name"] for run in record["runs"]] == [REFERENCE, IN_BF16, OTHER_SEED]
    assert record["left"] == [IN_FP8]
    assert "left out" in capsys.readouterr().out
    assert play({**ALIKE, IN_BF16: None})[0] == 1


def test_kernels_farther_from_the_references_than_another_seed_are_told(play):
    assert play({**ALIKE, IN_BF16: 2.5, OTHER_SEED: 2.4})[0] == 1
    assert play({**ALIKE, IN_BF16: 2.15, OTHER_SEED: 2.05})[0] == 0


def test_runs_made_in_parts_are_one_record(play, capsys):
    code, record, asked = play(ALIKE, only=["kernels", "reference"])
    assert (code, asked) == (0, [IN_BF16, REFERENCE])
    assert [run["name"] for run in record["runs"]] == [REFERENCE, IN_BF16]
    assert record["left"] == [IN_FP8, OTHER_SEED]
    assert "not judged without all steps of: other seed" in capsys.readouterr().out
    code, record, asked = play({OTHER_SEED: 2.1}, only=["seed"])
    assert (code, asked, record["left"]) == (0, [OTHER_SEED], [IN_FP8])
    assert [run["apart"] for run in record["runs"]] == pytest.approx([0, 0, 0.1])
    # Another training's runs are no part of it.
    code, record, _ = play({IN_FP8: 2.0}, steps=60, only=["fp8"])
    assert [run["name"] for run in record["runs"]] == [IN_FP8]


def test_runs_made_at_once_are_one_record(play, tmp_path):
    play(ALIKE, only=["reference"])
    out = tmp_path / "losses.json"
    record = json.loads(out.read_text())

    class Late(dict):
        """Losses that are there when another process has written its run."""

        def __getitem__(self, name):
            out.write_text(json.dumps(record))
            return 2.0

    out.unlink()
    code, both, _ = play(Late(), only=["kernels"])
    assert code == 0
    assert [run["name"] for run in both["runs"]] == [REFERENCE, IN_BF16]


def test_what_the_limit_cut_or_left_out_is_named_and_is_no_pass(play, capsys):
    code, record, _ = play(ALIKE, cut=(REFERENCE,), only=["reference", "kernels"])
    assert code == 1
    assert record["left"] == [REFERENCE, IN_FP8, OTHER_SEED]
    assert len(record["runs"][0]["losses"]) == 20
    assert "cut after 20 steps" in capsys.readouterr().out
    code, record, asked = play(ALIKE, only=["seed"], limit_seconds=0.0)
    assert (code, asked) == (1, [])
    assert "other seed: not run, the limit was over" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_over_its_limit_is_ended_and_what_it_did_is_kept(tmp_path):
    overrides = ["pp.size=1", "train.steps=100000", "run.tensorboard=false", "run.device=cpu"]
    found = trained_for(CONFIG, overrides, limit_seconds=20)
    assert found is not None
    assert found.was_cut
    assert 0 < len(found.metrics) < 100_000
    assert trained_for(CONFIG, [*overrides, "pp.size=0"], limit_seconds=20) is None

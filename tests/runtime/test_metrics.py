"""metrics.jsonl loses nothing and rounds nothing; what is beside it never ends a run."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.metrics import (
    MetricsError,
    MetricsLog,
    ProgressLine,
    StepMetrics,
    mfu,
    peak_flops,
    read_metrics,
)


def _step(step, loss=2.5, **more):
    values = {
        "grad_norm": 0.1,
        "lr": 1e-3,
        "tokens_per_s": 1e4,
        "mfu": None,
        "step_seconds": 0.5,
        "tokens": 512 * step,
    }
    return StepMetrics(step=step, loss=loss, **{**values, **more})


def _log(path, **options):
    return MetricsLog(path, tensorboard=None, warn=pytest.fail, **options)


@given(st.floats(), st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_as_the_same_floats(tmp_path_factory, loss, norm):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    log = _log(path)
    log.write(_step(1, loss, grad_norm=norm))
    log.close()
    (read,) = read_metrics(path)
    assert read.loss == (loss if math.isfinite(loss) else None)
    assert read.grad_norm == norm
    plain = json.loads(path.read_text())
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_s", "mfu"} <= set(plain)


def test_a_line_is_on_file_as_soon_as_it_is_written(tmp_path):
    log = _log(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        log.write(_step(step))
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step
    assert (tmp_path / "metrics.jsonl").stat().st_mode & 0o777 == 0o600
    log.close()


def test_after_a_resume_nothing_is_deleted_and_the_reader_follows_the_new_path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = _log(path)
    for step in range(1, 8):
        log.write(_step(step, loss=step))
    log.close()
    before = path.read_bytes()

    log = _log(path, resumed_at=4)
    log.write(_step(5, loss=50))
    log.close()
    assert path.read_bytes().startswith(before)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["resumed_at"] for line in lines] == [None] * 7 + [4]
    # Steps 6 and 7 belong to a past that was given up.
    assert [(m.step, m.loss) for m in read_metrics(path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 50),
    ]

    log = _log(path)  # started over: the directory held no checkpoint that could be used
    log.write(_step(1, loss=100))
    log.close()
    assert [(m.step, m.loss) for m in read_metrics(path)] == [(1, 100)]


def test_half_a_line_of_a_killed_start_costs_no_other_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = _log(path)
    log.write(_step(1))
    log.close()
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert [m.step for m in read_metrics(path)] == [1]
    log = _log(path, resumed_at=1)
    log.write(_step(2))
    log.close()
    assert [m.step for m in read_metrics(path)] == [1, 2]


def test_a_damaged_line_in_the_middle_is_told_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = _log(path)
    for step in (1, 2, 3):
        log.write(_step(step))
    log.close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"step": "two"}', lines[2]]) + "\n")
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:2: not a step"):
        read_metrics(path)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    warnings = []
    log = MetricsLog(
        tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tensorboard", warn=warnings.append
    )
    log.write(_step(1, loss=2.0))
    log.write(_step(2, loss=1.5, val_loss=1.75))
    log.close()
    assert warnings == []
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.0), (2, 1.5)]
    assert [(e.step, e.value) for e in events.Scalars("val_loss")] == [(2, 1.75)]
    assert "mfu" not in events.Tags()["scalars"]


def test_tensorboard_that_is_not_installed_is_not_missed(tmp_path, monkeypatch):
    monkeypatch.setattr("ppruntime.metrics.find_spec", lambda name: None)
    log = MetricsLog(tmp_path / "m.jsonl", tensorboard=tmp_path / "tb", warn=pytest.fail)
    log.write(_step(1))
    log.close()
    assert [m.step for m in read_metrics(tmp_path / "m.jsonl")] == [1]
    assert not (tmp_path / "tb").exists()


def test_tensorboard_that_does_not_work_is_told_once_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ppruntime.metrics.find_spec", lambda name: name)
    (tmp_path / "file").write_text("in the way")
    warnings = []
    log = MetricsLog(
        tmp_path / "metrics.jsonl", tensorboard=tmp_path / "file" / "tb", warn=warnings.append
    )
    log.write(_step(1))
    log.write(_step(2))
    log.close()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = MetricsLog(tmp_path / "other.jsonl", tensorboard=tmp_path / "tb", warn=warnings.append)
    log.write(_step(1))
    log.close()
    assert len(warnings) == 2
    assert all(text.startswith("TensorBoard is off: ") for text in warnings)
    assert [m.step for m in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_mfu_is_six_n_d_over_the_peak_of_all_devices():
    # 6 x 16.13e9 FLOPs a token, 128 H200 at 989.4 TFLOP/s: 653,000 tokens/s are half the peak.
    flops = 6 * 16_129_982_464
    share = mfu(
        654_282.0, flops_per_token=flops, num_devices=128, device_flops=peak_flops("NVIDIA H200")
    )
    assert share == pytest.approx(0.5, abs=1e-4)
    assert mfu(1.0, flops_per_token=flops, num_devices=1, device_flops=None) is None
    assert peak_flops("Some CPU") is None


def test_without_a_terminal_there_is_a_plain_line_each_interval_and_for_the_last_step():
    shown = io.StringIO()
    progress = ProgressLine(7, interval=3, file=shown)
    for step in range(1, 8):
        progress.update(_step(step, val_loss=3.0 if step == 6 else None))
    progress.note("saved [bold]step-00000007[/bold]")
    progress.close()
    lines = shown.getvalue().splitlines()
    assert [line[:8] for line in lines] == ["step 3/7", "step 6/7", "step 7/7", "saved [b"]
    assert lines[0] == (
        "step 3/7  loss 2.5000  10,000 tok/s  0:00:02 left  grad 0.100  lr 1.00e-03"
    )
    assert "val 3.0000" in lines[1]
    assert lines[3] == "saved [bold]step-00000007[/bold]"
    assert "\x1b" not in shown.getvalue()


def test_on_a_terminal_the_line_is_redrawn_in_place():
    shown = io.StringIO()
    progress = ProgressLine(3, file=shown, is_terminal=True)
    for step in (1, 2, 3):
        progress.update(_step(step, loss=float(step), mfu=0.412))
    progress.close()
    progress.close()
    text = shown.getvalue()
    assert "step 3/3  loss 3.0000  10,000 tok/s  mfu 41.2 %  0:00:00 left" in text
    assert "\x1b[2K" in text  # erases the line before


def test_a_loss_that_is_not_there_is_said_so():
    shown = io.StringIO()
    ProgressLine(1, file=shown).update(_step(1, loss=None))
    assert "loss none" in shown.getvalue()


_TRAIN_ON = """
import sys
from ppruntime.metrics import ProgressLine, StepMetrics
progress = ProgressLine(2000, is_terminal=sys.argv[1] == "terminal")
for step in range(1, 2001):
    progress.update(StepMetrics(step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens_per_s=1.0,
                                mfu=None, step_seconds=1.0, tokens=step))
progress.close()
print("trained on", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_training_goes_on_when_its_reader_goes_away(kind):
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAIN_ON, kind],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 0, errors
    assert errors.endswith("trained on\n")

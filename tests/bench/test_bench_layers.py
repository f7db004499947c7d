"""The layers' bench: what can be said of it without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from ppruntime.launch import bench_layers


@pytest.fixture
def small(monkeypatch):
    for name, value in {"HEADS": 16, "WIDTH": 64, "WINDOW": 8, "PAIRS": 8}.items():
        monkeypatch.setattr(bench_layers, name, value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "layers.json"
    assert bench_layers.main(["--out", str(out)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.usefixtures("small")
@pytest.mark.skipif(torch.cuda.is_available(), reason="small shapes, for the interpreter")
def test_its_lists_hold_a_causal_window_and_visible_entries():
    inputs = bench_layers.Inputs.make(48, 20, torch.device("cpu"))
    slots = inputs.slots[0]
    assert slots.shape == (48, 20)
    for query, row in enumerate(slots.tolist()):
        window = [x for x in row[:8] if x >= 0]
        entries = [x - 48 for x in row[8:] if x >= 0]
        assert window == list(range(max(0, query - 7), query + 1))
        assert len(entries) == min(12, (query + 1) // 2)
        assert entries == sorted(set(entries))
        assert all(2 * entry + 1 <= query for entry in entries)
    few = inputs.first(3)
    assert torch.equal(few.saved[0], inputs.saved[0][:, -3:])
    assert (few.reference()["out"] - few.saved[0].float()).abs().max() < 0.05


def test_a_row_counts_flops_per_median():
    row = bench_layers.Row("forward", "hopper", 640, 2e12, [4.0, 2.0, 1.0])
    assert row.record()["teraflops"] == pytest.approx(1000)
    assert row.record()["spread"] == 3.0
    assert "1000 TFLOP/s" in str(row)
    assert "failed: no" in str(bench_layers.Row("forward", "x", 640, 1.0, failure="no"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="small shapes, for the interpreter")
def test_halves_of_each_kind_and_their_parts_are_timed_and_what_cannot_run_says_why(tmp_path):
    out = tmp_path / "halves.json"
    small = ["--device", "cpu", "--tokens", "8", "--repetitions", "1"]
    small += ["--model", "tiny", "--out", str(out)]
    assert bench_layers.main(["--only", "halves", *small]) == 0
    lines = json.loads(out.read_text())["lines"]
    timed = {(x["part"], x["kind"], x["backend"], x["phase"]) for x in lines if x["median"]}
    for kind in ("SWA", "Full ratio 2", "Full ratio 1", "Reindex", "Reuse"):
        for phase in ("forward", "input gradient", "weight gradients"):
            assert ("attention half", kind, "reference", phase) in timed
    for part, kind in (("indexer", "ratio 2"), ("RoPE alone", "queries"), ("q_b and RoPE", "all")):
        assert {(part, kind, name, "forward") for name in ("reference", "triton")} <= timed
    assert ("grouped output", "all", "library", "weight gradients") in timed
    assert all(x["failure"] for x in lines if not x["median"])
    assert all(x["floor_ms"] > 0 for x in lines)

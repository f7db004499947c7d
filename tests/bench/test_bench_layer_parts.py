"""The bench of head, mHC and Engram runs where there is no GPU, and writes what it measured."""

from __future__ import annotations

import json

from ppruntime.launch import bench_layer_parts
from ppruntime.launch.bench_layer_parts import PASSES


def test_on_a_cpu_every_variant_that_runs_there_is_timed_and_agrees(tmp_path, capsys):
    out = tmp_path / "parts.json"
    arguments = ["--device", "cpu", "--model", "tiny", "--tokens", "8", "--repetitions", "1"]
    assert bench_layer_parts.main(["--out", str(out), *arguments]) == 0
    record = json.loads(out.read_text())
    rows = {(row["part"], row["variant"]): row for row in record["rows"]}
    assert set(rows) == {
        ("head", "reference"),
        ("head", "chunked"),
        ("mhc", "reference"),
        ("gated", "reference"),
        ("layerscale", "reference"),
        ("router", "reference"),
        ("swiglu", "reference"),
        ("engram gate", "reference"),
        ("engram rows", "plain"),
        ("engram rows", "routes"),
    }
    for row in rows.values():
        assert set(row["milliseconds"]) == set(PASSES)
        assert all(len(times) == 1 for times in row["milliseconds"].values())
        assert max(row["errors"]) < 1e-2
        assert not row["failure"]
    # Per token and bf16 channel: four streams in and out, y and x; three times four, and three.
    assert rows["mhc", "reference"]["forward"] == 8 * 64 * 2 * 10
    assert rows["mhc", "reference"]["backward"] == 8 * 64 * 2 * 15
    # One stream: that in and out, y and x; two gradients in and y, two out, the stream and dx.
    assert rows["gated", "reference"]["forward"] == 8 * 64 * 2 * 5
    assert rows["layerscale", "reference"]["backward"] == 8 * 64 * 2 * 7
    assert rows["engram gate", "reference"]["forward"] == 8 * 64 * 2 * 13
    assert rows["engram gate", "reference"]["backward"] == 8 * 64 * 2 * 22
    assert rows["engram rows", "routes"]["errors"] == [0.0]
    assert "x floor" in capsys.readouterr().out


def test_variants_are_compared_on_the_same_inputs_and_gradients(tmp_path, monkeypatch):
    """Each variant had gradients of its own once: every distance was the square root of two."""
    monkeypatch.setattr(bench_layer_parts, "_kernels", lambda _: ("reference", "reference"))
    out = tmp_path / "parts.json"
    arguments = ["--device", "cpu", "--model", "tiny", "--tokens", "8", "--repetitions", "1"]
    assert bench_layer_parts.main(["--out", str(out), *arguments]) == 0
    rows = json.loads(out.read_text())["rows"]
    twice = [row for row in rows if row["part"] not in ("head", "engram rows")]
    assert len(twice) == 11
    assert all(max(row["errors"]) == 0 for row in twice)


def test_a_variant_that_is_far_off_has_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_layer_parts, "FARTHEST", -1.0)
    out = tmp_path / "parts.json"
    arguments = ["--device", "cpu", "--model", "tiny", "--tokens", "8", "--repetitions", "1"]
    assert bench_layer_parts.main(["--out", str(out), *arguments]) == 1
    assert "from the first variant's" in capsys.readouterr().out

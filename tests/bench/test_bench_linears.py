"""The dense linears' bench: its rows, and a run at toy size where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from ppruntime.launch import bench_layers, bench_linears
from ppruntime.models.dims import preset


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "linears.json"
    assert bench_layers.main(["--only", "linears", "--out", str(out)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not out.exists()
    assert bench_linears.backends()["triton"] is None
    assert "needs a Hopper GPU" in bench_linears.backends()["deep_gemm"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes, by the recipe in torch")
def test_it_times_every_phase_of_every_variant_against_bf16(capsys):
    dims = replace(
        preset("tiny"), hidden_size=128, q_lora_rank=128, o_lora_rank=64, expert_width=128
    )
    bench = bench_linears.Bench(dims, 40, 2, torch.device("cpu"))
    bench.run(["reference"])
    assert bench.is_complete
    assert "o_b: " in capsys.readouterr().out
    record = bench.record()
    rows = record["rows"]
    assert {row["layer"] for row in rows} == {"q_a", "q_b", "o_b", "shared"}
    for row in rows:
        assert not row["failure"]
        assert len(row["milliseconds"]) == 2
        if row["variant"] == "bf16":
            assert row["ratio_to_bf16"] == 1
        if row["phase"] == "forward":
            low, high = (0.02, 0.1) if "fp8" in row["variant"] else (0, 0.01)
            assert low <= row["error"] < high
        if row["phase"] == "all":
            assert (
                row["flops"]
                == 6 * 40 * {"q_a": 1, "q_b": 2, "o_b": 1, "shared": 3}[row["layer"]] * 128 * 128
            )
    assert {r["phase"] for r in rows} == {"forward", "backward", "all", "weights"}


def test_a_row_counts_flops_per_median_and_its_ratio():
    row = bench_linears.Row("o_b", "all", "fp8 triton", 2e12, [4.0, 2.0, 1.0])
    record = row.record(3.0)
    assert record["teraflops"] == pytest.approx(1000)
    assert record["ratio_to_bf16"] == 1.5
    assert "1.50x bf16" in row.line(3.0)
    failed = bench_linears.Row("o_b", "all", "fp8 triton", 2e12, failure="no")
    assert failed.record(3.0)["ratio_to_bf16"] is None
    assert "failed: no" in failed.line(3.0)

"""The bench of the MoE half: its rows are one rank's of eight; what can run there, runs."""

from __future__ import annotations

import json

import pytest
import torch

from ppruntime.launch import bench_layers, bench_moe_half
from ppruntime.launch.bench_moe_half import NUM_RANKS, OneRankOfMany
from ppruntime.models.dims import changed, preset
from ppruntime.models.experts import Experts
from ppruntime.models.router import Routing, balanced_experts


def test_one_rank_gets_the_rows_that_it_would_get_from_all():
    num_tokens, num_experts, per_token = 512, 384, 6
    dispatcher = OneRankOfMany(num_experts // NUM_RANKS)
    assert dispatcher.held(num_experts) == range(48)
    given = []

    class Seen(Experts):
        def __init__(self):
            torch.nn.Module.__init__(self)

        def forward(self, x_RD, rows_per_expert):
            given.append(list(rows_per_expert))
            return x_RD

    experts = balanced_experts(num_tokens, num_experts, per_token, device=torch.device("cpu"))
    folded = experts % 48
    assert all(len(set(row)) == per_token for row in folded.tolist())
    weights = torch.full((num_tokens, per_token), 1 / per_token)
    routing = Routing(experts, weights, torch.zeros(num_tokens, num_experts))
    x = torch.randn(num_tokens, 8)
    counts = torch.zeros(num_experts, dtype=torch.int64)
    y = dispatcher.routed(Seen(), x, routing, counts)
    torch.testing.assert_close(y, x)
    (rows,) = given
    assert (len(rows), sum(rows)) == (48, num_tokens * per_token)
    assert max(rows) - min(rows) <= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="small shapes, for the interpreter")
def test_on_a_cpu_what_runs_there_is_timed_and_what_does_not_says_why(tmp_path, monkeypatch):
    wide = changed(preset("tiny"), hidden_size=128, expert_width=128)
    monkeypatch.setattr(bench_moe_half, "preset", lambda _: wide)
    out = tmp_path / "moe.json"
    small = ["--device", "cpu", "--tokens", "8", "--repetitions", "1", "--out", str(out)]
    assert bench_layers.main(["--only", "moe", *small]) == 0
    record = json.loads(out.read_text())
    timed = {(x["backend"], x["phase"]) for x in record["lines"] if x["median"]}
    for name in ("reference", "triton, shared expert in bf16"):
        for phase in ("forward", "input gradient", "weight gradients"):
            assert (name, phase) in timed
    assert {x["part"] for x in record["lines"]} == {"MoE half"}
    assert any("deep_gemm" in text and "needs" in text for text in record["left_out"])
    assert [x["backend"] for x in record["profiles"]][:1] == ["triton, shared expert in bf16"]

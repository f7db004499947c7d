"""Training with kernels.* options: the losses of the reference."""

from __future__ import annotations

from small_runs import train

from ppruntime.metrics import read_metrics


def test_the_chunked_head_trains_like_the_whole_one(tmp_path, run_ranks):
    chunked, whole = tmp_path / "chunked", tmp_path / "whole"
    options = ("kernels.head=chunked", "pp.size=2", "pp.schedule=zb_h1", "train.steps=2")
    one = ("pp.size=1", "pp.layers_per_stage=default", "train.steps=2")
    for num_ranks, run_dir, overrides in ((2, chunked, options), (1, whole, one)):
        ends = run_ranks(num_ranks, train, str(run_dir), overrides)
        assert [code for code, _, _ in ends] == [0] * num_ranks, ends
    pairs = [read_metrics(run_dir / "metrics.jsonl") for run_dir in (chunked, whole)]
    steps = list(zip(*pairs, strict=True))
    assert len(steps) == 2
    # Sums in another order; after an update, which divides by gradients that are next to nothing,
    # they have led elsewhere: how far depends on the processor's instructions.
    for (found, expected), bound in zip(steps, (1e-6, 5e-5), strict=True):
        for name in ("loss", "grad_norm"):
            a, b = getattr(found, name), getattr(expected, name)
            assert abs(a - b) <= bound * b, name

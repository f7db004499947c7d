"""Floors of a routed layer's phases, against what was worked out by hand for V4.1-Flash."""

from __future__ import annotations

import pytest

from ppruntime.launch.bench_moe_record import Row, gains, line
from ppruntime.launch.moe_floor import (
    BACKWARD,
    FORWARD,
    LayerSizes,
    Work,
    fused_work,
    phase_works,
    together,
)

EP8 = LayerSizes(
    num_tokens=8192,
    num_rows=49_152,
    num_away=49_152 * 7 // 8,  # a copy per pair of token and expert
    num_experts=48,
    hidden=5120,
    width=2304,
)


def test_products_of_one_rank_of_eight_are_3_479_tflop_each_way():
    works = phase_works(EP8)
    assert tuple(works) == (*FORWARD, *BACKWARD)
    tera = {phase: work.flops / 1e12 for phase, work in works.items()}
    assert (tera["L1"], tera["L2"]) == (pytest.approx(2.319, 1e-3), pytest.approx(1.160, 1e-3))
    assert tera["dgrad L1"] + tera["dgrad L2"] == pytest.approx(3.479, 1e-3)
    assert tera["wgrad"] == pytest.approx(3.479, 1e-3)
    assert together(works.values()).flops / 1e12 == pytest.approx(10.44, 1e-3)


def test_rows_that_leave_are_227_mb_in_fp8_and_440_in_bf16():
    fp8, bf16 = phase_works(EP8), phase_works(EP8, fp8=False)
    assert fp8["dispatch"].wire_bytes / 1e6 == pytest.approx(227, abs=0.5)
    assert bf16["dispatch"].wire_bytes / 1e6 == pytest.approx(440, abs=0.5)
    assert fp8["combine"].wire_bytes == bf16["combine"].wire_bytes
    assert fp8["dispatch"].floor_ms() == pytest.approx(0.58, abs=0.005)  # over the link
    assert fp8["combine"].floor_ms() == pytest.approx(1.13, abs=0.005)


def test_passes_move_the_bytes_of_the_kernel_table():
    works = phase_works(EP8)
    assert works["act"].memory_bytes / 1e9 == pytest.approx(0.57, abs=0.005)
    assert works["act"].floor_ms() == pytest.approx(0.14, abs=0.01)
    assert works["act back"].memory_bytes / 1e9 == pytest.approx(1.3, abs=0.05)
    assert works["act back"].floor_ms() == pytest.approx(0.31, abs=0.02)


def test_weight_gradients_wait_for_their_accumulators_with_one_micro_batch_and_not_with_two():
    one, two = (phase_works(EP8, num_fused=num)["wgrad"] for num in (1, 2))
    assert one.memory_bytes - two.memory_bytes == pytest.approx(6.79e9, rel=1e-3)
    assert Work(0, one.memory_bytes).floor_ms() == pytest.approx(3.4, abs=0.02)
    assert Work(0, two.memory_bytes).floor_ms() == pytest.approx(1.8, abs=0.01)
    assert one.floor_ms() == pytest.approx(3.41, abs=0.01)
    assert two.floor_ms() == pytest.approx(3.479 / 1.529, abs=0.005)  # its products


def test_phases_done_together_take_as_long_as_what_takes_longest_of_them():
    works = phase_works(EP8)
    fused = fused_work("L2 + combine", works)
    assert fused.wire_bytes == works["combine"].wire_bytes
    assert fused.flops == works["L2"].flops
    assert fused.floor_ms() == works["combine"].floor_ms()  # the products hide behind the link
    assert fused_work("L1", works).floor_ms() == pytest.approx(2.319 / 1.529, abs=0.005)
    assert fused_work("L1", works).floor_ms(fp8=False) == pytest.approx(2.319 / 0.806, abs=0.005)


def _row(phase, variant, milliseconds, *, num=1, shape="phase", floor_ms=0.5):
    return Row(shape, phase, variant, 1e12, 1e9, [milliseconds], floor_ms, num)


def test_a_phase_is_compared_with_those_that_it_does_together_in_the_yardsticks():
    rows = [
        _row("dispatch", "bf16 yardstick", 1.0),
        _row("L1", "bf16 yardstick", 3.0),
        _row("wgrad", "bf16 yardstick", 8.0),
        _row("dispatch", "deep_gemm + deep_ep, FP8 rows", 0.5),
        _row("dispatch + L1", "triton, mega_moe", 2.0),
        _row("wgrad", "triton, mega_moe, n=2", 5.0, num=2),
    ]
    fused, two = rows[-2:]
    assert gains(fused, rows) == {"gain_over_bf16": 2.0}  # the library has no L1 here
    assert gains(two, rows) == {"gain_over_bf16": 3.2}  # of one micro-batch each
    assert gains(rows[3], rows) == {"gain_over_bf16": 2.0, "gain_over_library": 1.0}
    assert fused.record()["ratio_to_floor"] == 4.0
    text = line(fused, rows)
    assert "4.00 x floor" in text
    assert "2.00 x bf16" in text


def test_one_gpus_rows_are_compared_within_their_shape_and_layers_by_their_micro_batches():
    rows = [
        _row("L1", "bf16 torch", 3.0, shape="balanced"),
        _row("L1", "deep_gemm", 1.5, shape="balanced"),
        _row("L1", "gluon", 2.0, shape="balanced"),
        _row("L1", "gluon", 2.0, shape="ep48"),
        _row("forward", "bf16 yardstick (1 micro-batches)", 6.0, shape="layer"),
        _row("forward", "triton, mega_moe, n=2 (2 micro-batches)", 8.0, shape="layer", num=2),
    ]
    assert gains(rows[2], rows) == {"gain_over_bf16": 1.5, "gain_over_library": 0.75}
    assert gains(rows[3], rows) == {}
    assert gains(rows[5], rows) == {"gain_over_bf16": 1.5}
    assert Row("step", "a", "b", 0.0, 0.0, [1.0]).record()["ratio_to_floor"] is None

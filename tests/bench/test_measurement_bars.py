"""docs/make_measurements.py tells what is asked of attention, the head and passes, and what of it a
record misses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def page():
    path = Path(__file__).resolve().parents[2] / "docs" / "make_measurements.py"
    spec = importlib.util.spec_from_file_location("make_measurements", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attentions_bars_are_of_the_fastest_at_640_slots(page):
    def row(part, variant, teraflops, slots=640, failure=""):
        return {
            "part": part, "variant": variant, "teraflops": teraflops, "slots": slots,
            "failure": failure, "median": 1.0, "spread": 0.1, "errors": {}, "repeats_bitwise": {},
        }  # fmt: skip

    rows = [
        row("forward", "library", 547),
        row("backward", "library", 386),
        row("backward", "library", 500, slots=128),
        row("forward", "hopper", 365),
        row("forward", "64 slots", 324),
        row("backward", "hopper", 300, failure="wrong"),
    ]
    text = page._attention({"tokens": 8192, "matmul_teraflops": 800.0, "rows": rows})
    bars = [line for line in text.splitlines() if line.startswith("- ")]
    assert bars == [
        "- met: forward, library, 640 slots, TFLOP/s: 547, at least 540",
        "- MISSED: backward, library, 640 slots, TFLOP/s: 386, at least 400",
        "- met: forward, own kernels, 640 slots, TFLOP/s: 365, at least 350",
    ]


def test_the_heads_time_is_of_both_passes_and_bytes_are_held_to_their_time(page):
    def row(part, forward, backward, variant="triton"):
        return {
            "part": part, "variant": variant, "failure": "", "peak_bytes": 5.3e9,
            "milliseconds": {"forward": [34.0], "backward": [62.0]},
            "ratio_to_floor": {"forward": forward, "backward": backward},
        }  # fmt: skip

    rows = [row("head", 1.2, 1.1), row("mhc", 2.0, 1.25), row("mhc", 9.0, 9.0, "reference")]
    bars = page._parts_bars({"rows": rows}).splitlines()
    assert bars == [
        "- MISSED: head, forward + backward, ms: 96, at most 94",
        "- met: head, peak, GB: 5.3, at most 6",
        "- MISSED: mhc, forward, x the time of its bytes: 2, at most 1.3",
        "- met: mhc, backward, x the time of its bytes: 1.25, at most 1.3",
    ]

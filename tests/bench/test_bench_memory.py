"""The bench of memory knobs: every knob is a config that can be run and planned."""

import pytest

from ppruntime.config import load
from ppruntime.launch.bench_memory import KNOBS, ONE_GPU, _configs
from ppruntime.plan_report import report

BASE = ("pp.size=1", "pp.schedule=async_1f1b", "pp.warmup_step=[5]", "train.num_micro_batches=12")


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_of_the_bench_can_be_run_and_the_plan_says_what_it_saves(knob):
    path = _configs() / "v41-proxy-8.toml"
    off = report(load([path], BASE)).ranks[0]
    plan = report(load([path], [*BASE, *KNOBS[knob]])).ranks[0]
    assert (plan.host_bytes > 0) == (("offload" in knob and "FP8" not in knob) or "masters" in knob)
    if knob != "off" and "no recomputation" not in knob and knob != "offload":
        assert plan.total_bytes < off.total_bytes


def test_without_a_knob_eight_layers_fit_into_one_gpu():
    in_flight = ("pp.size=1", "pp.schedule=async_1f1b", "pp.warmup_step=[2]")
    options = [*in_flight, "train.num_micro_batches=6", *ONE_GPU]
    off = report(load([_configs() / "v41-proxy-8.toml"], options)).ranks[0]
    assert 100e9 < off.total_bytes < 135e9

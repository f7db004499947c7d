"""The clock of the benches, where there is no device to run ahead of."""

from __future__ import annotations

import time

import pytest
import torch

from ppruntime.gpu_clock import Clock


def test_a_call_is_timed_by_the_wall_on_a_cpu_and_its_result_handed_on():
    clock = Clock(torch.device("cpu"))
    milliseconds, result = clock.timed(lambda: time.sleep(0.02) or "done")
    assert result == "done"
    assert milliseconds == clock.host_milliseconds >= 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_slow_host_does_not_lengthen_what_a_gpu_takes():
    """Once the clock knows how long the host takes, which the first calls tell it."""
    clock = Clock(torch.device("cuda"))
    x = torch.zeros(1000, device="cuda")

    def call():
        x.add_(1)
        time.sleep(0.01)
        x.add_(1)

    for _ in range(3):
        milliseconds = clock(call)
    assert clock.host_milliseconds >= 10
    assert milliseconds < 1

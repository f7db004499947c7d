"""torch's pipeline of sleeping stages does the work that ours does, and splits it as ours does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from ppruntime.launch.schedule_results import TorchResult
from ppruntime.launch.torch_rig import TORCH_CLASSES, SleepModule, TorchRig, TorchStep
from ppruntime.schedules import make
from ppruntime.schedules.costs import Costs
from ppruntime.schedules.ops import Kind


def torch_counts(rank: int) -> list[TorchStep]:
    dist.init_process_group("gloo")
    steps = []
    for name in TORCH_CLASSES:
        schedule = make(name, 2, 4)
        rig = TorchRig(schedule)
        steps.append(rig.step(Costs.even(0.002, 0.002, 0.002, schedule.stage_to_rank)))
    dist.barrier()
    dist.destroy_process_group()
    return steps


def test_torchs_stages_do_all_the_work_of_ours(run_ranks):
    of_ranks = run_ranks(2, torch_counts)
    for number, name in enumerate(TORCH_CLASSES):
        schedule = make(name, 2, 4)
        costs = Costs.even(0.002, 0.002, 0.002, schedule.stage_to_rank)
        theirs = [rank[number] for rank in of_ranks]
        result = TorchResult.of(schedule, costs, [(theirs, theirs)])
        assert result.ratio == 1
        assert result.work_ms == pytest.approx(24)
        assert min(result.torch_ms) > result.work_ms


def test_torch_steps_that_left_work_out_are_refused():
    schedule = make("1f1b", 2, 4)
    done = TorchStep(0.0, 1.0, {Kind.F: 4, Kind.I: 4, Kind.W: 4})
    lazy = TorchStep(0.0, 1.0, {Kind.F: 4, Kind.I: 4, Kind.W: 3})
    costs = Costs.even(0.1, 0.1, 0.1, schedule.stage_to_rank)
    with pytest.raises(AssertionError, match="torch's rank 1 of 1f1b did W 3 times, not 4"):
        TorchResult.of(schedule, costs, [([done, done], [done, lazy])])


def test_torchs_split_backward_sleeps_for_the_weight_apart():
    module = SleepModule(is_first=False)
    x = torch.ones(1, 64, requires_grad=True)
    y = module(x)
    assert module.slept == {Kind.F: 1}
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())
    assert module.slept == {Kind.F: 1, Kind.I: 1}
    assert torch.equal(x.grad, torch.ones_like(x))
    stage_backward_weight(module.parameters(), groups)
    assert module.slept == {Kind.F: 1, Kind.I: 1, Kind.W: 1}
    assert torch.equal(module.weight.grad, torch.ones(64))


def test_the_first_module_has_an_input_gradient_to_work_for_without_an_input_that_needs_one():
    module = SleepModule(is_first=True)
    module(torch.ones(1, 64)).sum().backward()
    assert module.slept == {Kind.F: 1, Kind.I: 1, Kind.W: 1}

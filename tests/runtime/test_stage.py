"""A stage against plain autograd over the same units: every bit of loss and gradients."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_memory import Recorder
from torch import Tensor
from toy_units import live_after, micro_batches, toy_units

from ppruntime.boundaries import warm_up
from ppruntime.models.carry import Carry
from ppruntime.models.linear import Linear, WeightGradQueue
from ppruntime.schedules import make
from ppruntime.schedules.counts import backward_kinds
from ppruntime.schedules.ops import Kind
from ppruntime.stage import Stage

SEED = torch.tensor(1 / 37)
BALANCE_SEED = torch.tensor(1 / 3)


def build_stages(num_halves: int, cuts: list[int], seed: int) -> list[Stage]:
    """Stages of the toy model, cut after the units numbered `cuts`."""
    units, live = toy_units(num_halves, seed), live_after(num_halves + 2)
    ends = [*cuts, len(units) - 1]
    stages = []
    for index, end in enumerate(ends):
        start = cuts[index - 1] + 1 if index else 0
        queue = WeightGradQueue()
        own = units[start : end + 1]
        for unit in own:
            for module in unit.modules():
                if isinstance(module, Linear):
                    module.queue = queue
        stages.append(
            Stage(
                index,
                own,
                inputs=live[start - 1] if start else (),
                outputs=live[end],
                queue=queue,
            )
        )
    return stages


def run_chain(stages: list[Stage], batches: list, *, split: bool) -> list[Tensor]:
    for stage in stages:
        stage.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
    for m, batch in enumerate(batches):
        received: tuple[Tensor, ...] = ()
        for stage in stages:
            received = stage.forward(m, tuple(t.clone() for t in received), batch)
    for m in range(len(batches)):
        grads: tuple[Tensor, ...] = ()
        for stage in reversed(stages):
            backward = stage.backward_input if split else stage.backward
            grads = backward(m, tuple(g.clone() for g in grads))
        if split:
            for stage in stages:
                stage.weight_grads(m)
    return stages[-1].losses


def reference(num_halves: int, seed: int, batches: list) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients of one process that accumulates over micro-batches, by plain
    autograd."""
    units = toy_units(num_halves, seed)
    losses = []
    for batch in batches:
        carry = Carry()
        for unit in units:
            carry = unit(carry, batch)
        torch.autograd.backward((carry.balance_loss, carry.loss), (BALANCE_SEED, SEED))
        losses.append(carry.loss.detach())
    return losses, [p.grad for unit in units for p in unit.parameters()]


@settings(max_examples=40)
@given(
    num_halves=st.integers(1, 8),
    data=st.data(),
    split=st.booleans(),
    num_micro_batches=st.integers(1, 4),
)
def test_any_cut_gives_the_bits_of_one_process(num_halves, data, split, num_micro_batches):
    cuts = data.draw(st.lists(st.integers(0, num_halves), unique=True, max_size=4).map(sorted))
    batches = micro_batches(num_micro_batches, 2, 5, seed=3)
    losses, grads = reference(num_halves, 7, batches)
    stages = build_stages(num_halves, cuts, 7)
    assert all(map(torch.equal, run_chain(stages, batches, split=split), losses))
    found = [p.grad for stage in stages for p in stage.units.parameters()]
    for grad, expected in zip(found, grads, strict=True):
        assert (grad is None and expected is None) or torch.equal(grad, expected)
    assert not any(stage.num_in_flight for stage in stages)


def test_a_stage_without_units_passes_on_values_and_gradients():
    batches = micro_batches(2, 2, 5, seed=0)
    _, grads = reference(4, 1, batches)
    stages = build_stages(4, [2], 1)
    fields = stages[0].outputs
    empty = Stage(9, [], inputs=fields, outputs=fields, queue=WeightGradQueue())
    run_chain([stages[0], empty, stages[1]], batches, split=True)
    found = [p.grad for stage in stages for p in stage.units.parameters()]
    assert all(map(torch.equal, found, grads))


def test_a_sent_output_is_freed_when_the_receiver_drops_it():
    first = build_stages(4, [2], 1)[0]
    first.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
    outputs = first.forward(0, (), micro_batches(1, 2, 5, seed=0)[0])
    streams = weakref.ref(outputs[0].untyped_storage())
    storage_pointer = outputs[0].data_ptr()
    assert storage_pointer
    del outputs
    gc.collect()
    assert streams() is None, "the stage keeps an output that its backward does not read"


def test_gradients_leave_in_memory_of_their_own():
    stages = build_stages(4, [2], 1)
    last = stages[1]
    kv = last.inputs.index("kv")
    fields = last.inputs
    passing = Stage(5, [], inputs=fields, outputs=fields, queue=WeightGradQueue())
    passing.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
    batch = micro_batches(1, 2, 5, seed=0)[0]
    received = stages[0].forward(0, (), batch)
    passing.forward(0, received, batch)
    grads = tuple(torch.ones_like(received[i]) for i in range(3))
    sent = passing.backward(0, grads)
    assert torch.equal(sent[kv], grads[kv])
    for out in sent:
        assert all(out.data_ptr() != grad.data_ptr() for grad in grads)


def test_evaluation_keeps_nothing_and_copies_what_only_passes_through():
    stages = build_stages(4, [2], 1)
    batch = micro_batches(1, 2, 5, seed=0)[0]
    received = stages[0].evaluate(0, (), batch)
    fields = stages[0].outputs
    passing = Stage(5, [], inputs=fields, outputs=fields, queue=WeightGradQueue())
    passed = passing.evaluate(0, received, batch)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(passed, received, strict=True))
    assert not any(tensor.requires_grad for tensor in passed)
    assert stages[0].num_in_flight == passing.num_in_flight == 0


def test_evaluation_and_training_have_the_same_loss_in_any_order():
    batches = micro_batches(2, 2, 5, seed=4)
    stages = build_stages(4, [1, 3], 2)

    def evaluate() -> list[Tensor]:
        for stage in stages:
            stage.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
        for m, batch in enumerate(batches):
            received: tuple[Tensor, ...] = ()
            for stage in stages:
                received = stage.evaluate(m, received, batch)
        return stages[-1].losses

    before = evaluate()
    trained = run_chain(stages, batches, split=False)
    assert all(map(torch.equal, before, trained))
    assert all(map(torch.equal, evaluate(), trained))


def test_two_steps_without_clearing_double_every_gradient():
    batches = micro_batches(2, 2, 5, seed=4)
    stages = build_stages(3, [1], 2)
    run_chain(stages, batches, split=False)
    once = [p.grad.clone() for stage in stages for p in stage.units.parameters()]
    run_chain(stages, batches, split=False)
    twice = [p.grad for stage in stages for p in stage.units.parameters()]
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(b, 2 * a, rtol=1e-6, atol=1e-9)


def test_a_step_that_starts_with_work_left_over_is_refused():
    stage = build_stages(2, [1], 2)[0]
    stage.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
    stage.forward(0, (), micro_batches(1, 1, 3, seed=1)[0])
    with pytest.raises(AssertionError, match="stage 0 starts a step with work left over"):
        stage.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)


class _Asks(torch.autograd.Function):
    """The identity; its backward notes whether autograd would start threads."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(torch._C._is_multithreading_enabled())
        return grad, None


class AskingUnit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, carry, batch):
        return carry._replace(streams=_Asks.apply(carry.streams, self.seen))


def test_a_backward_runs_in_the_ranks_thread_if_that_is_wanted_and_only_there():
    for here in (False, True):
        unit = AskingUnit()
        ends = {"inputs": ("streams",), "outputs": ("streams",)}
        stage = Stage(0, [unit], **ends, queue=WeightGradQueue(), backward_here=here)
        (batch,) = micro_batches(1, 2, 5, seed=0)
        for m, backward in enumerate((stage.backward, stage.backward_input)):
            stage.forward(m, (torch.ones(2, 5, 1, 4),), batch)
            backward(m, (torch.ones(2, 5, 1, 4),))
        assert unit.seen == [not here] * 2
        assert torch._C._is_multithreading_enabled()


def peak_of(act):
    with Recorder(samples_every_op=True) as recorder:
        act()
    return recorder.peak_bytes


def test_a_warm_up_goes_back_as_the_order_does_and_takes_no_more_memory_than_a_step():
    """Weight gradients that wait need more: a run whose order has none must not fail on them."""

    def first_stage():
        stage = build_stages(num_halves=6, cuts=[5], seed=0)[0]
        calls = []
        for name in ("backward", "backward_input", "weight_grads"):
            act = getattr(stage, name)
            setattr(stage, name, lambda *g, n=name, act=act: (calls.append(n), act(*g))[1])
        return stage, calls

    def step(stage, split):
        (batch,) = micro_batches(1, 2, 5, seed=0)
        stage.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
        outputs = stage.forward(0, (), batch)
        grads = [torch.zeros_like(t) for t in outputs if t.dtype is torch.float32]
        del outputs
        if split:
            stage.backward_input(0, grads)
            stage.weight_grads(0)
        else:
            stage.backward(0, grads)

    peaks = {}
    for name, kind, told in (
        ("1f1b", Kind.B, ["backward"]),
        ("1f1b_w", Kind.I, ["backward_input", "backward", "weight_grads"]),
    ):
        backwards = backward_kinds(make(name, 2, 6), 0)
        assert backwards == {kind}
        stage, calls = first_stage()
        warm = partial(warm_up, stage, None, backwards=backwards, batch=2, seq_len=5)
        peaks[kind] = peak_of(partial(warm, device=torch.device("cpu")))
        assert calls == told
        taken = peak_of(partial(step, first_stage()[0], kind is Kind.I))
        assert peaks[kind] == pytest.approx(taken, rel=0.05)
    assert peaks[Kind.B] < peaks[Kind.I]
    assert backward_kinds(make("dualpipe_v", 2, 8), 1) == {Kind.B, Kind.I}


def test_operands_of_a_put_off_weight_gradient_are_freed_before_the_next_one():
    (stage,) = build_stages(2, [], seed=0)
    stage.reset(loss_seed=SEED, balance_seed=BALANCE_SEED)
    (batch,) = micro_batches(1, 1, 4, seed=0)
    stage.forward(0, (), batch)
    stage.backward_input(0, ())
    queue: WeightGradQueue = stage._queue
    operands = [torch.ones(3) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in operands]
    seen: list[int] = []

    def task(operand: Tensor) -> None:
        assert operand.sum() == 3
        seen.append(sum(reference() is not None for reference in alive))

    for operand in operands:
        queue.add(partial(task, operand))
    stage._weight_tasks[0] += queue.pop()
    del operand, operands
    stage.weight_grads(0)
    assert seen == [3, 2, 1]

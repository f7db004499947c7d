"""Activations that leave between forward and backward: the same bits, and memory that is free."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipelines import run_local, toy_stages
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from toy_units import micro_batches

from ppruntime import activation_offload
from ppruntime.activation_offload import ActivationOffload, ToFp8, ToHost
from ppruntime.host_memory import HostPool
from ppruntime.schedules import NAMES, make
from ppruntime.schedules.check import check
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import Kind, ScheduleError
from ppruntime.schedules.passes import (
    add_frees,
    add_offload,
    add_transfers,
    split_backward,
    split_pairs,
)

CPU = torch.device("cpu")
NUM_HALVES = 7


def lowered_and_slots(schedule, **offload):
    slots = slots_held(schedule)
    moved = add_offload(split_pairs(schedule), **offload) if offload else schedule
    lowered = add_frees(add_transfers(moved, slots=slots))
    check(lowered, slots=slots)
    return lowered, slots


def gradients(stages) -> list[Tensor | None]:
    return [p.grad for stage in stages for p in stage.units.parameters()]


@settings(max_examples=10)
@example("1f1b", 4, False, 1, 1, 256)
@example("dualpipe_v", 2, False, 1, None, 4096)
@example("zb_v", 2, True, 2, 0, 256)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([256, 4096]),
)
def test_every_order_has_the_bits_of_the_one_without(
    name, num_ranks, split, every, overlapped, page_bytes
):
    schedule = make(name, num_ranks, 6)
    if split:
        schedule = split_backward(schedule)
    cuts = [(s * NUM_HALVES) // schedule.num_stages for s in range(1, schedule.num_stages)]
    batches = micro_batches(6, 1, 4, seed=3)
    expected = toy_stages(NUM_HALVES, cuts, 7)
    lowered, slots = lowered_and_slots(schedule)
    for _ in range(2):
        run_local(lowered, expected, batches, slots)

    stages = toy_stages(NUM_HALVES, cuts, 7)
    lowered, slots = lowered_and_slots(schedule, every=every, overlapped=overlapped)
    pools = [HostPool(CPU, page_bytes=page_bytes) for _ in range(num_ranks)]
    offloads = {
        rank: ActivationOffload(
            ToHost(CPU, pool), {s: stages[s].standing_tensors for s in lowered.stages_of(rank)}
        )
        for rank, pool in enumerate(pools)
    }
    run_local(lowered, stages, batches, slots, offloads=offloads)
    after_one_step = [pool.num_bytes for pool in pools]
    run_local(lowered, stages, batches, slots, offloads=offloads)
    assert all(map(torch.equal, stages[-1].losses, expected[-1].losses))
    assert all(map(torch.equal, gradients(stages), gradients(expected)))
    assert [pool.num_bytes for pool in pools] == after_one_step
    assert not any(pool.num_bytes_used for pool in pools)
    moved = Kind.OFFLOAD in lowered.kinds()
    assert any(after_one_step) == moved
    # Of 1F1B's first ranks everything can go; the last has nothing to move.
    if name == "1f1b" and num_ranks == 4 and every == overlapped == 1:
        assert after_one_step[0] > 0 == after_one_step[3]


def collected(offload, key, compute, staying=()):
    with offload.collecting(key, staying):
        return compute()


def test_shared_memory_moves_once_and_views_come_back_as_views():
    pool = HostPool(CPU, page_bytes=256)
    offload = ActivationOffload(ToHost(CPU, pool), {0: lambda: ()})
    x = torch.randn(4, 64, requires_grad=True)
    kept = []

    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            kept.append(StorageWeakRef(y.untyped_storage()))
            ctx.save_for_backward(y, y[1:3], y.t(), y.flatten()[7:9])
            ctx.expected = [t.clone() for t in (y, y[1:3], y.t(), y.flatten()[7:9])]
            return y.sum()

        @staticmethod
        def backward(ctx, grad):
            saved = ctx.saved_tensors
            assert all(map(torch.equal, saved, ctx.expected))
            assert [t.stride() for t in saved] == [(64, 1), (64, 1), (1, 64), (1,)]
            assert len({t.untyped_storage().data_ptr() for t in saved}) == 1
            return grad.expand(4, 64)

    loss = collected(offload, (0, 0), lambda: Views.apply(x))
    offload.offload((0, 0))
    assert pool.num_bytes_used == 4 * 64 * 4  # once, not four times
    assert not kept[0].expired()
    offload.offloaded((0, 0))
    gc.collect()
    assert kept[0].expired()
    offload.reload((0, 0))
    assert pool.num_bytes_used == 0
    offload.arrive((0, 0))
    loss.backward()
    assert torch.equal(x.grad, torch.ones(4, 64))


def test_parameters_inputs_and_small_tensors_stay():
    pool = HostPool(CPU, page_bytes=256)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    received = torch.randn(64, 64)
    offload = ActivationOffload(ToHost(CPU, pool), {0: lambda: [weight]})

    def compute():
        leaf = received.detach().requires_grad_()
        hidden = (leaf[:32] @ weight).exp()
        return (hidden.sum(1)[:1].exp().sum() + (hidden * leaf[32:]).sum(),)

    (loss,) = collected(offload, (0, 0), compute, [received])
    offload.offload((0, 0))
    # `hidden` alone; the exponential of one number is less than a thousandth of it.
    assert pool.num_bytes_used == 32 * 64 * 4
    offload.offloaded((0, 0))
    with pytest.raises(AssertionError, match="still away"):
        loss.backward(retain_graph=True)


def test_what_a_checkpoint_keeps_moves_too():
    pool = HostPool(CPU, page_bytes=256)
    offload = ActivationOffload(ToHost(CPU, pool), {0: lambda: ()})
    x = torch.randn(8, 32, requires_grad=True)

    def compute():
        return checkpoint(lambda y: y.exp().exp(), x * 2, use_reentrant=False).sum()

    loss = collected(offload, (0, 0), compute)
    offload.offload((0, 0))
    assert pool.num_bytes_used == 8 * 32 * 4  # the input of what is recomputed
    offload.offloaded((0, 0))
    offload.reload((0, 0))
    offload.arrive((0, 0))
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(grad, torch.autograd.grad(compute(), x)[0])


def test_a_graph_that_is_dropped_takes_its_memory_along():
    offload = ActivationOffload(ToHost(CPU, HostPool(CPU, page_bytes=256)), {0: lambda: ()})
    x = torch.randn(64, requires_grad=True)
    y = collected(offload, (0, 0), lambda: x.exp())
    kept = StorageWeakRef(y.untyped_storage())
    gc.disable()
    try:
        offload.offload((0, 0))
        offload.offloaded((0, 0))
        del y  # exp saves its own output: no cycle may hold it
        assert kept.expired()
    finally:
        gc.enable()


class _KeepsInput(torch.autograd.Function):
    """Saves a copy of its input; its backward counts what is there of `lying`."""

    @staticmethod
    def forward(ctx, x, lying, counts):
        ctx.save_for_backward(x.clone())
        ctx.lying, ctx.counts = lying, counts
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        ctx.lying.append(StorageWeakRef(saved.untyped_storage()))
        ctx.counts.append(sum(not each.expired() for each in ctx.lying))
        return grad * 2, None, None


@pytest.mark.parametrize("mover", [ToHost(CPU, HostPool(CPU)), ToFp8(torch.float32)])
def test_a_backward_frees_what_came_back_as_it_goes(mover):
    offload = ActivationOffload(mover, {0: lambda: ()})
    x, lying, counts = torch.randn(64, 128, requires_grad=True), [], []
    with offload.collecting((0, 0), (x,)):
        y = x
        for _ in range(6):
            y = _KeepsInput.apply(y, lying, counts)
    for act in (offload.offload, offload.offloaded, offload.reload, offload.arrive):
        act((0, 0))
    y.sum().backward()
    assert counts == [1] * 6


def test_as_fp8_leaves_no_more_than_one_piece_is_there_in_both_forms(monkeypatch):
    offload = ActivationOffload(ToFp8(torch.bfloat16), {0: lambda: ()})
    x = torch.randn(4, 256, dtype=torch.bfloat16, requires_grad=True)
    with offload.collecting((0, 0), ()):
        y = ((x * 2).sigmoid() * 3).tanh().sin()
    wide, alive, narrowed = [], [], activation_offload._narrowed

    def watch(values):
        wide.append(StorageWeakRef(values.untyped_storage()))
        alive.append(sum(not each.expired() for each in wide))
        return narrowed(values)

    monkeypatch.setattr(activation_offload, "_narrowed", watch)
    offload.offload((0, 0))
    # The last one alone: all before it are FP8 by then.
    assert len(wide) > 1
    assert alive == [1] * len(wide)
    for act in (offload.offloaded, offload.reload, offload.arrive):
        act((0, 0))
    y.sum().backward()


def test_fp8_keeps_half_a_mantissa_and_leaves_other_dtypes_alone():
    offload = ActivationOffload(ToFp8(torch.bfloat16), {0: lambda: ()})
    torch.manual_seed(0)
    x = (torch.randn(3, 130) * 10).to(torch.bfloat16).requires_grad_()
    wide = torch.randn(256, requires_grad=True)
    y, z = collected(offload, (0, 0), lambda: (x * x.detach().exp().clamp(max=9), wide.exp()))
    before = [y.grad_fn._saved_other.clone(), z.clone()]
    offload.offload((0, 0))
    offload.offloaded((0, 0))
    offload.reload((0, 0))
    offload.arrive((0, 0))
    after = y.grad_fn._saved_other
    assert after.dtype is torch.bfloat16
    assert not torch.equal(after, before[0])
    # Three bits of mantissa in each group of 128, whose largest is at most 9.
    error = (after - before[0]).abs().float()
    assert (error <= (before[0].abs().float() / 16).clamp_min(9 / 448)).all()
    assert torch.equal(after.flatten()[-6:], before[0].flatten()[-6:])  # they fill no group
    assert torch.equal(z.grad_fn._saved_result, before[1])


def test_as_fp8_comes_back_no_more_than_one_piece_is_there_in_both_forms(monkeypatch):
    """Else a reload would need all of a micro-batch's FP8 beside its bf16."""
    offload = ActivationOffload(ToFp8(torch.bfloat16), {0: lambda: ()})
    x = torch.randn(4, 256, dtype=torch.bfloat16, requires_grad=True)
    with offload.collecting((0, 0), ()):
        y = ((x * 2).sigmoid() * 3).tanh().sin()
    narrow, alive = [], []
    narrowed, widened = activation_offload._narrowed, activation_offload._widened

    def watch_narrowed(values):
        kept = narrowed(values)
        narrow.append(StorageWeakRef(kept.data.untyped_storage()))
        return kept

    def watch_widened(kept):
        alive.append(sum(not each.expired() for each in narrow))
        return widened(kept)

    monkeypatch.setattr(activation_offload, "_narrowed", watch_narrowed)
    monkeypatch.setattr(activation_offload, "_widened", watch_widened)
    for act in (offload.offload, offload.offloaded, offload.reload, offload.arrive):
        act((0, 0))
    assert len(narrow) > 1
    assert alive == list(range(len(narrow), 0, -1))
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_an_executor_without_a_place_refuses_an_order_that_moves():
    schedule = make("gpipe", 1, 6)
    lowered, slots = lowered_and_slots(schedule, every=1)
    with pytest.raises(ScheduleError, match="0OFFLOAD3 moves activations"):
        run_local(lowered, toy_stages(2, [], 7), micro_batches(6, 1, 4, seed=3), slots)

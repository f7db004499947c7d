"""Any checked order, any cut, any number of ranks: the bits of one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import BALANCE_SEED, LOSS_SEED, run_local, toy_stages
from toy_units import micro_batches, toy_units

from ppruntime.models.carry import Carry
from ppruntime.schedules import NAMES, make
from ppruntime.schedules.check import check
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.forward_only import forward_only
from ppruntime.schedules.ops import Kind, Op, Schedule, ScheduleError
from ppruntime.schedules.passes import add_frees, add_transfers, split_backward
from ppruntime.transports.base import TransportError


def reference(num_halves: int, seed: int, batches: list) -> tuple[list, list]:
    """Losses and gradients of one process that accumulates over micro-batches, by plain
    autograd."""
    units = toy_units(num_halves, seed)
    losses = []
    for batch in batches:
        carry = Carry()
        for unit in units:
            carry = unit(carry, batch)
        torch.autograd.backward((carry.balance_loss, carry.loss), (BALANCE_SEED, LOSS_SEED))
        losses.append(carry.loss.detach())
    return losses, [p.grad for unit in units for p in unit.parameters()]


def equal(grads: list, others: list) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(grads, others, strict=True)
    )


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    num_ranks=st.integers(1, 5),
    num_micro_batches=st.integers(1, 7),
    split=st.booleans(),
    data=st.data(),
)
def test_every_order_gives_the_bits_of_one_process(name, num_ranks, num_micro_batches, split, data):
    num_halves = 7
    schedule = make(name, num_ranks, num_micro_batches)
    cuts = data.draw(
        st.lists(
            st.integers(0, num_halves),
            min_size=schedule.num_stages - 1,
            max_size=schedule.num_stages - 1,
        ).map(sorted)
    )
    slots = slots_held(schedule)
    if split:
        schedule = split_backward(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    check(lowered, slots=slots)
    batches = micro_batches(num_micro_batches, 1, 4, seed=3)
    losses, grads = reference(num_halves, 7, batches)
    stages = toy_stages(num_halves, cuts, 7)
    run_local(lowered, stages, batches, slots)
    assert all(map(torch.equal, stages[-1].losses, losses))
    assert equal([p.grad for stage in stages for p in stage.units.parameters()], grads)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_over_any_placement_has_the_losses_of_training(name):
    schedule = make(name, 3, 4)
    batches = micro_batches(4, 1, 4, seed=3)
    losses, _ = reference(6, 7, batches)
    stages = toy_stages(6, range(0, schedule.num_stages - 1), 7)
    slots = slots_held(schedule)
    for _ in range(2):
        run_local(forward_only(schedule), stages, batches, slots, training=False)
        assert all(map(torch.equal, stages[-1].losses, losses))
    assert all(p.grad is None for stage in stages for p in stage.units.parameters())


def test_the_log_has_every_op_once_in_the_order_and_waits_before_work():
    schedule = make("1f1b", 3, 4)
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    times = run_local(lowered, toy_stages(6, [1, 3], 7), micro_batches(4, 1, 4, seed=1), slots)
    for rank in range(3):
        assert [t.op for t in times[rank]] == [str(op) for op in lowered.ops(rank)]
        assert all(t.start <= t.ready <= t.end for t in times[rank])
        assert all(a.end <= b.start for a, b in zip(times[rank], times[rank][1:], strict=False))


def test_a_failing_stage_names_rank_and_op_and_ends_the_other_ranks():
    schedule = make("1f1b", 3, 4)
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    stages = toy_stages(6, [1, 3], 7)

    def fail(*_: object) -> None:
        raise RuntimeError("a unit broke")

    stages[1].backward = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="a unit broke") as caught:
        run_local(lowered, stages, micro_batches(4, 1, 4, seed=1), slots)
    assert caught.value.__notes__ == ["rank 1 was in 1B0"]


def test_an_order_that_waits_for_what_never_comes_ends_within_the_limit():
    schedule = make("1f1b", 2, 1)
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    orders = (
        tuple(op for op in lowered.orders[0] if op != Op(0, Kind.SEND_F, 0)),
        lowered.orders[1],
    )
    broken = Schedule("broken", 1, lowered.stage_to_rank, orders)
    with pytest.raises((TransportError, AssertionError), match="rank 0"):
        run_local(
            broken,
            toy_stages(6, [3], 7),
            micro_batches(1, 1, 4, seed=1),
            slots,
            timeout_seconds=0.3,
        )


def test_an_op_without_a_channel_is_refused_when_bound():
    schedule = make("1f1b", 2, 1)
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    orders = (lowered.orders[0], (*lowered.orders[1], Op(1, Kind.SEND_F, 0)))
    broken = Schedule("broken", 1, lowered.stage_to_rank, orders)
    with pytest.raises(ScheduleError, match="1SEND_F0 needs a channel"):
        run_local(
            broken, toy_stages(6, [3], 7), micro_batches(1, 1, 4, seed=1), slots, timeout_seconds=1
        )

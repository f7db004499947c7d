"""Which channels need no credits: against a brute force that holds one rank back at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.check import check
from ppruntime.schedules.counts import Edge, crosses_ranks, edges, slots_held
from ppruntime.schedules.credits import uncredited
from ppruntime.schedules.forward_only import forward_only
from ppruntime.schedules.ops import COMPUTE, Kind, ScheduleError
from ppruntime.schedules.passes import add_frees, add_transfers, split_backward
from ppruntime.schedules.progress import stalled

SENDS = {"F": Kind.SEND_F, "B": Kind.SEND_B}
RECEIVES = {"F": Kind.RECV_F, "B": Kind.RECV_B}
FREES = {"F": Kind.FREE_F, "B": Kind.FREE_B}


def _lower(schedule):
    return add_frees(add_transfers(schedule))


def _brute_force(schedules, slots):
    """The channels on which no message can be sent too early, by trying to for each of them."""
    result = set()
    for edge in edges(schedules[0]):
        if crosses_ranks(schedules[0], edge) and all(
            _is_always_in_time(pair, edge, slots[edge]) for pair in product(schedules, repeat=2)
        ):
            result.add(edge)
    return frozenset(result)


def _is_always_in_time(pair, edge, num_slots):
    placement = pair[0].stage_to_rank
    programs = [
        [(step, op) for step, schedule in enumerate(pair) for op in schedule.ops(rank)]
        for rank in range(pair[0].num_ranks)
    ]
    source, destination = placement[edge.src_stage], placement[edge.dst_stage]
    sends = [
        (step, op)
        for step, op in programs[source]
        if op.kind is SENDS[edge.kind] and op.stage == edge.src_stage
    ]
    for earlier, message in zip(sends, sends[num_slots:], strict=False):
        free = replace(earlier[1], stage=edge.dst_stage, kind=FREES[edge.kind])
        program = programs[destination]
        last_reader = program.index((earlier[0], free))
        while last_reader >= 0 and program[last_reader][1].kind not in COMPUTE:
            last_reader -= 1
        # The destination stops before it is done with the slot; everybody else runs on.
        if last_reader >= 0 and message in _sent(pair, programs, destination, last_reader):
            return False
    return True


def _sent(pair, programs, held_rank, held_at):
    placement, last = pair[0].stage_to_rank, pair[0].num_stages - 1
    at, sent, is_moving = [0] * len(programs), set(), True

    def has_input(step, op):
        if op.kind is Kind.F and op.stage > 0:
            stage, kind = op.stage - 1, Kind.SEND_F
        elif op.kind in (Kind.B, Kind.I) and op.stage < last:
            stage, kind = op.stage + 1, Kind.SEND_B
        else:
            return True
        return (step, replace(op, stage=stage, kind=kind)) in sent

    while is_moving:
        is_moving = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and not (rank == held_rank and at[rank] >= held_at):
                step, op = program[at[rank]]
                if not has_input(step, op):
                    break
                if op.kind in SENDS.values():
                    assert placement[op.stage] == rank
                    sent.add((step, op))
                at[rank] += 1
                is_moving = True
    return sent


def _shuffled(schedule, swaps):
    """The order after those swaps of neighbours that leave it legal."""
    for rank, index in swaps:
        order = list(schedule.orders[rank % schedule.num_ranks])
        if len(order) < 2:
            continue
        i = index % (len(order) - 1)
        order[i], order[i + 1] = order[i + 1], order[i]
        orders = list(schedule.orders)
        orders[rank % schedule.num_ranks] = tuple(order)
        other = replace(schedule, orders=tuple(orders))
        try:
            check(other)
        except ScheduleError:
            continue
        schedule = other
    return schedule


@settings(max_examples=settings.default.max_examples // 2)
@given(
    name=st.sampled_from(NAMES),
    num_ranks=st.integers(2, 4),
    num_micro_batches=st.integers(1, 5),
    split=st.booleans(),
    has_evaluation=st.booleans(),
    fewer=st.integers(0, 2),
    swaps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=12),
)
def test_a_channel_needs_no_credits_if_and_only_if_no_timing_can_overtake_its_slots(
    name, num_ranks, num_micro_batches, split, has_evaluation, fewer, swaps
):
    schedule = make(name, num_ranks, num_micro_batches)
    if split:
        schedule = split_backward(schedule)
    schedule = _shuffled(schedule, swaps)
    slots = {edge: max(1, n - fewer) for edge, n in slots_held(schedule).items()}
    schedules = [_lower(schedule), *([forward_only(schedule)] if has_evaluation else [])]
    assert uncredited(schedules, slots) == _brute_force(schedules, slots)


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_in_1f1b_the_gradient_that_came_back_is_the_credit_of_every_forward_channel(num_ranks):
    schedule = make("1f1b", num_ranks, 3 * num_ranks)
    slots, lowered = slots_held(schedule), _lower(schedule)
    forwards = {Edge(s, s + 1, "F") for s in range(num_ranks - 1)}
    assert forwards <= uncredited([lowered], slots)
    assert not forwards & uncredited([lowered], {e: n - 1 for e, n in slots.items()})
    # The last rank's gradient leaves only after the forward that the one before it caused.
    assert Edge(num_ranks - 1, num_ranks - 2, "B") in uncredited([lowered], slots)


def test_an_evaluation_between_steps_takes_the_proof_away():
    schedule = make("1f1b", 4, 12)
    schedules = [_lower(schedule), forward_only(schedule)]
    assert {e.kind for e in uncredited(schedules, slots_held(schedule))} == {"B"}


def test_a_weight_gradient_that_still_reads_the_input_is_not_covered_by_the_gradient_sent_before():
    # 1F1B-W sends the gradient before W, and the slot is read until W is done.
    schedule = make("1f1b_w", 4, 12)
    assert {e.kind for e in uncredited([_lower(schedule)], slots_held(schedule))} <= {"B"}


def test_an_order_that_is_not_lowered_or_that_hangs_is_refused():
    schedule = make("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match="1f1b has no transfers; apply add_transfers"):
        uncredited([schedule], 2)
    with pytest.raises(ScheduleError, match="1f1b has no frees; apply add_frees"):
        uncredited([add_transfers(schedule)], 2)
    lowered = _lower(schedule)
    backward_first = tuple(sorted(lowered.orders[0], key=lambda op: op.kind is not Kind.B))
    hangs = replace(lowered, orders=(backward_first, lowered.orders[1]))
    assert stalled(hangs)
    with pytest.raises(ScheduleError, match="rank 0 hangs before its computation 0"):
        uncredited([hangs], 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_slots_are_freed_in_the_order_in_which_their_receives_were_posted(name, num_ranks):
    # Slots that a peer writes go round as a ring: any other order would hold a free one back.
    for num_micro_batches, split in product((1, 2, 7, 12), (False, True)):
        schedule = make(name, num_ranks, num_micro_batches)
        lowered = _lower(split_backward(schedule) if split else schedule)
        for edge in edges(lowered):
            ops = list(lowered.ops(lowered.stage_to_rank[edge.dst_stage]))
            posted, freed = (
                [op.micro_batch for op in ops if (op.kind, op.stage) == (kind, edge.dst_stage)]
                for kind in (RECEIVES[edge.kind], FREES[edge.kind])
            )
            assert len(posted) == num_micro_batches
            assert freed == posted

"""Absent ranks in virtual time: told what the present ones sent, they answer as the timeline has
it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.schedules import make
from ppruntime.schedules.absent import AbsentRanks
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import Kind, ScheduleError
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.schedules.timeline import simulate

ORDERS = ("gpipe", "1f1b", "async_1f1b", "1f1b_w", "zb_h1", "zb_h2")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_present_part_hears_from_its_neighbours_when_the_whole_pipeline_would(data):
    num_ranks = data.draw(st.integers(2, 6))
    schedule = make(data.draw(st.sampled_from(ORDERS)), num_ranks, data.draw(st.integers(1, 9)))
    first = data.draw(st.integers(0, num_ranks - 1))
    present = range(first, data.draw(st.integers(first + 1, num_ranks)))
    times = st.lists(st.floats(0.01, 2), min_size=num_ranks, max_size=num_ranks)
    costs = Costs(*(tuple(data.draw(times)) for _ in range(3)))
    hops = Hops.both(data.draw(st.floats(0, 1)))
    start = 100.0
    absent = AbsentRanks(schedule, costs, hops, present, start=start)
    timeline = simulate(schedule, costs, hops)
    made = {t.op: t for row in timeline.rows for t in row}
    ops = sorted((t for r in present for t in timeline.rows[r]), key=lambda t: (t.start, t.finish))
    for timed in ops:
        op, forward = timed.op, timed.op.kind is Kind.F
        if op.kind is Kind.W:
            continue
        source = op.stage - 1 if forward else op.stage + 1
        if 0 <= source < num_ranks and source not in present:
            arrival = absent.arrival(op.stage, forward=forward, micro_batch=op.micro_batch)
            sent = next(
                t
                for t in made.values()
                if t.op.stage == source
                and t.op.micro_batch == op.micro_batch
                and (t.op.kind is Kind.F) == forward
                and t.op.kind is not Kind.W
            )
            latency = hops.forward if forward else hops.backward
            assert arrival == pytest.approx(start + sent.finish + latency, rel=1e-9)
        absent.sent(
            op.stage, forward=forward, micro_batch=op.micro_batch, time=start + timed.finish
        )


def test_what_hangs_on_nothing_sent_is_not_known():
    schedule = make("1f1b", 4, 4)
    costs = Costs.even(1, 1, 1, schedule.stage_to_rank)
    absent = AbsentRanks(schedule, costs, Hops(), range(2), start=0.0)
    assert absent.arrival(1, forward=False, micro_batch=0) is None
    absent.sent(1, forward=True, micro_batch=0, time=5.0)
    assert absent.arrival(1, forward=False, micro_batch=0) is None  # rank 2 warms up with two
    absent.sent(1, forward=True, micro_batch=1, time=5.0)
    assert absent.arrival(1, forward=False, micro_batch=0) == 5 + (1 + 1) + 2 + 2


def test_lowered_orders_and_wrong_costs_are_refused():
    schedule = make("1f1b", 2, 2)
    costs = Costs.even(1, 1, 1, schedule.stage_to_rank)
    with pytest.raises(ScheduleError, match="before it is lowered"):
        AbsentRanks(add_frees(add_transfers(schedule, slots=1)), costs, Hops(), [0], start=0)
    with pytest.raises(ScheduleError, match="one triple per stage"):
        AbsentRanks(make("1f1b", 3, 2), costs, Hops(), [0], start=0)

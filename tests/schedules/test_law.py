"""The steady-state law against the timeline, and the planner against the law."""

from math import lcm

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ppruntime.schedules import make
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.law import cycles, stall, steady_time
from ppruntime.schedules.ops import ScheduleError
from ppruntime.schedules.plan_warmup import plan_warmup
from ppruntime.schedules.timeline import simulate

times = st.floats(0.1, 3.0)


@st.composite
def pipelines(draw, max_ranks=5):
    """(costs, hops, non-increasing warm-up)"""
    ranks = draw(st.integers(1, max_ranks))
    columns = [draw(st.lists(times, min_size=ranks, max_size=ranks)) for _ in range(3)]
    latency = st.lists(st.floats(0, 2.0), min_size=ranks - 1, max_size=ranks - 1)
    steps = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    warmup = [sum(steps[rank:]) for rank in range(ranks)]
    return Costs(*map(tuple, columns)), Hops(draw(latency), draw(latency)), tuple(warmup)


def lead(warmup, costs, hops, deferred):
    """The share by which the slowest cycle is slower than the next slower one of another time."""
    rates = [c.time / (warmup[c.first] - warmup[c.last] + 1) for c in cycles(costs, hops, deferred)]
    rates += [costs.work(stage) for stage in range(costs.num_stages)]
    most = max(rates)
    return 1 - max((rate for rate in rates if rate < most * (1 - 1e-12)), default=0.0) / most


@settings(max_examples=60)  # of 50 ms each: the deep profile's 2,000 would run out of time
@given(pipelines(max_ranks=4), st.booleans())
def test_the_law_is_what_the_timeline_does(pipeline, deferred):
    """Two step lengths that differ by a multiple of every cycle's count of micro-batches, so that
    the periodic part of the difference cancels; long enough for the slowest cycle to have won."""
    costs, hops, warmup = pipeline
    counts = [a - b + 1 for i, a in enumerate(warmup) for b in warmup[i:]]
    period = lcm(*counts)
    start = 50 + round(30 / lead(warmup, costs, hops, deferred))
    assume(period <= 60 and start <= 500)
    name = "1f1b_w" if deferred else "async_1f1b"
    short, long = (
        simulate(make(name, len(warmup), m, warmup_step=warmup), costs, hops).makespan
        for m in (start, start + period)
    )
    law = steady_time(warmup, costs, hops, defer_weight_grads=deferred)
    assert (long - short) / period == pytest.approx(law, abs=1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_plain_1f1b_pays_for_two_latencies_per_hop(ranks):
    costs = Costs((1.0,) * ranks, (1.0,) * ranks, (1.0,) * ranks)
    warmup = tuple(range(ranks - 1, -1, -1))
    assert steady_time(warmup, costs, Hops.both(0.1)) == pytest.approx(
        3 + 0.2 * (ranks - 1) / ranks
    )


def test_deferred_weight_gradients_hide_transfers_up_to_half_a_w():
    costs = Costs((1.0,) * 8, (1.0,) * 8, (1.0,) * 8)
    warmup = tuple(range(7, -1, -1))
    assert steady_time(warmup, costs, Hops.both(0.5)) == 3.875
    assert steady_time(warmup, costs, Hops.both(0.5), defer_weight_grads=True) == 3.0
    assert steady_time(warmup, costs, Hops.both(0.6), defer_weight_grads=True) == pytest.approx(
        3.175
    )


@pytest.mark.parametrize(("slack", "in_flight"), [(0.0, 31), (0.02, 23), (0.05, 16)])
def test_golden_warmups_at_16_ranks(slack, in_flight):
    """2c / (F + B) = 3.3 %."""
    costs = Costs((1.0,) * 16, (1.0,) * 16, (1.0,) * 16)
    plan = plan_warmup(costs, Hops.both(0.033 * 3 / 2), stall_budget=slack)
    assert plan.in_flight[0] == in_flight
    assert plan.stall <= slack + 1e-9


@given(pipelines(), st.floats(0, 0.5), st.booleans())
def test_a_plan_keeps_its_budget_and_no_rank_can_do_with_less(pipeline, budget, deferred):
    costs, hops, _ = pipeline
    plan = plan_warmup(costs, hops, stall_budget=budget, defer_weight_grads=deferred)
    assert plan.stall <= budget + 1e-8
    assert plan.stall == pytest.approx(stall(plan.warmup, costs, hops, defer_weight_grads=deferred))
    for rank, warmup in enumerate(plan.warmup):
        if warmup == 0:
            continue
        # lower this rank, and all below it to stay legal, as if they had no needs of their own
        less = plan.warmup[:rank] + tuple(min(w, warmup - 1) for w in plan.warmup[rank:])
        assert stall(less, costs, hops, defer_weight_grads=deferred) > budget - 1e-8


@given(pipelines(max_ranks=4), st.data(), st.booleans())
def test_no_vector_within_a_memory_budget_is_faster_than_the_plan(pipeline, data, deferred):
    costs, hops, _ = pipeline
    ranks = costs.num_stages
    limits = data.draw(st.lists(st.integers(1, 6), min_size=ranks, max_size=ranks))
    plan = plan_warmup(costs, hops, memory_budget=limits, defer_weight_grads=deferred)
    assert all(held <= limit for held, limit in zip(plan.in_flight, limits, strict=True))
    rival, top = [], 99
    for limit in limits:
        top = min(top, limit - 1)
        rival.append(data.draw(st.integers(0, top)))
        top = rival[-1]
    best = tuple(min(limits[: rank + 1]) - 1 for rank in range(ranks))
    for vector in (tuple(rival), best):
        time = steady_time(vector, costs, hops, defer_weight_grads=deferred)
        assert plan.time_per_micro_batch <= time + 1e-9


def test_wrong_requests_say_what_would_work():
    costs = Costs((1.0,) * 2, (1.0,) * 2, (1.0,) * 2)
    for arguments, said in (
        ({}, "exactly one"),
        ({"stall_budget": 0.1, "memory_budget": 3}, "exactly one"),
        ({"stall_budget": -0.1}, "the stall budget is -0.1"),
        ({"memory_budget": 0}, "the memory budget of rank 0 is 0 activations"),
        ({"memory_budget": [1, 2, 3]}, "names 3 ranks of 2"),
    ):
        with pytest.raises(ScheduleError, match=said):
            plan_warmup(costs, **arguments)
    with pytest.raises(ScheduleError, match="rank 0 warms up with 0 forwards and rank 1 with 1"):
        steady_time((0, 1), costs)

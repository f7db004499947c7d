"""No order is faster than the lower bound: handmade ones, random ones, all of a tiny case."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make, placement
from ppruntime.schedules.bounds import lower_bound
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.list_scheduler import ListScheduler
from ppruntime.schedules.ops import Schedule
from ppruntime.schedules.problem import problem_of
from ppruntime.schedules.timeline import simulate

ROUNDING = 1e-9
times = st.one_of(st.floats(0.01, 4.0), st.sampled_from((0.0, 0.5, 1.0)))


def draw_costs(data: st.DataObject, num_stages: int) -> tuple[Costs, Hops]:
    columns = [data.draw(st.lists(times, min_size=num_stages, max_size=num_stages)) for _ in "FIW"]
    latencies = st.lists(times, min_size=num_stages - 1, max_size=num_stages - 1)
    hops = Hops(data.draw(latencies), data.draw(latencies))
    return Costs(*map(tuple, columns)), hops


def has_whole_backwards_only(schedule: Schedule) -> bool:
    kinds = {op.kind.value for rank in range(schedule.num_ranks) for op in schedule.ops(rank)}
    return kinds <= {"F", "B"}


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 5),
    micro_batches=st.integers(1, 9),
    data=st.data(),
)
def test_no_handmade_order_beats_the_bound_for_its_own_memory(name, ranks, micro_batches, data):
    schedule = make(name, ranks, micro_batches)
    costs, hops = draw_costs(data, schedule.num_stages)
    timeline = simulate(schedule, costs, hops)
    arguments = (costs, hops, schedule.stage_to_rank, micro_batches, timeline.peak_in_flight)
    bound = lower_bound(*arguments)
    assert timeline.makespan >= bound.makespan * (1 - ROUNDING)
    assert bound.makespan >= lower_bound(*arguments[:-1]).makespan * (1 - ROUNDING)
    if has_whole_backwards_only(schedule):
        whole = lower_bound(*arguments, split_backward=False)
        assert timeline.makespan >= whole.makespan * (1 - ROUNDING)


@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    micro_batches=st.integers(1, 8),
    spare=st.integers(0, 6),
    seed=st.integers(0, 10**6),
    is_v=st.booleans(),
    is_reversed=st.booleans(),
    data=st.data(),
)
def test_no_random_order_beats_the_bound(
    ranks, chunks, micro_batches, spare, seed, is_v, is_reversed, data
):
    """Random priorities and caps: orders that no one would write, at caps that really bind."""
    ranks_of = placement.v_shape(ranks) if is_v and chunks == 2 else placement.loop(ranks, chunks)
    costs, hops = draw_costs(data, len(ranks_of))
    caps = [chunks + spare] * ranks
    problem = problem_of(costs, hops, ranks_of, micro_batches, caps)
    rng = random.Random(seed)
    chosen = problem.reversed() if is_reversed else problem
    priority = [[rng.random() for _ in range(micro_batches)] for _ in problem.classes]
    made = ListScheduler(chosen).run(priority, rng.choice((0.0, 0.5, 1.0)))
    assert made is not None
    bound = lower_bound(costs, hops, ranks_of, micro_batches, caps)
    assert made.makespan >= bound.makespan * (1 - ROUNDING)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_bound_is_reached_by_zb_h1_and_zb_v_at_equal_costs(ranks):
    for name in ("zb_h1", "zb_v"):
        schedule = make(name, ranks, 3 * ranks)
        costs = Costs.even(2, 2, 2, schedule.stage_to_rank)
        timeline = simulate(schedule, costs)
        bound = lower_bound(
            costs, Hops(), schedule.stage_to_rank, 3 * ranks, timeline.peak_in_flight
        )
        assert bound.makespan == timeline.makespan


def test_one_micro_batch_takes_its_path():
    costs = Costs((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0))
    hops = Hops((0.5, 0.25), (1.0, 2.0))
    schedule = make("zb_h1", 3, 1)
    bound = lower_bound(costs, hops, schedule.stage_to_rank, 1)
    assert bound.path == 6 + 0.75 + 15 + 3 + 7  # stage 0's weight gradient comes last
    assert bound.makespan == bound.path == simulate(schedule, costs, hops).makespan


def test_less_memory_never_lowers_the_bound():
    ranks_of = placement.v_shape(6)
    costs = Costs.even(1, 1.5, 0.5, ranks_of)
    bounds = [
        lower_bound(costs, Hops.both(0.2), ranks_of, 20, [cap] * 6).makespan
        for cap in range(2, 30, 2)
    ]
    for tighter, looser in pairwise(bounds):
        assert tighter >= looser
    assert bounds[0] > 1.5 * bounds[-1]


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_holds_against_every_order_of_a_tiny_case(cap, seed):
    """Two ranks, three micro-batches: all interleavings of the classes on each rank."""
    rng = random.Random(seed)
    times = [tuple(rng.choice((0.5, 1.0, 2.0)) for _ in range(2)) for _ in "FIW"]
    costs, hops = Costs(*times), Hops((rng.choice((0.0, 0.5)),), (rng.choice((0.0, 1.0)),))
    problem = problem_of(costs, hops, (0, 1), 3, [cap, cap])
    best = fastest_of_all(problem)
    assert lower_bound(costs, hops, (0, 1), 3, [cap, cap]).makespan <= best + ROUNDING


def fastest_of_all(problem) -> float:
    """Depth-first over all semi-active orders: every next op of every rank, at its earliest."""
    count, classes = problem.num_micro_batches, problem.classes
    best = [float("inf")]

    def descend(done, ends, free_at, held):
        if all(n == count for n in done):
            best[0] = min(best[0], max(free_at))
            return
        if max(free_at) >= best[0]:
            return
        for c, cls in enumerate(classes):
            k = done[c]
            inputs = [e for e in problem.edges if e.after == c]
            if k == count or any(done[e.before] <= k for e in inputs):
                continue
            if cls.takes and held[cls.rank] >= problem.caps[cls.rank]:
                continue
            start = max([free_at[cls.rank]] + [ends[e.before][k] + e.latency for e in inputs])
            after = [*done]
            after[c] += 1
            now_free, now_held = [*free_at], [*held]
            now_free[cls.rank] = start + cls.duration
            now_held[cls.rank] += cls.takes - cls.frees
            grown = [*ends]
            grown[c] = (*ends[c], start + cls.duration)
            key = (tuple(after), tuple(now_free), tuple(grown))
            if key not in seen:
                seen.add(key)
                descend(after, grown, now_free, now_held)

    seen: set = set()
    descend(
        [0] * len(classes), [()] * len(classes), [0.0] * problem.num_ranks, [0] * problem.num_ranks
    )
    return best[0]

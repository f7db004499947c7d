"""The search: legal, within its cap, never behind the handmade orders, and close to the bound."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.schedules.check import check
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import Kind, ScheduleError
from ppruntime.schedules.search import SearchResult, caps_of, search
from ppruntime.schedules.timeline import simulate

DOCS = Path(__file__).parents[2] / "docs"
FEW = 30_000
"""Ops placed: a fraction of the default effort."""


def even(num_stages: int, stages_per_rank: int, times=(1.0, 1.0, 1.0)) -> Costs:
    return Costs(*((time / stages_per_rank,) * num_stages for time in times))


def assert_sound(result: SearchResult, cap, ranks: int, stages_per_rank: int) -> None:
    schedule = result.schedule
    check(schedule, max_in_flight=caps_of(cap, ranks, stages_per_rank))
    for stage in range(schedule.num_stages):
        order = [
            op.micro_batch
            for op in schedule.ops(schedule.stage_to_rank[stage])
            if op.stage == stage and op.kind in (Kind.W, Kind.B)
        ]
        assert order == list(range(schedule.num_micro_batches))
    assert result.makespan >= result.lower_bound * (1 - 1e-9)
    if result.handmade_makespan is not None:
        assert result.makespan <= result.handmade_makespan


@settings(max_examples=25)
@given(
    ranks=st.integers(1, 4),
    stages_per_rank=st.integers(1, 3),
    micro_batches=st.integers(1, 9),
    cap=st.one_of(st.none(), st.sampled_from((0.6, 1.0, 1.25, 2.0))),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_results_are_legal_and_never_behind_the_handmade(
    ranks, stages_per_rank, micro_batches, cap, seed, data
):
    if cap is not None:
        cap = max(cap, 1 / ranks)
    stages = ranks * stages_per_rank
    times = st.lists(st.floats(0.1, 3.0), min_size=stages, max_size=stages)
    costs = Costs(*(tuple(data.draw(times)) for _ in "FIW"))
    hops = Hops.both(data.draw(st.floats(0, 1)))
    request = {
        "num_ranks": ranks,
        "num_micro_batches": micro_batches,
        "stages_per_rank": stages_per_rank,
        "seed": seed,
        "effort": 3_000,
    }
    result = search(costs, hops, cap, **request)
    assert_sound(result, cap, ranks, stages_per_rank)
    assert simulate(result.schedule, costs, hops).makespan == result.makespan
    assert search(costs, hops, cap, **request).schedule == result.schedule


@pytest.mark.parametrize("latency", [0.0, 0.09])
@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (8, 6), (8, 16)])
def test_equal_costs_end_within_1_percent_of_the_bound(
    ranks, micro_batches, stages_per_rank, latency
):
    costs = even(ranks * stages_per_rank, stages_per_rank)
    result = search(
        costs,
        Hops.both(latency),
        1.25,
        num_ranks=ranks,
        effort=150_000,
        num_micro_batches=micro_batches,
        stages_per_rank=stages_per_rank,
    )
    assert_sound(result, 1.25, ranks, stages_per_rank)
    assert result.gap <= 0.01


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_uneven_stages_end_within_3_percent_of_the_bound(seed, stages_per_rank):
    rng = random.Random(seed)
    stages = 8 * stages_per_rank
    times = tuple((1 + rng.uniform(-0.15, 0.15)) / stages_per_rank for _ in range(stages))
    result = search(
        Costs(times, times, times),
        Hops.both(0.09),
        1.25,
        num_ranks=8,
        effort=150_000,
        num_micro_batches=16,
        stages_per_rank=stages_per_rank,
    )
    assert_sound(result, 1.25, 8, stages_per_rank)
    assert result.gap <= 0.03


@pytest.mark.parametrize(("stages_per_rank", "latency"), [(1, 0.09), (2, 0.0), (2, 0.09)])
def test_unequal_forward_and_backward_end_ahead_of_every_handmade_order(stages_per_rank, latency):
    costs = even(8 * stages_per_rank, stages_per_rank, (1.0, 1.5, 0.5))
    result = search(
        costs,
        Hops.both(latency),
        1.25,
        num_ranks=8,
        num_micro_batches=16,
        stages_per_rank=stages_per_rank,
        effort=100_000,
    )
    assert_sound(result, 1.25, 8, stages_per_rank)
    assert result.makespan < 0.995 * result.handmade_makespan


def test_a_cap_may_differ_per_rank_and_lie_below_every_handmade_order():
    cap = [2.0, 1.0, 1.0, 1.0]
    result = search(even(4, 1), Hops(), cap, num_ranks=4, num_micro_batches=6, effort=FEW)
    assert_sound(result, cap, 4, 1)
    assert result.handmade is None
    assert result.timeline.peak_in_flight <= (2, 1, 1, 1)


def test_more_memory_is_never_slower():
    spans = [
        search(
            even(8, 2),
            Hops.both(0.1),
            cap,
            num_ranks=4,
            num_micro_batches=12,
            stages_per_rank=2,
            effort=FEW,
        ).makespan
        for cap in (0.5, 1.0, 2.0)
    ]
    assert spans[0] >= spans[1] >= spans[2]


@pytest.mark.slow
def test_a_big_search_stays_within_its_time():
    """16 ranks, 64 micro-batches, two stages each: the largest the targets speak of."""
    costs = even(32, 2, (1.0, 1.5, 0.5))
    begin = time.process_time()
    result = search(
        costs, Hops.both(0.09), 1.25, num_ranks=16, num_micro_batches=64, stages_per_rank=2
    )
    seconds = time.process_time() - begin
    assert_sound(result, 1.25, 16, 2)
    assert result.makespan < 0.98 * result.handmade_makespan
    assert seconds < 40  # 10 s on a free core; a shared one is slower


def test_impossible_requests_say_what_would_work():
    arguments = {"num_ranks": 4, "num_micro_batches": 4}
    for costs, cap, said in (
        (even(8, 2), 1.0, "costs are for 8 stages, 4 ranks with 1 each have 4"),
        (even(4, 1), 0.1, "gives rank 0 0.4 whole-rank activations; a step needs 1 at least"),
        (even(4, 1), [1.0], "names 1 ranks of 4"),
    ):
        with pytest.raises(ScheduleError, match=said):
            search(costs, Hops(), cap, **arguments)


def test_the_gaps_in_the_documents_come_out_again():
    """The small cases of docs/bench/schedule_search.json: same makespan, same bound."""
    results = json.loads((DOCS / "bench" / "schedule_search.json").read_text())
    small = [
        case
        for case in results["cases"]
        if case["ranks"] == 4 and case["spread"] == 0 and case["cpu_seconds"] < 1
    ]
    assert len(small) >= 3
    for case in small[:6]:
        found = search(
            even(4 * case["stages_per_rank"], case["stages_per_rank"], case["costs"]),
            Hops.both(case["transfer"]),
            case["memory_cap"],
            num_ranks=4,
            num_micro_batches=case["micro_batches"],
            stages_per_rank=case["stages_per_rank"],
        )
        assert found.makespan == pytest.approx(case["makespan"], rel=1e-12)
        assert found.lower_bound == pytest.approx(case["lower_bound"], rel=1e-12)

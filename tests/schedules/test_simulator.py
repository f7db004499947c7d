"""The event simulator against the timeline, an independent longest path, and closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.costs import Costs, Hops, StageBytes
from ppruntime.schedules.longest_path import longest_path
from ppruntime.schedules.machine import HostCopies, Interference, Link, Machine, Noise, StepEnd
from ppruntime.schedules.ops import Schedule, ScheduleError, parse_op
from ppruntime.schedules.passes import add_frees, add_offload, add_transfers
from ppruntime.schedules.simulator import simulate_machine
from ppruntime.schedules.timeline import simulate

SECONDS = st.floats(0.01, 2)


def machine(costs: Costs, **changes: object) -> Machine:
    hops = costs.num_stages - 1
    given = {
        "costs": costs,
        "links": (Link(),) * hops,
        "forward_bytes": (1.0,) * hops,
        "backward_bytes": (1.0,) * hops,
    }
    return Machine(**(given | changes))


@st.composite
def orders_on_machines(draw):
    schedule = make(draw(st.sampled_from(NAMES)), draw(st.integers(1, 5)), draw(st.integers(1, 9)))
    times = st.lists(SECONDS, min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs(*(tuple(draw(times)) for _ in range(3)))
    latencies = tuple(draw(st.floats(0, 1)) for _ in range(schedule.num_stages - 1))
    return schedule, costs, latencies


@settings(max_examples=60, deadline=None)
@given(orders_on_machines())
def test_on_an_ideal_machine_simulator_timeline_and_longest_path_agree_to_1e_9(case):
    schedule, costs, latencies = case
    hops = Hops(latencies, latencies)
    links = tuple(Link(f"hop {i}", seconds) for i, seconds in enumerate(latencies))
    found = simulate_machine(schedule, machine(costs, links=links))
    timeline = simulate(schedule, costs, hops)
    assert found.makespan == pytest.approx(longest_path(schedule, costs, hops), rel=1e-9)
    assert found.makespan == pytest.approx(timeline.makespan, rel=1e-9)
    assert found.seconds == found.makespan
    for rank, idle in enumerate(timeline.idle):
        assert found.lost[rank].dependency == pytest.approx(idle.dependency, abs=1e-9)
        assert found.lost[rank].transfer == pytest.approx(idle.transfer, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(orders_on_machines(), st.floats(0, 1), st.floats(0, 0.2), st.integers(0, 3))
def test_causes_add_up_and_the_critical_path_has_no_gap(case, blocking, jitter, seed):
    schedule, costs, latencies = case
    found = simulate_machine(
        schedule,
        machine(
            costs,
            links=tuple(Link("shared", seconds, bandwidth=5.0) for seconds in latencies),
            interference=Interference(0.3, 0.6, blocking),
            noise=Noise(jitter, 0.05, 8, 0.05, 0.5, seed),
        ),
    )
    for work, lost in zip(found.work, found.lost, strict=True):
        assert work + sum(lost) == pytest.approx(found.makespan, rel=1e-9)
        assert min(lost._replace(noise=0)) >= -1e-9
    legs = found.critical_path
    assert legs[0].start == 0
    assert legs[-1].finish == found.makespan
    for before, leg in pairwise(legs):
        # A message's last byte leaves a latency before it arrives; the next may then start.
        assert leg.start <= before.finish + 1e-9
        assert leg.cause == "transfer" or leg.start == pytest.approx(before.finish, abs=1e-9)


def test_a_message_slows_both_ends_for_as_long_as_it_moves():
    """Two ranks, forward only in effect: F0 ends at 10, its message moves for 4; rank 0's second
    forward runs beside it."""
    schedule = make("gpipe", 2, 2)
    costs = Costs((10.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    link = (Link("link", 0.0, bandwidth=0.25),)
    half = simulate_machine(schedule, machine(costs, links=link, interference=Interference(1.0)))
    second = half.rows[0][1]
    assert second.finish - second.start == pytest.approx(12)  # 4 s at half speed do the work of 2
    stuck = simulate_machine(
        schedule, machine(costs, links=link, interference=Interference(blocking=1.0))
    )
    second = stuck.rows[0][1]
    assert second.finish - second.start == pytest.approx(14)
    assert stuck.lost[0].interference >= 4


def test_messages_of_one_rank_share_its_link_and_wait_for_each_other():
    schedule = make("gpipe", 2, 3)
    costs = Costs((1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    found = simulate_machine(schedule, machine(costs, links=(Link("ib", 0.5, bandwidth=0.2),)))
    sends = [t for t in found.transfers if t.rank == 0]
    assert [(t.start, t.finish) for t in sends] == [(1, 6.5), (6, 11.5), (11, 16.5)]


def test_offloaded_activations_are_away_in_between_and_late_copies_are_waited_for():
    order = "0F0 0OFFLOAD0 0F1 0F2 0B2 0RELOAD0 0B1 0B0"
    schedule = Schedule("mine", 3, (0,), (tuple(map(parse_op, order.split())),))
    computations = tuple(step for step in schedule.orders[0] if "LOAD" not in str(step))
    sizes = StageBytes((8.0,), (0.0,), (100.0,))
    costs = Costs((1.0,), (1.0,), (1.0,))

    def run(order: Schedule, rate: float):
        host = HostCopies(rate, rate)
        return simulate_machine(order, machine(costs, host=host, stage_bytes=sizes))

    fast, kept = run(schedule, 80.0), run(Schedule("kept", 3, (0,), (computations,)), 80.0)
    assert fast.makespan == kept.makespan == 9
    assert (fast.peak_bytes, kept.peak_bytes) == ((116.0,), (124.0,))
    slow = run(schedule, 2.0)  # away 1 to 5, back 5 to 9; its backward could run from 7 on
    assert slow.lost[0].host == pytest.approx(2)
    assert slow.makespan == pytest.approx(11)
    assert [leg.cause for leg in slow.critical_path].count("host") == 1


def test_gradients_are_reduced_in_other_ranks_drain():
    schedule = make("1f1b", 4, 8)
    costs = Costs.even(1, 1, 1, schedule.stage_to_rank)
    drain = simulate(schedule, costs).idle[3].drain
    end = StepEnd(reduce=(0.0, 0.0, 0.0, drain + 0.5), together=2.0, gather=(0.25, 1, 0, 0))
    found = simulate_machine(schedule, machine(costs, end=end))
    assert found.exposed_reduce == pytest.approx(0.5)
    assert found.seconds == pytest.approx(found.makespan + 0.5 + 2 + 1)


def test_a_lockstep_group_is_as_slow_as_its_slowest():
    schedule = make("1f1b", 2, 40)
    costs = Costs.even(1, 1, 1, schedule.stage_to_rank)

    def mean(group: int) -> float:
        runs = [
            simulate_machine(
                schedule, machine(costs, noise=Noise(rank_spread=0.05, group=group, seed=seed))
            ).makespan
            for seed in range(20)
        ]
        return sum(runs) / len(runs)

    assert mean(8) > 1.03 * mean(1)


def test_what_cannot_be_simulated_is_refused_with_the_remedy():
    schedule = make("1f1b", 2, 2)
    costs = Costs.even(1, 1, 1, schedule.stage_to_rank)
    with pytest.raises(ScheduleError, match="before transfers are added"):
        simulate_machine(add_frees(add_transfers(schedule, slots=1)), machine(costs))
    with pytest.raises(ScheduleError, match="how fast the host copies are"):
        simulate_machine(add_offload(make("gpipe", 2, 4)), machine(costs))
    with pytest.raises(ScheduleError, match="give one per hop"):
        machine(costs, links=())
    orders = tuple(tuple(map(parse_op, row.split())) for row in ("0B0 0F0", "1F0 1B0"))
    stuck = Schedule("stuck", 1, (0, 1), orders)
    with pytest.raises(ScheduleError, match="rank 0 waits at 0B0"):
        simulate_machine(stuck, machine(costs))
    with pytest.raises(ScheduleError, match="deadlocks"):
        longest_path(stuck, costs)


def test_a_longest_path_has_no_use_for_transfers():
    schedule = make("1f1b", 2, 2)
    lowered = add_frees(add_transfers(schedule, slots=1))
    with pytest.raises(ScheduleError, match="no compute op"):
        longest_path(lowered, Costs.even(1, 1, 1, schedule.stage_to_rank))

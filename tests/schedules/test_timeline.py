"""The timeline against closed forms, golden numbers and an independent longest path."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make, passes
from ppruntime.schedules.costs import Costs, Hops, StageBytes, parse_costs
from ppruntime.schedules.ops import Kind, Op, Pair, Schedule, ScheduleError, ops_of, parse_step
from ppruntime.schedules.timeline import Timeline, simulate


def uniform(schedule: Schedule, forward: float, input_grad: float, weight_grad: float) -> Costs:
    return Costs.even(forward, input_grad, weight_grad, schedule.stage_to_rank)


def longest_path(
    schedule: Schedule, costs: Costs, hops: Hops, paired: Costs | None = None
) -> float:
    """The makespan as the longest path over all precedence edges, by relaxation to a fixpoint:
    nothing in common with the event simulation but the definition. With `paired` the halves of a
    pair have no edge between them."""
    forward, backward = hops.per_stage_hop(schedule.stage_to_rank)
    orders = [list(schedule.ops(rank)) for rank in range(schedule.num_ranks)]

    def length(op: Op) -> float:
        return paired.of(op) if paired is not None and op in halves else costs.of(op)

    gradient = {
        (op.stage, op.micro_batch): op for o in orders for op in o if op.kind in (Kind.I, Kind.B)
    }
    edges = [(a, b, 0.0) for order in orders for a, b in pairwise(order)]
    halves = set[Op]()
    if paired is not None:
        steps = [[ops_of(step) for step in order] for order in schedule.orders]
        edges = [(a, b, 0.0) for o in steps for x, y in pairwise(o) for a in x for b in y]
        halves = {op for order in steps for ops in order if len(ops) == 2 for op in ops}
    for order in orders:
        for op in order:
            s, m = op.stage, op.micro_batch
            if op.kind is Kind.F and s:
                edges.append((Op(s - 1, Kind.F, m), op, forward[s - 1]))
            if op.kind in (Kind.I, Kind.B):
                edges.append((Op(s, Kind.F, m), op, 0.0))
                if s + 1 < schedule.num_stages:
                    edges.append((gradient[s + 1, m], op, backward[s]))
            if op.kind is Kind.W:
                edges.append((gradient[s, m], op, 0.0))
    start = {op: 0.0 for order in orders for op in order}
    changed = True
    while changed:
        changed = False
        for a, b, latency in edges:
            at = start[a] + length(a) + latency
            if at > start[b]:
                start[b], changed = at, True
    return max(at + length(op) for op, at in start.items())


GOLDEN = {
    # 4 x 8, then 8 x 32: makespan and span bubble at 1, 1, 1, then both at 1, 1.5, 0.5
    "gpipe": ((9, 9, 9, 9), (21, 21, 21, 21)),
    "1f1b": ((9, 9, 9, 9), (21, 21, 21, 21)),
    "async_1f1b": ((9, 9, 9, 9), (21, 21, 21, 21)),
    "1f1b_w": ((6, 6, 7.5, 7.5), (14, 14, 17.5, 17.5)),
    "zb_h1": ((3, 3, 6, 6), (7, 7, 14, 14)),
    "zb_h2": ((3, 0, 4.5, 4.5), (7, 0, 10.5, 10.5)),
    "interleaved_1f1b": ((4.5, 4.5, 4.5, 4.5), (10.5, 10.5, 10.5, 10.5)),
    "interleaved_zb1p": ((1.5, 1.5, 3, 3), (3.5, 3.5, 7, 7)),
    "zb_v": ((1.5, 0, 3, 3), (3.5, 0, 7, 7)),
    "dualpipe_v": ((1.5, 1.5, 3.25, 3.25), (3.5, 3.5, 8.25, 8.25)),
    "v_half": ((2.5, 2.5, 7.25, 7.25), (8.5, 8.5, 29.25, 29.25)),
    "v_min": ((5.5, 5.5, 16.5, 16.5), (13, 13, 61.75, 61.75)),
}
FUSED = ((3, 3, 4.75, 4.75), (7, 7, 11.75, 11.75))


def bubbles(name: str, ranks: int, micro_batches: int, *, fuse_pairs: bool) -> tuple[float, ...]:
    schedule = make(name, ranks, micro_batches)
    even, uneven = (
        simulate(schedule, uniform(schedule, *costs), fuse_pairs=fuse_pairs)
        for costs in ((1, 1, 1), (1, 1.5, 0.5))
    )
    return (even.makespan_bubble, even.span_bubble, uneven.makespan_bubble, uneven.span_bubble)


@pytest.mark.parametrize(("size", "column"), [((4, 8), 0), ((8, 32), 1)])
@pytest.mark.parametrize("name", NAMES)
def test_golden_bubbles(name, size, column):
    assert bubbles(name, *size, fuse_pairs=False) == GOLDEN[name][column]
    if name == "dualpipe_v":
        assert bubbles(name, *size, fuse_pairs=True) == FUSED[column]


@pytest.mark.parametrize(
    ("name", "latency", "bubble"),
    [("1f1b", 0.1, 27.8), ("async_1f1b", 0.1, 22.4), ("1f1b", 0.5, 55.0)],
)
def test_golden_bubbles_with_latency(name, latency, bubble):
    schedule = make(name, 8, 32)
    timeline = simulate(schedule, uniform(schedule, 1, 1, 1), Hops.both(latency))
    assert timeline.makespan_bubble == pytest.approx(bubble, abs=1e-9)


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 6),
    micro_batches=st.integers(1, 9),
    data=st.data(),
)
def test_makespan_is_the_longest_path(name, ranks, micro_batches, data):
    schedule = make(name, ranks, micro_batches)
    cost = st.integers(0, 9).map(float)
    triples = data.draw(
        st.lists(
            st.tuples(cost, cost, cost), min_size=schedule.num_stages, max_size=schedule.num_stages
        )
    )
    costs = Costs(*zip(*triples, strict=True))
    hops = Hops(data.draw(cost), data.draw(cost))
    timeline = simulate(schedule, costs, hops)
    assert timeline.makespan == longest_path(schedule, costs, hops)
    assert_consistent(timeline)


def assert_consistent(timeline: Timeline) -> None:
    """Ops do not overlap, idle adds up, and the critical path is as long as the step."""
    for rank, row in enumerate(timeline.rows):
        for a, b in pairwise(row):
            assert a.finish <= b.start
        idle = timeline.idle[rank]
        assert min(idle) >= 0
        assert idle.total + timeline.busy[rank] == pytest.approx(timeline.makespan, abs=1e-9)
    path = timeline.critical_path
    if timeline.makespan:
        assert path[0].start == 0
        assert path[-1].finish == timeline.makespan
    for a, b in pairwise(path):
        assert a.finish == pytest.approx(b.start, abs=1e-9)
    assert sum(leg.finish - leg.start for leg in path) == pytest.approx(timeline.makespan, abs=1e-9)


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 5),
    micro_batches=st.integers(1, 8),
    latency=st.integers(0, 3),
)
def test_a_lowered_order_takes_as_long_as_its_computations(name, ranks, micro_batches, latency):
    schedule = make(name, ranks, micro_batches)
    lowered = passes.add_frees(passes.add_transfers(schedule))
    costs, hops = uniform(schedule, 2, 4, 2), Hops.both(float(latency))
    plain, full = simulate(schedule, costs, hops), simulate(lowered, costs, hops)
    assert plain.rows == full.rows
    assert sorted(map(str, plain.transfers)) == sorted(map(str, full.transfers))
    assert plain.idle == full.idle
    assert plain.peak_in_flight == full.peak_in_flight
    assert_consistent(full)


def test_a_late_send_delays_its_reader():
    """A lowered order's transfer starts at its SEND entry, not when the data exists."""
    early = Schedule(
        "early",
        2,
        (0, 1),
        (
            (
                Op(0, Kind.F, 0),
                Op(0, Kind.SEND_F, 0),
                Op(0, Kind.F, 1),
                Op(0, Kind.SEND_F, 1),
                Op(0, Kind.B, 0),
                Op(0, Kind.B, 1),
            ),
            (
                Op(1, Kind.F, 0),
                Op(1, Kind.B, 0),
                Op(1, Kind.SEND_B, 0),
                Op(1, Kind.F, 1),
                Op(1, Kind.B, 1),
                Op(1, Kind.SEND_B, 1),
            ),
        ),
    )
    order = list(early.orders[0])
    order[1], order[2] = order[2], order[1]
    late = Schedule("late", 2, (0, 1), (tuple(order), early.orders[1]))
    costs = uniform(early, 1, 1, 1)
    assert simulate(early, costs).rows[1][0].start == 1
    assert simulate(late, costs).rows[1][0].start == 2


def test_bubble_counts_the_first_message_as_fill_and_waits_by_cause():
    schedule = make("1f1b", 2, 2)
    timeline = simulate(schedule, uniform(schedule, 1, 1, 1), Hops.both(0.5))
    # rank 1: F0 1.5-2.5, B0 2.5-4.5, F1 (there since 2.5) 4.5-5.5, B1 5.5-7.5; rank 0 ends at 10
    assert timeline.makespan == 10
    assert timeline.idle[1] == (1.5, 2.5, 0, 0)
    # rank 0: F0 0-1, F1 1-2, B0 5-7 (made 4.5, sent 0.5), B1 8-10 (made 7.5, sent 0.5)
    assert timeline.idle[0] == (0, 0, 2.5 + 0.5, 0.5 + 0.5)
    assert [str(leg.op) for leg in timeline.critical_path] == [
        "0F0", "0SEND_F0", "1F0", "1B0", "1F1", "1B1", "1SEND_B1", "0B1",
    ]  # fmt: skip


def test_a_deadlocked_order_raises_with_the_cycle_of_waits():
    schedule = Schedule(
        "mine",
        2,
        (0, 1),
        (
            (Op(0, Kind.F, 0), Op(0, Kind.B, 0), Op(0, Kind.F, 1), Op(0, Kind.B, 1)),
            (Op(1, Kind.F, 0), Op(1, Kind.F, 1), Op(1, Kind.B, 0), Op(1, Kind.B, 1)),
        ),
    )
    with pytest.raises(
        ScheduleError, match="rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1"
    ):
        simulate(schedule, uniform(schedule, 1, 1, 1))


def test_an_op_that_nobody_runs_is_named():
    schedule = Schedule(
        "mine", 1, (0, 1), ((Op(0, Kind.F, 0), Op(0, Kind.B, 0)), (Op(1, Kind.F, 0),))
    )
    with pytest.raises(ScheduleError, match="rank 0 waits at 0B0 for 1I0, which rank 1 never runs"):
        simulate(schedule, uniform(schedule, 1, 1, 1))


def test_an_op_outside_the_schedule_is_refused():
    schedule = Schedule("mine", 1, (0,), ((Op(0, Kind.F, 1),),))
    with pytest.raises(ScheduleError, match=r"rank 0 runs 0F1, but the schedule has 1 stages"):
        simulate(schedule, uniform(schedule, 1, 1, 1))


def test_a_fused_pair_waits_for_both_inputs_and_takes_the_gain():
    pair = Pair(Op(0, Kind.F, 1), Op(1, Kind.B, 0))
    schedule = Schedule(
        "pairs",
        2,
        (0, 0),
        (
            (
                Op(0, Kind.F, 0),
                Op(1, Kind.F, 0),
                pair,
                Op(0, Kind.B, 0),
                Op(1, Kind.F, 1),
                Op(1, Kind.B, 1),
                Op(0, Kind.B, 1),
            ),
        ),
    )
    costs = uniform(schedule, 2, 2, 2)
    halves = simulate(schedule, costs)
    fused = simulate(schedule, costs, fuse_pairs=True, overlap_gain=0.8)
    assert halves.makespan == 12
    assert fused.makespan == pytest.approx(12 - 0.2 * 3)
    first, second = fused.rows[0][2:4]
    assert (first.start, first.finish) == (second.start, second.finish)
    assert fused.busy[0] == fused.makespan


def test_halves_that_run_beside_each_other_wait_for_their_own_input_alone():
    texts = "0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1"
    alone = Schedule("pairs", 2, (0, 0), (tuple(map(parse_step, texts.split())),))
    costs = Costs((1.0,) * 2, (1.0,) * 2, (1.0,) * 2)
    paired = Costs((3.0,) * 2, (1.0,) * 2, (1.0,) * 2)
    timeline = simulate(alone, costs, paired=paired)
    # 0F0 1F0, then 0F1 for 3 beside 1B0 for 2, then 0B0 1F1 1B1 0B1.
    found = {str(timed.op): (timed.start, timed.finish) for timed in timeline.rows[0]}
    assert (found["0F1"], found["1B0"], found["0B0"]) == ((2, 5), (2, 4), (5, 7))
    assert timeline.makespan == timeline.busy[0] == 5 + 2 + 1 + 2 + 2
    with pytest.raises(ScheduleError, match="pairs are fused, or their halves run beside"):
        simulate(alone, costs, paired=paired, fuse_pairs=True)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    num_ranks=st.integers(1, 5),
    more=st.integers(0, 8),
    hop=st.sampled_from([0.0, 0.25, 2.0]),
    stretch=st.sampled_from([0.5, 0.75, 1.0, 1.5]),
)
def test_pairs_that_overlap_take_the_longest_path_of_their_waits(num_ranks, more, hop, stretch):
    schedule = make("dualpipe_v", num_ranks, num_ranks + 1 + more)
    costs, paired = uniform(schedule, 1, 1, 1), uniform(schedule, *3 * [stretch])
    timeline = simulate(schedule, costs, Hops.both(hop), paired=paired)
    assert timeline.makespan == pytest.approx(
        longest_path(schedule, costs, Hops.both(hop), paired=paired)
    )
    for rank, row in enumerate(timeline.rows):
        assert list(row) == sorted(row, key=lambda timed: timed.start)
        assert timeline.idle[rank].total + timeline.busy[rank] == pytest.approx(timeline.makespan)
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].finish == timeline.makespan
    assert all(one.finish == pytest.approx(then.start) for one, then in pairwise(path))


def test_jitter_costs_plain_1f1b_most_and_is_seeded():
    """16 ranks, 320 micro-batches, 10 % noise: no slack loses about 9 %, a step more about 1 %."""

    def loss(name: str, seed: int) -> float:
        schedule = make(name, 16, 320)
        costs = uniform(schedule, 1, 1, 1)
        quiet = simulate(schedule, costs).makespan
        return simulate(schedule, costs, jitter=0.1, seed=seed).makespan / quiet - 1

    plain, slack = loss("1f1b", 1), loss("async_1f1b", 1)
    assert 0.075 < plain < 0.1
    assert 0.005 < slack < 0.015
    assert loss("1f1b", 1) == plain
    assert loss("1f1b", 2) != plain


def test_bytes_follow_activations_and_kept_operands():
    order = [
        Op(0, Kind.F, 0),
        Op(0, Kind.F, 1),
        Op(0, Kind.I, 0),
        Op(0, Kind.W, 0),
        Op(0, Kind.B, 1),
    ]
    schedule = Schedule("bytes", 2, (0,), (tuple(order),))
    held = StageBytes(activation=(10.0,), weight_grad_operands=(4.0,), base=(100.0,))
    timeline = simulate(schedule, uniform(schedule, 1, 1, 1), stage_bytes=held)
    assert [tuple(point) for point in timeline.memory[0]] == [
        (0, 100), (0, 110), (1, 120), (3, 114), (4, 110), (6, 100),
    ]  # fmt: skip
    assert timeline.peak_bytes == (120.0,)
    assert timeline.peak_in_flight == (2,)


def test_latency_may_differ_per_pair_of_ranks_and_direction():
    schedule = make("1f1b", 3, 1)
    costs = uniform(schedule, 1, 1, 1)
    up, down = {(0, 1): 1.0, (1, 2): 2.0}, {(1, 0): 4.0, (2, 1): 8.0}
    assert simulate(schedule, costs, Hops(up, down)).makespan == 3 * 3 + 15
    assert simulate(schedule, costs, Hops((1.0, 2.0), (4.0, 8.0))).makespan == 3 * 3 + 15
    with pytest.raises(ScheduleError, match="no backward latency is given for ranks 1 -> 0"):
        simulate(schedule, costs, Hops(up, up))


def test_stages_of_one_rank_hand_over_in_no_time():
    schedule = make("interleaved_1f1b", 1, 2, stages_per_rank=3)
    assert simulate(schedule, uniform(schedule, 3, 3, 3), Hops.both(100.0)).makespan_bubble == 0


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 7),
    data=st.data(),
)
def test_nothing_gets_faster_when_something_gets_slower(name, ranks, micro_batches, data):
    schedule = make(name, ranks, micro_batches)
    before = uniform(schedule, 2, 3, 1)
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    slower = [list(times) for times in (before.forward, before.input_grad, before.weight_grad)]
    data.draw(st.sampled_from(slower))[stage] += 1
    after = Costs(*map(tuple, slower))
    assert simulate(schedule, after).makespan >= simulate(schedule, before).makespan
    assert (
        simulate(schedule, before, Hops.both(0.5)).makespan >= simulate(schedule, before).makespan
    )


def test_16_ranks_and_320_micro_batches_take_well_under_a_second():
    schedule = make("1f1b_w", 16, 320)
    costs = uniform(schedule, 1, 1, 1)
    begin = time.process_time()
    simulate(schedule, costs, Hops.both(0.1))
    assert time.process_time() - begin < 1.0


def test_costs_on_the_command_line_are_per_rank_or_per_stage():
    assert parse_costs("1,2,4", (0, 1, 1, 0)) == Costs((0.5,) * 4, (1.0,) * 4, (2.0,) * 4)
    assert parse_costs("1,2,4; 3,5,6", (0, 1)) == Costs((1, 3), (2, 5), (4, 6))
    for text, said in (
        ("1,2", "not three numbers"),
        ("1,2,x", "not three numbers"),
        ("1,1,1;1,1,1", "costs name 2 stages, the schedule has 4"),
        ("1,-1,1", "stage 0 costs -0.5"),
        ("nan,1,1", "stage 0 costs nan"),
    ):
        with pytest.raises(ScheduleError, match=said):
            parse_costs(text, (0, 1, 1, 0))

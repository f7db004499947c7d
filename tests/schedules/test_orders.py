"""What every order promises, for any number of ranks, chunks and micro-batches."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make, placement
from ppruntime.schedules.check import check
from ppruntime.schedules.counts import num_transfers, peak_in_flight, slots_held
from ppruntime.schedules.ops import Kind, Op, Schedule, ScheduleError
from ppruntime.schedules.passes import add_frees, add_transfers, merge, split_pairs
from ppruntime.schedules.progress import slots_needed

V_ORDERS = ("zb_v", "v_half", "v_min", "dualpipe_v")
INTERLEAVED = ("interleaved_1f1b", "interleaved_zb1p")
ONE_CHUNK = tuple(name for name in NAMES if name not in V_ORDERS + INTERLEAVED)


@st.composite
def schedules(draw, max_ranks=8):
    name = draw(st.sampled_from(NAMES))
    num_ranks = draw(st.integers(1, max_ranks))
    num_micro_batches = draw(st.integers(1, 3 * num_ranks))
    chunks = draw(st.integers(1, 3)) if name in INTERLEAVED else None
    return make(name, num_ranks, num_micro_batches, stages_per_rank=chunks)


@given(schedules())
def test_no_order_breaks_a_rule_alone_or_lowered(schedule):
    check(schedule)
    check(schedule, fuse_pairs=True)
    check(add_frees(add_transfers(schedule)), slots=slots_held(schedule))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_micro_batches", [1, 15, 31, 50])
def test_16_ranks_work_with_any_number_of_micro_batches(name, num_micro_batches):
    check(make(name, 16, num_micro_batches))


@given(schedules())
def test_micro_batches_that_were_dropped_leave_the_others_in_place(schedule):
    """An order for fewer micro-batches never holds more than the whole one it was cut from."""
    name, num_ranks = schedule.name, schedule.num_ranks
    chunks = schedule.num_stages // num_ranks
    whole = make(name, num_ranks, 4 * num_ranks, stages_per_rank=chunks)
    for held, most in zip(peak_in_flight(schedule), peak_in_flight(whole), strict=True):
        assert held <= min(most, chunks * schedule.num_micro_batches)


@given(st.integers(1, 16), st.integers(1, 3), st.integers(1, 48))
def test_peak_in_flight_is_its_formula(p, v, m):
    for name, formula in {
        "gpipe": lambda r: m,
        "1f1b": lambda r: min(m, p - r),
        "async_1f1b": lambda r: min(m, 2 * (p - 1 - r) + 1),
        "1f1b_w": lambda r: min(m, p - r),
        "zb_h1": lambda r: min(m, p),
        "zb_h2": lambda r: min(m, 2 * p - 1),
    }.items():
        assert peak_in_flight(make(name, p, m)) == tuple(map(formula, range(p))), name
    rounds = -(-m // p) * p
    factor = 2 if v > 1 else 1
    assert peak_in_flight(make("interleaved_1f1b", p, rounds, stages_per_rank=v)) == tuple(
        min(rounds * v, (v - 1) * p + factor * (p - 1 - r) + 1) for r in range(p)
    )
    zb1p = make("interleaved_zb1p", p, rounds, stages_per_rank=v)
    assert peak_in_flight(zb1p) == (p * v,) * p


@pytest.mark.parametrize("p", range(1, 17))
def test_peak_of_v_orders_is_the_same_on_every_rank(p):
    m = 2 * p
    assert peak_in_flight(make("zb_v", p, m)) == (2 * p,) * p
    assert peak_in_flight(make("dualpipe_v", p, m)) == (min(2 * p + 1, 2 * m),) * p
    half, third = (max(peak_in_flight(make(name, p, m))) for name in ("v_half", "v_min"))
    assert half == (p + 2 if p % 2 == 0 else p + 1)
    assert third == 2 * -(-(p + 2) // 3)


@given(schedules())
def test_transfers_are_one_per_hop_between_ranks_micro_batch_and_direction(schedule):
    p, m, stages = schedule.num_ranks, schedule.num_micro_batches, schedule.num_stages
    if schedule.name in V_ORDERS:
        expected = 4 * m * (p - 1)
    else:
        expected = 2 * m * (stages - 1) if p > 1 else 0
    assert num_transfers(schedule) == expected
    lowered = add_transfers(schedule)
    ranks, direction = schedule.stage_to_rank, {Kind.SEND_F: 1, Kind.SEND_B: -1}
    sends = [op for r in range(p) for op in lowered.ops(r) if op.kind in direction]
    crossing = [op for op in sends if ranks[op.stage] != ranks[op.stage + direction[op.kind]]]
    assert len(crossing) == expected
    assert len(sends) == 2 * m * (stages - 1)


@given(schedules())
def test_one_slot_a_channel_is_enough_but_for_interleaved_zb1p(schedule):
    needed = slots_needed(schedule)
    if schedule.num_ranks == 1:
        assert needed == 0
    elif schedule.name == "interleaved_zb1p":
        assert 1 <= needed <= (schedule.num_ranks + 1) // 2
    else:
        assert needed == 1


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_interleaved_zb1p_needs_half_as_many_slots_as_ranks_rounded_up(num_ranks):
    schedule = make("interleaved_zb1p", num_ranks, 3 * num_ranks)
    assert slots_needed(schedule) == (num_ranks + 1) // 2


@given(st.integers(1, 10), st.integers(1, 30))
def test_orders_meet_where_their_definitions_do(p, m):
    one = make("1f1b", p, m)
    assert make("async_1f1b", p, m, warmup_step=1).orders == one.orders
    assert make("interleaved_1f1b", p, m, stages_per_rank=1).orders == one.orders
    assert merge(make("1f1b_w", p, m)).orders == one.orders
    assert make("async_1f1b", p, m, warmup_step=[m] * p).orders == make("gpipe", p, m).orders
    eager = make("async_1f1b", p, m)
    assert merge(make("1f1b_w", p, m, warmup_step=2)).orders == eager.orders
    assert make("interleaved_zb1p", p, m, stages_per_rank=1).orders == make("zb_h1", p, m).orders


@pytest.mark.parametrize("name", [name for name in ONE_CHUNK if name != "gpipe"])
def test_one_rank_accumulates_gradients_one_micro_batch_after_the_other(name):
    plain = tuple(op for m in range(5) for op in (Op(0, Kind.F, m), Op(0, Kind.B, m)))
    assert merge(make(name, 1, 5)).orders == (plain,)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_runs_micro_batches_in_order_on_every_stage(name):
    schedule = make(name, 1, 5)
    for stage in range(schedule.num_stages):
        for kind in Kind:
            numbers = [
                op.micro_batch for op in schedule.ops(0) if op.stage == stage and op.kind is kind
            ]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_the_v_turns_on_the_last_rank_and_ends_on_the_first(num_ranks):
    stage_to_rank = placement.v_shape(num_ranks)
    assert stage_to_rank == stage_to_rank[::-1]
    assert stage_to_rank[0] == stage_to_rank[-1] == 0
    assert stage_to_rank[num_ranks - 1] == stage_to_rank[num_ranks] == num_ranks - 1
    assert placement.loop(num_ranks, 3) == tuple(s % num_ranks for s in range(3 * num_ranks))


@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_a_warmup_vector_works_exactly_if_it_never_rises(p, m, data):
    vector = data.draw(st.lists(st.integers(0, m), min_size=p, max_size=p))
    if vector == sorted(vector, reverse=True):
        schedule = make("async_1f1b", p, m, warmup_step=vector)
        check(schedule)
        assert peak_in_flight(schedule) == tuple(min(m, w + 1) for w in vector)
    else:
        with pytest.raises(ScheduleError, match="never rising"):
            make("async_1f1b", p, m, warmup_step=vector)


def test_the_error_about_a_warmup_vector_gives_the_nearest():
    with pytest.raises(ScheduleError, match=r"the nearest is \[3, 3, 2, 0\]"):
        make("async_1f1b", 4, 8, warmup_step=[1, 3, 2])


@pytest.mark.parametrize(
    ("name", "sizes", "options", "message"),
    [
        ("1f1bx", (4, 8), {}, "no order '1f1bx'; the orders are gpipe, 1f1b, "),
        ("1f1b", (0, 8), {}, "0 ranks and 8 micro-batches; the nearest is 1 and 8"),
        ("1f1b", (4, 0), {}, "4 ranks and 0 micro-batches; the nearest is 4 and 1"),
        ("1f1b", (4, 8), {"stages_per_rank": 2}, "stages_per_rank = 2; the nearest is 1"),
        ("zb_v", (4, 8), {"stages_per_rank": 1}, "stages_per_rank = 1; the nearest is 2"),
        ("interleaved_1f1b", (4, 8), {"stages_per_rank": 0}, "= 0; the nearest is 1"),
        ("1f1b", (4, 8), {"warmup_step": 2}, "no effect on 1f1b; leave it out or use async_1f1b"),
        ("async_1f1b", (4, 8), {"warmup_step": -1}, "warmup_step is -1; the least is 0"),
    ],
)
def test_a_wrong_request_is_answered_with_what_would_be_right(name, sizes, options, message):
    with pytest.raises(ScheduleError) as error:
        make(name, *sizes, **options)
    assert message in str(error.value)


def test_gradients_add_up_in_ascending_order_on_every_order():
    for name in NAMES:
        schedule = make(name, 4, 11)
        for rank in range(4):
            for stage in schedule.stages_of(rank):
                added = [
                    op.micro_batch
                    for op in schedule.ops(rank)
                    if op.stage == stage and op.kind in (Kind.B, Kind.W)
                ]
                assert added == list(range(11)), name


@pytest.mark.parametrize("name", ["v_half", "dualpipe_v"])
def test_16_ranks_and_320_micro_batches_are_ready_in_seconds(name):
    """80,000 to 90,000 ops; 1 to 2 s on a free core, the limit is for a busy one."""
    start = time.process_time()
    schedule = make(name, 16, 320)
    check(add_frees(add_transfers(schedule)), slots=slots_held(schedule))
    assert time.process_time() - start < 8


def test_pairs_are_a_forward_of_one_chunk_and_a_backward_of_the_other():
    schedule = make("dualpipe_v", 4, 12)
    pairs = [step for order in schedule.orders for step in order if not isinstance(step, Op)]
    # 2 (M - 2P + r + 1) and then P - 1 - r a rank; the last rank leaves its first two apart.
    assert len(pairs) == sum(2 * (5 + r) + 3 - r for r in range(4)) - 1
    for pair in pairs:
        assert pair.forward.stage + pair.backward.stage == 7
    assert all(isinstance(step, Op) for order in split_pairs(schedule).orders for step in order)


def test_a_schedule_says_which_stages_a_rank_holds():
    schedule: Schedule = make("dualpipe_v", 3, 6)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]

"""Passes keep the computations, put what they add where it belongs, and lower to what can run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.check import check
from ppruntime.schedules.counts import Edge, crosses_ranks, edges, slots_held
from ppruntime.schedules.formats import from_csv, to_csv
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Pair, ScheduleError, ops_of
from ppruntime.schedules.passes import (
    add_frees,
    add_offload,
    add_transfers,
    defer_weight_grads,
    drop_micro_batches,
    merge,
    split_backward,
    split_pairs,
)


@st.composite
def schedules(draw):
    num_ranks = draw(st.integers(1, 5))
    return make(draw(st.sampled_from(NAMES)), num_ranks, draw(st.integers(1, 2 * num_ranks + 2)))


def computations(schedule, *, as_whole=False):
    """Per rank, in order; with `as_whole` a set in which I and W count as the B they make up."""
    ranks = range(schedule.num_ranks)
    if not as_whole:
        return [[op for op in schedule.ops(r) if op.kind in COMPUTE] for r in ranks]
    whole = {Kind.F: Kind.F, Kind.B: Kind.B, Kind.I: Kind.B, Kind.W: Kind.B}
    return [{Op(op.stage, whole[op.kind], op.micro_batch) for op in schedule.ops(r)} for r in ranks]


def texts(schedule, rank):
    return [str(step) for step in schedule.orders[rank]]


@given(schedules())
def test_every_pass_keeps_the_computations(schedule):
    for change in (split_backward, merge, defer_weight_grads, split_pairs):
        changed = change(schedule)
        assert computations(changed, as_whole=True) == computations(schedule, as_whole=True)
        check(changed)
    for add in (add_transfers, add_frees, add_offload):
        assert computations(add(schedule)) == computations(schedule)


@given(schedules())
def test_merging_undoes_splitting(schedule):
    whole = merge(schedule)
    assert merge(split_backward(whole)).orders == whole.orders


def test_a_split_pair_keeps_its_forward_beside_the_input_gradient():
    pair = Pair(Op(0, Kind.F, 4), Op(3, Kind.B, 0))
    split = split_backward(make("dualpipe_v", 2, 6))
    steps = split.orders[0]
    at = steps.index(Pair(pair.forward, Op(3, Kind.I, pair.backward.micro_batch + 2)))
    assert steps[at + 1] == Op(3, Kind.W, 2)


def test_weight_gradients_wait_for_the_send_and_no_longer():
    lowered = add_frees(add_transfers(make("1f1b", 2, 2)))
    assert texts(lowered, 1)[-4:] == ["1F1", "1B1", "1SEND_B1", "1FREE_F1"]
    deferred = defer_weight_grads(lowered)
    assert texts(deferred, 1)[-5:] == ["1F1", "1I1", "1SEND_B1", "1W1", "1FREE_F1"]
    assert deferred.orders == add_frees(add_transfers(make("1f1b_w", 2, 2))).orders
    assert merge(deferred).orders == lowered.orders


def test_1f1b_is_lowered_as_written_here():
    lowered = add_frees(add_transfers(make("1f1b", 2, 3)))
    assert to_csv(lowered) == (
        "0RECV_B0,0RECV_B1,0F0,0SEND_F0,0F1,0SEND_F1,0B0,0FREE_B0,0RECV_B2,0F2,0SEND_F2,"
        "0B1,0FREE_B1,0B2,0FREE_B2\n"
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1FREE_F0,1RECV_F2,1F1,1B1,1SEND_B1,1FREE_F1,"
        "1F2,1B2,1SEND_B2,1FREE_F2\n"
    )


@given(schedules())
def test_sends_follow_what_they_send_at_once(schedule):
    lowered = add_frees(add_transfers(schedule))
    last = schedule.num_stages - 1
    for order in lowered.orders:
        for i, op in enumerate(order):
            assert isinstance(op, Op)
            if op.kind is Kind.F and op.stage < last:
                assert order[i + 1] == Op(op.stage, Kind.SEND_F, op.micro_batch)
            if op.kind in (Kind.B, Kind.I) and op.stage > 0:
                assert order[i + 1] == Op(op.stage, Kind.SEND_B, op.micro_batch)


@given(schedules())
def test_frees_follow_the_last_reader_and_its_send(schedule):
    lowered = add_frees(add_transfers(schedule))
    for order in lowered.orders:
        kinds = [op.kind for op in order]
        split = {(op.stage, op.micro_batch) for op in order if op.kind is Kind.W}
        for i, op in enumerate(order):
            if op.kind not in (Kind.FREE_F, Kind.FREE_B):
                continue
            reader = max(
                j for j in range(i) if kinds[j] in (Kind.B, Kind.I, Kind.W) and kinds[j] in COMPUTE
            )
            assert (order[reader].stage, order[reader].micro_batch) == (op.stage, op.micro_batch)
            expected = Kind.W if (op.stage, op.micro_batch) in split else Kind.B
            assert order[reader].kind is expected
            between = set(kinds[reader + 1 : i])
            assert between <= {Kind.SEND_B, Kind.FREE_F}


def receives_ahead(lowered, rank):
    """For each step that computes: the receives from other ranks posted and not yet read by it or
    by a step before, and the most steps that one of them is ahead of its reader."""
    order = lowered.orders[rank]
    numbers, count = {}, 0
    for step in order:
        for op in ops_of(step):
            numbers[op] = count
        count += any(op.kind in COMPUTE for op in ops_of(step))
    remote = {e.dst_stage for e in edges(lowered) if crosses_ranks(lowered, e) and e.kind == "F"}
    back = {e.dst_stage for e in edges(lowered) if crosses_ranks(lowered, e) and e.kind == "B"}
    pending, result, farthest = set(), [], 0
    for step in order:
        for op in ops_of(step):
            key = (op.stage, op.micro_batch)
            if op.kind is Kind.RECV_F and op.stage in remote:
                pending.add((*key, "F"))
                reader = numbers[Op(op.stage, Kind.F, op.micro_batch)]
                farthest = max(farthest, reader - numbers[op])
            elif op.kind is Kind.RECV_B and op.stage in back:
                pending.add((*key, "B"))
                readers = (numbers.get(Op(op.stage, k, op.micro_batch)) for k in (Kind.B, Kind.I))
                farthest = max(farthest, next(r for r in readers if r is not None) - numbers[op])
            elif op.kind is Kind.F:
                pending.discard((*key, "F"))
            elif op.kind in (Kind.B, Kind.I):
                pending.discard((*key, "B"))
        if any(op.kind in COMPUTE for op in ops_of(step)):
            result.append(len(pending))
    return result, farthest


@given(schedules(), st.integers(0, 3))
def test_receives_keep_to_their_lead(schedule, lead):
    lowered = add_frees(add_transfers(schedule, recv_lead=lead))
    check(lowered, slots=slots_held(schedule))
    for rank in range(schedule.num_ranks):
        pending, farthest = receives_ahead(lowered, rank)
        assert max(pending) <= lead
        assert farthest <= lead


@given(schedules())
def test_receives_stand_as_early_as_a_slot_allows(schedule):
    """The first ones before anything is computed, the others behind the last reader of the slot."""
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule))
    for rank in range(schedule.num_ranks):
        ends = {}  # (stage, micro-batch) -> what reads its slots last
        for op in schedule.ops(rank):
            if op.kind in (Kind.B, Kind.W):
                ends[op.stage, op.micro_batch] = op
        computed = None
        for op in lowered.ops(rank):
            if op.kind in COMPUTE:
                computed = op
            if op.kind in (Kind.RECV_F, Kind.RECV_B):
                step = 1 if op.kind is Kind.RECV_F else -1
                edge = (op.stage - step, op.stage, "F" if op.kind is Kind.RECV_F else "B")
                assert computed == ends.get((op.stage, op.micro_batch - slots[edge]))


@given(schedules(), st.data())
def test_fewer_slots_either_work_or_are_refused_with_the_number_that_does(schedule, data):
    held = slots_held(schedule)
    slots = {edge: data.draw(st.integers(1, most)) for edge, most in held.items()}
    refusal = None
    try:
        lowered = add_frees(add_transfers(schedule, slots=slots))
    except ScheduleError as error:
        refusal = str(error)
    if refusal is None:
        check(lowered)
    else:
        assert "are enough" in refusal
        assert any(slots[edge] < held[edge] for edge in held)


def test_too_few_slots_are_refused_with_the_place_and_the_remedy():
    message = (
        "rank 1, step 1: 1F1 needs micro-batch 1 while all 1 slots for activations of stage 0 for"
        " stage 1 are held; 4 are enough"
    )
    with pytest.raises(ScheduleError) as error:
        add_transfers(make("gpipe", 2, 4), slots=1)
    assert str(error.value) == message


def test_slots_held_counts_what_is_there_and_one_to_come():
    held = slots_held(make("1f1b", 4, 8))
    assert [held[Edge(s, s + 1, "F")] for s in range(3)] == [4, 3, 2]
    assert [held[Edge(s + 1, s, "B")] for s in range(3)] == [2, 2, 2]
    assert slots_held(make("gpipe", 2, 5)) == {(0, 1, "F"): 5, (1, 0, "B"): 2}


def test_messages_read_out_of_order_are_still_received_in_the_senders():
    by_hand = from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F1,1F0,1F2,1B0,1B1,1B2\n", name="by hand")
    lowered = add_frees(add_transfers(by_hand))
    check(lowered, slots=slots_held(by_hand))
    assert texts(lowered, 1)[:3] == ["1RECV_F0", "1RECV_F1", "1RECV_F2"]
    for lead in range(3):
        check(add_frees(add_transfers(by_hand, recv_lead=lead)))


def test_pairs_stay_only_if_they_are_to_be_fused():
    schedule = make("dualpipe_v", 2, 8)
    apart = add_transfers(schedule)
    assert all(isinstance(step, Op) for order in apart.orders for step in order)
    fused = add_frees(add_transfers(schedule, fuse_pairs=True))
    check(fused, slots=slots_held(schedule), fuse_pairs=True)
    at = next(i for i, step in enumerate(fused.orders[1]) if isinstance(step, Pair))
    assert [str(step) for step in fused.orders[1][at : at + 3]] == [
        "(2F2;1B0)OVERLAP_F_B",
        "2SEND_F2",
        "1SEND_B0",
    ]


@given(schedules(), st.integers(1, 4), st.sampled_from([None, 0, 1, 2]))
def test_offload_moves_what_has_time_to_move(schedule, every, overlapped):
    moved = add_offload(schedule, every=every, overlapped=overlapped)
    check(add_frees(add_transfers(moved)))
    lowered = add_frees(add_transfers(schedule))
    check(add_offload(lowered, every=every, overlapped=overlapped))
    for before, order in zip(schedule.orders, moved.orders, strict=True):
        forward, backward, has_backward = {}, {}, []  # (stage, micro-batch) -> computation
        for i, step in enumerate(before):
            has_backward.append(any(op.kind is not Kind.F for op in ops_of(step)))
            for op in ops_of(step):
                if op.kind is not Kind.W:
                    at = forward if op.kind is Kind.F else backward
                    at[op.stage, op.micro_batch] = i
        found = {Kind.OFFLOAD: {}, Kind.OFFLOADED: {}, Kind.RELOAD: {}}
        num_steps = 0
        for step in order:
            if ops_of(step)[0].kind in COMPUTE:
                num_steps += 1
            else:
                found[step.kind][step.stage, step.micro_batch] = num_steps
        away, gone, home = found.values()
        assert away.keys() == gone.keys() == home.keys()
        for key, i in forward.items():
            waits = next(n for n in range(i + 1, len(before)) if has_backward[n])
            if overlapped is not None and waits > i + 1:
                waits = min(waits - 1, i + overlapped)
            elif overlapped is not None:
                waits = min(waits, i + overlapped)
            worth_it = waits + 1 < backward[key] - 1 and key[1] % every == 0
            worth_it &= backward[key] != has_backward.index(True)
            assert (key in away) == worth_it
            if worth_it:
                assert (away[key], gone[key]) == (i + 1, waits + 1)
                last = max((n for n in range(backward[key]) if has_backward[n]), default=-1)
                earliest = max(last, waits + 2) if overlapped != 0 else backward[key] - 1
                assert min(earliest, backward[key] - 1) <= home[key] < backward[key]
        late = {key: backward[key] - 1 for key in away}
        first = has_backward.index(True)
        most = [
            max(
                sum(
                    i <= n <= backward[key] and not (key in away and gone[key] <= n < back[key])
                    for key, i in forward.items()
                )
                for n in range(first, len(before))
            )
            for back in (home, late)
        ]
        assert most[0] == most[1]


def test_offload_stands_where_the_text_says():
    paced = add_frees(add_transfers(add_offload(make("1f1b", 4, 4), overlapped=1)))
    assert [text for text in texts(paced, 0) if "_B" not in text] == [
        *("0F0", "0SEND_F0"),
        *("0F1", "0SEND_F1", "0OFFLOAD1"),
        *("0F2", "0SEND_F2", "0OFFLOAD2", "0OFFLOADED1"),
        *("0F3", "0SEND_F3", "0OFFLOAD3", "0OFFLOADED2", "0RELOAD1"),
        *("0B0", "0OFFLOADED3", "0RELOAD2", "0B1", "0RELOAD3", "0B2", "0B3"),
    ]


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        # Five in flight: a reload beside a backward holds no more than one beside a forward.
        (
            4,
            "0F0 0F1 0F2 0OFFLOAD2 0F3 0F4 0OFFLOAD4 0OFFLOADED2 0B0 0OFFLOADED4 0F5"
            " 0RELOAD2 0B1 0F6 0OFFLOAD6 0B2 0OFFLOADED6 0F7 0RELOAD4 0B3 0B4 0RELOAD6 0B5 0B6 0B7",
        ),
        # Four: one more micro-batch would be there, so that it has a forward's time alone.
        (
            3,
            "0F0 0F1 0F2 0OFFLOAD2 0F3 0OFFLOADED2 0B0 0F4 0OFFLOAD4 0B1 0OFFLOADED4"
            " 0RELOAD2 0F5 0B2 0F6 0OFFLOAD6 0B3 0OFFLOADED6 0RELOAD4 0F7 0B4 0RELOAD6 0B5 0B6 0B7",
        ),
    ],
)
def test_copies_of_one_in_two_have_the_time_that_memory_allows(warmup, expected):
    order = make("async_1f1b", 1, 8, warmup_step=[warmup])
    assert texts(add_offload(order, every=2, overlapped=2), 0) == expected.split()


def test_dropped_micro_batches_leave_the_other_half_of_a_pair():
    dropped = drop_micro_batches(make("dualpipe_v", 2, 4), 3)
    assert "(0F3;3B1)OVERLAP_F_B" in texts(make("dualpipe_v", 2, 4), 0)
    assert texts(dropped, 0)[6:9] == ["3F1", "3B1", "(3F2;0B0)OVERLAP_F_B"]
    assert texts(dropped, 0)[9:] == ["3B2", "0B1", "0I2", "0W2"]
    check(dropped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: add_transfers(add_transfers(s)), "has RECV_B and RECV_F and SEND_B and SEND_F"),
        (lambda s: add_frees(add_frees(s)), "the order has its frees already"),
        (lambda s: add_offload(s, every=0), "add_offload(every=0); the least is 1"),
        (lambda s: add_offload(s, overlapped=-1), "add_offload(overlapped=-1); the least is 0"),
        (lambda s: add_transfers(s, recv_lead=-1), "recv_lead is -1; the least is 0"),
        (
            lambda s: add_transfers(from_csv("0F0,0B0\n1F0\n", name="x")),
            "activations of stage 0 for stage 1: micro-batch 0 lacks an op at one end",
        ),
    ],
)
def test_a_wrong_use_is_refused_with_the_reason(change, message):
    with pytest.raises(ScheduleError) as error:
        change(make("1f1b", 2, 2))
    assert message in str(error.value)

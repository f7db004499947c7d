"""Pairs whose halves run at once: what lanes let happen, checked on everything they could let
happen."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.schedules import make
from ppruntime.schedules.check import check, check_progress
from ppruntime.schedules.counts import Edge, crosses_ranks, edges, slots_held
from ppruntime.schedules.credits import uncredited
from ppruntime.schedules.formats import from_csv
from ppruntime.schedules.lanes import LaneOp, lane_program
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Pair, Schedule, ScheduleError, parse_op
from ppruntime.schedules.passes import (
    add_frees,
    add_offload,
    add_transfers,
    split_backward,
    split_pairs,
)

SIZES = st.tuples(st.integers(1, 5), st.integers(0, 9), st.booleans(), st.booleans())
"""Ranks, micro-batches beyond them, split backwards, offload."""


def lowered(num_ranks, more, split=False, offload=False):
    """A DualPipeV order, its pairs and its slots."""
    schedule = make("dualpipe_v", num_ranks, num_ranks + 1 + more)
    if split:
        schedule = split_backward(schedule)
    slots = slots_held(schedule)
    moved = add_offload(schedule, every=2) if offload else schedule
    pairs = [step for order in schedule.orders for step in order if isinstance(step, Pair)]
    assert pairs
    return add_frees(add_transfers(moved, slots=slots)), pairs, slots


def sent_to(op: Op) -> Op:
    """Who takes what a send brings."""
    if op.kind is Kind.SEND_F:
        return Op(op.stage + 1, Kind.F, op.micro_batch)
    return Op(op.stage - 1, Kind.B, op.micro_batch)


def whole(op: Op) -> Op:
    """The op with B for I."""
    return replace(op, kind=Kind.B) if op.kind is Kind.I else op


class HappensBefore:
    """Whether an op of one rank has ended when another starts: vector clocks over lanes."""

    def __init__(self, program: tuple[LaneOp, ...]) -> None:
        lanes = {entry.op.stage for entry in program}
        given = dict.fromkeys(lanes, 0)
        clocks = {lane: dict.fromkeys(lanes, 0) for lane in lanes}
        sent: dict[Op, dict[int, int]] = {}
        self.place: dict[Op, tuple[int, int]] = {}
        self.seen: dict[Op, dict[int, int]] = {}
        for op, joins, _ in program:
            for lane in joins:
                for other in lanes:
                    clocks[lane] = _later(clocks[lane], {**clocks[other], other: given[other]})
            lane = op.stage
            if (message := sent.get(whole(op))) is not None:
                clocks[lane] = _later(clocks[lane], message)  # `take` waits for the send's event
            self.seen[op] = dict(clocks[lane])
            given[lane] += 1
            self.place[op] = lane, given[lane]
            clocks[lane][lane] = given[lane]
            if op.kind in (Kind.SEND_F, Kind.SEND_B):
                sent[sent_to(op)] = dict(clocks[lane])

    def __call__(self, first: Op, then: Op) -> bool:
        lane, place = self.place[first]
        return self.seen[then][lane] >= place


def _later(one, other):
    return {lane: max(one[lane], other[lane]) for lane in one}


@given(sizes=SIZES)
def test_outside_pairs_the_order_means_what_it_says_and_inside_one_nothing(sizes):
    order, pairs, _ = lowered(*sizes)
    beside = {pair.forward: pair.backward for pair in pairs}
    for rank in range(order.num_ranks):
        ops = list(order.ops(rank))
        program = lane_program(ops, pairs)
        assert sorted(map(str, (entry.op for entry in program))) == sorted(map(str, ops))
        happens_before = HappensBefore(program)
        computations = [op for op in ops if op.kind in COMPUTE]
        for i, first in enumerate(computations):
            for then in computations[i + 1 :]:
                if beside.get(first) != then:
                    assert happens_before(first, then), (first, then)
                else:
                    assert not happens_before(first, then), "they were to run at once"
                assert not happens_before(then, first)


@given(sizes=SIZES)
def test_each_stage_runs_its_own_ops_in_the_orders_order_but_for_receives(sizes):
    order, pairs, _ = lowered(*sizes)
    for rank in range(order.num_ranks):
        ops = list(order.ops(rank))
        program = [entry.op for entry in lane_program(ops, pairs)]
        for stage in order.stages_of(rank):
            for kinds in ({Kind.RECV_F}, {Kind.RECV_B}, set(Kind) - {Kind.RECV_F, Kind.RECV_B}):
                mine = [op for op in program if op.stage == stage and op.kind in kinds]
                assert mine == [op for op in ops if op.stage == stage and op.kind in kinds]


@given(sizes=SIZES)
def test_the_order_ends_also_if_each_pair_waits_for_both_inputs(sizes):
    num_ranks, more, split, _ = sizes
    schedule = make("dualpipe_v", num_ranks, num_ranks + 1 + more)
    schedule = split_backward(schedule) if split else schedule
    slots = slots_held(schedule)
    fused = add_frees(add_transfers(schedule, slots=slots, fuse_pairs=True))
    check_progress(fused, slots=slots, fuse_pairs=True)


def memory_races(program, *, until_free):
    """(who gets memory, who still reads it): what a caching allocator could hand out too early.

    A message between two stages of the rank lies in memory of its sender's lane and is let go of at
    its FREE, or else as soon as its last reader is handed over. Computations and reloads ask for
    memory of their lane.
    """
    happens_before = HappensBefore(program)
    last_reader = {
        (op.stage, op.micro_batch): op for op, *_ in program if op.kind in (Kind.B, Kind.I, Kind.W)
    }
    own_stages = {op.stage for op, *_ in program}
    let_go: dict[int, list[Op]] = defaultdict(list)
    races = []
    for op, *_ in program:
        if op.kind in COMPUTE or op.kind is Kind.RELOAD:
            readers = let_go[op.stage]
            races += [(op, reader) for reader in readers if not happens_before(reader, op)]
        reader = last_reader[op.stage, op.micro_batch]
        if until_free:
            makers = {Kind.FREE_F: [op.stage - 1], Kind.FREE_B: [op.stage + 1]}.get(op.kind, [])
        else:
            makers = [op.stage - 1, op.stage + 1] if op == reader else []
        for maker in makers:
            if maker in own_stages:
                let_go[maker].append(reader)
    return races


@given(sizes=SIZES)
def test_no_lane_gets_memory_that_another_one_still_reads(sizes):
    order, pairs, _ = lowered(*sizes)
    for rank in range(order.num_ranks):
        program = lane_program(list(order.ops(rank)), pairs)
        assert memory_races(program, until_free=True) == []


def test_without_waiting_for_the_free_it_would():
    order, pairs, _ = lowered(2, 6)
    races = memory_races(lane_program(list(order.ops(1)), pairs), until_free=False)
    assert races
    for asking, reader in races:
        assert Pair(asking, reader) in pairs


class Lanes:
    """One rank's lanes as the device has them: entries in turn, None for a wait for other lanes."""

    def __init__(self, programs: list[tuple[LaneOp, ...]], stages: tuple[int, ...]) -> None:
        self.entries: dict[int, list] = {stage: [] for stage in stages}
        self.num_done = dict.fromkeys(stages, 0)
        for step, program in enumerate(programs):
            self._join(stages)
            for op, joins, _ in program:
                self._join(joins)
                self.entries[op.stage].append((step, op))
        self._join(stages)

    def _join(self, lanes):
        for lane in lanes:
            self.entries[lane].append({o: len(e) for o, e in self.entries.items() if o != lane})

    def next_of(self, lane):
        """What the lane does next, if nothing holds it but a message: (step, op); None if it has to
        wait for another lane or is through."""
        entries = self.entries[lane]
        while self.num_done[lane] < len(entries):
            entry = entries[self.num_done[lane]]
            if not isinstance(entry, dict):
                return entry
            if any(self.num_done[other] < place for other, place in entry.items()):
                return None
            self.num_done[lane] += 1
        return None


class Machine:
    """All ranks of a pipeline over two steps. What may happen next is drawn from `seed`, unfairly:
    some lanes and channels are slow. Fails where a message overwrites a slot that is read."""

    def __init__(self, order: Schedule, pairs, slots, seed: int) -> None:
        self.order, self.slots, self.rng = order, slots, random.Random(seed)
        self.free_of_credits = uncredited([order], slots, pairs=pairs)
        self.ranks = [
            Lanes([lane_program(list(order.ops(r)), pairs)] * 2, order.stages_of(r))
            for r in range(order.num_ranks)
        ]
        self.sent: dict[Edge, list] = defaultdict(list)
        self.num_moved: dict[Edge, int] = defaultdict(int)
        self.done: set = set()
        self.speed = {
            key: self.rng.choice((1, 1, 30)) for key in (*edges(order), *range(order.num_stages))
        }

    def run(self):
        while moves := [*self._lane_moves(), *self._transfers()]:
            weights = [self.speed[key] for key, _ in moves]
            self.rng.choices(moves, weights)[0][1]()
        for rank in self.ranks:
            for lane, entries in rank.entries.items():
                assert rank.num_done[lane] == len(entries), f"stage {lane} hangs"

    def _lane_moves(self):
        for rank in self.ranks:
            for lane in rank.entries:
                entry = rank.next_of(lane)
                if entry is not None and self._is_there(*entry):
                    yield lane, partial(self._do, rank, lane, entry)

    def _do(self, rank, lane, entry):
        step, op = entry
        rank.num_done[lane] += 1
        self.done.add((step, whole(op)))
        if op.kind in (Kind.SEND_F, Kind.SEND_B):
            self.sent[self._edge(sent_to(op))].append((step, op.micro_batch))

    def _is_there(self, step, op):
        edge = self._edge(op)
        if edge is None:
            return True
        return (step, op.micro_batch) in self.sent[edge][: self._num_there(edge)]

    def _edge(self, op):
        """What a computation's input comes over."""
        if op.kind is Kind.F and op.stage > 0:
            return Edge(op.stage - 1, op.stage, "F")
        if op.kind in (Kind.B, Kind.I) and op.stage + 1 < self.order.num_stages:
            return Edge(op.stage + 1, op.stage, "B")
        return None

    def _num_there(self, edge):
        between_ranks = crosses_ranks(self.order, edge)
        return self.num_moved[edge] if between_ranks else len(self.sent[edge])

    def _transfers(self):
        for edge, messages in self.sent.items():
            number = self.num_moved[edge]
            if not crosses_ranks(self.order, edge) or number == len(messages):
                continue
            before = None
            if number >= self.slots[edge]:
                before = messages[number - self.slots[edge]]
            kind = Kind.FREE_F if edge.kind == "F" else Kind.FREE_B
            if (
                before is None
                or edge in self.free_of_credits
                or (before[0], Op(edge.dst_stage, kind, before[1])) in self.done
            ):
                yield edge, partial(self._move, edge, before)

    def _move(self, edge, before):
        self.num_moved[edge] += 1
        if before is not None:
            step, m = before
            readers = [(step, Op(edge.dst_stage, kind, m)) for kind in (Kind.B, Kind.W)]
            split = Op(edge.dst_stage, Kind.W, m) in set(
                self.order.ops(self.order.stage_to_rank[edge.dst_stage])
            )
            assert set(readers[: 1 + split]) <= self.done, f"{edge}: {m} is overwritten too early"


@settings(max_examples=settings.default.max_examples // 2)
@given(sizes=SIZES, seed=st.integers(0, 10**6))
def test_whatever_is_slow_two_steps_end_and_no_slot_is_overwritten_while_it_is_read(sizes, seed):
    order, pairs, slots = lowered(*sizes)
    Machine(order, pairs, slots, seed).run()


def test_without_any_credits_some_slot_would_be():
    order, pairs, slots = lowered(3, 6)
    with pytest.raises(AssertionError, match="is overwritten too early"):
        run_without_credits(order, pairs, slots, edges(order))


def run_without_credits(order, pairs, slots, without):
    for seed in range(300):
        machine = Machine(order, pairs, slots, seed)
        machine.free_of_credits |= {*without}
        machine.run()


# Rank 1 sends 3B1 beside 1F2 or before it; only in the order with pairs apart has 1F2 ended.
NEEDS_THE_FORWARDS_END = """\
0F0,2F0,0F1,2F1,2B0,0F2,2B1,2F2,0B0,0B1,2B2,0B2
1F0,1F1,3F0,3B0,3F1,1F2,3B1,1B0,1B1,3F2,3B2,1B2
"""


def test_a_proof_that_needs_the_forwards_end_does_not_hold_for_pairs_that_overlap():
    schedule = from_csv(NEEDS_THE_FORWARDS_END, name="by hand")
    slots = dict.fromkeys(edges(schedule), 3) | {Edge(3, 2, "B"): 1}
    order = add_frees(add_transfers(schedule, slots=3))
    pairs = [Pair(parse_op("1F2"), parse_op("3B1")), Pair(parse_op("0F2"), parse_op("2B1"))]
    edge = Edge(3, 2, "B")
    assert edge in uncredited([order], slots)
    assert edge not in uncredited([order], slots, pairs=pairs)
    with pytest.raises(AssertionError, match="is overwritten too early"):
        run_without_credits(order, pairs, slots, [edge])


@given(
    name=st.sampled_from(["dualpipe_v", "zb_v", "v_half", "interleaved_1f1b"]),
    num_ranks=st.integers(2, 4),
    num_micro_batches=st.integers(2, 6),
    fewer=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_channels_without_credits_are_safe_whatever_the_order_and_its_pairs(
    name, num_ranks, num_micro_batches, fewer, seed
):
    rng = random.Random(seed)
    schedule = shuffled(split_pairs(make(name, num_ranks, num_micro_batches)), rng)
    pairs = [
        Pair(one, two)
        for order in schedule.orders
        for one, two in pairwise(order)
        if one.kind is Kind.F and two.kind in (Kind.B, Kind.I) and one.stage != two.stage
    ]
    needed = slots_held(schedule)
    slots = {edge: max(1, num - fewer) for edge, num in needed.items()}
    order = add_frees(add_transfers(schedule, slots=needed))
    machine = Machine(order, pairs, slots, seed)
    # What has credits may hang for want of slots; here it is to find out what the others do.
    machine.slots = {e: n if e in machine.free_of_credits else 99 for e, n in slots.items()}
    machine.run()


def shuffled(schedule, rng):
    """The order after some swaps of neighbours that leave it legal."""
    for _ in range(rng.randint(0, 12)):
        rank = rng.randrange(schedule.num_ranks)
        order = list(schedule.orders[rank])
        i = rng.randrange(len(order) - 1)
        order[i], order[i + 1] = order[i + 1], order[i]
        orders = (order if r == rank else other for r, other in enumerate(schedule.orders))
        other = replace(schedule, orders=tuple(map(tuple, orders)))
        with suppress(ScheduleError):
            check(other)
            add_transfers(other)
            schedule = other
    return schedule


def test_a_pair_has_its_backward_handed_over_first_and_joins_once():
    forward, backward = Op(0, Kind.F, 5), Op(1, Kind.B, 3)
    ops = [
        Op(1, Kind.F, 3),
        forward,
        Op(0, Kind.SEND_F, 5),
        Op(1, Kind.RECV_F, 6),
        backward,
        Op(1, Kind.SEND_B, 3),
        Op(1, Kind.FREE_F, 3),
        Op(0, Kind.B, 3),
    ]
    program = lane_program(ops, [Pair(forward, backward)])
    assert [(str(op), joins, half) for op, joins, half in program] == [
        ("1F3", (1,), None),
        ("1RECV_F6", (1, 0), "backward"),
        ("1B3", (), "backward"),
        ("1SEND_B3", (), "backward"),
        ("0F5", (), "forward"),
        ("0SEND_F5", (), "forward"),
        ("1FREE_F3", (), None),
        ("0B3", (0,), None),
    ]


@pytest.mark.parametrize(
    ("ops", "pair", "text"),
    [
        ("0F1 0B0", ("0F1", "0B0"), "both halves are of stage 0, which has one lane"),
        ("1B0 0F1", ("0F1", "1B0"), "1B0 is not behind 0F1; put it there"),
        ("0F1 1F0 1B0", ("0F1", "1B0"), "between the halves stands 1F0; only transfers may"),
    ],
)
def test_what_no_lanes_can_run_at_once_is_refused(ops, pair, text):
    halves = Pair(*map(parse_op, pair))
    with pytest.raises(ScheduleError, match=text):
        lane_program([parse_op(op) for op in ops.split()], [halves])

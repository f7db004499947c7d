"""Runs an order without times: how far each rank gets, and who waits for whom in the end.

Whether an order can hang does not depend on how fast anything is, so one run decides it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from ppruntime.schedules.counts import Edge, crosses_ranks, num_transfers
from ppruntime.schedules.ops import Kind, Op, Schedule, ScheduleError, Step, ops_of


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that stands still at `op`, the `step`-th of its order, until `peer` runs `awaited`."""

    rank: int
    step: int
    op: Op
    peer: int
    awaited: Op
    for_slot: bool
    """True if it waits for room in a channel, False if for its input."""


@dataclass(slots=True)
class _Channel:
    """What one stage sends to a neighbour. `capacity` None: any number of messages fit."""

    src_rank: int
    dst_rank: int
    arrived: bytearray
    capacity: int | None
    sent: list[int] = field(default_factory=list)
    num_given_back: int = 0


class _Ends(NamedTuple):
    """The channels of one stage; None at the ends of the pipeline."""

    up_in: _Channel | None
    up_out: _Channel | None
    down_in: _Channel | None
    down_out: _Channel | None


class _Action(NamedTuple):
    """What an op does to channels, in the order in which the fields are worked off."""

    step: int
    op: Op
    takes: _Channel | None
    gives_back: _Channel | None
    sends: _Channel | None


def stalled(
    schedule: Schedule,
    *,
    slots: int | Mapping[Edge, int] | None = None,
    fuse_pairs: bool = False,
) -> tuple[Wait, ...]:
    """The waits of the ranks that never get to their end, in rank order; empty if all do.

    A compute op waits for its input: the neighbour's F or I/B, or its SEND where the order has
    sends. With `slots`, a number for all channels or one each, a message to another rank also waits
    for a slot: it is given back at its FREE, or without frees when its reader starts.
    With `fuse_pairs` a pair waits for both inputs before either half runs.
    """
    ends = _ends(schedule, slots)
    kinds = schedule.kinds()
    programs = [_program(order, ends, kinds, fuse_pairs) for order in schedule.orders]
    at = [0] * schedule.num_ranks
    blocked_on: dict[int, int] = {}  # rank -> the rank that has to move first
    waiters: dict[int, set[int]] = defaultdict(set)
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        start = at[rank]
        peer = _advance(programs[rank], at, rank)
        if peer is not None:
            blocked_on[rank] = peer
            waiters[peer].add(rank)
        if at[rank] > start and rank in waiters:
            ready.extend(sorted(waiters.pop(rank)))
    return tuple(
        _wait(schedule, rank, program[at[rank]], kinds)
        for rank, program in enumerate(programs)
        if at[rank] < len(program)
    )


def slots_needed(schedule: Schedule) -> int:
    """The smallest number of receive buffers per channel with which the order cannot hang, however
    slow or fast the ranks are; 0 if no two ranks talk.

    The model: a rank that sends waits while the channel holds that many messages which the receiver
    has not begun to read. Raises ScheduleError for an order that hangs with any number.
    """
    if num_transfers(schedule) == 0:
        return 0
    if stalled(schedule):
        raise ScheduleError(
            f"{schedule.name} hangs with any number of slots; check(schedule) shows where"
        )
    too_few, enough = 0, 1
    while stalled(schedule, slots=enough):  # ends: num_micro_batches slots never fill
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if stalled(schedule, slots=middle):
            too_few = middle
        else:
            enough = middle
    return enough


def _advance(program: list[_Action], at: list[int], rank: int) -> int | None:
    """Runs one rank until its end or until it has to wait; the rank it waits for, if any."""
    for position in range(at[rank], len(program)):
        action = program[position]
        if action.takes is not None and not action.takes.arrived[action.op.micro_batch]:
            at[rank] = position
            return action.takes.src_rank
        if action.gives_back is not None:
            action.gives_back.num_given_back += 1
        channel = action.sends
        if channel is not None:
            in_use = len(channel.sent) - channel.num_given_back
            if channel.capacity is not None and in_use >= channel.capacity:
                at[rank] = position
                return channel.dst_rank
            channel.sent.append(action.op.micro_batch)
            channel.arrived[action.op.micro_batch] = 1
    at[rank] = len(program)
    return None


def _ends(schedule: Schedule, slots: int | Mapping[Edge, int] | None) -> list[_Ends]:
    """One entry a stage."""
    ranks = schedule.stage_to_rank

    def channel(edge: Edge) -> _Channel:
        capacity = slots[edge] if isinstance(slots, Mapping) else slots
        if not crosses_ranks(schedule, edge):
            capacity = None  # handed over by reference
        arrived = bytearray(schedule.num_micro_batches)
        return _Channel(ranks[edge.src_stage], ranks[edge.dst_stage], arrived, capacity)

    hops = range(schedule.num_stages - 1)
    up = [None, *(channel(Edge(s, s + 1, "F")) for s in hops), None]
    down = [None, *(channel(Edge(s + 1, s, "B")) for s in hops), None]
    return [_Ends(up[s], up[s + 1], down[s + 1], down[s]) for s in range(schedule.num_stages)]


def _program(
    order: Sequence[Step], ends: Sequence[_Ends], kinds: Set[Kind], fuse_pairs: bool
) -> list[_Action]:
    has_sends = Kind.SEND_F in kinds or Kind.SEND_B in kinds
    has_frees = Kind.FREE_F in kinds or Kind.FREE_B in kinds
    program: list[_Action] = []
    for i, step in enumerate(order):
        halves = [_actions(i, op, ends[op.stage], has_sends, has_frees) for op in ops_of(step)]
        if fuse_pairs and len(halves) == 2:
            (first, *first_out), (second, *second_out) = halves
            program += [first, second, *first_out, *second_out]
        else:
            for actions in halves:
                program += actions
    return program


def _actions(i: int, op: Op, ends: _Ends, has_sends: bool, has_frees: bool) -> list[_Action]:
    """A computation, and its send where the order has no ops for that; or a lowered op's part."""
    kind = op.kind
    if kind is Kind.F or kind is Kind.B or kind is Kind.I:
        forward = kind is Kind.F
        source = ends.up_in if forward else ends.down_in
        sink = ends.up_out if forward else ends.down_out
        actions = [_Action(i, op, source, None if has_frees else source, None)]
        if sink is not None and not has_sends:
            actions.append(_Action(i, op, None, None, sink))
        return actions
    if kind is Kind.SEND_F:
        return [_Action(i, op, None, None, ends.up_out)]
    if kind is Kind.SEND_B:
        return [_Action(i, op, None, None, ends.down_out)]
    if kind is Kind.FREE_F:
        return [_Action(i, op, None, ends.up_in, None)]
    if kind is Kind.FREE_B:
        return [_Action(i, op, None, ends.down_in, None)]
    return []


def _wait(schedule: Schedule, rank: int, action: _Action, kinds: Set[Kind]) -> Wait:
    """What a blocked action waits for, named as an op."""
    channel = action.takes
    if channel is not None and not channel.arrived[action.op.micro_batch]:
        forward = action.op.kind is Kind.F
        stage = action.op.stage + (-1 if forward else 1)
        m, peer, for_slot = action.op.micro_batch, channel.src_rank, False
        wanted = (Kind.SEND_F, Kind.F) if forward else (Kind.SEND_B, Kind.I, Kind.B)
    else:
        channel = action.sends
        assert channel is not None, "an action waits for its input or for a slot"
        forward = action.op.kind in (Kind.F, Kind.SEND_F)
        stage = action.op.stage + (1 if forward else -1)
        m, peer, for_slot = channel.sent[channel.num_given_back], channel.dst_rank, True
        wanted = (Kind.FREE_F, Kind.F) if forward else (Kind.FREE_B, Kind.I, Kind.B)
    there = set(schedule.ops(peer))
    named = [Op(stage, kind, m) for kind in wanted if kind in kinds]
    awaited = next((op for op in named if op in there), named[0])
    return Wait(rank, action.step, action.op, peer, awaited, for_slot)

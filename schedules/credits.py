"""Which channels need no credits: their slots are free in time by the order alone.

A message overwrites the slot of the message `slots` before it. Where the order itself sees to it
that the destination is done with that one before the source has the new one to send, the source
need not be told: in 1F1B the gradient that came back is the credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from ppruntime.schedules.counts import Edge, crosses_ranks, edges
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Schedule, ScheduleError

_Message: TypeAlias = tuple[Edge, int, int]
"""Channel, step (0 or 1), micro-batch."""


def uncredited(schedules: Sequence[Schedule], slots: int | Mapping[Edge, int]) -> frozenset[Edge]:
    """The channels between ranks that need no credits, whichever of `schedules` runs after which.

    All are lowered (transfers and frees), over the same stages, and run on the same channels with
    `slots` receive buffers, one number or one each; nothing but the messages keeps ranks in step,
    not even between two steps. An order that only goes forward proves nothing about the channels it
    uses, so with an evaluation among `schedules` forward channels keep their credits.

    What counts is when computations end, not when ops are issued: a message can leave once the
    computations before its SEND are done, and a slot is free once those before its FREE are. Hence
    a FREE that stands behind the gradient's SEND still precedes what that gradient causes.
    Raises ScheduleError for an order that is not lowered or that hangs.
    """
    proven = {e for e in edges(schedules[0]) if crosses_ranks(schedules[0], e)}
    for schedule in schedules:
        _check_lowered(schedule)
    for pair in product(schedules, repeat=2):
        if proven:
            proven &= _proven(pair, slots)
    return frozenset(proven)


_Inputs: TypeAlias = list[_Message | None]
"""What each computation of a rank, over two steps, waits for from another rank."""


@dataclass(slots=True)
class _Moments:
    """When messages leave and slots become free: after how many of their rank's computations."""

    sent: dict[_Message, int]
    freed: dict[_Message, int]
    order: dict[Edge, list[_Message]]
    """Each channel's messages in the order in which they are sent."""


def _proven(pair: Sequence[Schedule], slots: int | Mapping[Edge, int]) -> set[Edge]:
    """The channels on which every message of the two steps finds its slot free by the order."""
    ranks, moments = _walk(pair)
    known = _what_is_known(pair, ranks, moments)
    placement = pair[0].stage_to_rank
    result = set()
    for edge, messages in moments.order.items():
        num_slots = slots if isinstance(slots, int) else slots[edge]
        source, destination = placement[edge.src_stage], placement[edge.dst_stage]
        if all(
            known[source][moments.sent[message]][destination] >= moments.freed[earlier]
            for earlier, message in zip(messages, messages[num_slots:], strict=False)
        ):
            result.add(edge)
    # A channel that neither step uses has nothing to prove.
    return result | (set(edges(pair[0])) - moments.order.keys())


def _walk(pair: Sequence[Schedule]) -> tuple[list[_Inputs], _Moments]:
    """Reads both steps off the orders: what each computation waits for, what leaves and is freed
    when."""
    placement = pair[0].stage_to_rank
    moments = _Moments({}, {}, {})
    ranks = []
    for rank in range(pair[0].num_ranks):
        inputs: _Inputs = []
        for step, schedule in enumerate(pair):
            for op in schedule.ops(rank):
                if op.kind in COMPUTE:
                    inputs.append(_input(op, step, placement))
                    continue
                edge = _edge(op)
                if edge is None or placement[edge.src_stage] == placement[edge.dst_stage]:
                    continue
                message = (edge, step, op.micro_batch)
                if op.kind in (Kind.SEND_F, Kind.SEND_B):
                    moments.sent[message] = len(inputs)
                    moments.order.setdefault(edge, []).append(message)
                elif op.kind in (Kind.FREE_F, Kind.FREE_B):
                    moments.freed[message] = len(inputs)
        ranks.append(inputs)
    return ranks, moments


def _what_is_known(
    pair: Sequence[Schedule], ranks: Sequence[_Inputs], moments: _Moments
) -> list[list[list[int]]]:
    """[rank][n][other rank]: how many computations of the other rank have ended for certain when
    the rank has ended n of its own (vector clocks)."""
    placement, num_ranks = pair[0].stage_to_rank, len(ranks)
    known = [[[0] * num_ranks] for _ in ranks]
    waiters: dict[int, set[int]] = {}
    ready = deque(range(num_ranks))
    while ready:
        rank = ready.popleft()
        mine, before = known[rank], len(known[rank])
        while len(mine) <= len(ranks[rank]):
            message, clock = ranks[rank][len(mine) - 1], mine[-1]
            if message is not None:
                source, sent = placement[message[0].src_stage], moments.sent[message]
                if sent >= len(known[source]):
                    waiters.setdefault(source, set()).add(rank)
                    break
                clock = list(map(max, clock, known[source][sent]))
            else:
                clock = clock.copy()
            clock[rank] = len(mine)
            mine.append(clock)
        if len(mine) > before:
            ready.extend(sorted(waiters.pop(rank, ())))
    for rank, inputs in enumerate(ranks):
        if len(known[rank]) <= len(inputs):
            raise ScheduleError(
                f"{pair[0].name}: rank {rank} hangs before its computation {len(known[rank]) - 1};"
                " check(schedule) shows who waits for whom"
            )
    return known


def _input(op: Op, step: int, placement: Sequence[int]) -> _Message | None:
    """The message from another rank that a computation reads."""
    if op.kind is Kind.F and op.stage > 0:
        edge = Edge(op.stage - 1, op.stage, "F")
    elif op.kind in (Kind.B, Kind.I) and op.stage + 1 < len(placement):
        edge = Edge(op.stage + 1, op.stage, "B")
    else:
        return None
    if placement[edge.src_stage] == placement[edge.dst_stage]:
        return None
    return edge, step, op.micro_batch


def _edge(op: Op) -> Edge | None:
    """The channel of a transfer or a free."""
    stage = op.stage
    match op.kind:
        case Kind.SEND_F:
            return Edge(stage, stage + 1, "F")
        case Kind.FREE_F:
            return Edge(stage - 1, stage, "F")
        case Kind.SEND_B:
            return Edge(stage, stage - 1, "B")
        case Kind.FREE_B:
            return Edge(stage + 1, stage, "B")
        case _:
            return None


def _check_lowered(schedule: Schedule) -> None:
    kinds = schedule.kinds()
    for needed, what in (
        ({Kind.SEND_F, Kind.SEND_B}, "transfers; apply add_transfers"),
        ({Kind.FREE_F, Kind.FREE_B}, "frees; apply add_frees"),
    ):
        if schedule.num_stages > 1 and kinds.isdisjoint(needed):
            raise ScheduleError(f"uncredited: {schedule.name} has no {what}")

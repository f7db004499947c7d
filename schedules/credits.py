"""Which channels need no credits: their slots are free in time by the order alone.

A message overwrites the slot of the message `slots` before it. Where the order itself sees to it
that the destination is done with that one before the source has the new one to send, the source
need not be told: in 1F1B the gradient that came back is the credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

from ppruntime.schedules.counts import Edge, crosses_ranks, edges
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Pair, Schedule, ScheduleError

_Message: TypeAlias = tuple[Edge, int, int]
"""Channel, step (0 or 1), micro-batch."""


def uncredited(
    schedules: Sequence[Schedule],
    slots: int | Mapping[Edge, int],
    *,
    pairs: Iterable[Pair] = (),
) -> frozenset[Edge]:
    """The channels between ranks that need no credits, whichever of `schedules` runs after which.

    All are lowered (transfers and frees), over the same stages, and run on the same channels with
    `slots` receive buffers, one number or one each; nothing but the messages keeps ranks in step,
    not even between two steps. An order that only goes forward proves nothing about the channels it
    uses, so with an evaluation among `schedules` forward channels keep their credits. `pairs` are
    those whose halves run at once (`lanes`): the end of one says nothing of the other's.

    What counts is when computations end, not when ops are issued: a message can leave once the
    computations before its SEND are done, and a slot is free once those before its FREE are. Hence
    a FREE that stands behind the gradient's SEND still precedes what that gradient causes.
    Raises ScheduleError for an order that is not lowered or that hangs.
    """
    proven = {e for e in edges(schedules[0]) if crosses_ranks(schedules[0], e)}
    for schedule in schedules:
        _check_lowered(schedule)
    paired = {pair.forward: pair.backward for pair in pairs}
    for two in product(schedules, repeat=2):
        if proven:
            proven &= _proven(two, slots, paired)
    return frozenset(proven)


class _Computation(NamedTuple):
    """One computation of a rank, over two steps."""

    stage: int
    after: tuple[int, ...]
    """Computations of the rank, by number, that have ended before it starts."""
    awaits: _Message | None
    """What it waits for from another rank."""


@dataclass(slots=True)
class _Moments:
    """When messages leave and slots become free."""

    sent: dict[_Message, int | None]
    """Behind which computation of its rank; None: behind none."""
    freed: dict[_Message, int]
    """After how many computations of the stage that reads it."""
    order: dict[Edge, list[_Message]]
    """Each channel's messages in the order in which they are sent."""


def _proven(
    two: Sequence[Schedule], slots: int | Mapping[Edge, int], paired: Mapping[Op, Op]
) -> set[Edge]:
    """The channels on which every message of the two steps finds its slot free by the order."""
    ranks, moments = _walk(two, paired)
    known = _what_is_known(two, ranks, moments)
    placement = two[0].stage_to_rank
    nothing = (0,) * len(placement)
    result = set()
    for edge, messages in moments.order.items():
        num_slots = slots if isinstance(slots, int) else slots[edge]
        for earlier, message in zip(messages, messages[num_slots:], strict=False):
            behind = moments.sent[message]
            ended = nothing if behind is None else known[placement[edge.src_stage]][behind]
            if ended[edge.dst_stage] < moments.freed[earlier]:
                break
        else:
            result.add(edge)
    # A channel that neither step uses has nothing to prove.
    return result | (set(edges(two[0])) - moments.order.keys())


def _walk(
    two: Sequence[Schedule], paired: Mapping[Op, Op]
) -> tuple[list[list[_Computation]], _Moments]:
    """Reads both steps off the orders: what each computation waits for, what leaves and is freed
    when."""
    placement = two[0].stage_to_rank
    moments = _Moments({}, {}, {})
    ranks = []
    for rank in range(two[0].num_ranks):
        done: list[_Computation] = []
        num_of = dict.fromkeys(two[0].stages_of(rank), 0)
        latest: tuple[int, ...] = ()  # behind these, all so far have ended
        half: Op | None = None  # the backward that runs beside the latest forward
        before: tuple[int, ...] = ()
        for step, schedule in enumerate(two):
            for op in schedule.ops(rank):
                if op.kind in COMPUTE:
                    is_beside = op == half
                    after, before = (before if is_beside else latest), latest
                    latest = (*latest, len(done)) if is_beside else (len(done),)
                    half = paired.get(op)
                    done.append(_Computation(op.stage, after, _input(op, step, placement)))
                    num_of[op.stage] += 1
                    continue
                edge = _edge(op)
                if edge is None or placement[edge.src_stage] == placement[edge.dst_stage]:
                    continue
                message = (edge, step, op.micro_batch)
                if op.kind in (Kind.SEND_F, Kind.SEND_B):
                    # It follows the computation that made it, in a pair too.
                    moments.sent[message] = len(done) - 1 if done else None
                    moments.order.setdefault(edge, []).append(message)
                elif op.kind in (Kind.FREE_F, Kind.FREE_B):
                    moments.freed[message] = num_of[op.stage]
        ranks.append(done)
    return ranks, moments


def _what_is_known(
    two: Sequence[Schedule], ranks: Sequence[Sequence[_Computation]], moments: _Moments
) -> list[list[tuple[int, ...]]]:
    """[rank][n][stage]: how many computations of the stage have ended for certain when the rank's
    n-th has (vector clocks)."""
    placement = two[0].stage_to_rank
    known: list[list[tuple[int, ...]]] = [[] for _ in ranks]
    waiters: dict[int, set[int]] = {}
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        mine, before = known[rank], len(known[rank])
        for stage, after, message in ranks[rank][before:]:
            clocks = [mine[n] for n in after]
            if message is not None:
                source, sent = placement[message[0].src_stage], moments.sent[message]
                if sent is not None:
                    if sent >= len(known[source]):
                        waiters.setdefault(source, set()).add(rank)
                        break
                    clocks.append(known[source][sent])
            ended = [0] * len(placement)
            for clock in clocks:
                ended = list(map(max, ended, clock))
            ended[stage] += 1
            mine.append(tuple(ended))
        if len(mine) > before:
            ready.extend(sorted(waiters.pop(rank, ())))
    for rank, done in enumerate(ranks):
        if len(known[rank]) < len(done):
            raise ScheduleError(
                f"{two[0].name}: rank {rank} hangs before its computation {len(known[rank])};"
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

"""A training order -> the same forwards and nothing else, for a loss without gradients."""

from __future__ import annotations

from dataclasses import replace

from ppruntime.schedules.ops import Kind, Op, Schedule, Step


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` in their order, with sends, receives and frees; one slot a channel
    is enough.

    It cannot hang if the order could not: only waits went away. A slot is free as soon as its
    forward has run and its output is on the way, and the next receive is posted there.
    """
    last_stage = schedule.num_stages - 1
    orders: list[tuple[Step, ...]] = []
    for rank in range(schedule.num_ranks):
        forwards = [op for op in schedule.ops(rank) if op.kind is Kind.F]
        following: dict[int, int] = {}  # stage -> index of its next forward, from the end backwards
        next_of: list[Op | None] = [None] * len(forwards)
        for i in reversed(range(len(forwards))):
            if (j := following.get(forwards[i].stage)) is not None:
                next_of[i] = forwards[j]
            following[forwards[i].stage] = i
        order: list[Step] = [
            replace(forwards[i], kind=Kind.RECV_F)
            for stage, i in sorted(following.items())
            if stage > 0
        ]
        for op, next_op in zip(forwards, next_of, strict=True):
            order.append(op)
            if op.stage < last_stage:
                order.append(replace(op, kind=Kind.SEND_F))
            if op.stage > 0:
                order.append(replace(op, kind=Kind.FREE_F))
                if next_op is not None:
                    order.append(replace(next_op, kind=Kind.RECV_F))
        orders.append(tuple(order))
    return replace(schedule, name=f"{schedule.name}, forward only", orders=tuple(orders))

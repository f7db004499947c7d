"""The rules for what the passes add: transfers, receive buffers, moves to the host.

As in `check`, one function a rule, one message each. `check` calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppruntime.schedules.counts import Edge, edges
from ppruntime.schedules.grid import fault, lack
from ppruntime.schedules.ops import Kind, Op, Schedule
from ppruntime.schedules.positions import Positions

TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
FREES = (Kind.FREE_F, Kind.FREE_B)


def check_transfers(schedule: Schedule, at: Positions) -> None:
    """Each hop has one send and one receive for each micro-batch, and there are no others."""
    last = schedule.num_stages - 1
    for stage, rank in enumerate(schedule.stage_to_rank):
        for kind in TRANSFERS:
            has_neighbour = stage < last if kind in (Kind.SEND_F, Kind.RECV_B) else stage > 0
            for m, position in enumerate(at.all(kind, stage)):
                op = Op(stage, kind, m)
                if position < 0 and has_neighbour:
                    raise lack(schedule, rank, op, "a transfer that its neighbour counts on")
                if position >= 0 and not has_neighbour:
                    text = f"stage {stage} has no neighbour on that side; leave it out"
                    raise fault(schedule, rank, at.step(op), op, text)


def check_fifo(schedule: Schedule, at: Positions) -> None:
    """Each channel's receives are posted in the order in which its messages are sent."""
    for edge in edges(schedule):
        send, receive, _ = _kinds(edge)
        sent = _in_order(at.all(send, edge.src_stage))
        received = _in_order(at.all(receive, edge.dst_stage))
        for first, other in zip(sent, received, strict=True):
            if first != other:
                op = Op(edge.dst_stage, receive, other)
                text = f"the next message there is {Op(edge.src_stage, send, first)}"
                rank = schedule.stage_to_rank[edge.dst_stage]
                raise fault(schedule, rank, at.step(op), op, f"{text}; swap the receives")


def check_frees(schedule: Schedule, at: Positions) -> None:
    """Each receive buffer is freed once a micro-batch, and nothing else is."""
    last = schedule.num_stages - 1
    for stage, rank in enumerate(schedule.stage_to_rank):
        for kind in FREES:
            receives = stage > 0 if kind is Kind.FREE_F else stage < last
            for m, position in enumerate(at.all(kind, stage)):
                op = Op(stage, kind, m)
                if position < 0 and receives:
                    raise lack(schedule, rank, op, "so its slot is lost")
                if position >= 0 and not receives:
                    text = f"stage {stage} receives nothing on that side; leave it out"
                    raise fault(schedule, rank, at.step(op), op, text)


def check_slots(schedule: Schedule, at: Positions, slots: int | Mapping[Edge, int]) -> None:
    """A receive is posted only when a slot of its channel is free. Slots go round as a ring."""
    for edge in edges(schedule):
        num_slots = slots if isinstance(slots, int) else slots[edge]
        _, receive, free = _kinds(edge)
        posted, freed = at.all(receive, edge.dst_stage), at.all(free, edge.dst_stage)
        sequence = _in_order(posted)
        for oldest, m in zip(sequence, sequence[num_slots:], strict=False):
            if freed[oldest] > posted[m]:
                op = Op(edge.dst_stage, receive, m)
                text = (
                    f"all {num_slots} slots for {edge} are held, the oldest by micro-batch"
                    f" {oldest}; post it later or give the channel more"
                )
                rank = schedule.stage_to_rank[edge.dst_stage]
                raise fault(schedule, rank, at.step(op), op, text)


def check_offload(schedule: Schedule, at: Positions) -> None:
    """What is moved to the host leaves, comes back, and only that."""
    kinds = (Kind.OFFLOAD, Kind.OFFLOADED, Kind.RELOAD)
    for stage, rank in enumerate(schedule.stage_to_rank):
        moves = zip(*(at.all(kind, stage) for kind in kinds), strict=True)
        for m, (out, gone, back) in enumerate(moves):
            ops = [Op(stage, kind, m) for kind in kinds]
            if out >= 0 > back:
                raise lack(schedule, rank, ops[2], f"though {ops[0]} moved it away")
            if back >= 0 > out:
                raise lack(schedule, rank, ops[0], f"though {ops[2]} brings it back")
            if out >= 0 > gone:
                raise lack(schedule, rank, ops[1], f"where {ops[0]}'s copy has to be done")
            if gone >= 0 > out:
                raise lack(schedule, rank, ops[0], f"which {ops[1]} waits for")


def _kinds(edge: Edge) -> tuple[Kind, Kind, Kind]:
    """What sends, receives and frees on a channel."""
    if edge.kind == "F":
        return Kind.SEND_F, Kind.RECV_F, Kind.FREE_F
    return Kind.SEND_B, Kind.RECV_B, Kind.FREE_B


def _in_order(at: Sequence[int]) -> list[int]:
    """The micro-batches sorted by position."""
    return sorted(range(len(at)), key=at.__getitem__)

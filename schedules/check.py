"""What a legal order is: one function a rule, each with one message.

A rule that is broken raises ScheduleError: the rank, the step and the op, what is wrong, what would
work, and below it the table of the order with that step pointed at. Works on computations alone and
on lowered orders (with sends, receives, frees), generated or written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppruntime.schedules.check_lowered import (
    FREES,
    TRANSFERS,
    check_fifo,
    check_frees,
    check_offload,
    check_slots,
    check_transfers,
)
from ppruntime.schedules.counts import Edge
from ppruntime.schedules.grid import fault, lack, with_grid
from ppruntime.schedules.ops import Kind, Op, Pair, Schedule, ScheduleError, ops_of
from ppruntime.schedules.positions import Positions, positions
from ppruntime.schedules.progress import Wait, slots_needed, stalled


def check(
    schedule: Schedule,
    *,
    slots: int | Mapping[Edge, int] | None = None,
    max_in_flight: int | Sequence[int] | None = None,
    fuse_pairs: bool = False,
    ascending: bool = True,
) -> None:
    """Raises ScheduleError at the first rule that the order breaks; returns if it may be run.

    `slots`: receive buffers per channel, one number or one each. With it the order must not hang
    although a send waits for a slot (given back at its FREE; without frees, when its reader
    starts), and no receive may be posted without one. `max_in_flight`: chunk activations that a
    rank may hold, one number or one a rank. `fuse_pairs`: a pair waits for both its inputs.
    `ascending=False` allows weight gradients in any order of micro-batches; the sums then differ in
    their last bits from those of other orders.
    """
    check_placement(schedule)
    check_range(schedule)
    check_owner(schedule)
    check_once(schedule)
    check_pairs(schedule)
    at, kinds = positions(schedule), schedule.kinds()
    check_complete(schedule, at)
    if not kinds.isdisjoint(TRANSFERS):
        check_transfers(schedule, at)
    if not kinds.isdisjoint(FREES):
        check_frees(schedule, at)
    check_offload(schedule, at)
    check_precedence(schedule, at)
    if ascending:
        check_accumulation(schedule, at)
    if not kinds.isdisjoint(TRANSFERS):
        check_fifo(schedule, at)
        if slots is not None and not kinds.isdisjoint(FREES):
            check_slots(schedule, at, slots)
    if max_in_flight is not None:
        check_in_flight(schedule, max_in_flight)
    check_progress(schedule, slots=slots, fuse_pairs=fuse_pairs)


def check_placement(schedule: Schedule) -> None:
    """Every stage is on a rank that exists, every rank has a stage, there is something to do."""
    num_ranks, placement = schedule.num_ranks, schedule.stage_to_rank
    if num_ranks < 1 or schedule.num_micro_batches < 1:
        raise ScheduleError(
            f"{schedule.name} has {num_ranks} ranks and {schedule.num_micro_batches} micro-batches;"
            " the least is 1 of each"
        )
    for stage, rank in enumerate(placement):
        if not 0 <= rank < num_ranks:
            raise ScheduleError(
                f"stage {stage} is placed on rank {rank}; ranks go from 0 to {num_ranks - 1}"
            )
    for rank in range(num_ranks):
        if rank not in placement:
            raise ScheduleError(
                f"rank {rank} of {num_ranks} has no stage (stage_to_rank = {list(placement)});"
                " give it one or leave the rank out"
            )


def check_range(schedule: Schedule) -> None:
    """Every op is of a stage and a micro-batch that exist."""
    num_stages, num_micro_batches = schedule.num_stages, schedule.num_micro_batches
    for rank, order in enumerate(schedule.orders):
        for i, step in enumerate(order):
            for op in ops_of(step):
                if not 0 <= op.stage < num_stages:
                    text = f"there is no stage {op.stage}, they go from 0 to {num_stages - 1}"
                    raise fault(schedule, rank, i, op, text)
                if not 0 <= op.micro_batch < num_micro_batches:
                    text = f"micro-batches go from 0 to {num_micro_batches - 1}"
                    raise fault(schedule, rank, i, op, text)


def check_owner(schedule: Schedule) -> None:
    """Every op is on the rank that holds its stage."""
    for rank, order in enumerate(schedule.orders):
        for i, step in enumerate(order):
            for op in ops_of(step):
                owner = schedule.stage_to_rank[op.stage]
                if owner != rank:
                    text = f"stage {op.stage} is on rank {owner}; move the op there"
                    raise fault(schedule, rank, i, op, text)


def check_once(schedule: Schedule) -> None:
    """No op is there twice."""
    for rank, order in enumerate(schedule.orders):
        seen: dict[Op, int] = {}
        for i, step in enumerate(order):
            for op in ops_of(step):
                if (before := seen.setdefault(op, i)) != i:
                    text = f"it is there already, at step {before}; take one out"
                    raise fault(schedule, rank, i, op, text)


def check_pairs(schedule: Schedule) -> None:
    """A pair is a forward and a backward (B or I)."""
    for rank, order in enumerate(schedule.orders):
        for i, step in enumerate(order):
            if not isinstance(step, Pair):
                continue
            if step.forward.kind is not Kind.F or step.backward.kind not in (Kind.B, Kind.I):
                text = f"{step} is no pair: a pair is F and then B or I"
                raise fault(schedule, rank, i, step.forward, text)


def check_complete(schedule: Schedule, at: Positions) -> None:
    """Each stage runs F and a whole backward, B or else I and W, for each micro-batch."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        rows = zip(*(at.all(kind, stage) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)), strict=True)
        for m, (forward, whole, gradient, weights) in enumerate(rows):
            if forward < 0:
                raise lack(schedule, rank, Op(stage, Kind.F, m), "its forward")
            if whole >= 0:
                if gradient >= 0 or weights >= 0:
                    op = Op(stage, Kind.I if gradient >= 0 else Kind.W, m)
                    text = f"{Op(stage, Kind.B, m)} does it too; a backward is B, or else I and W"
                    raise fault(schedule, rank, at.step(op), op, text)
            elif gradient < 0 and weights < 0:
                raise lack(schedule, rank, Op(stage, Kind.B, m), "its backward")
            elif gradient < 0:
                raise lack(schedule, rank, Op(stage, Kind.I, m), "the first half of a backward")
            elif weights < 0:
                raise lack(schedule, rank, Op(stage, Kind.W, m), "the other half of a backward")


_PRECEDENCE = (
    (Kind.F, Kind.B),
    (Kind.F, Kind.I),
    (Kind.I, Kind.W),
    (Kind.RECV_F, Kind.F),
    (Kind.RECV_B, Kind.B),
    (Kind.RECV_B, Kind.I),
    (Kind.F, Kind.SEND_F),
    (Kind.B, Kind.SEND_B),
    (Kind.I, Kind.SEND_B),
    (Kind.B, Kind.FREE_F),
    (Kind.W, Kind.FREE_F),
    (Kind.B, Kind.FREE_B),
    (Kind.W, Kind.FREE_B),
    (Kind.F, Kind.OFFLOAD),
    (Kind.OFFLOAD, Kind.OFFLOADED),
    (Kind.OFFLOADED, Kind.RELOAD),
    (Kind.RELOAD, Kind.B),
    (Kind.RELOAD, Kind.I),
)
"""First, then: for one stage and micro-batch, so on one rank, where both occur."""


def check_precedence(schedule: Schedule, at: Positions) -> None:
    """F before I or B, I before W; a receive before its reader, a send behind what makes the
    message, a free behind the last reader, activations at hand when the backward starts."""
    for first, then in _PRECEDENCE:
        for stage, rank in enumerate(schedule.stage_to_rank):
            if (first, stage) not in at.of:
                continue
            for m, (a, b) in enumerate(zip(at.of[first, stage], at.all(then, stage), strict=True)):
                if 0 <= b < a:
                    op = Op(stage, then, m)
                    text = f"it runs before {Op(stage, first, m)}; move it behind"
                    raise fault(schedule, rank, at.step(op), op, text)


def check_accumulation(schedule: Schedule, at: Positions) -> None:
    """Each stage adds up its weight gradients (B, W) in ascending order of micro-batches: every
    order gives the same bits."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        latest = -1
        whole, weights = at.all(Kind.B, stage), at.all(Kind.W, stage)
        for m, position in enumerate(map(max, whole, weights)):
            if position < latest:
                op = Op(stage, Kind.B if whole[m] >= 0 else Kind.W, m)
                text = f"it adds to the gradients before micro-batch {m - 1} does; swap the two"
                raise fault(schedule, rank, at.step(op), op, text)
            latest = position


def check_in_flight(schedule: Schedule, max_in_flight: int | Sequence[int]) -> None:
    """No rank ever holds more chunk activations than it may."""
    for rank, order in enumerate(schedule.orders):
        cap = max_in_flight if isinstance(max_in_flight, int) else max_in_flight[rank]
        held = 0
        for i, step in enumerate(order):
            for op in ops_of(step):
                held += (op.kind is Kind.F) - (op.kind is Kind.B or op.kind is Kind.W)
                if held > cap:
                    text = f"it makes {held} activations in flight of {cap}; run a backward first"
                    raise fault(schedule, rank, i, op, text)


def check_progress(
    schedule: Schedule,
    *,
    slots: int | Mapping[Edge, int] | None = None,
    fuse_pairs: bool = False,
) -> None:
    """Every rank gets to its end, however slow or fast the others are: no cycle of waits. With
    `slots`, also when a message waits at its sender for a receive buffer."""
    waits = stalled(schedule, slots=slots, fuse_pairs=fuse_pairs)
    if not waits:
        return
    remedy = "move one of these ops"
    if slots is not None and not stalled(schedule, fuse_pairs=fuse_pairs):
        remedy = "give the channels more slots"
        if isinstance(slots, int) and schedule.kinds().isdisjoint(FREES):
            remedy += f": {slots_needed(schedule)} each are enough"
    for wait in waits:
        if wait.awaited not in set(schedule.ops(wait.peer)):
            text = f"{_phrase(wait)}, which rank {wait.peer} never runs; add it"
            raise with_grid(schedule, text, (wait.rank, wait.step))
    cycle = _cycle(waits)
    text = "; ".join(f"{_phrase(w)}, which rank {w.peer} runs later" for w in cycle)
    raise with_grid(
        schedule, f"{text}: they wait for ever; {remedy}", (cycle[0].rank, cycle[0].step)
    )


def _cycle(waits: Sequence[Wait]) -> list[Wait]:
    """The ranks that wait for one another, from the first that occurs."""
    by_rank = {wait.rank: wait for wait in waits}
    seen = [waits[0]]
    while (following := by_rank[seen[-1].peer]) not in seen:
        seen.append(following)
    return seen[seen.index(following) :]


def _phrase(wait: Wait) -> str:
    reason = "for a slot, for" if wait.for_slot else "for"
    return f"rank {wait.rank} waits at {wait.op} {reason} {wait.awaited}"

"""What a legal order is: one function a rule, each with one message.

A rule that is broken raises ScheduleError: the rank, the step and the op, what is wrong, what would
work, and below it the table of the whole order with that step pointed at. Works on orders of
computations alone and on lowered ones (with sends, receives, frees), generated or written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ppruntime.schedules.counts import Edge, edges, slots_needed
from ppruntime.schedules.grid import grid
from ppruntime.schedules.ops import Kind, Op, Pair, Schedule, ScheduleError, ops_of
from ppruntime.schedules.progress import Wait, stalled

_TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


def check(
    schedule: Schedule,
    *,
    slots: int | Mapping[Edge, int] | None = None,
    max_in_flight: int | Sequence[int] | None = None,
    fuse_pairs: bool = False,
    ascending: bool = True,
) -> None:
    """Raises ScheduleError at the first rule that the order breaks; returns if it may be run.

    `slots`: receive buffers per channel, one number or one each. Given, the order must not hang
    although a send waits for a slot (given back at its FREE; without frees, when its reader starts),
    and no receive may be posted without one. `max_in_flight`: chunk activations a rank may hold, one
    number or one a rank. `fuse_pairs`: a pair waits for both inputs. `ascending=False` allows weight
    gradients in any order of micro-batches, at the price of other bits than other orders give.
    """
    check_placement(schedule)
    at = index_ops(schedule)
    check_complete(schedule, at)
    check_pairs(schedule)
    check_precedence(schedule, at)
    if ascending:
        check_accumulation(schedule, at)
    if at.has(*_TRANSFERS):
        check_transfers(schedule, at)
        check_fifo(schedule, at)
    if at.has(Kind.FREE_F, Kind.FREE_B):
        check_frees(schedule, at)
        if slots is not None and at.has(*_TRANSFERS):
            check_slots(schedule, at, slots)
    if at.has(Kind.OFFLOAD, Kind.RELOAD):
        check_offload(schedule, at)
    if max_in_flight is not None:
        check_in_flight(schedule, max_in_flight)
    check_progress(schedule, slots=slots, fuse_pairs=fuse_pairs)


@dataclass(frozen=True, slots=True)
class Positions:
    """Where each op stands: its number among the ops of its rank (pairs taken apart), by kind, stage
    and micro-batch; -1 if it is not there."""

    of: Mapping[tuple[Kind, int], list[int]]
    step_of: tuple[tuple[int, ...], ...]
    """rank, number -> step."""
    num_micro_batches: int

    def all(self, kind: Kind, stage: int) -> list[int]:
        """The positions of all micro-batches."""
        return self.of.get((kind, stage)) or [-1] * self.num_micro_batches

    def has(self, *kinds: Kind) -> bool:
        return any(kind in kinds for kind, _ in self.of)


def check_placement(schedule: Schedule) -> None:
    """Every stage is on a rank that exists, every rank has a stage, there is something to do."""
    num_ranks, ranks = schedule.num_ranks, set(schedule.stage_to_rank)
    if num_ranks < 1 or schedule.num_micro_batches < 1:
        raise ScheduleError(
            f"{schedule.name} has {num_ranks} ranks and {schedule.num_micro_batches} micro-batches;"
            " the least is 1 of each"
        )
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < num_ranks:
            raise ScheduleError(
                f"stage {stage} is placed on rank {rank}; ranks go from 0 to {num_ranks - 1}"
            )
    for rank in range(num_ranks):
        if rank not in ranks:
            raise ScheduleError(
                f"rank {rank} of {num_ranks} has no stage (stage_to_rank ="
                f" {list(schedule.stage_to_rank)}); give it one or leave the rank out"
            )


def index_ops(schedule: Schedule) -> Positions:
    """Every op is in range, on its stage's rank, and there once. Gives where each stands."""
    num_micro_batches, num_stages = schedule.num_micro_batches, schedule.num_stages
    of: dict[tuple[Kind, int], list[int]] = {}
    step_of = []
    for rank, order in enumerate(schedule.orders):
        steps: list[int] = []
        for i, step in enumerate(order):
            for op in ops_of(step):
                stage, m = op.stage, op.micro_batch
                if not 0 <= stage < num_stages:
                    _fail(schedule, rank, i, op, f"stages go from 0 to {num_stages - 1}")
                if not 0 <= m < num_micro_batches:
                    _fail(
                        schedule, rank, i, op, f"micro-batches go from 0 to {num_micro_batches - 1}"
                    )
                if schedule.stage_to_rank[stage] != rank:
                    owner = schedule.stage_to_rank[stage]
                    _fail(
                        schedule,
                        rank,
                        i,
                        op,
                        f"stage {stage} is on rank {owner}; move the op there",
                    )
                where = of.get((op.kind, stage))
                if where is None:
                    where = of[op.kind, stage] = [-1] * num_micro_batches
                if where[m] >= 0:
                    _fail(
                        schedule,
                        rank,
                        i,
                        op,
                        f"it is there already, at step {steps[where[m]]}; once is enough",
                    )
                where[m] = len(steps)
                steps.append(i)
        step_of.append(tuple(steps))
    return Positions(of, tuple(step_of), num_micro_batches)


def check_complete(schedule: Schedule, at: Positions) -> None:
    """Each stage runs F and a whole backward, B or I and W but not both, for each micro-batch."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        rows = zip(*(at.all(kind, stage) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)), strict=True)
        for m, (forward, whole, gradient, weights) in enumerate(rows):
            if forward < 0:
                _miss(schedule, rank, Op(stage, Kind.F, m), "its forward")
            if whole >= 0 and (gradient >= 0 or weights >= 0):
                twice = Op(stage, Kind.I if gradient >= 0 else Kind.W, m)
                found = at.step_of[rank][gradient if gradient >= 0 else weights]
                text = f"{Op(stage, Kind.B, m)} does it already; a backward is B, or I and W"
                _fail(schedule, rank, found, twice, text)
            if whole < 0 and gradient < 0 and weights < 0:
                _miss(schedule, rank, Op(stage, Kind.B, m), "its backward")
            if whole < 0 and gradient < 0:
                _miss(schedule, rank, Op(stage, Kind.I, m), "the input half of its backward")
            if whole < 0 and weights < 0:
                _miss(schedule, rank, Op(stage, Kind.W, m), "the weight half of its backward")


def check_pairs(schedule: Schedule) -> None:
    """A pair is a forward and a backward (B or I)."""
    for rank, order in enumerate(schedule.orders):
        for i, step in enumerate(order):
            if isinstance(step, Pair):
                if step.forward.kind is not Kind.F:
                    _fail(
                        schedule, rank, i, step.forward, "the first half of a pair is a forward (F)"
                    )
                if step.backward.kind not in (Kind.B, Kind.I):
                    _fail(
                        schedule,
                        rank,
                        i,
                        step.backward,
                        "the second half of a pair is a backward (B or I)",
                    )


def check_precedence(schedule: Schedule, at: Positions) -> None:
    """F before I or B, I before W; RECV before its reader, SEND after what makes the message, FREE
    after the last reader: for the same stage and micro-batch, so on one rank."""
    for first, then in _PRECEDENCE:
        for stage, rank in enumerate(schedule.stage_to_rank):
            if (first, stage) not in at.of or (then, stage) not in at.of:
                continue
            for m, (a, b) in enumerate(zip(at.of[first, stage], at.of[then, stage], strict=True)):
                if 0 <= b < a:
                    text = (
                        f"it runs before {Op(stage, first, m)}, which it builds on; move it behind"
                    )
                    _fail(schedule, rank, at.step_of[rank][b], Op(stage, then, m), text)


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
    (Kind.OFFLOAD, Kind.RELOAD),
    (Kind.RELOAD, Kind.B),
    (Kind.RELOAD, Kind.I),
)


def check_accumulation(schedule: Schedule, at: Positions) -> None:
    """Each stage adds up its weight gradients (B, W) in ascending order of micro-batches, so that
    every order gives the same bits."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        whole, weights = at.all(Kind.B, stage), at.all(Kind.W, stage)
        latest = -1
        for m, position in enumerate(map(max, whole, weights)):
            if position < latest:
                op = Op(stage, Kind.B if whole[m] >= 0 else Kind.W, m)
                text = f"the weight gradient of micro-batch {m - 1} is added after it; swap the two"
                _fail(schedule, rank, at.step_of[rank][position], op, text)
            latest = position


def check_transfers(schedule: Schedule, at: Positions) -> None:
    """Each hop has one send and one receive for each micro-batch, and there are no others."""
    last = schedule.num_stages - 1
    wanted = {(Kind.SEND_F, s) for s in range(last)} | {(Kind.RECV_F, s + 1) for s in range(last)}
    wanted |= {(Kind.SEND_B, s + 1) for s in range(last)} | {(Kind.RECV_B, s) for s in range(last)}
    for kind in _TRANSFERS:
        for stage, rank in enumerate(schedule.stage_to_rank):
            for m, position in enumerate(at.all(kind, stage)):
                if position < 0 and (kind, stage) in wanted:
                    _miss(
                        schedule,
                        rank,
                        Op(stage, kind, m),
                        "a transfer that its neighbour counts on",
                    )
                if position >= 0 and (kind, stage) not in wanted:
                    text = f"stage {stage} has no neighbour on that side; leave it out"
                    _fail(schedule, rank, at.step_of[rank][position], Op(stage, kind, m), text)


def check_fifo(schedule: Schedule, at: Positions) -> None:
    """Each channel's receives are posted in the order in which its messages are sent."""
    for edge in edges(schedule):
        send, receive = _ends(edge)
        sent = _in_order(at.all(send, edge.src_stage))
        received = _in_order(at.all(receive, edge.dst_stage))
        for first, other in zip(sent, received, strict=True):
            if first != other:
                rank = schedule.stage_to_rank[edge.dst_stage]
                op = Op(edge.dst_stage, receive, other)
                text = f"the next message there is {Op(edge.src_stage, send, first)}; swap the receives"
                found = at.of[receive, edge.dst_stage][other]
                _fail(schedule, rank, at.step_of[rank][found], op, text)


def check_frees(schedule: Schedule, at: Positions) -> None:
    """Each receive buffer is freed once a micro-batch, and nothing else is."""
    last = schedule.num_stages - 1
    for kind in (Kind.FREE_F, Kind.FREE_B):
        for stage, rank in enumerate(schedule.stage_to_rank):
            receives = stage > 0 if kind is Kind.FREE_F else stage < last
            for m, position in enumerate(at.all(kind, stage)):
                if position < 0 and receives:
                    _miss(schedule, rank, Op(stage, kind, m), "without it the slot is lost")
                if position >= 0 and not receives:
                    text = f"stage {stage} receives nothing on that side; leave it out"
                    _fail(schedule, rank, at.step_of[rank][position], Op(stage, kind, m), text)


def check_slots(schedule: Schedule, at: Positions, slots: int | Mapping[Edge, int]) -> None:
    """A receive is posted only when a slot of its channel is free. Slots go round as a ring."""
    for edge in edges(schedule):
        num_slots = slots if isinstance(slots, int) else slots[edge]
        rank = schedule.stage_to_rank[edge.dst_stage]
        _, receive = _ends(edge)
        posted = at.all(receive, edge.dst_stage)
        freed = at.all(Kind.FREE_F if edge.kind == "F" else Kind.FREE_B, edge.dst_stage)
        sequence = _in_order(posted)
        for k in range(num_slots, len(sequence)):
            if freed[sequence[k - num_slots]] > posted[sequence[k]]:
                op = Op(edge.dst_stage, receive, sequence[k])
                text = (
                    f"all {num_slots} slots for {edge} are held, the oldest by micro-batch"
                    f" {sequence[k - num_slots]}; post it later or give the channel more"
                )
                _fail(schedule, rank, at.step_of[rank][posted[sequence[k]]], op, text)


def check_offload(schedule: Schedule, at: Positions) -> None:
    """What is moved to the host comes back, and only that."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        moves = zip(at.all(Kind.OFFLOAD, stage), at.all(Kind.RELOAD, stage), strict=True)
        for m, (out, back) in enumerate(moves):
            if (out < 0) != (back < 0):
                kind = Kind.OFFLOAD if back < 0 else Kind.RELOAD
                other = Op(stage, Kind.RELOAD if back < 0 else Kind.OFFLOAD, m)
                found = at.step_of[rank][max(out, back)]
                _fail(schedule, rank, found, Op(stage, kind, m), f"{other} is missing; add it")


def check_in_flight(schedule: Schedule, max_in_flight: int | Sequence[int]) -> None:
    """No rank ever holds more chunk activations than it may."""
    for rank, order in enumerate(schedule.orders):
        cap = max_in_flight if isinstance(max_in_flight, int) else max_in_flight[rank]
        held = 0
        for i, step in enumerate(order):
            for op in ops_of(step):
                held += (op.kind is Kind.F) - (op.kind is Kind.B or op.kind is Kind.W)
                if held > cap:
                    text = f"with it {held} activations are in flight, {cap} may be; run a backward first"
                    _fail(schedule, rank, i, op, text)


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
    if slots is None or stalled(schedule, fuse_pairs=fuse_pairs):
        _hangs(schedule, waits, "move one of these ops")
    number = f"{slots} slots" if isinstance(slots, int) else "these slots"
    _hangs(schedule, waits, f"{number} a channel are too few; {slots_needed(schedule)} are enough")


def _hangs(schedule: Schedule, waits: Sequence[Wait], remedy: str) -> NoReturn:
    by_rank = {wait.rank: wait for wait in waits}
    seen: list[Wait] = []
    wait = waits[0]
    while wait not in seen:
        seen.append(wait)
        if wait.peer not in by_rank:
            text = f"rank {wait.rank} waits at {wait.op} for {wait.awaited}, which rank {wait.peer} never runs"
            raise ScheduleError(_with_grid(schedule, wait.rank, wait.step, f"{text}; {remedy}"))
        wait = by_rank[wait.peer]
    cycle = seen[seen.index(wait) :]
    if len(cycle) == 1 and not _runs(schedule, wait.peer, wait.awaited):
        text = f"rank {wait.rank} waits at {wait.op} for {wait.awaited}, which rank {wait.peer} never runs"
    else:
        text = ", ".join(_phrase(w) for w in cycle) + ": a cycle of waits"
    raise ScheduleError(_with_grid(schedule, wait.rank, wait.step, f"{text}; {remedy}"))


def _phrase(wait: Wait) -> str:
    reason = "for a slot, given back by" if wait.for_slot else "for"
    return f"rank {wait.rank} waits at {wait.op} {reason} {wait.awaited} on rank {wait.peer}"


def _runs(schedule: Schedule, rank: int, op: Op) -> bool:
    return op in schedule.ops(rank)


def _ends(edge: Edge) -> tuple[Kind, Kind]:
    return (Kind.SEND_F, Kind.RECV_F) if edge.kind == "F" else (Kind.SEND_B, Kind.RECV_B)


def _in_order(positions: Sequence[int]) -> list[int]:
    """The micro-batches sorted by position."""
    return sorted(range(len(positions)), key=positions.__getitem__)


def _miss(schedule: Schedule, rank: int, op: Op, what: str) -> NoReturn:
    raise ScheduleError(
        _with_grid(schedule, rank, None, f"rank {rank} never runs {op}, {what}; add it")
    )


def _fail(schedule: Schedule, rank: int, step: int, op: Op, text: str) -> NoReturn:
    raise ScheduleError(_with_grid(schedule, rank, step, f"rank {rank}, step {step}, {op}: {text}"))


def _with_grid(schedule: Schedule, rank: int, step: int | None, text: str) -> str:
    mark = None if step is None else (rank, step)
    return f"{text}\n{schedule.name}:\n{grid(schedule, mark)}"

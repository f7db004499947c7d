"""A simulated step: what happened in it, and what follows from that.

`simulator` writes a `History` while it plays an order; `step_of` reads it: where each rank's time
went, what it held, and the chain of waits that the step is as long as.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from ppruntime.schedules.costs import StageBytes
from ppruntime.schedules.machine import Machine
from ppruntime.schedules.ops import Kind, Op, Schedule
from ppruntime.schedules.timeline import MemoryPoint, TimedOp

Key: TypeAlias = tuple[int, bool, int]
"""An input: the stage that reads it, whether it is a forward's, the micro-batch."""


class Lost(NamedTuple):
    """Where a rank's time of one step went beside work as costed; with that it adds up to the
    pipeline's makespan."""

    fill: float
    """Before its first op."""
    drain: float
    """After its last op."""
    dependency: float
    """Between ops: the input was not made yet."""
    transfer: float
    """Between ops: the input was on its way, or in the queue of its link."""
    host: float
    """Between ops: activations were not back from the host."""
    noise: float
    """Ops took longer than they cost: jitter, stragglers, stalls. Negative where noise helped."""
    interference: float
    """Ops took longer because messages moved."""


class Leg(NamedTuple):
    """A piece of the critical path. `cause` is compute, transfer or host."""

    op: Op
    rank: int
    start: float
    finish: float
    cause: str


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step. Times are seconds from the first op's start."""

    schedule: Schedule
    rows: tuple[tuple[TimedOp, ...], ...]
    transfers: tuple[TimedOp, ...]
    """Messages between ranks: first byte leaving to arrived, by sender."""
    host_copies: tuple[TimedOp, ...]
    work: tuple[float, ...]
    """Per rank: what its ops cost."""
    lost: tuple[Lost, ...]
    makespan: float
    """The pipeline: first start to last finish."""
    seconds: float
    """The step: with the gradients' reduction, what comes together, and the gather."""
    exposed_reduce: float
    """Of the step: reduction that no rank's work hides."""
    memory: tuple[tuple[MemoryPoint, ...], ...]
    """Bytes per rank over time; empty unless the machine has stage bytes."""
    critical_path: tuple[Leg, ...]
    """The chain that the makespan is the length of."""

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        return tuple(max((p.bytes_held for p in points), default=0.0) for points in self.memory)

    @property
    def busiest(self) -> int:
        """The rank with the most work."""
        return self.work.index(max(self.work))


@dataclass(slots=True)
class Done:
    """A compute op that ran."""

    op: Op
    start: float
    finish: float
    base: float
    """What it costs."""
    drawn: float
    """What it would have taken with noise alone; interference makes the rest."""
    cause: Message | Copy | None
    """What it waited for: the rank's op before (None), a message or a reload."""


@dataclass(slots=True)
class Message:
    """A boundary between two ranks."""

    op: Op
    src: int
    dst: int
    key: Key
    source: int
    """Which of the sender's ops made it."""
    made: float
    """When that op ended."""
    start: float
    left: float
    arrive: float
    before: Message | None
    """The one that it waited for in the link's queue."""


@dataclass(slots=True)
class Copy:
    """A host copy."""

    op: Op
    rank: int
    source: int
    """Which of the rank's ops it was issued behind."""
    issued: float
    start: float
    finish: float
    before: Copy | None
    """The one that it waited for in its direction."""


@dataclass(slots=True)
class History:
    """All that ran in a step, in the order of its beginning."""

    done: list[list[Done]]
    """Per rank."""
    messages: list[Message] = field(default_factory=list)
    copies: dict[tuple[Kind, int, int], Copy] = field(default_factory=dict)
    """By kind, stage and micro-batch."""
    freed: dict[tuple[int, int], float] = field(default_factory=dict)
    """When OFFLOADED gave the memory of a (stage, micro-batch) back."""


def step_of(history: History, schedule: Schedule, machine: Machine) -> SimulatedStep:
    """What a step that has run to its end was like."""
    rows = tuple(
        tuple(TimedOp(d.op, rank, d.start, d.finish) for d in row)
        for rank, row in enumerate(history.done)
    )
    ends = [row[-1].finish if row else 0.0 for row in rows]
    makespan = max(ends, default=0.0)
    end = machine.end
    reduce = end.reduce or (0.0,) * len(rows)
    reduced = max((e + r for e, r in zip(ends, reduce, strict=True)), default=0.0)
    exposed = max(0.0, reduced - makespan)
    return SimulatedStep(
        schedule=schedule,
        rows=rows,
        transfers=tuple(TimedOp(m.op, m.src, m.start, m.arrive) for m in history.messages),
        host_copies=tuple(
            TimedOp(c.op, c.rank, c.start, c.finish) for c in history.copies.values()
        ),
        work=tuple(sum(d.base for d in row) for row in history.done),
        lost=tuple(_lost(row, makespan) for row in history.done),
        makespan=makespan,
        seconds=makespan + exposed + end.together + max(end.gather, default=0.0),
        exposed_reduce=exposed,
        memory=tuple(
            tuple(_memory(history, rank, machine.stage_bytes)) if machine.stage_bytes else ()
            for rank in range(len(rows))
        ),
        critical_path=tuple(reversed(list(_path(history, ends)))),
    )


def _lost(row: list[Done], makespan: float) -> Lost:
    if not row:
        return Lost(makespan, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    dependency = transfer = host = 0.0
    for before, done in pairwise(row):
        gap, cause = done.start - before.finish, done.cause
        if isinstance(cause, Copy):
            host += gap
        elif isinstance(cause, Message):
            waited = min(gap, max(0.0, cause.made - before.finish))
            dependency += waited
            transfer += gap - waited
        else:
            dependency += gap
    return Lost(
        fill=row[0].start,
        drain=makespan - row[-1].finish,
        dependency=dependency,
        transfer=transfer,
        host=host,
        noise=sum(d.drawn - d.base for d in row),
        interference=sum(d.finish - d.start - d.drawn for d in row),
    )


def _memory(history: History, rank: int, sizes: StageBytes) -> Iterator[MemoryPoint]:
    changes: list[tuple[float, float]] = []
    for done in history.done[rank]:
        activation = sizes.activation[done.op.stage]
        operands = sizes.weight_grad_operands[done.op.stage]
        match done.op.kind:
            case Kind.F:
                changes.append((done.start, activation))
            case Kind.B:
                changes.append((done.finish, -activation))
            case Kind.I:
                changes.append((done.finish, operands - activation))
            case _:
                changes.append((done.finish, -operands))
    for copy in history.copies.values():
        if copy.rank == rank:
            size = sizes.activation[copy.op.stage]
            if copy.op.kind is Kind.OFFLOAD:  # free when OFFLOADED says so, or the copy's end
                place = (copy.op.stage, copy.op.micro_batch)
                changes.append((history.freed.get(place, copy.finish), -size))
            else:  # and taken when the first one is to come
                changes.append((copy.start, size))
    held = sizes.base[rank] if sizes.base else 0.0
    yield MemoryPoint(0.0, held)
    for time, amount in sorted(changes):  # what goes at a moment goes before what comes
        held += amount
        yield MemoryPoint(time, held)


def _path(history: History, ends: list[float]) -> Iterator[Leg]:
    """Back from the last finish: through what each op waited for."""
    if not any(history.done):
        return
    rank = max(range(len(ends)), key=lambda r: ends[r])
    index = len(history.done[rank]) - 1
    while index >= 0:
        done = history.done[rank][index]
        yield Leg(done.op, rank, done.start, done.finish, "compute")
        cause = done.cause
        if cause is None:
            index -= 1
        elif isinstance(cause, Message):
            message = cause
            yield Leg(message.op, message.src, message.start, message.arrive, "transfer")
            while message.before is not None:
                message = message.before
                yield Leg(message.op, message.src, message.start, message.left, "transfer")
            rank, index = message.src, message.source
        else:
            copy = cause
            yield Leg(copy.op, rank, copy.start, copy.finish, "host")
            while copy.before is not None and copy.before.finish == copy.start:
                copy = copy.before
                yield Leg(copy.op, rank, copy.start, copy.finish, "host")
            if copy.op.kind is Kind.RELOAD and copy.start > copy.issued:
                copy = history.copies[Kind.OFFLOAD, copy.op.stage, copy.op.micro_batch]
                yield Leg(copy.op, rank, copy.start, copy.finish, "host")
            index = copy.source

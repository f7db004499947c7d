"""When each op of an order runs, and what that says about bubbles and memory.

The model is an executor that runs its rank's entries in order, waits only for an op's own inputs,
never blocks on a send, and has buffers enough (`check` says how many slots an order needs). Times
are in the unit of the costs. `virtual_time` plays the order, this module explains what came out;
there is no other place that turns an order and costs into times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppruntime.schedules.costs import Costs, Hops, StageBytes
from ppruntime.schedules.counts import peak_in_flight
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Schedule, ScheduleError
from ppruntime.schedules.virtual_time import Need, Run, Task, noise_factors


class TimedOp(NamedTuple):
    """An op with its start and finish. A transfer is the sender's SEND_F or SEND_B."""

    op: Op
    rank: int
    start: float
    finish: float


class Idle(NamedTuple):
    """Where a rank's idle time of one step went; the four add up to makespan - busy time."""

    fill: float
    """Before its first op."""
    drain: float
    """After its last op."""
    dependency: float
    """Between ops: the input was not made yet."""
    transfer: float
    """Between ops: the input was on its way."""

    @property
    def total(self) -> float:
        return self.fill + self.drain + self.dependency + self.transfer


class MemoryPoint(NamedTuple):
    """From `time` on, a rank holds `bytes_held` bytes, until its next point."""

    time: float
    bytes_held: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a schedule in time. `rows[r]` are rank r's compute ops in order of start."""

    schedule: Schedule
    rows: tuple[tuple[TimedOp, ...], ...]
    busy: tuple[float, ...]
    """Time each rank computes (with jitter and with the gain of fused pairs)."""
    idle: tuple[Idle, ...]
    makespan: float
    """First start (time 0) to last finish over all ranks."""
    span: float
    """Longest time from a rank's own first start to its own last finish."""
    peak_in_flight: tuple[int, ...]
    """Most chunk activations each rank holds: +1 at F, -1 at B, or at W where B is split."""
    peak_bytes: tuple[float, ...]
    """Zeros unless bytes were given."""
    memory: tuple[tuple[MemoryPoint, ...], ...]
    """Bytes each rank holds over time; empty unless bytes were given."""
    transfers: tuple[TimedOp, ...]
    """Every message between two ranks, by receiving rank: made (or sent) to arrived."""
    critical_path: tuple[TimedOp, ...]
    """The chain of ops and transfers, without a gap, that the makespan is the length of."""

    @property
    def makespan_bubble(self) -> float:
        """Step time beyond the busiest rank's work, if every step ends at a barrier."""
        return self.makespan - max(self.busy)

    @property
    def span_bubble(self) -> float:
        """Step time beyond the busiest rank's work, if steps chain without a barrier."""
        return self.span - max(self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The makespan bubble as a share of the makespan, 0 to 1."""
        return self.makespan_bubble / self.makespan if self.makespan else 0.0


def simulate(
    schedule: Schedule,
    costs: Costs,
    hops: Hops | None = None,
    *,
    fuse_pairs: bool = False,
    overlap_gain: float = 1.0,
    paired: Costs | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    stage_bytes: StageBytes | None = None,
) -> Timeline:
    """Runs `schedule`, compute-only or lowered, in virtual time.

    A lowered order's transfers start at its SEND entries, else when the op that made the data ends;
    no entry but compute takes time. `fuse_pairs` makes every Pair a barrier: both halves start once
    both inputs are there, and take `overlap_gain` x (forward + backward). With `paired`, the costs
    of ops in pairs, halves run beside each other (`lanes`): each starts once its own input is
    there, and what follows waits for both. `jitter` is the relative standard deviation of op times,
    drawn from `seed` per op, so orders can be compared under it.

    Raises ScheduleError with the cycle of waits if the order cannot finish.
    """
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"costs are for {costs.num_stages} stages, schedule {schedule.name!r} has "
            f"{schedule.num_stages}; give one triple per stage"
        )
    if fuse_pairs and paired is not None:
        raise ScheduleError("pairs are fused, or their halves run beside each other; give one")
    if not 0 <= jitter < float("inf") or not 0 < overlap_gain < float("inf"):
        raise ScheduleError(
            f"jitter is {jitter} and overlap_gain {overlap_gain}; jitter is a share from 0 up, the "
            "gain a factor above 0"
        )
    noise = noise_factors(schedule, jitter, seed)
    run = Run(schedule, costs, hops or Hops(), fuse_pairs, overlap_gain, noise, paired)
    return _timeline(run, stage_bytes)


def _timeline(run: Run, stage_bytes: StageBytes | None) -> Timeline:
    in_time = [_in_time(run, rank) for rank in range(len(run.tasks))]
    rows = tuple(
        tuple(
            TimedOp(op, rank, start, finish)
            for task, start, finish, _ in played
            for op in task.ops
            if op.kind in COMPUTE
        )
        for rank, played in enumerate(in_time)
    )
    makespan = max((finish for row in run.finishes for finish in row), default=0.0)
    first = [row[0].start if row else 0.0 for row in rows]
    last = [max((timed.finish for timed in row), default=0.0) for row in rows]
    memory = tuple(
        _memory(run, rank, stage_bytes) if stage_bytes else () for rank in range(len(rows))
    )
    return Timeline(
        schedule=run.schedule,
        rows=rows,
        busy=tuple(map(_busy, in_time)),
        idle=tuple(_idle(run, played, makespan) for played in in_time),
        makespan=makespan,
        span=max((b - a for a, b in zip(first, last, strict=True)), default=0.0),
        peak_in_flight=peak_in_flight(run.schedule),
        peak_bytes=tuple(max((p.bytes_held for p in points), default=0.0) for points in memory),
        memory=memory,
        transfers=tuple(_transfers(run)),
        critical_path=_critical_path(run),
    )


class _Played(NamedTuple):
    """A task that has run, and the input that held it up."""

    task: Task
    start: float
    finish: float
    cause: Need | None


def _in_time(run: Run, rank: int) -> list[_Played]:
    """A rank's tasks by their starts. They start in the rank's order, except that a pair's backward
    may run beside its forward and start before it."""
    columns = run.tasks[rank], run.starts[rank], run.finishes[rank], run.late[rank]
    played = [_Played(*one) for one in zip(*columns, strict=True)]
    if any(task.beside for task in run.tasks[rank]):
        played.sort(key=lambda one: one.start)
    return played


def _busy(played: Sequence[_Played]) -> float:
    """Time in which a task runs, one or two."""
    if not any(one.task.beside for one in played):
        return sum(one.task.duration for one in played)
    total = now = 0.0
    for one in played:
        total += max(0.0, one.finish - max(now, one.start))
        now = max(now, one.finish)
    return total


def _idle(run: Run, played: Sequence[_Played], makespan: float) -> Idle:
    dependency = transfer = fill = now = 0.0
    begun = False
    for task, start, finish, cause in played:
        if not begun:
            fill = start
            begun = task.duration > 0 or task.ops[0].kind in COMPUTE
        elif start > now and cause is not None:
            made = run.done[cause.key]
            assert made is not None, f"{task.ops[0]} ran before its input"
            dependency += max(0.0, made - now)
            transfer += start - max(now, made)
        now = max(now, finish)
    if not begun:
        return Idle(makespan, 0.0, 0.0, 0.0)
    return Idle(fill, makespan - now, dependency, transfer)


def _critical_path(run: Run) -> tuple[TimedOp, ...]:
    """Walks back from the last finish: to the late input if there was one, else to the task before
    on the same rank."""
    place = {
        run.key(op): (rank, index)
        for rank, tasks in enumerate(run.tasks)
        for index, task in enumerate(tasks)
        for op in task.ops
    }
    ends = [(max(row), -rank) for rank, row in enumerate(run.finishes) if row]
    if not ends:
        return ()
    rank = -max(ends)[1]
    index = _later_of(run, rank, len(run.tasks[rank]) - 1)
    path: list[TimedOp] = []
    while index >= 0:
        task, start = run.tasks[rank][index], run.starts[rank][index]
        finish = run.finishes[rank][index]
        path.extend(
            TimedOp(op, rank, start, finish) for op in reversed(task.ops) if op.kind in COMPUTE
        )
        cause = run.late[rank][index]
        if cause is None:
            before = index - 1 - run.tasks[rank][index].beside
            index = _later_of(run, rank, before) if before >= 0 else -1
            continue
        rank, index = place[cause.key]
        if cause.latency:
            path.append(TimedOp(_message(run, cause.key), rank, start - cause.latency, start))
    return tuple(reversed(path))


def _later_of(run: Run, rank: int, index: int) -> int:
    """The task, or the one that it runs beside if that ends later."""
    if not run.tasks[rank][index].beside:
        return index
    return max(index, index - 1, key=run.finishes[rank].__getitem__)


def _transfers(run: Run) -> Iterator[TimedOp]:
    ranks = run.schedule.stage_to_rank
    for rank, tasks in enumerate(run.tasks):
        for need in (need for task in tasks for need in task.needs):
            message = _message(run, need.key)
            source, made = ranks[message.stage], run.done[need.key]
            if source != rank and made is not None:
                yield TimedOp(message, source, made, made + need.latency)


def _message(run: Run, key: int) -> Op:
    """The send that carries a result."""
    maker = run.maker(key)
    forward = maker.kind is Kind.F or maker.kind is Kind.SEND_F
    return Op(maker.stage, Kind.SEND_F if forward else Kind.SEND_B, maker.micro_batch)


def _memory(run: Run, rank: int, stage_bytes: StageBytes) -> tuple[MemoryPoint, ...]:
    """Bytes over time. What moves to the host counts until OFFLOADED and from RELOAD on."""
    assert not any(task.beside for task in run.tasks[rank]), "bytes are counted one op at a time"
    held = stage_bytes.base[rank] if stage_bytes.base else 0.0
    points = [MemoryPoint(0.0, held)]

    def change(time: float, amount: float) -> None:
        nonlocal held
        held += amount
        points.append(MemoryPoint(time, held))

    for task, start, finish in zip(
        run.tasks[rank], run.starts[rank], run.finishes[rank], strict=True
    ):
        for op in task.ops:
            activation = stage_bytes.activation[op.stage]
            operands = stage_bytes.weight_grad_operands[op.stage]
            if op.kind is Kind.F:
                change(start, activation)
            elif op.kind is Kind.B:
                change(finish, -activation)
            elif op.kind is Kind.I:
                change(finish, operands - activation)
            elif op.kind is Kind.W:
                change(finish, -operands)
            elif op.kind is Kind.OFFLOADED:
                change(start, -activation)
            elif op.kind is Kind.RELOAD:
                change(start, activation)
    return tuple(points)

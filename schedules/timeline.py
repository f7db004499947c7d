"""When each op of an order runs: an event simulation, and what it says about bubbles and memory.

The model is an executor that runs its rank's entries in order, waits only for an op's own inputs,
never blocks on a send, and has buffers enough (`check` says how many slots an order needs). Times
are in the unit of the costs. This is the only place that turns an order and costs into times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from ppruntime.schedules.costs import Costs, Hops, StageBytes
from ppruntime.schedules.counts import peak_in_flight
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Pair, Schedule, ScheduleError, ops_of


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


class _Need(NamedTuple):
    """An input of a task: the slot of `_Run.done` that says when it was made, and its latency."""

    key: int
    latency: float


class _Task(NamedTuple):
    """What starts and ends as a whole: one op, or a fused pair."""

    ops: tuple[Op, ...]
    needs: tuple[_Need, ...]
    duration: float


_CODE = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2, Kind.SEND_F: 3, Kind.SEND_B: 4}
_FORWARD_CODES = (_CODE[Kind.F], _CODE[Kind.SEND_F])
_NUM_CODES = 5


def simulate(
    schedule: Schedule,
    costs: Costs,
    hops: Hops | None = None,
    *,
    fuse_pairs: bool = False,
    overlap_gain: float = 1.0,
    jitter: float = 0.0,
    seed: int = 0,
    stage_bytes: StageBytes | None = None,
) -> Timeline:
    """Runs `schedule`, compute-only or lowered, in virtual time.

    A lowered order's transfers start at its SEND entries, else when the op that made the data ends;
    no entry but compute takes time. `fuse_pairs` makes every Pair a barrier: both halves start once
    both inputs are there, and take `overlap_gain` x (forward + backward). `jitter` is the relative
    standard deviation of op times, drawn from `seed` per op, so orders can be compared under it.

    Raises ScheduleError with the cycle of waits if the order cannot finish.
    """
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"costs are for {costs.num_stages} stages, schedule {schedule.name!r} has "
            f"{schedule.num_stages}; give one triple per stage"
        )
    run = _Run(
        schedule, costs, hops or Hops(), fuse_pairs, overlap_gain, _noise(schedule, jitter, seed)
    )
    run.play()
    return run.timeline(stage_bytes)


def _noise(schedule: Schedule, jitter: float, seed: int) -> list[float]:
    """A factor per (stage, micro-batch, F | I or B | W), the same for every order; empty: none."""
    if not jitter:
        return []
    draw = random.Random(seed).gauss
    count = schedule.num_stages * schedule.num_micro_batches * 3
    return [max(0.0, draw(1.0, jitter)) for _ in range(count)]


class _Run:
    """One simulation. `done[key]` is when an op's result exists, None until then."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        hops: Hops,
        fuse_pairs: bool,
        overlap_gain: float,
        noise: list[float],
    ) -> None:
        self.schedule = schedule
        self.costs = costs
        self.forward_latency, self.backward_latency = hops.per_stage_hop(schedule.stage_to_rank)
        self.noise = noise
        lowered = any(
            op.kind is Kind.SEND_F or op.kind is Kind.SEND_B
            for rank in range(schedule.num_ranks)
            for op in schedule.ops(rank)
        )
        self.sent_forward = _CODE[Kind.SEND_F if lowered else Kind.F]
        self.sent_backward = _CODE[Kind.SEND_B if lowered else Kind.I]
        self.tasks = [
            [
                task
                for step in order
                for task in self._tasks_of(step, rank, fuse_pairs, overlap_gain)
            ]
            for rank, order in enumerate(schedule.orders)
        ]
        size = schedule.num_stages * schedule.num_micro_batches * _NUM_CODES
        self.done: list[float | None] = [None] * size
        self.starts: list[list[float]] = [[] for _ in self.tasks]
        self.finishes: list[list[float]] = [[] for _ in self.tasks]
        self.late: list[list[_Need | None]] = [[] for _ in self.tasks]
        """Per task the input that held it up, None if it started right after the task before."""

    def _key(self, stage: int, code: int, micro_batch: int) -> int:
        return (stage * self.schedule.num_micro_batches + micro_batch) * _NUM_CODES + code

    def _op_of_key(self, key: int) -> Op:
        place, code = divmod(key, _NUM_CODES)
        stage, micro_batch = divmod(place, self.schedule.num_micro_batches)
        kind = (Kind.F, Kind.I, Kind.W, Kind.SEND_F, Kind.SEND_B)[code]
        if kind is Kind.I:  # I or B, whichever the schedule runs
            whole = Op(stage, Kind.B, micro_batch)
            rank = self.schedule.stage_to_rank[stage]
            kind = Kind.B if whole in self.schedule.ops(rank) else Kind.I
        return Op(stage, kind, micro_batch)

    def _tasks_of(
        self, step: Op | Pair, rank: int, fuse_pairs: bool, overlap_gain: float
    ) -> list[_Task]:
        ops = ops_of(step)
        tasks = [_Task((op,), self._needs(op, rank), self._duration(op)) for op in ops]
        if len(tasks) == 1 or not fuse_pairs:
            return tasks
        needs = tuple(need for task in tasks for need in task.needs)
        return [_Task(ops, needs, overlap_gain * sum(task.duration for task in tasks))]

    def _duration(self, op: Op) -> float:
        if op.kind not in COMPUTE:
            return 0.0
        duration = self.costs.of(op)
        if not self.noise:
            return duration
        place = op.stage * self.schedule.num_micro_batches + op.micro_batch
        return duration * self.noise[3 * place + _CODE[op.kind]]

    def _needs(self, op: Op, rank: int) -> tuple[_Need, ...]:
        """What has to exist before `op` runs: the dataflow, implied by the stages alone."""
        stage, kind, micro_batch = op.stage, op.kind, op.micro_batch
        schedule = self.schedule
        if not (0 <= stage < schedule.num_stages and 0 <= micro_batch < schedule.num_micro_batches):
            raise ScheduleError(
                f"rank {rank} runs {op}, but the schedule has {schedule.num_stages} stages and "
                f"{schedule.num_micro_batches} micro-batches"
            )
        ranks = schedule.stage_to_rank
        needs = []
        if kind is Kind.F:
            if stage > 0:
                local = ranks[stage - 1] == rank
                code = _CODE[Kind.F] if local else self.sent_forward
                key = self._key(stage - 1, code, micro_batch)
                needs.append(_Need(key, self.forward_latency[stage - 1]))
        elif kind is Kind.I or kind is Kind.B:
            needs.append(_Need(self._key(stage, _CODE[Kind.F], micro_batch), 0.0))
            if stage < schedule.num_stages - 1:
                local = ranks[stage + 1] == rank
                code = _CODE[Kind.I] if local else self.sent_backward
                key = self._key(stage + 1, code, micro_batch)
                needs.append(_Need(key, self.backward_latency[stage]))
        elif kind is Kind.W or kind is Kind.SEND_B:
            needs.append(_Need(self._key(stage, _CODE[Kind.I], micro_batch), 0.0))
        elif kind is Kind.SEND_F:
            needs.append(_Need(self._key(stage, _CODE[Kind.F], micro_batch), 0.0))
        return tuple(needs)

    def play(self) -> None:
        """Runs every rank as far as its inputs allow, waking the ranks that waited for a result."""
        waiting: dict[int, list[int]] = {}
        clock = [0.0] * len(self.tasks)
        runnable = list(range(len(self.tasks)))
        while runnable:
            rank = runnable.pop()
            self._advance(rank, clock, waiting, runnable)
        if any(len(done) < len(tasks) for done, tasks in zip(self.starts, self.tasks, strict=True)):
            self._raise_deadlock()

    def _advance(
        self, rank: int, clock: list[float], waiting: dict[int, list[int]], runnable: list[int]
    ) -> None:
        done, tasks = self.done, self.tasks[rank]
        starts, finishes, late = self.starts[rank], self.finishes[rank], self.late[rank]
        now = clock[rank]
        for index in range(len(starts), len(tasks)):
            ops, needs, duration = tasks[index]
            start, cause = now, None
            for need in needs:
                made = done[need.key]
                if made is None:
                    clock[rank] = now
                    waiting.setdefault(need.key, []).append(rank)
                    return
                if made + need.latency > start:
                    start, cause = made + need.latency, need
            now = start + duration
            starts.append(start)
            finishes.append(now)
            late.append(cause)
            for op in ops:
                code = _CODE.get(op.kind)
                if code is not None:
                    key = self._key(op.stage, code, op.micro_batch)
                    done[key] = now
                    runnable.extend(waiting.pop(key, ()))
        clock[rank] = now

    def _raise_deadlock(self) -> NoReturn:
        """Follows the waits from rank to rank until they close or end at an op nobody runs."""
        waits: list[str] = []
        seen: dict[int, int] = {}
        rank = next(r for r, tasks in enumerate(self.tasks) if len(self.starts[r]) < len(tasks))
        while rank not in seen:
            seen[rank] = len(waits)
            task = self.tasks[rank][len(self.starts[rank])]
            key = next(need.key for need in task.needs if self.done[need.key] is None)
            op, needed = task.ops[0], self._op_of_key(key)
            owner = self.schedule.stage_to_rank[needed.stage]
            waits.append(f"rank {rank} waits at {op} for {needed}")
            if needed not in self.schedule.ops(owner):
                raise ScheduleError(
                    f"schedule {self.schedule.name!r} cannot finish: {waits[-1]}, "
                    f"which rank {owner} never runs"
                )
            rank = owner
        cycle = ", ".join(waits[seen[rank] :])
        raise ScheduleError(
            f"schedule {self.schedule.name!r} deadlocks: {cycle}; "
            "each waits for an op that its rank has further down; move one of these up"
        )

    def timeline(self, stage_bytes: StageBytes | None) -> Timeline:
        rows = tuple(
            tuple(
                TimedOp(op, rank, start, finish)
                for task, start, finish in zip(
                    tasks, self.starts[rank], self.finishes[rank], strict=True
                )
                for op in task.ops
                if op.kind in COMPUTE
            )
            for rank, tasks in enumerate(self.tasks)
        )
        makespan = max((finish for row in self.finishes for finish in row), default=0.0)
        first = [row[0].start if row else 0.0 for row in rows]
        last = [row[-1].finish if row else 0.0 for row in rows]
        memory = tuple(
            self._memory(rank, stage_bytes) if stage_bytes else () for rank in range(len(rows))
        )
        return Timeline(
            schedule=self.schedule,
            rows=rows,
            busy=tuple(sum(task.duration for task in tasks) for tasks in self.tasks),
            idle=tuple(self._idle(rank, makespan) for rank in range(len(rows))),
            makespan=makespan,
            span=max((b - a for a, b in zip(first, last, strict=True)), default=0.0),
            peak_in_flight=peak_in_flight(self.schedule),
            peak_bytes=tuple(max((p.bytes_held for p in points), default=0.0) for points in memory),
            memory=memory,
            transfers=tuple(self._transfers()),
            critical_path=self._critical_path(),
        )

    def _idle(self, rank: int, makespan: float) -> Idle:
        dependency = transfer = fill = now = 0.0
        begun = False
        for task, start, finish, cause in zip(
            self.tasks[rank], self.starts[rank], self.finishes[rank], self.late[rank], strict=True
        ):
            if not begun:
                fill = start
                begun = task.duration > 0 or task.ops[0].kind in COMPUTE
            elif start > now and cause is not None:
                made = self.done[cause.key]
                assert made is not None, f"{task.ops[0]} ran before its input"
                dependency += max(0.0, made - now)
                transfer += start - max(now, made)
            now = finish
        if not begun:
            return Idle(makespan, 0.0, 0.0, 0.0)
        return Idle(fill, makespan - now, dependency, transfer)

    def _critical_path(self) -> tuple[TimedOp, ...]:
        """Walks back from the last finish: to the late input if there was one, else to the task
        before on the same rank."""
        place = {
            self._key(op.stage, _CODE[op.kind], op.micro_batch): (rank, index)
            for rank, tasks in enumerate(self.tasks)
            for index, task in enumerate(tasks)
            for op in task.ops
            if op.kind in _CODE
        }
        ends = [(row[-1], rank) for rank, row in enumerate(self.finishes) if row]
        if not ends:
            return ()
        rank = max(ends, key=lambda end: (end[0], -end[1]))[1]
        index = len(self.tasks[rank]) - 1
        path: list[TimedOp] = []
        while index >= 0:
            task, start = self.tasks[rank][index], self.starts[rank][index]
            finish = self.finishes[rank][index]
            path.extend(
                TimedOp(op, rank, start, finish) for op in reversed(task.ops) if op.kind in COMPUTE
            )
            cause = self.late[rank][index]
            if cause is None:
                index -= 1
                continue
            source = self._op_of_key(cause.key)
            rank, index = place[cause.key]
            if cause.latency:
                kind = Kind.SEND_F if cause.key % _NUM_CODES in _FORWARD_CODES else Kind.SEND_B
                message = Op(source.stage, kind, source.micro_batch)
                path.append(TimedOp(message, rank, start - cause.latency, start))
        return tuple(reversed(path))

    def _transfers(self) -> Iterator[TimedOp]:
        ranks = self.schedule.stage_to_rank
        for rank, tasks in enumerate(self.tasks):
            for need in (need for task in tasks for need in task.needs):
                place, code = divmod(need.key, _NUM_CODES)
                stage, micro_batch = divmod(place, self.schedule.num_micro_batches)
                made = self.done[need.key]
                if ranks[stage] != rank and made is not None:
                    kind = Kind.SEND_F if code in _FORWARD_CODES else Kind.SEND_B
                    message = Op(stage, kind, micro_batch)
                    yield TimedOp(message, ranks[stage], made, made + need.latency)

    def _memory(self, rank: int, stage_bytes: StageBytes) -> tuple[MemoryPoint, ...]:
        """Bytes over time. Host copies (OFFLOAD, RELOAD) count at the time of their entry."""
        held = stage_bytes.base[rank] if stage_bytes.base else 0.0
        points = [MemoryPoint(0.0, held)]

        def change(time: float, amount: float) -> None:
            nonlocal held
            held += amount
            points.append(MemoryPoint(time, held))

        for task, start, finish in zip(
            self.tasks[rank], self.starts[rank], self.finishes[rank], strict=True
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
                elif op.kind is Kind.OFFLOAD:
                    change(start, -activation)
                elif op.kind is Kind.RELOAD:
                    change(start, activation)
        return tuple(points)

"""Runs an order in virtual time: when each entry starts and ends, and what held it up.

A rank takes its entries in order. An entry starts when the one before it has ended and its inputs
are there; only compute takes time; a send blocks nobody. The halves of a pair may run beside each
other, each once its own input is there. The forward is played first: in an order that ends with its
pairs taken apart its input never depends on the backward. Since orders are fixed, ranks can be
played one after another, each as far as its inputs go, and no event queue is needed.
"""

from __future__ import annotations

import random
from typing import NamedTuple, NoReturn

from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Schedule, ScheduleError, Step, ops_of


class Need(NamedTuple):
    """An input of a task: `Run.done[key]` says when it was made; it arrives `latency` later."""

    key: int
    latency: float


class Task(NamedTuple):
    """What starts and ends as a whole: one op, or a fused pair."""

    ops: tuple[Op, ...]
    needs: tuple[Need, ...]
    duration: float
    beside: bool = False
    """It runs beside the task before it: it waits for what came before that one, and what follows
    waits for both."""


_CODE = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2, Kind.SEND_F: 3, Kind.SEND_B: 4}
_KINDS = (Kind.F, Kind.I, Kind.W, Kind.SEND_F, Kind.SEND_B)
"""What a result is made by, per code; I stands for B as well."""


class Run:
    """One order, played to its end by the constructor; lists are per rank and task.

    Raises ScheduleError with the cycle of waits if the order cannot end.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        hops: Hops,
        fuse_pairs: bool,
        overlap_gain: float,
        noise: list[float],
        paired: Costs | None = None,
    ) -> None:
        self.schedule = schedule
        self.costs, self.paired = costs, paired
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
        size = schedule.num_stages * schedule.num_micro_batches * len(_KINDS)
        self.done: list[float | None] = [None] * size
        self.starts: list[list[float]] = [[] for _ in self.tasks]
        self.finishes: list[list[float]] = [[] for _ in self.tasks]
        self.late: list[list[Need | None]] = [[] for _ in self.tasks]
        """Per task the input that held it up, None if it started right after the task before."""
        self._free_at = [0.0] * len(self.tasks)
        """Per rank when the latest task could have started, had its inputs been there."""

        self._play()

    def key(self, op: Op) -> int | None:
        """Where `done` has the time of the op's result; None for what makes nothing."""
        code = _CODE.get(op.kind)
        return None if code is None else self._key(op.stage, code, op.micro_batch)

    def maker(self, key: int) -> Op:
        """The op that makes a result; an I stands for a B."""
        place, code = divmod(key, len(_KINDS))
        stage, micro_batch = divmod(place, self.schedule.num_micro_batches)
        return Op(stage, _KINDS[code], micro_batch)

    def _key(self, stage: int, code: int, micro_batch: int) -> int:
        return (stage * self.schedule.num_micro_batches + micro_batch) * len(_KINDS) + code

    def _tasks_of(self, step: Step, rank: int, fuse_pairs: bool, overlap_gain: float) -> list[Task]:
        ops = ops_of(step)
        if len(ops) == 2 and self.paired is not None:
            return [
                Task((op,), self._needs(op, rank), self._duration(op, self.paired), beside)
                for op, beside in zip(ops, (False, True), strict=True)
            ]
        tasks = [Task((op,), self._needs(op, rank), self._duration(op, self.costs)) for op in ops]
        if len(tasks) == 1 or not fuse_pairs:
            return tasks
        needs = tuple(need for task in tasks for need in task.needs)
        return [Task(ops, needs, overlap_gain * sum(task.duration for task in tasks))]

    def _duration(self, op: Op, costs: Costs) -> float:
        if op.kind not in COMPUTE:
            return 0.0
        duration = costs.of(op)
        if not self.noise:
            return duration
        place = op.stage * self.schedule.num_micro_batches + op.micro_batch
        return duration * self.noise[3 * place + _CODE[op.kind]]

    def _needs(self, op: Op, rank: int) -> tuple[Need, ...]:
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
                needs.append(Need(key, self.forward_latency[stage - 1]))
        elif kind is Kind.I or kind is Kind.B:
            needs.append(Need(self._key(stage, _CODE[Kind.F], micro_batch), 0.0))
            if stage < schedule.num_stages - 1:
                local = ranks[stage + 1] == rank
                code = _CODE[Kind.I] if local else self.sent_backward
                key = self._key(stage + 1, code, micro_batch)
                needs.append(Need(key, self.backward_latency[stage]))
        elif kind is Kind.W or kind is Kind.SEND_B:
            needs.append(Need(self._key(stage, _CODE[Kind.I], micro_batch), 0.0))
        elif kind is Kind.SEND_F:
            needs.append(Need(self._key(stage, _CODE[Kind.F], micro_batch), 0.0))
        return tuple(needs)

    def _play(self) -> None:
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
        now, free_at = clock[rank], self._free_at[rank]
        for index in range(len(starts), len(tasks)):
            ops, needs, duration, beside = tasks[index]
            if not beside:
                free_at = now
            start, cause = free_at, None
            for need in needs:
                made = done[need.key]
                if made is None:
                    clock[rank], self._free_at[rank] = now, free_at
                    waiting.setdefault(need.key, []).append(rank)
                    return
                if made + need.latency > start:
                    start, cause = made + need.latency, need
            finish = start + duration
            now = max(now, finish) if beside else finish
            starts.append(start)
            finishes.append(finish)
            late.append(cause)
            for op in ops:
                code = _CODE.get(op.kind)
                if code is not None:
                    key = self._key(op.stage, code, op.micro_batch)
                    done[key] = finish
                    runnable.extend(waiting.pop(key, ()))
        clock[rank], self._free_at[rank] = now, free_at

    def _raise_deadlock(self) -> NoReturn:
        """Follows the waits from rank to rank until they close or end at an op nobody runs."""
        waits: list[str] = []
        seen: dict[int, int] = {}
        rank = next(r for r, tasks in enumerate(self.tasks) if len(self.starts[r]) < len(tasks))
        while rank not in seen:
            seen[rank] = len(waits)
            task = self.tasks[rank][len(self.starts[rank])]
            key = next(need.key for need in task.needs if self.done[need.key] is None)
            op, needed = task.ops[0], self.maker(key)
            owner = self.schedule.stage_to_rank[needed.stage]
            waits.append(f"rank {rank} waits at {op} for {self._as_ordered(needed, owner)}")
            if not any(self.key(other) == key for other in self.schedule.ops(owner)):
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

    def _as_ordered(self, maker: Op, rank: int) -> Op:
        """The op as the order has it: a B where the backward is whole."""
        whole = Op(maker.stage, Kind.B, maker.micro_batch)
        return whole if maker.kind is Kind.I and whole in self.schedule.ops(rank) else maker


def noise_factors(schedule: Schedule, jitter: float, seed: int) -> list[float]:
    """A factor per (stage, micro-batch, F | I or B | W), the same for every order; empty: none."""
    if not jitter:
        return []
    draw = random.Random(seed).gauss
    count = schedule.num_stages * schedule.num_micro_batches * 3
    return [max(0.0, draw(1.0, jitter)) for _ in range(count)]

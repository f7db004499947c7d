"""An order on a machine that is not ideal: shared links, interference, noise, host copies, step's
end.

`timeline.simulate` plays orders whose ops take what they cost. Here an op's speed changes while it
runs, so events go by time: an op ends, a message starts, leaves or arrives, a host copy ends. On an
ideal machine both give the same times (a test holds them to 1e-9).

The executor is the same: a rank takes its entries in order, waits for an op's own inputs only,
never blocks on a send and has buffers enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NoReturn

from ppruntime.schedules.machine import Machine
from ppruntime.schedules.noise import OpTimes
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Schedule, ScheduleError
from ppruntime.schedules.simulated_step import (
    Copy,
    Done,
    History,
    Key,
    Message,
    SimulatedStep,
    step_of,
)

_HOST = frozenset(kind for kind in Kind if kind.value in ("OFFLOAD", "OFFLOADED", "RELOAD"))


def simulate_machine(schedule: Schedule, machine: Machine) -> SimulatedStep:
    """Plays `schedule` (computations, and offloads if it has any) on `machine`.

    Raises ScheduleError where the order waits for ever, where it has transfers of its own, or where
    it offloads and the machine says nothing of host copies or bytes.
    """
    if machine.costs.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"costs are for {machine.costs.num_stages} stages, schedule {schedule.name!r} has "
            f"{schedule.num_stages}; give one triple per stage"
        )
    return step_of(_Engine(schedule, machine).history, schedule, machine)


@dataclass(slots=True)
class _RankState:
    entries: tuple[Op, ...]
    next: int = 0
    running: Op | None = None
    start: float = 0.0
    base: float = 0.0
    drawn: float = 0.0
    left: float = 0.0
    since: float = 0.0
    rate: float = 1.0
    version: int = 0
    going_out: int = 0
    coming_in: int = 0
    cause: Message | Copy | None = None
    awaited: Copy | None = None
    """The offload that an OFFLOADED has waited for since the op before."""


def _later(cause: Message | Copy | None, awaited: Copy | None) -> Message | Copy | None:
    """Which of two things waited for came last."""
    if awaited is None:
        return cause
    arrived = cause.arrive if isinstance(cause, Message) else 0.0
    return awaited if awaited.finish > arrived else cause


class _Engine:
    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self._schedule, self._machine = schedule, machine
        self._ranks = [_RankState(tuple(schedule.ops(r))) for r in range(schedule.num_ranks)]
        self.history = History([[] for _ in self._ranks])
        self._events: list[tuple[float, int, str, object]] = []
        self._count = 0
        self._there: dict[Key, Message | None] = {}
        self._own: set[tuple[int, int, str]] = set()
        self._queue: dict[tuple[int, str], Message] = {}
        self._engine: dict[tuple[int, Kind], Copy] = {}
        self._draws = OpTimes(schedule, machine)
        self._check()
        for rank in range(len(self._ranks)):
            self._try(rank, 0.0)
        while self._events:
            now, _, what, about = heappop(self._events)
            self._handle(now, what, about)
        if any(state.next < len(state.entries) for state in self._ranks):
            self._raise_stuck()

    def _check(self) -> None:
        kinds = self._schedule.kinds()
        offloads = bool(kinds & _HOST)
        if wrong := kinds - COMPUTE - _HOST:
            raise ScheduleError(
                f"schedule {self._schedule.name!r} has {sorted(k.value for k in wrong)}; simulate "
                "the order before transfers are added, the machine makes them"
            )
        if offloads and (self._machine.host is None or self._machine.stage_bytes is None):
            raise ScheduleError(
                f"schedule {self._schedule.name!r} offloads activations; say how many bytes "
                "(stage_bytes) and how fast the host copies are (host)"
            )

    def _push(self, time: float, what: str, about: object) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, what, about))

    def _handle(self, now: float, what: str, about: object) -> None:
        if what == "end":
            assert isinstance(about, tuple)
            rank, version = about
            if self._ranks[rank].version == version:
                self._finish(rank, now)
            return
        if what == "copied":
            assert isinstance(about, Copy)
            self._try(about.rank, now)
            return
        assert isinstance(about, Message)
        if what == "arrive":
            self._there[about.key] = about
            self._try(about.dst, now)
            return
        step = 1 if what == "start" else -1
        self._ranks[about.src].going_out += step
        self._ranks[about.dst].coming_in += step
        for rank in (about.src, about.dst):
            self._change_rate(rank, now)

    # --- compute

    def _try(self, rank: int, now: float) -> None:
        """Starts what the rank can start now."""
        state = self._ranks[rank]
        while state.running is None and state.next < len(state.entries):
            op = state.entries[state.next]
            if op.kind in _HOST:
                if op.kind in (Kind.OFFLOAD, Kind.RELOAD):
                    self._copy(rank, op, now)
                elif not self._has_left(state, op, now):
                    return
                state.next += 1
                continue
            ready, cause = self._inputs(op, now)
            if not ready:
                return
            idle = not self.history.done[rank] or now > self.history.done[rank][-1].finish
            state.next += 1
            state.running, state.start, state.since = op, now, now
            state.cause = _later(cause, state.awaited) if idle else None
            state.awaited = None
            state.base = self._machine.costs.of(op)
            state.drawn = state.left = self._draws(rank, op, state.base)
            state.rate = self._rate(state)
            self._schedule_end(rank, now)

    def _inputs(self, op: Op, now: float) -> tuple[bool, Message | Copy | None]:
        """Whether all is there, and what came last of what was waited for."""
        s, m = op.stage, op.micro_batch
        latest: Message | Copy | None = None
        if op.kind is Kind.W:
            return (s, m, "I") in self._own, None
        is_forward = op.kind is Kind.F
        has_input = s > 0 if is_forward else s + 1 < self._schedule.num_stages
        if has_input:
            key = (s, is_forward, m)
            if key not in self._there:
                return False, None
            latest = self._there[key]
        if not is_forward:
            if (s, m, "F") not in self._own:
                return False, None
            reload = self.history.copies.get((Kind.RELOAD, s, m))
            if reload is not None:
                if reload.finish > now:
                    return False, None
                arrived = latest.arrive if isinstance(latest, Message) else 0.0
                latest = reload if reload.finish > arrived else latest
        return True, latest

    def _rate(self, state: _RankState) -> float:
        return self._machine.interference.rate(state.going_out > 0, state.coming_in > 0)

    def _change_rate(self, rank: int, now: float) -> None:
        state = self._ranks[rank]
        rate = self._rate(state)
        if state.running is None or rate == state.rate:
            return
        state.left = max(0.0, state.left - (now - state.since) * state.rate)
        state.since, state.rate = now, rate
        self._schedule_end(rank, now)

    def _schedule_end(self, rank: int, now: float) -> None:
        state = self._ranks[rank]
        state.version += 1
        if state.rate > 0:
            self._push(now + state.left / state.rate, "end", (rank, state.version))

    def _finish(self, rank: int, now: float) -> None:
        state = self._ranks[rank]
        op = state.running
        assert op is not None, "an end without an op"
        state.running = None
        done = self.history.done[rank]
        done.append(Done(op, state.start, now, state.base, state.drawn, state.cause))
        s, m = op.stage, op.micro_batch
        if op.kind is Kind.F:
            self._own.add((s, m, "F"))
            if s + 1 < self._schedule.num_stages:
                self._hand_on(op, rank, s + 1, is_forward=True, now=now)
        elif op.kind in (Kind.B, Kind.I):
            self._own.add((s, m, "I"))
            if s > 0:
                self._hand_on(op, rank, s - 1, is_forward=False, now=now)
        self._try(rank, now)

    # --- messages and copies

    def _hand_on(self, op: Op, rank: int, to: int, *, is_forward: bool, now: float) -> None:
        key: Key = (to, is_forward, op.micro_batch)
        dst = self._schedule.stage_to_rank[to]
        if dst == rank:
            self._there[key] = None
            return
        machine, hop = self._machine, min(op.stage, to)
        link = machine.links[hop]
        num_bytes = (machine.forward_bytes if is_forward else machine.backward_bytes)[hop]
        before = self._queue.get((rank, link.name))
        start = now if before is None else max(now, before.left)
        left = start + num_bytes / link.bandwidth
        kind = Kind.SEND_F if is_forward else Kind.SEND_B
        message = Message(
            op=Op(op.stage, kind, op.micro_batch),
            src=rank,
            dst=dst,
            key=key,
            source=len(self.history.done[rank]) - 1,
            made=now,
            start=start,
            left=left,
            arrive=left + link.latency,
            before=before if start > now else None,
        )
        self._queue[rank, link.name] = message
        self.history.messages.append(message)
        if left > start:
            self._push(start, "start", message)
            self._push(left, "left", message)
        self._push(message.arrive, "arrive", message)

    def _copy(self, rank: int, op: Op, now: float) -> None:
        host, sizes = self._machine.host, self._machine.stage_bytes
        assert host is not None, "_check came first"
        assert sizes is not None, "_check came first"
        rate = host.to_host if op.kind is Kind.OFFLOAD else host.from_host
        before = self._engine.get((rank, op.kind))
        start = now if before is None else max(now, before.finish)
        if op.kind is Kind.RELOAD:
            start = max(start, self.history.copies[Kind.OFFLOAD, op.stage, op.micro_batch].finish)
        finish = start + sizes.activation[op.stage] / rate
        source = len(self.history.done[rank]) - 1
        copy = Copy(op, rank, source, now, start, finish, before if start > now else None)
        self._engine[rank, op.kind] = self.history.copies[op.kind, op.stage, op.micro_batch] = copy
        if op.kind is Kind.RELOAD:
            self._push(finish, "copied", copy)

    def _has_left(self, state: _RankState, op: Op, now: float) -> bool:
        """Whether an offload is done; if not, the rank is tried again when it is."""
        copy = self.history.copies[Kind.OFFLOAD, op.stage, op.micro_batch]
        if copy.finish > now:
            state.awaited = copy
            self._push(copy.finish, "copied", copy)
            return False
        self.history.freed[op.stage, op.micro_batch] = now
        return True

    def _raise_stuck(self) -> NoReturn:
        waits = [
            f"rank {rank} waits at {state.entries[state.next]}"
            for rank, state in enumerate(self._ranks)
            if state.next < len(state.entries)
        ]
        raise ScheduleError(
            f"schedule {self._schedule.name!r} deadlocks: {', '.join(waits)}; each waits for an op "
            "that its rank has further down; `schedule check` names the cycle"
        )

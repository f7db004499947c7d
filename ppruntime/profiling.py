"""The measured step: what each rank did when, where its time went, and pictures of both.

The executor gives start, ready and end of every op on the rank's own clock. Here they are brought
onto one clock, gathered on all pipeline ranks and split into compute, exposed transfer, waiting for
a peer, and idle. The planned timeline beside it is the same order with the measured op times and
free transfers: what differs between the two is transfers, jitter and the host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TypeAlias

import msgspec
import torch
import torch.distributed as dist

from ppruntime.clocks import OpTimes
from ppruntime.messages import collective_device, gather_bytes
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.draw import Panel, chrome_trace, svg, trace_threads
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Pair, Schedule, ops_of, parse_op
from ppruntime.schedules.timeline import TimedOp, Timeline, simulate

_NUM_PINGS = 8
_NS_PER_MS = 1e6


class ProfilingError(RuntimeError):
    """The measured times of a step contradict each other."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far this rank's clock is ahead of rank 0's."""

    ns: int
    error_ns: int
    """The offset is right to within this; 0 where both read the same clock."""


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """One op on the common clock, in ns since the step's first op on any rank."""

    op: Op
    start: int
    ready: int
    end: int


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Where one rank's share of a step went, in ns; the four parts add up to the step."""

    compute: int
    """In F, B, I and W, their inputs at hand."""
    transfer: int
    """Exposed transfer: its input was made but had not arrived, or the host was busy with it."""
    peer: int
    """Its input was not made yet."""
    idle: int
    """Between ops, before the first and after the last."""

    @property
    def step(self) -> int:
        return self.compute + self.transfer + self.peer + self.idle


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of all pipeline ranks. `rows[r]` are rank r's ops in the order they were begun in;
    those of two stages may overlap if some of its pairs overlap."""

    schedule: Schedule
    rows: tuple[tuple[MeasuredOp, ...], ...]
    pairs_overlap: bool = False
    """Whether the halves of the schedule's pairs ran at once (`pp.overlap_pairs`)."""
    turns: int = 1
    """Micro-batches whose weight gradients were added at once: one in so many took longer."""

    @property
    def step_ns(self) -> int:
        """First start to last end over all ranks."""
        return max((m.end for row in self.rows for m in row), default=0)

    @property
    def compute_rows(self) -> tuple[tuple[TimedOp, ...], ...]:
        """F, B, I and W in milliseconds, without their waits, in order of start; what
        `schedules.draw` takes."""
        rows = (
            [
                TimedOp(m.op, rank, m.ready / _NS_PER_MS, m.end / _NS_PER_MS)
                for m in row
                if m.op.kind in COMPUTE
            ]
            for rank, row in enumerate(self.rows)
        )
        return tuple(tuple(sorted(row, key=lambda timed: timed.start)) for row in rows)

    @property
    def paired(self) -> frozenset[Op]:
        """The ops that ran beside another one of their rank; none unless `pairs_overlap`."""
        if not self.pairs_overlap:
            return frozenset()
        orders = self.schedule.orders
        pairs = (step for order in orders for step in order if isinstance(step, Pair))
        return frozenset(op for pair in pairs for op in ops_of(pair))


# --- measuring -----------------------------------------------------------------------------------


def align_clocks(group: dist.ProcessGroup | None) -> ClockOffset:
    """How far this rank's `time.perf_counter_ns` is ahead of that of the group's rank 0.

    Ranks on rank 0's host read one and the same clock. For another, the middle of rank 0's shortest
    ping of eight is taken to be the moment of its answer (Cristian 1989), so half that ping bounds
    the error. A collective of the group, a few milliseconds long.
    """
    if group is None:
        return ClockOffset(0, 0)
    boots = gather_bytes(_boot_id(), group)
    rank = dist.get_rank(group)
    offset = ClockOffset(0, 0)
    for peer in (r for r, boot in enumerate(boots) if boot != boots[0]):
        if rank == 0:
            _ping(peer, group)
        elif rank == peer:
            offset = _answer_pings(group)
    return offset


def _boot_id() -> bytes:
    # Per boot of a kernel, and all its processes share CLOCK_MONOTONIC.
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def _ping(peer: int, group: dist.ProcessGroup) -> None:
    device = collective_device(group)
    best = [0, 1 << 62]  # offset, length of the ping
    answer = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_NUM_PINGS):
        sent = time.perf_counter_ns()
        dist.send(torch.zeros(1, dtype=torch.int64, device=device), group=group, group_dst=peer)
        dist.recv(answer, group=group, group_src=peer)
        there = int(answer.item())
        came = time.perf_counter_ns()
        if came - sent < best[1]:
            best = [there - (sent + came) // 2, came - sent]
    dist.send(torch.tensor(best, device=device), group=group, group_dst=peer)


def _answer_pings(group: dist.ProcessGroup) -> ClockOffset:
    device = collective_device(group)
    ping = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_NUM_PINGS):
        dist.recv(ping, group=group, group_src=0)
        ping.item()  # on a GPU: until it is there
        now = torch.tensor([time.perf_counter_ns()], device=device)
        dist.send(now, group=group, group_dst=0)
    result = torch.zeros(2, dtype=torch.int64, device=device)
    dist.recv(result, group=group, group_src=0)
    offset, length = result.tolist()
    return ClockOffset(offset, length // 2)


def gather_step(
    schedule: Schedule,
    times: Sequence[OpTimes[int]],
    *,
    offset: ClockOffset,
    group: dist.ProcessGroup | None,
    pairs_overlap: bool = False,
    turns: int = 1,
) -> MeasuredStep:
    """Every pipeline rank's ops of one step on rank 0's clock. A collective of the pipeline group.

    Raises ProfilingError where a rank's ops run backwards or overlap; with `pairs_overlap`, where
    those of one stage do.
    """
    mine = [
        OpTimes(t.op, t.start - offset.ns, t.ready - offset.ns, t.end - offset.ns) for t in times
    ]
    parts = gather_bytes(msgspec.json.encode(mine), group)
    everyones = [msgspec.json.decode(part, type=list[OpTimes[int]]) for part in parts]
    return measured_step(schedule, everyones, pairs_overlap=pairs_overlap, turns=turns)


def measured_step(
    schedule: Schedule,
    times_of_ranks: Sequence[Sequence[OpTimes[int]]],
    *,
    pairs_overlap: bool = False,
    turns: int = 1,
) -> MeasuredStep:
    """A step from the times of all its ranks, in ns of one clock. Raises as `gather_step`."""
    first = min((t.start for times in times_of_ranks for t in times), default=0)
    rows = tuple(
        tuple(
            MeasuredOp(parse_op(t.op), t.start - first, t.ready - first, t.end - first)
            for t in times
        )
        for times in times_of_ranks
    )
    for rank, row in enumerate(rows):
        _check_row(rank, row, by_stage=pairs_overlap)
    return MeasuredStep(schedule, rows, pairs_overlap, turns)


def _check_row(rank: int, row: Sequence[MeasuredOp], *, by_stage: bool) -> None:
    ends: dict[int, int] = {}
    for m in row:
        lane = m.op.stage if by_stage else 0
        before = ends.get(lane, 0)
        if not before <= m.start <= m.ready <= m.end:
            raise ProfilingError(
                f"rank {rank} ran {m.op} from {m.start} over {m.ready} to {m.end} ns, and the op"
                f" before it until {before} ns"
            )
        ends[lane] = m.end


# --- reading -------------------------------------------------------------------------------------


def split_times(step: MeasuredStep) -> tuple[RankTimes, ...]:
    """Where each rank's time went. A rank's parts add up to the step, to the nanosecond: while one
    of two ops that overlap computes the rank does, whatever the other waits for."""
    made = {m.op: m.end for row in step.rows for m in row if m.op.kind in COMPUTE}
    splits = []
    for row in step.rows:
        spans: tuple[list[tuple[int, int]], ...] = ([], [], [])
        computing, moving, waiting = spans
        for m in row:
            if m.op.kind in COMPUTE:
                arrived_late = _made_within(m, made)
                waiting.append((m.start, arrived_late))
                moving.append((arrived_late, m.ready))
                computing.append((m.ready, m.end))
            else:
                moving.append((m.start, m.end))
        compute, or_moving, or_waiting = (
            _covered([span for kind in spans[: i + 1] for span in kind]) for i in range(3)
        )
        idle = step.step_ns - or_waiting
        splits.append(RankTimes(compute, or_moving - compute, or_waiting - or_moving, idle))
    return tuple(splits)


def _covered(spans: Sequence[tuple[int, int]]) -> int:
    """Time that lies in at least one of some spans (start, end)."""
    total = now = 0
    for start, end in sorted(spans):
        total += max(0, end - max(now, start))
        now = max(now, end)
    return total


def _made_within(m: MeasuredOp, made: dict[Op, int]) -> int:
    """When the op's input was made, moved into the op's wait; until then it waited for the peer."""
    moments = [made[source] for source in _sources(m.op) if source in made]
    return min(max([m.start, *moments]), m.ready)


def _sources(op: Op) -> tuple[Op, ...]:
    """The ops on other stages that may have made what `op` waits for."""
    if op.kind is Kind.F:
        return (Op(op.stage - 1, Kind.F, op.micro_batch),)
    if op.kind in (Kind.B, Kind.I):
        return tuple(Op(op.stage + 1, kind, op.micro_batch) for kind in (Kind.B, Kind.I))
    return ()


def measured_costs(step: MeasuredStep) -> Costs:
    """Each stage's mean op times in ms, which keep the work of a rank; of ops that ran alone,
    unless none of the stage's kind did. A whole backward is halved where I and W never ran apart,
    and is their sum where it never ran; a stage that ran nothing of a kind costs nothing. By turn
    too, where the step had several."""

    def of(ops: frozenset[Op]) -> Costs:
        return _costs(step, _means(step, ops & step.paired) | _means(step, ops - step.paired))

    every, turns = _all_ops(step), step.turns
    if turns == 1:
        return of(every)
    by_turn = (frozenset(op for op in every if op.micro_batch % turns == t) for t in range(turns))
    return replace(of(every), by_turn=tuple(map(of, by_turn)))


def measured_pair_costs(step: MeasuredStep) -> Costs | None:
    """As `measured_costs`, of ops that ran beside another one; None where pairs did not overlap."""
    if not step.pairs_overlap:
        return None
    paired = step.paired
    return _costs(step, _means(step, _all_ops(step) - paired) | _means(step, paired))


def _all_ops(step: MeasuredStep) -> frozenset[Op]:
    return frozenset(timed.op for row in step.compute_rows for timed in row)


_Means: TypeAlias = dict[tuple[int, Kind], float]
"""Milliseconds, by stage and kind."""


def _means(step: MeasuredStep, ops: frozenset[Op]) -> _Means:
    samples: dict[tuple[int, Kind], list[float]] = {}
    for timed in (timed for row in step.compute_rows for timed in row if timed.op in ops):
        samples.setdefault((timed.op.stage, timed.op.kind), []).append(timed.finish - timed.start)
    return {key: fmean(values) for key, values in samples.items()}


def _costs(step: MeasuredStep, means: _Means) -> Costs:
    num_stages = step.schedule.num_stages

    def half(stage: int, kind: Kind) -> float:
        return means.get((stage, kind), means.get((stage, Kind.B), 0.0) / 2)

    apart = [half(stage, Kind.I) + half(stage, Kind.W) for stage in range(num_stages)]
    return Costs(
        tuple(means.get((stage, Kind.F), 0.0) for stage in range(num_stages)),
        tuple(half(stage, Kind.I) for stage in range(num_stages)),
        tuple(half(stage, Kind.W) for stage in range(num_stages)),
        tuple(means.get((stage, Kind.B), both) for stage, both in enumerate(apart)),
    )


def measured_hops(step: MeasuredStep) -> Hops:
    """How long a boundary and a gradient were under way between two ranks, in ms: the median over
    those that a rank was waiting for when they were made. 0 where none was."""
    made = {m.op: m.end for row in step.rows for m in row if m.op.kind in COMPUTE}
    ranks = step.schedule.stage_to_rank
    times: dict[bool, list[int]] = {True: [], False: []}
    for m in (m for row in step.rows for m in row if m.op.kind in COMPUTE):
        for source in _sources(m.op):
            moment = made.get(source)
            if moment is None or ranks[source.stage] == ranks[m.op.stage]:
                continue
            if m.start < moment < m.ready:  # else it may have come before it was asked for
                times[m.op.kind is Kind.F].append(m.ready - moment)
    forward, backward = (
        median(times[is_forward]) / _NS_PER_MS if times[is_forward] else 0.0
        for is_forward in (True, False)
    )
    return Hops(forward, backward)


def planned_step(step: MeasuredStep, hops: Hops | None = None) -> Timeline:
    """The step's order in virtual time, in ms: each stage's mean op times, those of ops in pairs
    apart where pairs overlapped; transfers take `hops`, none by default."""
    return simulate(step.schedule, measured_costs(step), hops, paired=measured_pair_costs(step))


def report(step: MeasuredStep) -> str:
    """A table for people: per rank the shares of the step, in percent."""
    total = step.step_ns or 1
    lines = [f"step {step.step_ns / _NS_PER_MS:.2f} ms; share of it in %:"]
    lines.append(f"{'rank':>4} {'compute':>8} {'transfer':>9} {'peer':>6} {'idle':>6}")
    for rank, part in enumerate(split_times(step)):
        shares = [100 * ns / total for ns in (part.compute, part.transfer, part.peer, part.idle)]
        lines.append(
            f"{rank:>4} {shares[0]:>8.1f} {shares[1]:>9.1f} {shares[2]:>6.1f} {shares[3]:>6.1f}"
        )
    return "\n".join(lines)


# --- drawing -------------------------------------------------------------------------------------


def write_timeline(step: MeasuredStep, svg_path: Path, trace_path: Path, *, title: str) -> None:
    """Writes the picture and the trace of a step, planned above measured, on one scale.

    `title` is put in front of the panels' names. The trace opens in Perfetto and chrome://tracing;
    its `otherData` has each rank's `RankTimes`.
    """
    planned = planned_step(step)
    parts = split_times(step)
    total = step.step_ns or 1
    bubble = 1 - max((part.compute for part in parts), default=0) / total
    shares = ", ".join(
        f"{name} {sum(getattr(part, name) for part in parts) / len(parts) / total:.1%}"
        for name in ("compute", "transfer", "peer", "idle")
    )
    panels = [
        Panel(
            f"{title}, planned: {step.schedule.name}",
            f"{planned.makespan:.2f} ms, bubble {planned.bubble_fraction:.1%};"
            " each stage's mean op times, transfers take none",
            planned.rows,
        ),
        Panel(
            f"{title}, measured",
            f"{step.step_ns / _NS_PER_MS:.2f} ms, bubble {bubble:.1%}; mean rank: {shares}",
            step.compute_rows,
        ),
    ]
    _replace(svg_path, svg(panels, unit="ms"))
    _replace(trace_path, json.dumps(_trace(step, planned)))


def _trace(step: MeasuredStep, planned: Timeline) -> dict[str, object]:
    seconds = 1 / 1e3
    sends = [
        TimedOp(m.op, rank, m.start / _NS_PER_MS, m.end / _NS_PER_MS)
        for rank, row in enumerate(step.rows)
        for m in row
        if m.op.kind in (Kind.SEND_F, Kind.SEND_B)
    ]
    traces = (
        chrome_trace(planned.rows, seconds_per_unit=seconds, process="planned", pid=0),
        chrome_trace(step.compute_rows, sends, seconds_per_unit=seconds, process="measured", pid=1),
    )
    events = [event for trace in traces for event in json.loads(trace)["traceEvents"]]
    return {
        "traceEvents": [*events, *_wait_events(step)],
        "displayTimeUnit": "ms",
        "otherData": {
            f"rank {rank}": {
                "compute_ns": part.compute,
                "transfer_ns": part.transfer,
                "peer_ns": part.peer,
                "idle_ns": part.idle,
            }
            for rank, part in enumerate(split_times(step))
        },
    }


def _wait_events(step: MeasuredStep) -> Iterable[dict[str, object]]:
    made = {m.op: m.end for row in step.rows for m in row if m.op.kind in COMPUTE}
    threads = trace_threads(step.compute_rows)
    for rank, row in enumerate(step.rows):
        for m in row:
            if m.op.kind not in COMPUTE:
                continue
            late = _made_within(m, made)
            for name, start, end in (
                ("wait for peer", m.start, late),
                ("exposed transfer", late, m.ready),
            ):
                if end > start:
                    yield {
                        "ph": "X",
                        "name": name,
                        "cat": "wait",
                        "pid": 1,
                        "tid": threads[rank, m.op.stage],
                        "ts": start / 1e3,
                        "dur": (end - start) / 1e3,
                        "args": {"for": str(m.op)},
                    }


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)

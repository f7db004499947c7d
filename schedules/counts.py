"""What an order holds and moves, counted: activations in flight, transfers, receive buffers.

All of it is read off the order alone, with no times: it holds however fast the ranks are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ppruntime.schedules.ops import Kind, Schedule, ScheduleError, ops_of


class Edge(NamedTuple):
    """One channel: what `src_stage` sends to its neighbour `dst_stage`, "F" for activations
    (upwards) or "B" for their gradients (downwards). Equal to the plain tuple."""

    src_stage: int
    dst_stage: int
    kind: Literal["F", "B"]

    def __str__(self) -> str:
        what = "activations" if self.kind == "F" else "gradients"
        return f"{what} of stage {self.src_stage} for stage {self.dst_stage}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages of one channel, as the two orders at its ends say."""

    edge: Edge
    sent: tuple[int, ...]
    """Micro-batches in the order in which the source computes them."""
    taken_at: Mapping[int, int]
    """Micro-batch -> step of its first reader at the destination: F; or I, B."""
    freed_at: Mapping[int, int]
    """Micro-batch -> step of its last reader: B, or W where the backward is split."""

    @property
    def slots_held(self) -> int:
        """The most messages there at once, taken and not yet freed, and one to receive ahead; never
        more than there are. Slots go round as a ring: one is free when all before it are."""
        freed_up_to: list[int] = []  # the step at which this message and all before it are freed
        for m in self.sent:
            freed = self.freed_at[m]
            freed_up_to.append(max(freed, freed_up_to[-1]) if freed_up_to else freed)
        most = oldest = 0
        for k, m in enumerate(self.sent):
            while freed_up_to[oldest] < self.taken_at[m]:
                oldest += 1
            most = max(most, k - oldest + 1)
        return min(most + 1, len(self.sent))


def edges(schedule: Schedule) -> list[Edge]:
    """Every channel, hops within a rank included: upwards, then downwards, in stage order."""
    last = schedule.num_stages - 1
    return [Edge(s, s + 1, "F") for s in range(last)] + [Edge(s + 1, s, "B") for s in range(last)]


def crosses_ranks(schedule: Schedule, edge: Edge) -> bool:
    """False for a hop between two stages of one rank: nothing travels there."""
    return schedule.stage_to_rank[edge.src_stage] != schedule.stage_to_rank[edge.dst_stage]


def num_transfers(schedule: Schedule) -> int:
    """Messages between different ranks in one step, both directions together."""
    return schedule.num_micro_batches * sum(crosses_ranks(schedule, e) for e in edges(schedule))


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most chunk activations each rank ever holds: one more at F, one less at B, or at W where
    the backward is split."""
    peaks = []
    for rank in range(schedule.num_ranks):
        held = peak = 0
        for op in schedule.ops(rank):
            if op.kind is Kind.F:
                held += 1
                peak = max(peak, held)
            elif op.kind is Kind.B or op.kind is Kind.W:
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


BackwardKinds: TypeAlias = frozenset[Kind]
"""Of B and I, those by which a stage goes backward."""
BOTH_BACKWARDS: BackwardKinds = frozenset((Kind.B, Kind.I))


def backward_kinds(schedule: Schedule, stage: int) -> BackwardKinds:
    """How the stage goes backward: B, I, or both."""
    return frozenset(
        op.kind
        for op in schedule.ops(schedule.stage_to_rank[stage])
        if op.stage == stage and op.kind in (Kind.B, Kind.I)
    )


def slots_held(schedule: Schedule) -> dict[Edge, int]:
    """Receive buffers per channel with which no receive is ever late: the most messages that are
    there and not yet freed (the last reader is B, or W where the backward is split), and one to
    receive ahead; never more than there are messages. Hops within a rank are included."""
    return {edge: channel.slots_held for edge, channel in traffic(schedule).items()}


def traffic(schedule: Schedule) -> dict[Edge, Traffic]:
    """What goes over each channel. Raises ScheduleError unless both ends know the same messages."""
    num_stages = schedule.num_stages
    forwards: list[dict[int, int]] = [{} for _ in range(num_stages)]  # micro-batch -> step
    backwards: list[dict[int, int]] = [{} for _ in range(num_stages)]
    ends: list[dict[int, int]] = [{} for _ in range(num_stages)]
    for order in schedule.orders:
        for i, step in enumerate(order):
            for op in ops_of(step):
                kind = op.kind
                if kind is Kind.F:
                    forwards[op.stage][op.micro_batch] = i
                elif kind is Kind.W:
                    ends[op.stage][op.micro_batch] = i
                elif kind is Kind.B or kind is Kind.I:
                    backwards[op.stage][op.micro_batch] = i
                    ends[op.stage].setdefault(op.micro_batch, i)
    result = {}
    for edge in edges(schedule):
        done = forwards if edge.kind == "F" else backwards
        sent, taken, freed = done[edge.src_stage], done[edge.dst_stage], ends[edge.dst_stage]
        if odd := (sent.keys() ^ taken.keys()) | (sent.keys() ^ freed.keys()):
            raise ScheduleError(
                f"{edge}: micro-batch {min(odd)} lacks an op at one end; check(schedule) shows"
                " which"
            )
        result[edge] = Traffic(edge, tuple(sent), taken, freed)
    return result

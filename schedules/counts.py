"""What an order holds and moves, counted: activations in flight, transfers, receive buffers.

All of it is read off the order alone, with no times: it holds however fast the ranks are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ppruntime.schedules.ops import Kind, Schedule, ScheduleError, ops_of
from ppruntime.schedules.progress import stalled


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


def slots_held(schedule: Schedule) -> dict[Edge, int]:
    """Receive buffers per channel with which no receive is ever late: the most messages that are
    there and not yet freed (the last reader is B, or W where the backward is split), and one to
    receive ahead; never more than there are messages. Hops within a rank are included."""
    return {
        edge: min(schedule.num_micro_batches, 1 + _longest_window(channel))
        for edge, channel in traffic(schedule).items()
    }


def slots_needed(schedule: Schedule) -> int:
    """The smallest number of receive buffers per channel with which the order cannot hang, however
    slow or fast the ranks are; 0 if no two ranks talk.

    The model: a rank that sends waits while the channel holds that many messages which the receiver
    has not begun to read. Raises ScheduleError for an order that hangs with any number.
    """
    if num_transfers(schedule) == 0:
        return 0
    if stalled(schedule):
        raise ScheduleError(
            f"{schedule.name} hangs with any number of slots; check(schedule) shows where"
        )
    too_few, enough = 0, 1
    while stalled(schedule, slots=enough):  # ends: num_micro_batches slots never fill
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if stalled(schedule, slots=middle):
            too_few = middle
        else:
            enough = middle
    return enough


def traffic(schedule: Schedule) -> dict[Edge, Traffic]:
    """What goes over each channel. Raises ScheduleError unless both ends know the same messages."""
    sent: dict[Edge, list[int]] = {edge: [] for edge in edges(schedule)}
    taken_at: dict[Edge, dict[int, int]] = {edge: {} for edge in sent}
    freed_at: dict[Edge, dict[int, int]] = {edge: {} for edge in sent}
    around = [
        (Edge(s, s + 1, "F"), Edge(s, s - 1, "B"), Edge(s - 1, s, "F"), Edge(s + 1, s, "B"))
        for s in range(schedule.num_stages)
    ]
    for order in schedule.orders:
        for i, step in enumerate(order):
            for op in ops_of(step):
                m, kind = op.micro_batch, op.kind
                up_out, down_out, up_in, down_in = around[op.stage]
                if kind is Kind.F:
                    if up_out in sent:
                        sent[up_out].append(m)
                    if up_in in sent:
                        taken_at[up_in][m] = i
                elif kind in (Kind.B, Kind.I, Kind.W):
                    if kind is not Kind.W:
                        if down_out in sent:
                            sent[down_out].append(m)
                        if down_in in sent:
                            taken_at[down_in][m] = i
                    for edge in (up_in, down_in):  # W comes after I and has the last word
                        if edge in sent:
                            freed_at[edge][m] = i
    for edge in sent:
        ends = (set(sent[edge]), set(taken_at[edge]), set(freed_at[edge]))
        if not (ends[0] == ends[1] == ends[2]):
            odd = min(set.union(*ends) - set.intersection(*ends))
            raise ScheduleError(
                f"{edge}: micro-batch {odd} is not computed at both ends; check(schedule) shows where"
            )
    return {edge: Traffic(edge, tuple(sent[edge]), taken_at[edge], freed_at[edge]) for edge in sent}


def _longest_window(channel: Traffic) -> int:
    """The most slots of a ring in use when a message is taken: from the oldest not freed to it."""
    freed_up_to: list[int] = []  # the step at which this message and all before it are freed
    for m in channel.sent:
        freed = channel.freed_at[m]
        freed_up_to.append(max(freed, freed_up_to[-1]) if freed_up_to else freed)
    longest = oldest = 0
    for k, m in enumerate(channel.sent):
        while freed_up_to[oldest] < channel.taken_at[m]:
            oldest += 1
        longest = max(longest, k - oldest + 1)
    return longest

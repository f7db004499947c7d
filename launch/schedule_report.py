"""What `ppruntime schedule` says about orders: one set of facts, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence

from ppruntime.schedules.counts import num_transfers
from ppruntime.schedules.formats import digest
from ppruntime.schedules.ops import Schedule
from ppruntime.schedules.progress import slots_needed
from ppruntime.schedules.search import SearchResult
from ppruntime.schedules.timeline import Timeline


def order_facts(schedule: Schedule) -> dict[str, object]:
    """What the order alone says: JSON keys as documented in docs/schedules.md."""
    return {
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_micro_batches": schedule.num_micro_batches,
        "stage_to_rank": list(schedule.stage_to_rank),
        "transfers": num_transfers(schedule),
        "slots": slots_needed(schedule),
        "digest": digest(schedule),
        "order": [[str(step) for step in order] for order in schedule.orders],
    }


def timeline_facts(timeline: Timeline) -> dict[str, object]:
    """An order and what its timeline says; times in the costs' unit."""
    return {
        "makespan": timeline.makespan,
        "makespan_bubble": timeline.makespan_bubble,
        "span_bubble": timeline.span_bubble,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_in_flight": list(timeline.peak_in_flight),
        "busy": list(timeline.busy),
        "idle": [idle._asdict() for idle in timeline.idle],
        "critical_path": [str(leg.op) for leg in timeline.critical_path],
        **order_facts(timeline.schedule),
    }


def search_facts(result: SearchResult) -> dict[str, object]:
    """What a search found, its proven distance from the best, and what it had to beat."""
    return {
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "handmade": result.handmade,
        "handmade_makespan": result.handmade_makespan,
        **timeline_facts(result.timeline),
    }


def summary(timeline: Timeline) -> str:
    """One line: how long, how idle."""
    return (
        f"makespan {timeline.makespan:.6g}, bubble {timeline.makespan_bubble:.6g} "
        f"({timeline.bubble_fraction:.1%}), span bubble {timeline.span_bubble:.6g}, "
        f"{num_transfers(timeline.schedule)} transfers, "
        f"slots per channel {slots_needed(timeline.schedule)}"
    )


def rank_table(timeline: Timeline) -> str:
    """A line a rank: where its time went, and how much it held."""
    header = ["rank", "busy", "fill", "drain", "dependency", "transfer", "peak in flight"]
    lines = []
    for rank, idle in enumerate(timeline.idle):
        times = (timeline.busy[rank], idle.fill, idle.drain, idle.dependency, idle.transfer)
        cells = [str(rank), *(f"{time:.6g}" for time in times)]
        lines.append([*cells, str(timeline.peak_in_flight[rank])])
    return table(header, lines)


def table(header: Sequence[str], lines: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """Text columns: the first `num_left` start on the left, the others end on the right."""
    widths = [max(len(row[i]) for row in (header, *lines)) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *lines)
    )


def short_list(numbers: Sequence[int]) -> str:
    """`8 7 6 5`, equal ones together: `16 x8`."""
    if len(set(numbers)) == 1:
        return f"{numbers[0]} x{len(numbers)}" if len(numbers) > 1 else str(numbers[0])
    return " ".join(map(str, numbers))

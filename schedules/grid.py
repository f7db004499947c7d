"""An order as a text grid, one line a step and one column a rank, below what is wrong with it."""

from __future__ import annotations

from ppruntime.schedules.ops import Op, Schedule, ScheduleError

MAX_LINES = 120
"""A longer order is shown as this many steps around the mark: thousands of lines help nobody."""


def fault(schedule: Schedule, rank: int, step: int, op: Op, text: str) -> ScheduleError:
    """The error to raise about `op` of `rank`'s `step`: the place, the text, the marked grid."""
    return with_grid(schedule, f"rank {rank}, step {step}, {op}: {text}", (rank, step))


def lack(schedule: Schedule, rank: int, op: Op, what: str) -> ScheduleError:
    """The error to raise about an op that `rank` lacks; `what` says what it would be."""
    return with_grid(schedule, f"rank {rank} never runs {op}, {what}; add it", None)


def with_grid(schedule: Schedule, text: str, mark: tuple[int, int] | None) -> ScheduleError:
    """The error `text` with the grid below it."""
    return ScheduleError(f"{text}\n{schedule.name}:\n{grid(schedule, mark)}")


def grid(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """The table of `schedule`, `mark` = (rank, step) pointed at."""
    num_steps = max((len(order) for order in schedule.orders), default=0)
    first, last = _window(num_steps, mark)
    columns = [[str(step) for step in order[first:last]] for order in schedule.orders]
    if mark is not None:
        rank, step = mark
        columns[rank][step - first] += " <--"
    columns = [[f"rank {r}", *column] for r, column in enumerate(columns)]
    widths = [max(map(len, column)) for column in columns]
    titles = ["", *(f"step {i}" for i in range(first, last))]
    lines = []
    for i, title in enumerate(titles):
        cells = [column[i] if i < len(column) else "" for column in columns]
        row = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([title.rjust(len(titles[-1])), *row]).rstrip())
    if last - first < num_steps:
        lines.append(f"(steps {first} to {last - 1} of {num_steps})")
    return "\n".join(lines)


def _window(num_steps: int, mark: tuple[int, int] | None) -> tuple[int, int]:
    if num_steps <= MAX_LINES:
        return 0, num_steps
    centre = mark[1] if mark is not None else 0
    first = min(max(0, centre - MAX_LINES // 2), num_steps - MAX_LINES)
    return first, first + MAX_LINES

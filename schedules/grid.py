"""An order as a text grid, one line a step and one column a rank, for error messages."""

from __future__ import annotations

from ppruntime.schedules.ops import Schedule

MAX_LINES = 120
"""A longer order is shown as this many steps around the mark: thousands of lines help nobody."""


def grid(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """The whole table of `schedule`, the step `mark` = (rank, step) of it pointed at."""
    num_steps = max((len(order) for order in schedule.orders), default=0)
    first, last = _window(num_steps, mark)
    cells = [[str(step) for step in order[first:last]] for order in schedule.orders]
    widths = [max(map(len, [f"rank {r}", *column])) for r, column in enumerate(cells)]
    margin = len(f"step {last - 1}")
    header = [f"rank {r}".ljust(width) for r, width in enumerate(widths)]
    lines = ["  ".join([" " * margin, *header]).rstrip()]
    for i in range(first, last):
        row = [
            (column[i - first] if i - first < len(column) else "").ljust(width)
            for column, width in zip(cells, widths, strict=True)
        ]
        line = "  ".join([f"step {i}".rjust(margin), *row]).rstrip()
        if mark is not None and mark[1] == i:
            line += f"  <-- rank {mark[0]}"
        lines.append(line)
    if last - first < num_steps:
        lines.append(f"(steps {first} to {last - 1} of {num_steps})")
    return "\n".join(lines)


def _window(num_steps: int, mark: tuple[int, int] | None) -> tuple[int, int]:
    if num_steps <= MAX_LINES:
        return 0, num_steps
    centre = mark[1] if mark is not None else 0
    first = min(max(0, centre - MAX_LINES // 2), num_steps - MAX_LINES)
    return first, first + MAX_LINES

"""Pictures of timed ops: text for a terminal, SVG for a document, Chrome trace for Perfetto.

All three take rows of `TimedOp`, one row a rank, so that a planned step (`Timeline.rows`) and a
measured one are drawn alike, and one above the other on one scale. CSV and JSON are in `formats`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from ppruntime.schedules.ops import COMPUTE, Kind
from ppruntime.schedules.timeline import TimedOp

Rows = Sequence[Sequence[TimedOp]]
"""`rows[r]` are rank r's ops, in order of start."""

_MAX_TEXT_PANELS = 6


def text_picture(rows: Rows, width: int = 120) -> str:
    """One line a rank, time to the right, every op labelled; wrapped into panels of `width`.

    `F3--` is an op with its length, dots are idle time; with several stages on a rank the label has
    the stage in front (`2F3`). What would need more than six panels is drawn as `text_overview`.
    """
    ops = [timed for row in rows for timed in row if timed.finish > timed.start]
    if not ops:
        return "(nothing runs)"
    labels = _labels(rows)
    cell = max(map(len, labels.values())) + 1
    slot = min(timed.finish - timed.start for timed in ops)
    makespan = max(timed.finish for timed in ops)
    num_columns = round(makespan / slot * cell)
    margin = len(f"rank {len(rows) - 1}") + 2
    room = max(width - margin, cell)
    if num_columns > room * _MAX_TEXT_PANELS:
        return text_overview(rows, width)
    lines = [_text_row(row, labels, cell / slot, num_columns) for row in rows]
    panels = []
    for first in range(0, num_columns, room):
        panel = [f"{'time'.ljust(margin)}{_text_scale(first, room, num_columns, slot / cell)}"]
        for rank, line in enumerate(lines):
            panel.append(f"{f'rank {rank}'.ljust(margin)}{line[first : first + room]}".rstrip())
        panels.append("\n".join(panel))
    return "\n\n".join(panels)


def text_overview(rows: Rows, width: int = 120) -> str:
    """One line a rank, one character a slice of time: the kind that fills most of it, or a dot."""
    makespan = max((timed.finish for row in rows for timed in row), default=0.0)
    margin = len(f"rank {len(rows) - 1}") + 2
    room = max(width - margin, 10)
    if not makespan:
        return "(nothing runs)"
    lines = [f"{'time'.ljust(margin)}{_text_scale(0, room, room, makespan / room)}"]
    for rank, row in enumerate(rows):
        shares: list[dict[str, float]] = [{} for _ in range(room)]
        for timed in row:
            _share_out(timed, shares, makespan / room)
        line = "".join(_dominant(share, makespan / room) for share in shares)
        lines.append(f"{f'rank {rank}'.ljust(margin)}{line}")
    return "\n".join(lines)


def _share_out(timed: TimedOp, shares: list[dict[str, float]], slice_time: float) -> None:
    """Adds an op's time to the slices that it covers."""
    for i in range(int(timed.start / slice_time), len(shares)):
        covered = min(timed.finish, (i + 1) * slice_time) - max(timed.start, i * slice_time)
        if covered <= 0:
            return
        letter = timed.op.kind.value
        shares[i][letter] = shares[i].get(letter, 0.0) + covered


def _dominant(share: dict[str, float], slice_time: float) -> str:
    idle = slice_time - sum(share.values())
    letter = max(share, key=lambda kind: share[kind], default=".")
    return letter if letter != "." and share[letter] >= idle else "."


def _labels(rows: Rows) -> dict[TimedOp, str]:
    """`F3`, or `2F3` where a rank has several stages."""
    several = any(len({timed.op.stage for timed in row}) > 1 for row in rows)
    return {
        timed: str(timed.op) if several else f"{timed.op.kind.value}{timed.op.micro_batch}"
        for row in rows
        for timed in row
    }


def _text_row(
    row: Sequence[TimedOp], labels: dict[TimedOp, str], columns_per_unit: float, num_columns: int
) -> str:
    pieces: list[str] = []
    column = 0
    for timed in row:
        first = round(timed.start * columns_per_unit)
        size = round(timed.finish * columns_per_unit) - first
        pieces.append(_text_gap(first - column))
        pieces.append(labels[timed][:size].ljust(size - 1, "-").ljust(size))
        column = first + size
    pieces.append(_text_gap(num_columns - column))
    return "".join(pieces)


def _text_gap(size: int) -> str:
    return "." * (size - 1) + " " * (size > 0)


def _text_scale(first: int, room: int, num_columns: int, unit_per_column: float) -> str:
    """Times above the columns, about every twenty of them."""
    step = nice_step(20 * unit_per_column)
    line = [" "] * (room + 20)
    tick = ceil(first * unit_per_column / step) * step + 0.0
    while True:
        column = round(tick / unit_per_column) - first
        if column >= room or column + first > num_columns:
            return "".join(line).rstrip()
        line[max(column, 0) : max(column, 0) + len(f"{tick:g}")] = f"{tick:g}"
        tick = round((tick + step) / step) * step


def nice_step(at_least: float) -> float:
    """The smallest of 1, 2, 5 x 10^n that is not below `at_least`."""
    power = 10.0 ** floor(log10(at_least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= at_least * (1 - 1e-9))


# --- SVG -----------------------------------------------------------------------------------------

_COLOURS = {
    Kind.F: ("#7cb9f2", "#1f6fb8"),
    Kind.I: ("#ffc46b", "#cc7a00"),
    Kind.W: ("#7fd1a3", "#1e8a55"),
    Kind.B: ("#e39ac4", "#a33b78"),
}
"""Per kind the fill of chunk 0 and of the last chunk; those between are mixed. Chosen to differ in
lightness too, so that they stay apart in print and for the colour-blind."""
_BUBBLE = "#ececec"
_NAMES = {
    Kind.F: "F forward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.B: "B whole backward",
}
_ROW = 26
_GAP = 4
_MARGIN = 64
_HEAD = 44
_FONT = 11
_MAX_WIDTH = 14000


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture in an SVG: a title, a line of facts, and a row of ops a rank."""

    title: str
    facts: str
    rows: Rows


def svg(panels: Sequence[Panel], *, unit: str = "") -> str:
    """Panels one above the other on one time scale, with a legend; `unit` names the time unit.

    Ops carry their micro-batch number where it fits, and op, start and finish as hover text. Those
    that run at the same time have half of the row each, the rank's first chunk above. Wide enough
    that a usual op shows its number, so a long step makes a wide picture.
    """
    ops = [timed for panel in panels for row in panel.rows for timed in row]
    makespan = max((timed.finish for timed in ops), default=0.0) or 1.0
    chunks = {
        (i, r): sorted({t.op.stage for t in row})
        for i, panel in enumerate(panels)
        for r, row in enumerate(panel.rows)
    }
    num_chunks = max(map(len, chunks.values()), default=1)
    scale = _pixels_per_unit(ops, makespan)
    width = max(makespan * scale, 560.0) + 2 * _MARGIN
    body: list[str] = []
    top = 0.0
    for i, panel in enumerate(panels):
        body.append(_text(_MARGIN, top + 20, panel.title, size=15, weight="bold"))
        body.append(_text(_MARGIN, top + 36, panel.facts, size=_FONT))
        top += _HEAD
        for rank, row in enumerate(panel.rows):
            body.append(_text(_MARGIN - 8, top + _ROW * 0.65, f"rank {rank}", anchor="end"))
            body.append(_rect(_MARGIN, top, makespan * scale, _BUBBLE))
            in_company = ops_beside_others(row)
            for timed in row:
                body.extend(_op(timed, chunks[i, rank], top, scale, unit, timed in in_company))
            top += _ROW + _GAP
        body.append(_axis(makespan, scale, top, unit))
        top += 34
    body.append(_legend({timed.op.kind for timed in ops}, num_chunks, top + 6))
    height = top + 36
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def ops_beside_others(row: Sequence[TimedOp]) -> set[TimedOp]:
    """Those of a rank's ops, in order of start, that run while another one does."""
    found: set[TimedOp] = set()
    latest: TimedOp | None = None  # of those so far the one that ends last
    for timed in row:
        if latest is not None and timed.start < latest.finish and timed.start < timed.finish:
            found |= {latest, timed}
        if latest is None or timed.finish > latest.finish:
            latest = timed
    return found


def _pixels_per_unit(ops: Sequence[TimedOp], makespan: float) -> float:
    """Wide enough for a two-digit number in a short op (one in ten may be shorter still)."""
    lengths = sorted(timed.finish - timed.start for timed in ops if timed.finish > timed.start)
    shortest = lengths[len(lengths) // 10] if lengths else makespan
    return min(max(18.0 / shortest, 900.0 / makespan), _MAX_WIDTH / makespan)


def _fill(kind: Kind, chunk: int, num_chunks: int) -> str:
    first, last = _COLOURS[kind]
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    mixed = (
        round(int(first[i : i + 2], 16) * (1 - share) + int(last[i : i + 2], 16) * share)
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = _FONT,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = "#222222",
) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{fill}">{escape(text)}</text>'
    )


def _rect(x: float, y: float, width: float, fill: str, height: float = _ROW) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:g}" fill="{fill}"/>'


def _op(
    timed: TimedOp,
    chunks: Sequence[int],
    top: float,
    scale: float,
    unit: str,
    is_in_company: bool,
) -> list[str]:
    op, _, start, finish = timed
    if op.kind not in COMPUTE or finish <= start:
        return []
    x, width = _MARGIN + start * scale, (finish - start) * scale
    chunk, height = chunks.index(op.stage), float(_ROW)
    if is_in_company:
        height = _ROW / len(chunks)
        top += chunk * height
    fill = _fill(op.kind, chunk, len(chunks))
    hover = f"{op}  {start:g} to {finish:g} {unit}".rstrip()
    parts = [
        f'<rect x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:g}" fill="{fill}" '
        f'stroke="#ffffff" stroke-width="0.6"><title>{escape(hover)}</title></rect>'
    ]
    label = str(op.micro_batch)
    size = min(_FONT, (width - 2) / (0.58 * len(label)))
    if size >= 5:
        ink = "#ffffff" if chunk and 2 * chunk >= len(chunks) - 1 else "#111111"
        parts.append(
            _text(
                x + width / 2,
                top + height / 2 + size * 0.36,
                label,
                size=round(size, 1),
                anchor="middle",
                fill=ink,
            )
        )
    return parts


def _axis(makespan: float, scale: float, top: float, unit: str) -> str:
    step = nice_step(70 / scale)
    parts = [
        f'<line x1="{_MARGIN}" y1="{top:.1f}" x2="{_MARGIN + makespan * scale:.1f}" y2="{top:.1f}" '
        'stroke="#555555"/>'
    ]
    for i in range(int(makespan / step * (1 + 1e-9)) + 1):
        x = _MARGIN + i * step * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{top + 5:.1f}" stroke="#555555"/>'
        )
        parts.append(_text(x, top + 18, f"{i * step:g} {unit}".rstrip(), anchor="middle"))
    return "\n".join(parts)


def _legend(kinds: set[Kind], num_chunks: int, top: float) -> str:
    parts = []
    x = float(_MARGIN)
    for kind in (k for k in _NAMES if k in kinds):
        for chunk in range(num_chunks):
            parts.append(_rect(x, top, 16, _fill(kind, chunk, num_chunks), 16))
            x += 17
        name = _NAMES[kind] + (f" (chunk 0 to {num_chunks - 1})" if num_chunks > 1 else "")
        parts.append(_text(x + 4, top + 12, name))
        x += 16 + 6.2 * len(name)
    parts.append(_rect(x, top, 16, _BUBBLE, 16))
    parts.append(_text(x + 21, top + 12, "bubble; numbers are micro-batches"))
    return "\n".join(parts)


# --- Chrome trace --------------------------------------------------------------------------------


def trace_threads(rows: Rows) -> dict[tuple[int, int], int]:
    """(rank, stage) -> the thread that has the stage's ops in `chrome_trace`."""
    threads: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(rows):
        apart = bool(ops_beside_others(row))
        for chunk, stage in enumerate(sorted({timed.op.stage for timed in row})):
            own = 2 * len(rows) * chunk + 2 * rank
            threads[rank, stage] = own if apart else 2 * rank
    return threads


def chrome_trace(
    rows: Rows,
    transfers: Sequence[TimedOp] = (),
    *,
    seconds_per_unit: float = 1.0,
    process: str = "planned",
    pid: int = 0,
) -> str:
    """JSON for Perfetto or chrome://tracing: a thread a rank, an event an op, microseconds.

    `transfers` (SEND_F, SEND_B) get a thread of their own beside the sender's, and so does every
    chunk but the first of a rank whose ops run beside each other: a thread's events may not.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    ]
    threads = trace_threads(rows)
    for rank, row in enumerate(rows):
        named = [(2 * rank, f"rank {rank}")]
        if any(timed.rank == rank for timed in transfers):
            named.append((2 * rank + 1, f"rank {rank} sends"))
        named += [
            (threads[rank, stage], f"rank {rank}, stage {stage}")
            for stage in sorted({timed.op.stage for timed in row})
            if threads[rank, stage] != 2 * rank
        ]
        for tid, name in named:
            place = tid if tid < 2 * len(rows) else 2 * rank  # below the rank's own
            for kind, args in (
                ("thread_name", {"name": name}),
                ("thread_sort_index", {"sort_index": place}),
            ):
                events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})
    micro = 1e6 * seconds_per_unit
    for timed in [t for row in rows for t in row] + list(transfers):
        sends = timed.op.kind not in COMPUTE
        events.append(
            {
                "ph": "X",
                "name": str(timed.op),
                "cat": timed.op.kind.value,
                "pid": pid,
                "tid": 2 * timed.rank + 1 if sends else threads[timed.rank, timed.op.stage],
                "ts": timed.start * micro,
                "dur": (timed.finish - timed.start) * micro,
                "args": {"stage": timed.op.stage, "micro_batch": timed.op.micro_batch},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

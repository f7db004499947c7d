"""What `bench memory` asks of its rows, and a row for people. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppruntime.launch.bars import Bar
from ppruntime.launch.memory_cases import ONE_IN_TWO, planned_peak

Row = dict[str, Any]
"""One entry of the record's `rows`."""

_LEFT_OVER_BYTES = 1 << 28
_PLANNED_BAR, _COST_BAR, _COPIES_BAR = 0.03, 0.03, 45.0


def has_run(row: Row) -> bool:
    """Whether the row has figures."""
    return not row["refused"] and not row["failure"]


def median_seconds(row: Row) -> float:
    """Of the timed steps, the slowest rank's."""
    seconds: list[float] = row["step_seconds"]
    return statistics.median(seconds)


def off_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that this one is measured against; None where it did not run."""
    return next(
        (r for r in rows if r["case"] == row["case"] and r["knob"] == "off" and has_run(r)), None
    )


def planned_ratios(row: Row) -> list[float | None]:
    """Planned over measured peak, by rank; None where the device does not count."""
    return [
        planned["peak_bytes"] / found["peak_bytes"] if found["peak_bytes"] else None
        for found in row["ranks"]
        for planned in (row["plan"]["ranks"][found["pp_rank"]],)
    ]


def bars(rows: Sequence[Row], copies: Mapping[str, float]) -> list[Bar]:
    """All that the rows allow to be said, in their order; copies last."""
    found: list[Bar] = []
    for row in rows:
        if has_run(row):
            found += _bars_of(row, off_of(row, rows))
    return [
        *found,
        *_bars_between_steps(rows),
        *(
            Bar.at_least(name, rate, _COPIES_BAR)
            for name, rate in copies.items()
            if name.startswith("GB/s") and name.endswith("beside a matmul")
        ),
    ]


def _bars_between_steps(rows: Sequence[Row]) -> Iterator[Bar]:
    """The ledger's other rows that a run measures: the worst of all."""
    for key, text in (("resting_parameters", "parameters between steps"), ("optimizer", "moments")):
        worst = max(
            (
                abs(row["plan"]["ranks"][rank["pp_rank"]][key] / rank[key] - 1)
                for row in rows
                for rank in row["ranks"]
                if rank[key]
            ),
            default=None,
        )
        if worst is not None:
            yield Bar.of(f"{text}: planned over measured, worst row off by", worst, _PLANNED_BAR)


def _bars_of(row: Row, off: Row | None) -> Iterator[Bar]:
    for found, ratio in zip(row["ranks"], planned_ratios(row), strict=True):
        if ratio is not None:
            what = f"{row['name']}, rank {found['rank']}: planned over measured peak, off by"
            yield Bar.of(what, abs(ratio - 1), _PLANNED_BAR)
    if off is None or row is off:
        return
    if row["is_exact"]:
        steps = zip(_told(row), _told(off), strict=False)
        num = sum(ours != theirs for ours, theirs in steps)
        yield Bar.of(f"{row['name']}: steps with other losses or norms than off", num, 0)
    is_timed = row["ranks"][0]["reserved_bytes"] is not None  # a CPU has no link to hide
    if row["knob"] == ONE_IN_TWO and is_timed and link_allows(row, off):
        what = f"{row['name']}: step beyond off's"
        yield Bar.of(what, median_seconds(row) / median_seconds(off) - 1, _COST_BAR)


def _told(row: Row) -> list[tuple[float, float]]:
    return list(zip(row["losses"], row["grad_norms"], strict=True))


def link_allows(row: Row, off: Row) -> bool:
    """Whether a device as fast as it is without the knob is slow enough, by the plan, for the link
    to hide what the knob copies."""
    most: float | None = row["plan"]["hidden_up_to_flops_per_s"]
    rate: float = off["plan"]["flops_per_step"] / median_seconds(off)
    return most is None or rate <= most


def notes(rows: Sequence[Row]) -> list[str]:
    """What rows say that is no bar: memory of earlier rows in their peaks, runs that only fit with
    their knobs, links that are too slow."""
    found = []
    for row in rows:
        left = max((rank["left_over_bytes"] or 0 for rank in row["ranks"]), default=0)
        if left > _LEFT_OVER_BYTES:
            found.append(f"{row['name']}: {left / 1e9:.2f} GB of earlier rows were still there")
        off = off_of(row, rows)
        base = next((r for r in rows if r["case"] == row["case"] and r["knob"] == "off"), None)
        if not has_run(row) or row is base:
            continue
        if off is None and base is not None:
            why = base["failure"] or base["refused"]
            found.append(f"{row['name']}: runs where off does not ({why.splitlines()[0]})")
        if off is not None and row["knob"] == ONE_IN_TWO and not link_allows(row, off):
            found.append(f"{row['name']}: the link does not hide it: {row['plan']['offload']}")
    return found


def line(row: Row, rows: Sequence[Row]) -> str:
    """A row for people, with ratios to off's."""
    head = f"{row['name']:48}"
    if row["refused"]:
        return f"{head} {row['refused']}"
    if row["failure"]:
        return f"{head} failed: {row['failure'].splitlines()[0][:150]}"
    off, seconds = off_of(row, rows), median_seconds(row)
    share = "" if off is None else f"{seconds / median_seconds(off):7.1%}"
    parts = [f"{head} {seconds * 1e3:9.1f} ms {share:7}"]
    for found, ratio in zip(row["ranks"], planned_ratios(row), strict=True):
        if ratio is not None:
            parts.append(
                f"rank {found['rank']}: {found['peak_bytes'] / 1e9:6.1f} GB in {found['peak_op']},"
                f" planned {ratio:.1%}, slack {found['slack_bytes'] / 1e9:.1f},"
            )
        if found["host_bytes"]:
            parts.append(f"host {found['host_bytes'] / 1e9:.1f} GB")
    if off is not None and _told(row)[: len(_told(off))] != _told(off):
        parts.append("other losses")
    return "  ".join(parts)


def plan_line(row: Row) -> str:
    """A row before it is run."""
    ranks = ", ".join(
        f"{r['peak_bytes'] / 1e9:.1f} GB in {r['peak_op']} (host {r['host_bytes'] / 1e9:.1f})"
        for r in row["plan"]["ranks"]
    )
    verdict = f"  {row['refused']}" if row["refused"] else ""
    return f"{row['name']:48} {planned_peak(row['plan']) / 1e9:6.1f} GB  by rank: {ranks}{verdict}"

"""Orders as files: CSV as torch writes it (`compute_only`), JSON, and a digest that ranks compare.

A CSV row is a rank, a cell a step: `2F0`, `(0F8;7B0)OVERLAP_F_B`. Skipped are blank cells and
torch's ops for sharded parameters (UNSHARD, RESHARD, REDUCE_GRAD): no part of an order here.
Reading checks the form only; whether the order may be run is `check`'s question.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ppruntime.schedules.ops import Schedule, ScheduleError, Step, ops_of, parse_step

_SKIPPED = re.compile(r"\s*(\d+(UNSHARD|RESHARD|REDUCE_GRAD)\s*)?")


def to_csv(schedule: Schedule) -> str:
    """One row a rank, lowered ops included. `from_csv` gives the schedule back but for its name."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(str, order) for order in schedule.orders)
    return text.getvalue()


def from_csv(text: str, *, name: str) -> Schedule:
    """The order in a CSV text. The placement is where the ops are, the number of micro-batches the
    highest one plus 1. Raises ScheduleError with rank and column of a cell that is no step."""
    rows = list(csv.reader(io.StringIO(text)))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return _assemble(name, rows)


def to_json(schedule: Schedule) -> str:
    """An object with `name`, `num_micro_batches`, `stage_to_rank` and `order`: a list of texts a
    rank."""
    return json.dumps(
        {
            "name": schedule.name,
            "num_micro_batches": schedule.num_micro_batches,
            "stage_to_rank": list(schedule.stage_to_rank),
            "order": [[str(step) for step in order] for order in schedule.orders],
        }
    )


def from_json(text: str, *, name: str = "json") -> Schedule:
    """The order in a JSON text: what `to_json` writes, or any object with an `order`; other keys
    are left alone. `name` is for objects without one. Raises ScheduleError on a wrong form."""
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{name} is not JSON: {error}") from error
    if not isinstance(table, dict) or not _is_table(table.get("order")):
        raise ScheduleError(f'{name} needs an "order": a list over ranks of lists of op texts')
    schedule = _assemble(str(table.get("name", name)), table["order"])
    num_micro_batches = table.get("num_micro_batches", schedule.num_micro_batches)
    if num_micro_batches != schedule.num_micro_batches:
        raise ScheduleError(
            f"{name} says num_micro_batches = {num_micro_batches}, its ops go up to micro-batch"
            f" {schedule.num_micro_batches - 1}; correct the one or the other"
        )
    stage_to_rank = table.get("stage_to_rank", list(schedule.stage_to_rank))
    if stage_to_rank != list(schedule.stage_to_rank):
        raise ScheduleError(
            f"{name} says stage_to_rank = {stage_to_rank}, its ops lie as in"
            f" {list(schedule.stage_to_rank)}; correct the one or the other"
        )
    return schedule


def read(path: Path) -> Schedule:
    """The order in a .csv or .json file; a CSV's is called as its file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return from_csv(text, name=path.stem)
    if path.suffix == ".json":
        return from_json(text, name=path.stem)
    raise ScheduleError(f"{path} is neither .csv nor .json; the ending says how to read it")


def digest(schedule: Schedule) -> str:
    """16 hex digits, equal on two ranks if both hold the same table: placement, micro-batches and
    every rank's order, lowered ops included; the name does not count."""
    head = f"{schedule.num_micro_batches};{','.join(map(str, schedule.stage_to_rank))}\n"
    return hashlib.sha256((head + to_csv(schedule)).encode()).hexdigest()[:16]


def _is_table(rows: object) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in rows
    )


def _assemble(name: str, rows: Iterable[Sequence[str]]) -> Schedule:
    orders: list[tuple[Step, ...]] = []
    rank_of: dict[int, int] = {}
    num_micro_batches = 0
    for rank, row in enumerate(rows):
        order: list[Step] = []
        for column, cell in enumerate(row):
            if _SKIPPED.fullmatch(cell):
                continue
            try:
                step = parse_step(cell)
            except ScheduleError as error:
                raise ScheduleError(f"{name}, rank {rank}, column {column}: {error}") from error
            order.append(step)
            for op in ops_of(step):
                num_micro_batches = max(num_micro_batches, op.micro_batch + 1)
                if rank_of.setdefault(op.stage, rank) != rank:
                    raise ScheduleError(
                        f"{name}, rank {rank}, column {column}: {op} belongs to rank"
                        f" {rank_of[op.stage]}, which has other ops of stage {op.stage}; a stage is"
                        " on one rank"
                    )
        orders.append(tuple(order))
    num_stages = max(rank_of, default=-1) + 1
    if missing := [stage for stage in range(num_stages) if stage not in rank_of]:
        raise ScheduleError(f"{name} has no op of stage {missing[0]}; stages go from 0 up, no gaps")
    if not rank_of:
        raise ScheduleError(f"{name} has no op at all; a row is a rank, a cell an op such as 0F0")
    placement = tuple(rank_of[stage] for stage in range(num_stages))
    return Schedule(name, num_micro_batches, placement, tuple(orders))

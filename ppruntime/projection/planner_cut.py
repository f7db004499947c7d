"""The best cut of a model into stages that fit memory, for given micro-batches in flight. Pure.

For every run of half-layers the Pareto front of time, held bytes and bytes that an op makes, over
its units' modes; over cuts, the smallest busiest stage by dynamic programming, exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ppruntime.projection.planner_task import (
    Choice,
    Flow,
    PlannedStage,
    PlannedUnit,
    Task,
    Variant,
    held_by,
    most_held,
    reserved_bytes,
    slot_bytes,
    stage_of,
    units_of,
    update_bytes,
    waiting_bytes,
)


@dataclass(frozen=True, slots=True)
class _Point:
    work_s: float
    held_bytes: float
    made_bytes: float
    chosen: tuple[Choice, ...]


class Fronts:
    """For each run of units the modes that nothing beats in time and in both sizes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._halves = sum(unit.is_half for unit in task.units)
        self._longest = min(self._halves, math.ceil(2.5 * self._halves / task.num_stages) + 1)
        self._known: dict[tuple[int, int], list[_Point]] = {}
        self._cuts: dict[Flow, tuple[PlannedStage, ...] | None] = {}

    def best_cut(self, flow: Flow) -> tuple[PlannedStage, ...] | None:
        """The cut whose busiest stage is the shortest; of such cuts, the one with the least sum of
        squares. None if no cut fits."""
        if flow not in self._cuts:
            self._cuts[flow] = self._best_cut(flow)
        return self._cuts[flow]

    def _best_cut(self, flow: Flow) -> tuple[PlannedStage, ...] | None:
        task, halves = self._task, self._halves
        table: list[dict[tuple[int, int], PlannedStage]] = []
        for p in range(task.num_stages):
            row = {}
            starts = [0] if p == 0 else range(halves + 1)
            for i in starts:
                ends = [halves] if p == task.num_stages - 1 else range(i, halves + 1)
                for j in ends:
                    if j - i <= self._longest:
                        stage = self._fitting((p, i, j), flow)
                        if stage is not None:
                            row[i, j] = stage
            table.append(row)
        limit = self._chain(table, lambda so_far, stage: max(so_far, stage.work_s))
        if limit is None:
            return None
        most = limit[0] * (1 + 1e-12)
        kept = [{key: s for key, s in row.items() if s.work_s <= most} for row in table]
        best = self._chain(kept, lambda so_far, stage: so_far + stage.work_s**2)
        assert best is not None, "the shortest busiest stage is there"
        return best[1]

    def _chain(self, table, join) -> tuple[float, tuple[PlannedStage, ...]] | None:  # type: ignore[no-untyped-def]
        """The best value over cuts of `join` along the stages, and these."""
        best: dict[int, tuple[float, tuple[PlannedStage, ...]]] = {0: (0.0, ())}
        for row in table:
            new: dict[int, tuple[float, tuple[PlannedStage, ...]]] = {}
            for (i, j), stage in row.items():
                if i in best:
                    value = join(best[i][0], stage)
                    if j not in new or value < new[j][0]:
                        new[j] = (value, (*best[i][1], stage))
            best = new
        return best.get(self._halves)

    def _fitting(self, place: tuple[int, int, int], flow: Flow) -> PlannedStage | None:
        """The fastest way to run halves i to j - 1 as stage p within memory; `place`: p, i, j."""
        p, i, j = place
        task, front, in_flight = self._task, self._front(i, j, p), flow.in_flight[p]
        units = units_of(task, i, j, p)
        blocks, waiting = sum(unit.is_expert_block for unit in units), waiting_bytes(units, flow)
        alone = sum(unit.static_bytes for unit in units) + task.every_rank_bytes
        lasting = reserved_bytes(task, p) + slot_bytes(task, flow, place)
        shortest = math.inf
        best: tuple[_Point, Variant, float] | None = None
        for variant in task.variants:
            extra = blocks * (variant.input_grad_s + variant.weight_grad_s)
            static = alone + blocks * variant.static_bytes
            free = task.memory_bytes - lasting - static
            if free < max(0.0, update_bytes(units, variant)):
                continue
            for point in front:  # fastest first
                if point.work_s + extra >= shortest * (1 - 1e-12):
                    break  # as fast at best; earlier variants change less
                offloaded = self._offloaded(point, extra, in_flight, free, waiting)
                if offloaded is not None:
                    shortest, best = point.work_s + extra, (point, variant, offloaded)
                    break
        if best is None:
            return None
        point, variant, offloaded = best
        return stage_of(task, place, point.chosen, variant, flow, offloaded)

    def _offloaded(
        self, point: _Point, extra: float, in_flight: int, free: float, waiting: float
    ) -> float | None:
        """Bytes of a micro-batch that have to go to the host; None if even that does not fit."""
        missing = most_held(in_flight, point.held_bytes, waiting) + point.made_bytes - free
        if missing <= 0:
            return 0.0
        if not self._task.host_bytes_per_s or in_flight <= 2:
            return None
        needed = missing / (in_flight - 2)
        most = min(point.held_bytes, self._task.host_bytes_per_s * max(0.0, point.work_s + extra))
        return needed if needed <= most else None

    def _front(self, i: int, j: int, p: int) -> list[_Point]:
        """Of stage p with halves i to j - 1, and the embedding or the head if it has them."""
        front, last = self._from(-1 if p == 0 else i, j), self._task.units[-1]
        return self._longer(front, last) if p == self._task.num_stages - 1 else front

    def _from(self, i: int, j: int) -> list[_Point]:
        """Of halves i to j - 1; i = -1: of the embedding and halves 0 to j - 1."""
        if (i, j) not in self._known:
            units = self._task.units
            if j > max(i, 0):
                front = self._longer(self._from(i, j - 1), units[j])  # half j - 1 is unit j
            else:
                front = [_Point(0.0, 0.0, 0.0, ())]
                front = self._longer(front, units[0]) if i < 0 else front
            self._known[i, j] = front
        return self._known[i, j]

    def _longer(self, front: list[_Point], unit: PlannedUnit) -> list[_Point]:
        points = _pareto(
            _Point(
                point.work_s + choice.work_s,
                point.held_bytes + held_by(choice, is_first=not point.chosen),
                max(point.made_bytes, choice.made_bytes),
                (*point.chosen, choice),
            )
            for point in front
            for choice in unit.choices
        )
        return points[:1] if self._task.memory_bytes == math.inf else points


def _pareto(points: Iterator[_Point]) -> list[_Point]:
    """Fastest first; each holds or makes less than all before it."""
    front: list[_Point] = []
    least: dict[float, float] = {}  # held, by made bytes of those so far
    for point in sorted(points, key=lambda p: (p.work_s, p.held_bytes, p.made_bytes)):
        if all(point.held_bytes < held for made, held in least.items() if made <= point.made_bytes):
            front.append(point)
            least[point.made_bytes] = point.held_bytes
    return front

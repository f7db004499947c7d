"""Where each op of an order stands, so that a rule can ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppruntime.schedules.ops import Kind, Op, Schedule, ops_of


@dataclass(frozen=True, slots=True)
class Positions:
    """The number of each op among the ops of its rank (pairs taken apart), by kind, stage and
    micro-batch; -1 if it is not there."""

    of: Mapping[tuple[Kind, int], list[int]]
    steps: tuple[tuple[int, ...], ...]
    """rank -> number -> step."""
    schedule: Schedule

    def all(self, kind: Kind, stage: int) -> list[int]:
        """The positions of a stage's ops of one kind, by micro-batch."""
        return self.of.get((kind, stage)) or [-1] * self.schedule.num_micro_batches

    def step(self, op: Op) -> int:
        """The step of an op that is there, on the rank of its stage."""
        rank = self.schedule.stage_to_rank[op.stage]
        return self.steps[rank][self.of[op.kind, op.stage][op.micro_batch]]


def positions(schedule: Schedule) -> Positions:
    """Indexes an order whose ops are in range, on their ranks, and there once."""
    of: dict[tuple[Kind, int], list[int]] = {}
    all_steps = []
    for order in schedule.orders:
        steps: list[int] = []
        for i, step in enumerate(order):
            for op in ops_of(step):
                key = (op.kind, op.stage)
                if key not in of:
                    of[key] = [-1] * schedule.num_micro_batches
                of[key][op.micro_batch] = len(steps)
                steps.append(i)
        all_steps.append(tuple(steps))
    return Positions(of, tuple(all_steps), schedule)

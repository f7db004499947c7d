"""What ops take under noise: jitter, ranks of different speed, stalls; one draw for any order."""

from __future__ import annotations

import random

from ppruntime.schedules.machine import Machine
from ppruntime.schedules.ops import Kind, Op, Schedule
from ppruntime.schedules.virtual_time import noise_factors

_CODE = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2}


class OpTimes:
    """An op's time after jitter, the rank's speed and stalls. An op has the same draw in every
    order, so that orders can be compared."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        noise = machine.noise
        self._factors = noise_factors(schedule, noise.jitter, noise.seed)
        draw = random.Random(f"ranks {noise.seed}")
        self._slowness = [
            max(max(0.0, draw.gauss(1.0, noise.rank_spread)) for _ in range(noise.group))
            if noise.rank_spread
            else 1.0
            for _ in range(schedule.num_ranks)
        ]
        self._stall = noise.stall
        self._stalled: frozenset[int] = frozenset()
        if noise.stall_probability and noise.stall:
            count = schedule.num_stages * schedule.num_micro_batches * 3
            stalls = random.Random(f"stalls {noise.seed}")
            self._stalled = frozenset(
                i for i in range(count) if stalls.random() < noise.stall_probability
            )
        self._num_micro_batches = schedule.num_micro_batches

    def __call__(self, rank: int, op: Op, cost: float) -> float:
        """What `op`, which costs `cost`, takes on `rank`."""
        place = 3 * (op.stage * self._num_micro_batches + op.micro_batch) + _CODE[op.kind]
        factor = self._factors[place] if self._factors else 1.0
        stall = self._stall if place in self._stalled else 0.0
        return cost * factor * self._slowness[rank] + stall

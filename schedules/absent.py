"""Ranks of a pipeline that are not there, played in virtual time beside those that are.

Some ranks run for real and say when they sent what; the others follow their orders from that, each
op as long as it costs. So a real rank can be told when its neighbour's message would have come,
with the true number of micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Collection

from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Schedule, ScheduleError


class AbsentRanks:
    """The ranks of one step that are not in `present`. Times are those of the caller's clock, in
    the costs' unit.

    `schedule` has computations only. An absent rank starts at `start`, takes its ops in order and
    waits only for an op's own inputs, as the executor does.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        hops: Hops,
        present: Collection[int],
        *,
        start: float,
    ) -> None:
        if wrong := schedule.kinds() - COMPUTE:
            raise ScheduleError(
                f"schedule {schedule.name!r} has {sorted(k.value for k in wrong)}; absent ranks "
                "follow computations, give the order before it is lowered"
            )
        if costs.num_stages != schedule.num_stages:
            raise ScheduleError(
                f"costs are for {costs.num_stages} stages, schedule {schedule.name!r} has "
                f"{schedule.num_stages}; give one triple per stage"
            )
        self._ranks = schedule.stage_to_rank
        self._last = schedule.num_stages - 1
        self._costs = costs
        self._up, self._down = hops.per_stage_hop(schedule.stage_to_rank)
        self._orders = {
            rank: tuple(schedule.ops(rank))
            for rank in range(schedule.num_ranks)
            if rank not in present
        }
        self._next = dict.fromkeys(self._orders, 0)
        self._clock = dict.fromkeys(self._orders, start)
        self._there: dict[tuple[int, bool, int], float] = {}
        self._play()

    def sent(self, stage: int, *, forward: bool, micro_batch: int, time: float) -> None:
        """A present stage's output (`forward`) or input gradient left at `time`."""
        self._hand_on(stage, forward, micro_batch, time)
        self._play()

    def arrival(self, stage: int, *, forward: bool, micro_batch: int) -> float | None:
        """When the input (`forward`) or output gradient of a present stage is there; None while it
        hangs on something that has not been sent."""
        return self._there.get((stage, forward, micro_batch))

    def _hand_on(self, stage: int, forward: bool, micro_batch: int, time: float) -> None:
        to = stage + 1 if forward else stage - 1
        if 0 <= to <= self._last:
            latency = self._up[stage] if forward else self._down[to]
            self._there[to, forward, micro_batch] = time + latency

    def _play(self) -> None:
        """Lets every absent rank go on as far as its inputs allow."""
        moved = True
        while moved:
            moved = False
            for rank, order in self._orders.items():
                while self._next[rank] < len(order):
                    op = order[self._next[rank]]
                    ready = self._ready(op)
                    if ready is None:
                        break
                    end = max(self._clock[rank], ready) + self._costs.of(op)
                    self._clock[rank] = end
                    self._next[rank] += 1
                    moved = True
                    if op.kind is not Kind.W:
                        self._hand_on(op.stage, op.kind is Kind.F, op.micro_batch, end)

    def _ready(self, op: Op) -> float | None:
        """When the op's input from another stage is there; None if nobody knows yet."""
        first, last = op.stage == 0, op.stage == self._last
        if op.kind is Kind.W or (op.kind is Kind.F and first) or (op.kind is not Kind.F and last):
            return float("-inf")
        return self._there.get((op.stage, op.kind is Kind.F, op.micro_batch))

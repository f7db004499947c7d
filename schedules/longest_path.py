"""A step's length once more, as the longest path through the graph of its ops.

Nothing here is shared with `virtual_time` or `simulator`: no clock, no queue, no replay. It is what
these are held against.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Schedule, ScheduleError


def longest_path(schedule: Schedule, costs: Costs, hops: Hops | None = None) -> float:
    """Length of the longest chain of ops and transfers of a compute-only order: its makespan.

    Raises ScheduleError if the graph has a cycle, that is, if the order deadlocks.
    """
    ranks = schedule.stage_to_rank
    forward_latency, backward_latency = (hops or Hops()).per_stage_hop(ranks)
    duration: dict[Op, float] = {}
    before: dict[Op, dict[Op, float]] = {}
    gradient: dict[tuple[int, int], Op] = {}  # what makes the gradient of a stage's input
    for rank in range(schedule.num_ranks):
        previous: Op | None = None
        for op in schedule.ops(rank):
            if op.kind not in COMPUTE:
                raise ScheduleError(f"{op} is no compute op; give the order before it is lowered")
            duration[op] = costs.of(op)
            before[op] = {} if previous is None else {previous: 0.0}
            if op.kind in (Kind.B, Kind.I):
                gradient[op.stage, op.micro_batch] = op
            previous = op
    for op, needs in before.items():
        s, m = op.stage, op.micro_batch
        if op.kind is Kind.F and s > 0:
            needs[Op(s - 1, Kind.F, m)] = forward_latency[s - 1]
        elif op.kind is Kind.W:
            needs[gradient[s, m]] = 0.0
        elif op.kind in (Kind.B, Kind.I):
            own = Op(s, Kind.F, m)
            needs[own] = needs.get(own, 0.0)
            if s + 1 < schedule.num_stages:
                needs[gradient[s + 1, m]] = backward_latency[s]
    finish: dict[Op, float] = {}
    try:
        for op in TopologicalSorter(before).static_order():
            begin = max((finish[n] + wait for n, wait in before[op].items()), default=0.0)
            finish[op] = begin + duration[op]
    except CycleError as error:
        cycle = ", ".join(map(str, error.args[1]))
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks: {cycle}") from error
    return max(finish.values(), default=0.0)

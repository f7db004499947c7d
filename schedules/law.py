"""The steady-state law: time per micro-batch of strict forward/backward alternation.

With one stage a rank, warm-up w_r (forwards that rank r runs before its first backward), costs
f_r, i_r, v_r (weight gradient), one-way latencies c of the hops, an executor that never blocks on a
send and buffers enough, a long step takes per micro-batch the largest, over ranges a <= b, of

    T(a, b) = time(a, b) / (w_a - w_b + 1)
    whole backward   time(a, b) = sum over a..b of (f + i + v) + sum over hops in a..b of (c + c')
    1F1B-W           time(a, b) = sum over a..b of (f + i) + v_a + sum over hops of (c + c')

and of the busiest rank's f + i + v. It is the largest ratio of time to micro-batches around a cycle
of the event graph: the elementary cycles go up from a to b with an activation, turn, and come down
with its gradient, which rank a needs before its (w_a - w_b + 1)-th next forward. 1F1B-W sends a
gradient before it works on the weights, so that only rank a's weight gradient lies on the cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import ScheduleError


class Cycle(NamedTuple):
    """Ranks first..last, up and down again: `time` is spent per trip, and rank `first` has
    w_first - w_last + 1 micro-batches under way meanwhile."""

    first: int
    last: int
    time: float


def steady_time(
    warmup: Sequence[int],
    costs: Costs,
    hops: Hops | None = None,
    *,
    defer_weight_grads: bool = False,
) -> float:
    """Time per micro-batch of a long step with this warm-up vector, one stage a rank.

    `defer_weight_grads` is 1F1B-W, else the backward is whole. Raises ScheduleError unless the
    vector is non-increasing, which is exactly when the order does not deadlock.
    """
    _check_warmup(warmup, costs)
    trips = max(
        cycle.time / (warmup[cycle.first] - warmup[cycle.last] + 1)
        for cycle in cycles(costs, hops or Hops(), defer_weight_grads)
    )
    return max(trips, max(_work(costs)))


def stall(
    warmup: Sequence[int],
    costs: Costs,
    hops: Hops | None = None,
    *,
    defer_weight_grads: bool = False,
) -> float:
    """Share by which a micro-batch takes longer than the busiest rank's work on it: 0 is ideal."""
    time = steady_time(warmup, costs, hops, defer_weight_grads=defer_weight_grads)
    most = max(_work(costs))
    return time / most - 1.0 if most else 0.0


def _work(costs: Costs) -> list[float]:
    return [costs.work(stage) for stage in range(costs.num_stages)]


def cycles(costs: Costs, hops: Hops, defer_weight_grads: bool) -> Iterator[Cycle]:
    """Every cycle of the law: each rank's own, and each range of ranks, up and down."""
    num_ranks = costs.num_stages
    up, down = hops.per_stage_hop(range(num_ranks))
    for first in range(num_ranks):
        time = costs.weight_grad[first] if defer_weight_grads else 0.0
        for last in range(first, num_ranks):
            time += costs.forward[last] + costs.input_grad[last]
            if not defer_weight_grads:
                time += costs.weight_grad[last]
            if last > first:
                time += up[last - 1] + down[last - 1]
            yield Cycle(first, last, time)


def _check_warmup(warmup: Sequence[int], costs: Costs) -> None:
    if len(warmup) != costs.num_stages:
        raise ScheduleError(
            f"{len(warmup)} warm-up numbers for {costs.num_stages} ranks; the law is for one stage "
            "a rank and takes one number each"
        )
    for rank, (here, below) in enumerate(pairwise(warmup)):
        if here < below:
            raise ScheduleError(
                f"rank {rank} warms up with {here} forwards and rank {rank + 1} with {below}: that "
                "deadlocks; the numbers must not grow from rank to rank"
            )

"""The smallest warm-up that keeps stalls, or memory, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.law import cycles, steady_time
from ppruntime.schedules.ops import ScheduleError

_ROUNDING = 1e-9
"""A quotient this little above an integer is that integer: sums of costs are rounded."""


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """`warmup[r]`: forwards rank r runs before its first backward."""

    warmup: tuple[int, ...]
    time_per_micro_batch: float
    """By the steady-state law, for a long step."""
    stall: float
    """time_per_micro_batch / (busiest rank's work on a micro-batch) - 1."""

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Activations each rank holds at most: its warm-up and the one at work."""
        return tuple(w + 1 for w in self.warmup)


def plan_warmup(
    costs: Costs,
    hops: Hops | None = None,
    *,
    stall_budget: float | None = None,
    memory_budget: int | Sequence[int] | None = None,
    defer_weight_grads: bool = False,
) -> WarmupPlan:
    """The warm-up vector with the fewest activations on every rank, within one budget.

    `stall_budget`: the share by which a micro-batch may take longer than the busiest rank's work.
    `memory_budget`: activations in flight that a rank may hold, one number or one a rank; the plan
    is the fastest that fits, and of those the smallest. Exactly one is given. `defer_weight_grads`
    plans for 1F1B-W. A long step is assumed, so the number of micro-batches does not matter.

    The law's conditions w_a - w_b >= time(a, b) / T - 1 are difference constraints, so the vector
    built from the last rank backwards is the least on every rank at once: no other one within the
    budget is smaller anywhere.
    """
    hops = hops or Hops()
    if (stall_budget is None) == (memory_budget is None):
        raise ScheduleError("a warm-up plan takes a stall budget or a memory budget, exactly one")
    if max(costs.work(stage) for stage in range(costs.num_stages)) <= 0:
        raise ScheduleError("a warm-up plan needs costs above zero; every stage costs 0")
    if stall_budget is not None:
        if not 0 <= stall_budget < float("inf"):
            raise ScheduleError(
                f"the stall budget is {stall_budget}; a share from 0 up, such as 0.01"
            )
        return _plan(costs, hops, stall_budget, defer_weight_grads)
    assert memory_budget is not None
    limits = _limits(memory_budget, costs.num_stages)
    return _fastest_within(limits, costs, hops, defer_weight_grads)


def _plan(costs: Costs, hops: Hops, budget: float, defer_weight_grads: bool) -> WarmupPlan:
    most = max(costs.work(stage) for stage in range(costs.num_stages))
    warmup = _least_warmup(most * (1 + budget), costs, hops, defer_weight_grads)
    time = steady_time(warmup, costs, hops, defer_weight_grads=defer_weight_grads)
    return WarmupPlan(warmup, time, max(0.0, time / most - 1.0))


def _least_warmup(
    target: float, costs: Costs, hops: Hops, defer_weight_grads: bool
) -> tuple[int, ...]:
    """The least vector, rank by rank, with which no cycle takes over `target` a micro-batch."""
    warmup = [0] * costs.num_stages
    for cycle in reversed(list(cycles(costs, hops, defer_weight_grads))):
        needed = ceil(cycle.time / target - 1 - _ROUNDING) + warmup[cycle.last]
        if cycle.first < cycle.last:
            warmup[cycle.first] = max(warmup[cycle.first], warmup[cycle.first + 1], needed)
    return tuple(warmup)


def _fastest_within(
    limits: tuple[int, ...], costs: Costs, hops: Hops, defer_weight_grads: bool
) -> WarmupPlan:
    """Halves the interval between a stall that fits the limits and one that does not. A plan's
    stall is the law's exact value, one of finitely many, so the interval closes on it."""

    def fits(plan: WarmupPlan) -> bool:
        return all(held <= limit for held, limit in zip(plan.in_flight, limits, strict=True))

    best = _plan(costs, hops, 0.0, defer_weight_grads)
    if fits(best):
        return best
    plain = steady_time((0,) * costs.num_stages, costs, hops, defer_weight_grads=defer_weight_grads)
    most = max(costs.work(stage) for stage in range(costs.num_stages))
    too_little, enough = 0.0, plain / most - 1.0
    best = _plan(costs, hops, enough, defer_weight_grads)
    while enough - too_little > 1e-12 * max(1.0, enough):
        middle = (too_little + enough) / 2
        plan = _plan(costs, hops, middle, defer_weight_grads)
        if fits(plan):
            best, enough = plan, min(middle, plan.stall)
        else:
            too_little = middle
    return best


def _limits(memory_budget: int | Sequence[int], num_ranks: int) -> tuple[int, ...]:
    limits = (
        (memory_budget,) * num_ranks if isinstance(memory_budget, int) else tuple(memory_budget)
    )
    if len(limits) != num_ranks:
        raise ScheduleError(
            f"the memory budget names {len(limits)} ranks of {num_ranks}; give one number each"
        )
    for rank, limit in enumerate(limits):
        if limit < 1:
            raise ScheduleError(
                f"the memory budget of rank {rank} is {limit} activations; a step needs 1 at least"
            )
    return limits

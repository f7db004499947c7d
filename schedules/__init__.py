"""The schedules room: what every rank of a pipeline does, in which order, as plain data.

Standard library only: no torch, no configuration, no other room. Start at `ops.py` (op, pair,
schedule), then `one_f_one_b.py` for an order and `passes.py` for what is done to one.

ops            kinds of op, their text form, `Schedule`
placement      stage to rank: loop and V
one_f_one_b    GPipe, 1F1B with any warm-up, interleaved 1F1B
progress       runs an order without times: who waits for whom
counts         activations in flight, transfers, receive buffers
passes         order -> order: split backward, transfers, frees, offload
check          what a legal order is, one function a rule
grid           the text table in error messages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppruntime.schedules import one_f_one_b as _1f1b
from ppruntime.schedules import placement
from ppruntime.schedules.ops import Schedule, ScheduleError, Step
from ppruntime.schedules.passes import defer_weight_grads, drop_micro_batches


@dataclass(frozen=True, slots=True)
class _Request:
    """What one rank's order is built for."""

    rank: int
    num_ranks: int
    stages_per_rank: int
    num_micro_batches: int
    num_warmup: int


@dataclass(frozen=True, slots=True)
class _Order:
    """How an order is made. `stages_per_rank` None: any number, 2 if not said."""

    build: Callable[[_Request], Sequence[Step]]
    stages_per_rank: int | None = 1
    built_for: Callable[[int, int], int] = lambda num_ranks, num_micro_batches: num_micro_batches
    """(ranks, micro-batches) -> micro-batches that the definition allows, at least as many; those
    in excess are dropped."""
    warmup_step: int | None = None
    """The default; None where the order has no choice."""
    defers_weight_grads: bool = False


def _whole_rounds(num_ranks: int, num_micro_batches: int) -> int:
    return -(-num_micro_batches // num_ranks) * num_ranks


_ORDERS = {
    "gpipe": _Order(lambda q: _1f1b.gpipe(q.rank, q.num_micro_batches)),
    "1f1b": _Order(
        lambda q: _1f1b.one_f_one_b(q.rank, q.num_micro_batches, q.num_ranks - 1 - q.rank)
    ),
    "async_1f1b": _Order(
        lambda q: _1f1b.one_f_one_b(q.rank, q.num_micro_batches, q.num_warmup), warmup_step=2
    ),
    "1f1b_w": _Order(
        lambda q: _1f1b.one_f_one_b(q.rank, q.num_micro_batches, q.num_warmup),
        warmup_step=1,
        defers_weight_grads=True,
    ),
    "interleaved_1f1b": _Order(
        lambda q: _1f1b.interleaved(q.rank, q.num_ranks, q.stages_per_rank, q.num_micro_batches),
        stages_per_rank=None,
        built_for=_whole_rounds,
    ),
}

NAMES = tuple(_ORDERS)
"""The orders that `make` knows."""


def make(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    stages_per_rank: int | None = None,
    warmup_step: int | Sequence[int] | None = None,
) -> Schedule:
    """The order `name` as computations only, for any number of ranks and micro-batches.

    `stages_per_rank` is by default 2 for interleaved and V orders, else 1. `warmup_step` is for
    async_1f1b (2) and 1f1b_w (1): an int s, rank r runs s (P - 1 - r) forwards before its first
    backward; or these numbers themselves, one a rank. Where a definition asks for more micro-batches
    or for whole rounds, the order is built for the next number it allows and the excess dropped.
    Raises ScheduleError with the nearest valid numbers.
    """
    order = _ORDERS.get(name)
    if order is None:
        raise ScheduleError(f"there is no order {name!r}; the orders are {', '.join(NAMES)}")
    if num_ranks < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{name} was asked for with {num_ranks} ranks and {num_micro_batches} micro-batches;"
            f" the nearest is {max(1, num_ranks)} and {max(1, num_micro_batches)}"
        )
    stages = _stages_per_rank(name, order, stages_per_rank)
    built_for = order.built_for(num_ranks, num_micro_batches)
    warmup = _warmup(name, order, warmup_step, num_ranks, built_for)
    schedule = Schedule(
        name,
        built_for,
        placement.loop(num_ranks, stages) if _is_loop(order) else placement.v_shape(num_ranks),
        tuple(
            tuple(order.build(_Request(rank, num_ranks, stages, built_for, warmup[rank])))
            for rank in range(num_ranks)
        ),
    )
    if order.defers_weight_grads:
        schedule = defer_weight_grads(schedule)
    return drop_micro_batches(schedule, num_micro_batches)


def _is_loop(order: _Order) -> bool:
    return order.stages_per_rank != 2


def _stages_per_rank(name: str, order: _Order, asked: int | None) -> int:
    if asked is None:
        return order.stages_per_rank or 2
    if order.stages_per_rank is None and asked >= 1:
        return asked
    if asked != order.stages_per_rank:
        raise ScheduleError(
            f"{name} was asked for with stages_per_rank = {asked}; the nearest is"
            f" {order.stages_per_rank or 1}"
        )
    return asked


def _warmup(
    name: str,
    order: _Order,
    asked: int | Sequence[int] | None,
    num_ranks: int,
    num_micro_batches: int,
) -> tuple[int, ...]:
    if order.warmup_step is None:
        if asked is not None:
            takers = [other for other, o in _ORDERS.items() if o.warmup_step is not None]
            raise ScheduleError(
                f"warmup_step has no effect on {name}; leave it out or use {' or '.join(takers)}"
            )
        return (0,) * num_ranks
    step = order.warmup_step if asked is None else asked
    return _1f1b.warmup_vector(step, num_ranks, num_micro_batches)

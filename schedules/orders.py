"""The orders by name: what each is built from, and `make`, which answers a request for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppruntime.schedules import placement
from ppruntime.schedules.dualpipe_v import dualpipe_v
from ppruntime.schedules.one_f_one_b import gpipe, interleaved, one_f_one_b, warmup_vector
from ppruntime.schedules.ops import Op, Schedule, ScheduleError, Step
from ppruntime.schedules.passes import drop_micro_batches
from ppruntime.schedules.v_schedules import v_half, v_min
from ppruntime.schedules.zero_bubble import delay_weights, interleaved_zb1p, zb_h1, zb_h2, zb_v


@dataclass(frozen=True, slots=True)
class _Request:
    """What an order is built for. `num_warmup` has one number a rank."""

    num_ranks: int
    stages_per_rank: int
    num_micro_batches: int
    num_warmup: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Order:
    """How an order is made: `build` gives the order of every rank."""

    build: Callable[[_Request], Sequence[Sequence[Step]]]
    stages_per_rank: int | None = 1
    """None: any number, 2 if not said."""
    is_v: bool = False
    built_for: Callable[[int, int], int] = lambda num_ranks, num_micro_batches: num_micro_batches
    """(ranks, micro-batches) -> the next number of micro-batches that the definition allows."""
    warmup_step: int | None = None
    """The default; None where the order has no choice."""


def _each_rank(
    order: Callable[[int, _Request], Sequence[Step]],
) -> Callable[[_Request], list[Sequence[Step]]]:
    return lambda q: [order(rank, q) for rank in range(q.num_ranks)]


def _warmed_up(rank: int, q: _Request) -> list[Op]:
    return one_f_one_b(rank, q.num_micro_batches, q.num_warmup[rank])


def _whole_rounds(num_ranks: int, num_micro_batches: int) -> int:
    return -(-num_micro_batches // num_ranks) * num_ranks


_ORDERS = {
    "gpipe": _Order(_each_rank(lambda r, q: gpipe(r, q.num_micro_batches))),
    "1f1b": _Order(
        _each_rank(lambda r, q: one_f_one_b(r, q.num_micro_batches, q.num_ranks - 1 - r))
    ),
    "async_1f1b": _Order(_each_rank(_warmed_up), warmup_step=2),
    "1f1b_w": _Order(_each_rank(lambda r, q: delay_weights(_warmed_up(r, q), 0)), warmup_step=1),
    "interleaved_1f1b": _Order(
        _each_rank(
            lambda r, q: interleaved(r, q.num_ranks, q.stages_per_rank, q.num_micro_batches)
        ),
        stages_per_rank=None,
        built_for=_whole_rounds,
    ),
    "interleaved_zb1p": _Order(
        _each_rank(
            lambda r, q: interleaved_zb1p(r, q.num_ranks, q.stages_per_rank, q.num_micro_batches)
        ),
        stages_per_rank=None,
        built_for=_whole_rounds,
    ),
    "zb_h1": _Order(_each_rank(lambda r, q: zb_h1(r, q.num_ranks, q.num_micro_batches))),
    "zb_h2": _Order(_each_rank(lambda r, q: zb_h2(r, q.num_ranks, q.num_micro_batches))),
    "zb_v": _Order(
        _each_rank(lambda r, q: zb_v(r, q.num_ranks, q.num_micro_batches)),
        stages_per_rank=2,
        is_v=True,
        built_for=lambda num_ranks, m: max(m, 2 * num_ranks - 1),
    ),
    "v_half": _Order(
        lambda q: v_half(q.num_ranks, q.num_micro_batches), stages_per_rank=2, is_v=True
    ),
    "v_min": _Order(
        lambda q: v_min(q.num_ranks, q.num_micro_batches), stages_per_rank=2, is_v=True
    ),
    "dualpipe_v": _Order(
        _each_rank(lambda r, q: dualpipe_v(r, q.num_ranks, q.num_micro_batches)),
        stages_per_rank=2,
        is_v=True,
        built_for=lambda num_ranks, m: max(m, 2 * num_ranks),
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
    backward; or these numbers themselves, one a rank. Where a definition asks for more
    micro-batches, the order is built for the next number it allows and the excess dropped.
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
        placement.v_shape(num_ranks) if order.is_v else placement.loop(num_ranks, stages),
        tuple(map(tuple, order.build(_Request(num_ranks, stages, built_for, warmup)))),
    )
    return drop_micro_batches(schedule, num_micro_batches)


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
    return warmup_vector(step, num_ranks, num_micro_batches)

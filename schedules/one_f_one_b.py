"""GPipe, 1F1B with any warm-up, and interleaved 1F1B: orders that keep the backward whole.

Each function gives one rank's order; `schedules.make` puts the ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppruntime.schedules.ops import Kind, Op, ScheduleError


def gpipe(stage: int, num_micro_batches: int) -> list[Op]:
    """All forwards, then all backwards, both in ascending order: gradients add up as everywhere
    else, at the price of the most activations in flight: all of them. Source: Huang et al. 2019."""
    return alternate(*_both(stage, num_micro_batches), num_warmup=num_micro_batches)


def one_f_one_b(stage: int, num_micro_batches: int, num_warmup: int) -> list[Op]:
    """`num_warmup` forwards, then forward and backward in turn, then the backwards that are left.

    At most num_warmup + 1 micro-batches are in flight. With num_warmup = P - 1 - rank it is 1F1B
    (Narayanan et al. 2021, section 2.2), with more of them Async1F1B: each forward beyond gives a
    transfer time to hide in.
    """
    return alternate(*_both(stage, num_micro_batches), num_warmup=num_warmup)


def interleaved(
    rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> list[Op]:
    """1F1B over `stages_per_rank` chunks in loop placement, P micro-batches a chunk in turn.

    `num_micro_batches` has to be a multiple of `num_ranks` when there are several chunks. In flight
    are at most (V - 1) P + 2 (P - 1 - rank) + 1 chunk activations. With one chunk it is 1F1B.
    Source: Narayanan et al. 2021, section 2.2.
    """
    forwards, backwards = interleaved_ops(rank, num_ranks, stages_per_rank, num_micro_batches)
    lead = num_ranks - 1 - rank
    # The factor 2 lets the ranks drift apart by a transfer; a single chunk is 1F1B by definition.
    num_warmup = (stages_per_rank - 1) * num_ranks + (2 * lead if stages_per_rank > 1 else lead)
    return alternate(forwards, backwards, num_warmup=num_warmup)


def interleaved_ops(
    rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[list[Op], list[Op]]:
    """The forwards and the backwards of one rank, each in the interleaved sequence: blocks of P
    micro-batches, through the chunks upwards for forwards and downwards for backwards."""
    assert stages_per_rank == 1 or num_micro_batches % num_ranks == 0, "whole rounds only"
    forwards: list[Op] = []
    backwards: list[Op] = []
    for first in range(0, num_micro_batches, num_ranks):
        block = range(first, min(first + num_ranks, num_micro_batches))
        for chunk in range(stages_per_rank):
            forwards += [Op(chunk * num_ranks + rank, Kind.F, m) for m in block]
        for chunk in reversed(range(stages_per_rank)):
            backwards += [Op(chunk * num_ranks + rank, Kind.B, m) for m in block]
    return forwards, backwards


def alternate(forwards: Sequence[Op], backwards: Sequence[Op], *, num_warmup: int) -> list[Op]:
    """`num_warmup` forwards, then one forward and one backward in turn, then what is left."""
    num_warmup = min(num_warmup, len(forwards))
    order = list(forwards[:num_warmup])
    num_pairs = len(forwards) - num_warmup
    for forward, backward in zip(forwards[num_warmup:], backwards[:num_pairs], strict=True):
        order += (forward, backward)
    return order + list(backwards[num_pairs:])


def warmup_vector(
    warmup_step: int | Sequence[int], num_ranks: int, num_micro_batches: int
) -> tuple[int, ...]:
    """Forwards each rank runs before its first backward: step x (P - 1 - rank), or the list given.

    Raises ScheduleError unless a list has one number a rank and never rises: an order in which a
    later rank warms up longer than an earlier one waits for forwards that come after its wait.
    """
    if isinstance(warmup_step, int):
        if warmup_step < 0:
            raise ScheduleError(f"warmup_step is {warmup_step}; the least is 0, 1F1B's is 1")
        given: Sequence[int] = [warmup_step * (num_ranks - 1 - r) for r in range(num_ranks)]
    else:
        given = list(warmup_step)
        nearest = _never_rising(given, num_ranks)
        if given != nearest:
            raise ScheduleError(
                f"warmup_step = {given} has to be one number a rank ({num_ranks}), 0 or more and"
                f" never rising from rank to rank; the nearest is {nearest}"
            )
    return tuple(min(w, num_micro_batches) for w in given)


def _never_rising(given: Sequence[int], num_ranks: int) -> list[int]:
    """The list cut or filled to `num_ranks` entries, each raised to the largest that follows it."""
    padded = [*given[:num_ranks], *[0] * (num_ranks - len(given))]
    for r in reversed(range(num_ranks)):
        padded[r] = max(0, padded[r], *padded[r + 1 :])
    return padded


def _both(stage: int, num_micro_batches: int) -> tuple[list[Op], list[Op]]:
    every = range(num_micro_batches)
    return [Op(stage, Kind.F, m) for m in every], [Op(stage, Kind.B, m) for m in every]

"""Which rank holds which stage: the only place that knows.

Everything else (owner of the loss, who sends to whom) is read off `Schedule.stage_to_rank`.
"""

from __future__ import annotations


def loop(num_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod P: the stages go round the ranks, `stages_per_rank` times."""
    return tuple(range(num_ranks)) * stages_per_rank


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and back up: rank r holds r and 2P - 1 - r, so rank 0 holds the
    first stage and the last. Stages P - 1 and P are neighbours on one rank: no transfer there."""
    down = tuple(range(num_ranks))
    return down + down[::-1]

"""Where every routed row of an expert group goes, from the counts of all its ranks. Pure.

Each rank sorts its token-expert pairs by expert, stably, and tells how many it has for each. From
these counts alone every rank knows the same: which rows reach which rank, in which order, and where
they lie in its pool. There each expert begins at a multiple of 128 rows; within an expert rows come
by (source rank, pair), which is the order of one process that has all tokens one after another. So
what is computed of them has the same bits in every run, and at every number of ranks.

Whether a rank's pool would overflow follows from the counts too, so all ranks raise alike, before
any of them sends a row. The device makes the same plan for itself (`kernels.mega_moe_counts`); this
one says what it means, judges the routing, and is sent to the device where its pool was too small.
Shape letters: P ranks, E experts, L = E/P experts here, R pool rows,
B = R/128 blocks.

numpy inside: the host makes a plan in every forward, and torch takes three times as long over
numbers as few as these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppruntime.models.fp8_expert_rules import BLOCK
from ppruntime.models.mega_moe_rules import PoolOverflow, most_pool_rows


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pool of one rank; all on the host, int64."""

    start_L1: Tensor
    """First pool row of each expert here, then the end of the last: multiples of 128."""
    count_L: Tensor
    """Rows of each expert here, padding not counted."""
    before_PL: Tensor
    """Rows of an expert that come from the ranks before this one."""
    order_PL: Tensor
    """Where a rank's rows of an expert begin in its own list of pairs, padded as a pool is."""
    expert_B: Tensor
    """Expert of each block of 128 rows, counted from the first one here."""

    @property
    def num_rows(self) -> int:
        """R, padding included."""
        return int(self.start_L1[-1])

    @property
    def num_live_rows(self) -> int:
        """Rows that hold a pair."""
        return int(self.count_L.sum())

    def packed(self) -> Tensor:
        """All five as one int32 tensor, for one copy to the device; `unpacked` takes it apart."""
        parts = (self.start_L1, self.count_L, self.before_PL, self.order_PL, self.expert_B)
        flat = numpy.concatenate([part.numpy().ravel() for part in parts])
        return torch.from_numpy(flat.astype(numpy.int32))


def unpacked(packed: Tensor, num_ranks: int, num_here: int) -> tuple[Tensor, ...]:
    """Views of start [L + 1], count [L], before [P L], order [P L] and expert [B]."""
    table = num_ranks * num_here
    fixed = [num_here + 1, num_here, table, table]
    return torch.split(packed, [*fixed, len(packed) - sum(fixed)])


def padded_starts(counts: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Along the last dimension: first row of each expert when each is padded to whole blocks, and
    the end of the last."""
    starts = numpy.zeros((*counts.shape[:-1], counts.shape[-1] + 1), numpy.int64)
    numpy.cumsum((counts + BLOCK - 1) // BLOCK, -1, out=starts[..., 1:])
    starts *= BLOCK
    return starts


def pool_rows(counts_PE: Tensor) -> list[int]:
    """Pool rows of every rank, from rows of each rank for each expert."""
    num_ranks = len(counts_PE)
    per_expert = counts_PE.numpy().sum(0).reshape(num_ranks, -1)
    rows: list[int] = padded_starts(per_expert)[:, -1].tolist()
    return rows


def make_plan(
    counts_PE: Tensor, rank: int, *, capacity_factor: float | None = None, num_pairs: int = 0
) -> PoolPlan:
    """The pool of `rank` when rank p has counts_PE[p, e] rows for expert e. One that gets none has
    a block of padding: every rank runs every kernel, and so has loaded it before the first step.

    With a `capacity_factor` no rank may get more than `most_pool_rows` of it, `num_pairs` being the
    pairs of a rank's full micro-batch. Raises PoolOverflow with one text on all ranks.
    """
    num_ranks, num_experts = counts_PE.shape
    here = num_experts // num_ranks
    assert here * num_ranks == num_experts, (num_experts, num_ranks)
    if capacity_factor is not None:
        _refuse_overflow(counts_PE, capacity_factor, num_pairs)
    own = slice(rank * here, (rank + 1) * here)
    counts = counts_PE.numpy()
    counts_PL = counts[:, own]
    count_L = counts_PL.sum(0)
    start_L1 = padded_starts(count_L)
    if not start_L1[-1]:
        start_L1[1:] = BLOCK
    blocks_L = numpy.diff(start_L1) // BLOCK
    plan = (
        start_L1,
        count_L,
        counts_PL.cumsum(0) - counts_PL,
        padded_starts(counts)[:, :-1][:, own],
        numpy.arange(here).repeat(blocks_L),
    )
    return PoolPlan(*(torch.from_numpy(part) for part in plan))


def _refuse_overflow(counts_PE: Tensor, capacity_factor: float, num_pairs: int) -> None:
    rows = pool_rows(counts_PE)
    most = most_pool_rows(capacity_factor, num_pairs, counts_PE.shape[1] // len(rows))
    worst = max(range(len(rows)), key=rows.__getitem__)
    if rows[worst] <= most:
        return
    loads_E = counts_PE.sum(0)
    busiest = int(loads_E.argmax())
    ratio = float(loads_E.max()) / max(1.0, float(loads_E.double().mean()))
    raise PoolOverflow(
        f"rank {worst} of the expert group would get {rows[worst]} rows, "
        f"moe.dispatch.capacity_factor = {capacity_factor:g} allows {most}; the busiest expert, "
        f"{busiest}, has {int(loads_E.max())} rows, {ratio:.1f} times the mean; raise the factor, "
        "or leave it out to take what comes"
    )

"""Pure: units -> stages -> ranks. No process group, no weights, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ppruntime.models.dims import ModelDims, UnitSpec, forward_flops_per_token, unit_specs


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: its units and the carry's fields that cross its two boundaries, in order.

    `before` and `after` are the units next to the cuts: `after` is the last one that has run when
    the stage ends. A stage without units passes on what it gets.
    """

    index: int
    rank: int
    units: tuple[UnitSpec, ...]
    before: UnitSpec | None
    after: UnitSpec

    @property
    def inputs(self) -> tuple[str, ...]:
        """Fields that come in; none for the first stage."""
        return self.before.live_after if self.before else ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Fields that go out; none for the last stage."""
        return self.after.live_after

    @property
    def num_layers(self) -> float:
        """Layers in multiples of a half; embedding and head count nothing."""
        return sum(unit.layers for unit in self.units)


def cut(
    dims: ModelDims,
    stage_to_rank: Sequence[int],
    layers_per_stage: Sequence[float] | None,
    *,
    seq_len: int,
) -> tuple[StagePlan, ...]:
    """Cuts the model into one stage per entry of `stage_to_rank`.

    `layers_per_stage` gives each stage's layers in multiples of 0.5 (0 allowed) and sums to the
    model's; the embedding is on top in the first stage, the head in the last. None takes
    `balanced_layers` for documents of `seq_len` tokens.
    """
    specs = unit_specs(dims)
    if layers_per_stage is None:
        layers_per_stage = balanced_layers(dims, len(stage_to_rank), seq_len=seq_len)
    assert len(layers_per_stage) == len(stage_to_rank), "config rules let a wrong cut through"
    assert sum(layers_per_stage) == dims.num_layers, "config rules let a wrong cut through"
    # Unit 0 is the embedding and the last one the head, so the n-th half is unit n.
    ends = [1 + round(2 * layers) for layers in accumulate(layers_per_stage)]
    ends[-1] += 1
    starts = [0, *ends[:-1]]
    return tuple(
        StagePlan(
            index=index,
            rank=rank,
            units=specs[start:end],
            before=specs[start - 1] if start else None,
            after=specs[end - 1],
        )
        for index, (rank, start, end) in enumerate(zip(stage_to_rank, starts, ends, strict=True))
    )


def train_flops_per_token(dims: ModelDims, spec: UnitSpec, seq_len: int) -> float:
    """FLOPs that a token costs a unit in training, attention included: what a cut balances.

    A product with parameters costs three times its forward, sparse attention 3.5 times (two GEMMs
    forward, five backward), index scores once while the indexer is frozen.
    """
    flops = forward_flops_per_token(dims, spec, seq_len)
    return 3 * flops.matmul + 3.5 * flops.attention + flops.index_scores


def balanced_layers(dims: ModelDims, num_stages: int, *, seq_len: int) -> tuple[float, ...]:
    """Layers per stage, in multiples of 0.5, with the least training FLOPs on the busiest stage;
    among such cuts, the one with the least sum of squares. Embedding and head count."""
    costs = [train_flops_per_token(dims, spec, seq_len) for spec in unit_specs(dims)]
    upto = [0.0, *accumulate(costs[1:-1])]
    num_halves = len(costs) - 2

    def work(stage: int, start: int, end: int) -> float:
        first, last = stage == 0, stage == num_stages - 1
        return upto[end] - upto[start] + first * costs[0] + last * costs[-1]

    # busiest[end]: the least work of the busiest stage, over cuts of the first `end` halves.
    busiest = [work(0, 0, end) for end in range(num_halves + 1)]
    for stage in range(1, num_stages):
        busiest = [
            min(max(busiest[start], work(stage, start, end)) for start in range(end + 1))
            for end in range(num_halves + 1)
        ]
    limit = busiest[num_halves]

    def squared(stage: int, start: int, end: int) -> float:
        return w * w if (w := work(stage, start, end)) <= limit else math.inf

    # best[end]: (sum of squares, ends of the stages) where no stage has more work than `limit`.
    best: list[tuple[float, tuple[int, ...]]]
    best = [(squared(0, 0, end), (end,)) for end in range(num_halves + 1)]
    for stage in range(1, num_stages):
        best = [
            min(
                (best[start][0] + squared(stage, start, end), (*best[start][1], end))
                for start in range(end + 1)
            )
            for end in range(num_halves + 1)
        ]
    ends = best[num_halves][1]
    return tuple((end - start) / 2 for start, end in zip((0, *ends[:-1]), ends, strict=True))

"""The scheduling problem behind an order, for bounds and search: op classes instead of ops.

Micro-batches are alike, so only *how many* ops of each class (forward of stage 2, say) have run
matters: in any legal order the k-th started op of a class may be renamed micro-batch k without
changing a time, a dependency or a peak. So an order is a word per rank over its classes, a bound is
about the k-th op of a class, and a search need not decide micro-batch numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import Kind


@dataclass(frozen=True, slots=True)
class OpClass:
    """All ops of one kind on one stage. `takes` an activation's place at its start; `frees` one at
    its end."""

    stage: int
    kind: Kind
    rank: int
    duration: float
    takes: bool
    frees: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """The k-th op of class `before` has to end `latency` before the k-th of `after` starts."""

    before: int
    after: int
    latency: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Run every class `num_micro_batches` times; rank r holds at most `caps[r]` chunk activations.

    `classes` are in a topological order of `edges`.
    """

    num_micro_batches: int
    num_ranks: int
    classes: tuple[OpClass, ...]
    edges: tuple[Edge, ...]
    caps: tuple[int | None, ...]

    def reversed(self) -> Problem:
        """The same problem with time running backwards: its makespans are the same, its heads are
        this one's tails. Class c becomes class `len(classes) - 1 - c`."""
        last = len(self.classes) - 1
        return Problem(
            self.num_micro_batches,
            self.num_ranks,
            tuple(
                OpClass(c.stage, c.kind, c.rank, c.duration, c.frees, c.takes)
                for c in reversed(self.classes)
            ),
            tuple(Edge(last - e.after, last - e.before, e.latency) for e in self.edges),
            self.caps,
        )


def problem_of(
    costs: Costs,
    hops: Hops,
    stage_to_rank: Sequence[int],
    num_micro_batches: int,
    caps: Sequence[int] | None = None,
    *,
    split_backward: bool = True,
) -> Problem:
    """The problem of one pipeline step. `caps` are chunk activations per rank, None for no limit;
    `split_backward` allows I and W to run apart (else one class B takes both times)."""
    num_stages, num_ranks = len(stage_to_rank), max(stage_to_rank) + 1
    forward_latency, backward_latency = hops.per_stage_hop(stage_to_rank)
    classes: list[OpClass] = []
    edges: list[Edge] = []
    for stage, rank in enumerate(stage_to_rank):
        classes.append(OpClass(stage, Kind.F, rank, costs.forward[stage], True, False))
        if stage:
            edges.append(Edge(stage - 1, stage, forward_latency[stage - 1]))
    before = num_stages - 1  # the class whose end lets the next gradient start
    for stage in reversed(range(num_stages)):
        rank = stage_to_rank[stage]
        latency = backward_latency[stage] if stage < num_stages - 1 else 0.0
        edges.append(Edge(before, len(classes), latency))
        before = len(classes)
        i, w = costs.input_grad[stage], costs.weight_grad[stage]
        if split_backward:
            classes.append(OpClass(stage, Kind.I, rank, i, False, False))
            classes.append(OpClass(stage, Kind.W, rank, w, False, True))
            edges.append(Edge(before, before + 1, 0.0))
        else:
            classes.append(OpClass(stage, Kind.B, rank, i + w, False, True))
    return Problem(
        num_micro_batches,
        num_ranks,
        tuple(classes),
        tuple(edges),
        tuple(caps) if caps is not None else (None,) * num_ranks,
    )

"""When a stage's masters leave and come back, read off one rank's order. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppruntime.schedules.ops import COMPUTE, Kind, Op


@dataclass(frozen=True, slots=True)
class MasterMoments:
    """Computations of one stage, and one that may be another's."""

    leave: Op
    """Its first forward: all its weights are gathered behind it, the masters start to leave."""
    left: Op
    """The masters have left before it: its first backward, which makes the sums of gradients, or
    its second forward if that comes later."""
    through: Op
    """The first whole backward (B, W) behind its last forward: nothing of the step needs as much
    memory from there on."""
    back: Op | None
    """The rank's next computation, before which the masters start to come back: what leaves by then
    makes room for them. None: they do directly behind `through`, the stage's last computation."""


def master_moments(ops: Sequence[Op], stage: int) -> MasterMoments | None:
    """The moments of a stage of this rank; None: with one micro-batch there is no time away."""
    own = [op for op in ops if op.stage == stage and op.kind in COMPUTE]
    forwards = [i for i, op in enumerate(own) if op.kind is Kind.F]
    if len(forwards) < 2:
        return None
    first_backward = next(i for i, op in enumerate(own) if op.kind in (Kind.B, Kind.I))
    left = own[max(forwards[1], first_backward)]
    through = next(op for op in own[forwards[-1] :] if op.kind in (Kind.B, Kind.W))
    if through == own[-1]:
        return MasterMoments(own[forwards[0]], left, through, None)
    behind = iter(ops)
    next(op for op in behind if op == through)
    back = next(op for op in behind if op.kind in COMPUTE)
    return MasterMoments(own[forwards[0]], left, through, back)

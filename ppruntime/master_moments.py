"""When a stage's masters leave and come back, read off one rank's order. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppruntime.schedules.ops import Kind, Op


@dataclass(frozen=True, slots=True)
class MasterMoments:
    """Three computations of one stage."""

    leave: Op
    """Its first forward: all its weights are gathered behind it, the masters start to leave."""
    left: Op
    """Its second forward: the masters have left before it."""
    through: Op
    """The first whole backward (B, W) behind its last forward: the masters start to come back."""


def master_moments(ops: Sequence[Op], stage: int) -> MasterMoments | None:
    """The moments of a stage of this rank; None: with one micro-batch there is no time away."""
    own = [op for op in ops if op.stage == stage]
    forwards = [i for i, op in enumerate(own) if op.kind is Kind.F]
    if len(forwards) < 2:
        return None
    through = next(op for op in own[forwards[-1] :] if op.kind in (Kind.B, Kind.W))
    return MasterMoments(own[forwards[0]], own[forwards[1]], through)

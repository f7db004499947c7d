"""What reducing a step's gradients takes on one rank, behind its last op. Pure; no torch.

FSDP goes unit by unit and, with expert parallelism, experts by themselves: the group's gathered
weights are freed, its sums copied into one fp32 buffer, and what is left of them is a shard. Until
the first groups are through, that buffer lies beside everything else that a rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppruntime.config.keys import Config
from ppruntime.memory import Holding, holdings, waiting_gradient_bytes
from ppruntime.models.parameters import Part
from ppruntime.plan import StagePlan


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a rank's rows differ from those of its ops while gradients are reduced, in bytes."""

    weights_gone: int
    """Gathered weights that are freed by then."""
    sums_gone: int
    """Sums of which a shard is left, or nothing."""
    buffer: int
    """The gradients of one group, whole and side by side."""

    @property
    def more(self) -> int:
        """Beyond what lasts through a step."""
        return self.buffer - self.weights_gone - self.sums_gone


def reduction_peak(
    config: Config, stages: Sequence[StagePlan], *, applied: bool = False
) -> Reduction:
    """The moment with the most while the gradients of some stages of one rank are reduced.
    `applied`: each unit is updated and its gradients freed before the next one's turn."""
    return max(_moments(config, stages, applied=applied), key=lambda moment: moment.more)


def reduction_end(
    config: Config, stages: Sequence[StagePlan], *, applied: bool = False
) -> Reduction:
    """When all is reduced, and with `applied` updated."""
    *_, last = _moments(config, stages, applied=applied)
    return last


def _moments(config: Config, stages: Sequence[StagePlan], *, applied: bool) -> Iterator[Reduction]:
    """Before the first group, with each group's buffer, and behind all."""
    weights_gone = 0
    # Weight gradients that waited have been added to the sums by then.
    sums_gone = sum(waiting_gradient_bytes(config, stage) for stage in stages)
    yield Reduction(weights_gone, sums_gone, 0)
    for units in ([holdings(config, s, unit) for unit in s.units] for s in stages):
        for unit in units:
            left = 0
            for group in _groups(config, unit):
                weights_gone += sum(held.weights for held in group)
                yield Reduction(weights_gone, sums_gone, sum(held.whole_shards for held in group))
                shards = sum(held.sharded_sums for held in group)
                sums_gone += sum(held.sums for held in group) - shards
                left += shards
            if applied:
                sums_gone += left + sum(held.sums for held in unit if not held.is_sharded)
    yield Reduction(weights_gone, sums_gone, 0)


def _groups(config: Config, unit: Sequence[Holding]) -> Iterator[list[Holding]]:
    """What is reduced together, in order; nothing where weights are their own masters."""
    apart = {Part.EXPERTS} if config.parallel.ep > 1 else set[Part]()
    for experts in (False, True):
        if group := [h for h in unit if h.is_sharded and (h.part in apart) is experts]:
            yield group

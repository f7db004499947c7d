"""What ranks hold over a projected step: the ledger's moments at the times at which ops run.

All bytes of a projection come from `ppruntime.ledger`, the same that `ppruntime plan --ledger`
prints and that runs are held to. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ppruntime.config.keys import Config
from ppruntime.ledger import UPDATE, RankLedger, predict
from ppruntime.memory import activation_bytes
from ppruntime.plan import StagePlan
from ppruntime.schedules.costs import StageBytes
from ppruntime.schedules.timeline import MemoryPoint, TimedOp

SOURCE = (
    "the memory ledger of the run (`ppruntime plan --ledger`): weights, gradients, optimizer, "
    "slots, what is in flight and made again, the head's loss, the update"
)
WITHOUT = "context, communication's own buffers, other ops' workspaces and the allocator's slack"
"""What no ledger predicts."""


def ledgers_of(config: Config, *, offload_every: int | None = None) -> tuple[RankLedger, ...]:
    """The ledger of every rank; with activations of every so many micro-batches in host memory if
    that is asked for."""
    if offload_every is not None:
        pp = replace(
            config.pp,
            activation_offload=True,
            offload_every=offload_every,
            offload_paced=False,
            offload_target="host",
        )
        config = replace(config, pp=pp)
    return predict(config)


def memory_over_time(ledger: RankLedger, row: Sequence[TimedOp]) -> tuple[MemoryPoint, ...]:
    """Bytes over a step in which the rank's computations ran as `row` says: those of an op from its
    start until the next one's, those of the update behind the last op."""
    held = {moment.op: ledger.through_the_step + moment.total for moment in ledger.moments}
    ops = sorted(row, key=lambda timed: timed.start)
    end = max((timed.finish for timed in row), default=0.0)
    return (
        *(MemoryPoint(timed.start, float(held[str(timed.op)])) for timed in ops),
        MemoryPoint(end, float(held[UPDATE])),
    )


def copied_bytes(config: Config, plan: Sequence[StagePlan]) -> StageBytes:
    """What a host copy of a micro-batch moves, by stage."""
    kept = tuple(float(activation_bytes(config, stage)) for stage in plan)
    return StageBytes(kept, kept)

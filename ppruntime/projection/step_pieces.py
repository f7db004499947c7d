"""What was timed once a step on one layout, as it would be on another. Pure, no torch.

A piece takes as long as its parameters are many on the rank that has the most of them: those that
it sends (`SENT`), copies (quantise), or has as its own shard (everything else).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ppruntime.config.keys import Config
from ppruntime.models.dims import unit_parameters
from ppruntime.models.parameters import Part
from ppruntime.plan import StagePlan
from ppruntime.projection.calibration import PerStep
from ppruntime.projection.projector import Origin, ProjectionError, weakest

SENT = ("gather", "reduce")
"""Pieces that data ranks send each other."""
_COPIED = "quantise"


def sent_parameters(config: Config, plan: Sequence[StagePlan], num_ranks: int) -> tuple[float, ...]:
    """By pipeline rank: parameters that a data rank sends and gets when gradients are reduced or
    weights gathered. A ring or tree moves (n - 1) / n of a rank's; experts go over dp, all else
    over dp x ep; rows of Engram tables lie on one rank each and are not sent."""
    dp, ep = config.parallel.dp, config.parallel.ep
    sent = [0.0] * num_ranks
    for stage, count, part in _trained(config, plan):
        if part is Part.EXPERTS:
            sent[stage.rank] += count // ep * (dp - 1) / dp
        elif part is not Part.ENGRAM_TABLE:
            sent[stage.rank] += count * (dp * ep - 1) / (dp * ep)
    return tuple(sent)


def piece_parameters(config: Config, plan: Sequence[StagePlan], name: str) -> float:
    """What the piece `name` takes its time for, on the rank with the most; see the module."""
    num_ranks = 1 + max(stage.rank for stage in plan)
    if name in SENT:
        return max(sent_parameters(config, plan, num_ranks))
    found = [0.0] * num_ranks
    for stage, count, part in _trained(config, plan):
        if name != _COPIED:
            found[stage.rank] += count / config.parallel.num_data_ranks
        elif part is not Part.ENGRAM_TABLE:
            found[stage.rank] += count // (config.parallel.ep if part is Part.EXPERTS else 1)
    return max(found)


def on_run(row: PerStep, config: Config, plan: Sequence[StagePlan]) -> PerStep:
    """The piece on the run's ranks: as it is if it was timed on as many parameters and data ranks,
    or says neither; else a model of it. Over more data ranks than it was timed on, what is sent is
    assumed to go as fast as between those, though they may have shared a node.

    A row without `parameters` is taken to be of the run's pipeline ranks and cut. Raises
    ProjectionError for a piece that is sent and was timed where nothing was, and for an update by
    another rule.
    """
    num = config.parallel.num_data_ranks
    if row.optimizer not in (None, config.optim.type):
        raise ProjectionError(
            f"the calibration's {row.name} is {row.optimizer}'s, the run has optim.type "
            f"{config.optim.type}; set optim.type={row.optimizer}, time it with ppruntime "
            f"calibrate --per-step, or give --per-step-s {row.name}=SECONDS"
        )
    if row.parameters is None and row.data_ranks in (None, num):
        return row
    here, timed = piece_parameters(config, plan, row.name), _timed(row, config, plan)
    # A count in a file is whole.
    if row.data_ranks in (None, num) and abs(here - timed) <= 1:
        return row
    if timed < 1 <= here:
        raise ProjectionError(
            f"the calibration's {row.name} was timed on {_ranks(row.data_ranks)}, where some "
            f"parameters are not sent that the run's {num} data ranks send; time it on more "
            f"(ppruntime calibrate --per-step with parallel.dp=2), or give --per-step-s "
            f"{row.name}=SECONDS"
        )
    factor = here / timed if timed else 0.0
    origins, note = [Origin(row.origin), Origin.MODELLED], ""
    if row.name in SENT and row.data_ranks is not None and row.data_ranks < num:
        origins.append(Origin.ASSUMED)
        note = f", at the rate between {row.data_ranks}"
    return msgspec.structs.replace(
        row,
        seconds=row.seconds * factor,
        p95_s=None if row.p95_s is None else row.p95_s * factor,
        data_ranks=num,
        parameters=round(here),
        origin=weakest(*origins).value,
        source=f"{row.source}, x {factor:.3g} for {here:,.0f} parameters a rank on {_ranks(num)}"
        + note,
    )


def _timed(row: PerStep, config: Config, plan: Sequence[StagePlan]) -> float:
    """Parameters that the row was timed on; where it does not say, those of the run's cut."""
    if row.parameters is not None:
        return float(row.parameters)
    assert row.data_ranks is not None, "else it is as it is"
    dp, rest = divmod(row.data_ranks, config.parallel.ep)
    if rest:
        raise ProjectionError(
            f"the calibration's {row.name} was timed on {_ranks(row.data_ranks)}, which are no "
            f"whole groups of parallel.ep {config.parallel.ep}; time it on the run's expert ranks, "
            f"or give --per-step-s {row.name}=SECONDS"
        )
    parallel = msgspec.structs.replace(config.parallel, dp=dp)
    there = msgspec.structs.replace(config, parallel=parallel)
    if row.name in SENT and dp == 1 and config.parallel.dp > 1 and _has_experts(config, plan):
        return 0.0  # experts go over dp alone: their part of the time is not in the row
    return piece_parameters(there, plan, row.name)


def _has_experts(config: Config, plan: Sequence[StagePlan]) -> bool:
    return any(part is Part.EXPERTS for _, _, part in _trained(config, plan))


def _trained(config: Config, plan: Sequence[StagePlan]) -> list[tuple[StagePlan, int, Part]]:
    return [
        (stage, parameter.numel, parameter.part)
        for stage in plan
        for spec in stage.units
        for parameter in unit_parameters(config.model.dims, spec)
        if not parameter.frozen
    ]


def _ranks(num: int | None) -> str:
    return "some data ranks" if num is None else f"{num} data rank{'s' * (num != 1)}"

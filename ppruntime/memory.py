"""Bytes that a stage keeps on one rank, by what they are. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ppruntime.config_keys import Config
from ppruntime.models.dims import unit_parameters
from ppruntime.models.parameters import Part
from ppruntime.plan import StagePlan

_FP32 = 4
_BF16 = 2
_MOMENTS = 2


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a stage holds on one rank through a step, activations apart."""

    weights: int
    """What the units multiply with: in the compute dtype, the few fp32 ones in fp32."""
    gradients: int
    """fp32 sums over the step's micro-batches."""
    optimizer: int
    """AdamW's two moments, and fp32 masters where the weights are not the masters themselves."""


def state_bytes(config: Config, stage: StagePlan) -> StateBytes:
    """State of one stage on one rank.

    Experts lie over ep ranks, their masters and moments over dp; those of all else over dp x ep.
    With ep > 1, Engram tables count as split by rows over all data ranks and never gathered.
    """
    dims, dp, ep = config.model.dims, config.parallel.dp, config.parallel.ep
    wide = config.train.precision == "fp32"
    sharded = not wide or dp * ep > 1
    weights = gradients = optimizer = 0.0
    for spec in stage.units:
        for parameter in unit_parameters(dims, spec):
            here, shards = float(parameter.numel), dp * ep
            if parameter.part is Part.EXPERTS:
                here, shards = here / ep, dp
            elif parameter.part is Part.ENGRAM_TABLE and ep > 1:
                here, shards = here / (dp * ep), 1
            whole = sharded and not wide and parameter.fp32  # left out of the sharding
            weights += here * (_FP32 if wide or parameter.fp32 else _BF16)
            if not parameter.frozen:
                gradients += here * _FP32
                optimizer += here / (1 if whole else shards) * _FP32 * _MOMENTS
            if sharded and not whole:
                optimizer += here / shards * _FP32
    return StateBytes(round(weights), round(gradients), round(optimizer))

"""What crosses between stages: from the model's sizes, and from a run of the stage that sends it.

Both ends of a hop open their channel with the shapes that the sizes give; the sender first checks
that its stage really makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import ModelDims, carry_shape
from ppruntime.plan import StagePlan
from ppruntime.stage import Stage
from ppruntime.transports.base import Boundary, TensorSpec


def expected_boundaries(
    dims: ModelDims,
    plan: Sequence[StagePlan],
    *,
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
) -> tuple[Boundary, ...]:
    """What each stage but the last hands to the next for one micro-batch of [batch, seq_len] tokens
    in the compute dtype. Pure."""
    dtype_name = str(dtype).removeprefix("torch.")

    def spec(name: str, stage: StagePlan) -> TensorSpec:
        shape, field_dtype = carry_shape(
            dims, name, batch, seq_len, after=stage.after, dtype=dtype_name
        )
        return TensorSpec(name, shape, getattr(torch, field_dtype))

    return tuple(Boundary(tuple(spec(n, stage) for n in stage.outputs)) for stage in plan[:-1])


def probe(
    stage: Stage, received: Boundary | None, *, batch: int, seq_len: int, device: torch.device
) -> Boundary:
    """What the stage makes of `received`: one forward without gradients on blank input, shapes and
    dtypes taken off the result. None: the first stage, which receives nothing."""
    blank = torch.zeros(batch, seq_len, dtype=torch.int64, device=device)
    positions = torch.arange(seq_len, device=device).expand(batch, -1).contiguous()
    inputs = tuple(
        torch.zeros(t.shape, dtype=t.dtype, device=device)
        for t in (received.tensors if received else ())
    )
    outputs = stage.evaluate(0, inputs, MicroBatch(blank, blank, positions))
    return Boundary(
        tuple(
            TensorSpec(name, tuple(output.shape), output.dtype)
            for name, output in zip(stage.outputs, outputs, strict=True)
        )
    )
